//! Measurements, and the lines of the log that hold them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use suite::resources;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(super) enum Line {
    /// The work of the clients since the previous line.
    Clients(Clients),
    /// The resources of a server.
    Server { at: f64, name: String, process: Process },
    /// A fault of the network or of a process, on a side: `clients` or `servers`.
    Fault { at: f64, side: String, what: String },
    /// How it ended.
    Verdict { at: f64, side: String, failures: Vec<String>, totals: BTreeMap<String, u64> },
}

/// The work of all clients in one interval. Its end is in seconds since both sides began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Clients {
    pub at: f64,
    pub seconds: f64,
    /// Commands answered and compared.
    pub operations: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub connected: u64,
    /// Failed attempts.
    pub refused: u64,
    /// Connections that ended by an error.
    pub lost: u64,
    /// Microseconds from the first byte of an exchange to its last: median, 99th percentile, most.
    pub p50: u64,
    pub p99: u64,
    pub max: u64,
    pub process: Process,
    /// Objects of the device in use, by kind.
    pub objects: Objects,
    /// The counters of the device since the previous line.
    pub device: BTreeMap<String, u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    pub descriptors: u64,
    pub resident_kib: u64,
    pub pinned_kib: u64,
    pub threads: u64,
}

impl Process {
    /// Reads those of the process with this id, or of "self".
    pub(super) fn of(id: &str) -> io::Result<Self> {
        let number = |name| resources::status(id, name).unwrap_or(0);
        let descriptors = resources::descriptors(id).ok_or(io::ErrorKind::NotFound)?;
        Ok(Self {
            // For "self", one of them is this folder's own, at each measurement.
            descriptors: descriptors as u64,
            resident_kib: number("VmRSS"),
            pinned_kib: number("VmPin"),
            threads: number("Threads"),
        })
    }

    /// Returns what is held beyond `before`, except memory in use, which is judged by its trend.
    pub(super) fn beyond(self, before: Self) -> Option<String> {
        (self.descriptors > before.descriptors || self.pinned_kib > before.pinned_kib).then(|| {
            format!(
                "{} descriptors and {} KiB pinned, at the beginning {} and {}",
                self.descriptors, self.pinned_kib, before.descriptors, before.pinned_kib
            )
        })
    }
}

/// Objects of a device in use, by kind: protection domains, queues, regions, identifiers.
pub(super) type Objects = BTreeMap<String, u64>;

#[derive(Clone, Debug)]
pub(super) struct Device(pub String);

impl Device {
    /// Returns its objects in use, of all processes; none if the tool `rdma` is not installed.
    pub(super) fn objects(&self) -> Objects {
        let Ok(output) = Command::new("rdma").args(["-j", "resource", "show", &self.0]).output() else {
            return Objects::new();
        };
        let shown: Vec<BTreeMap<String, serde_json::Value>> =
            serde_json::from_slice(&output.stdout).unwrap_or_default();
        let numbers = shown.into_iter().flatten();
        numbers
            .filter_map(|(name, value)| Some((name, value.as_u64()?)))
            // A number of the device, and no count.
            .filter(|(name, _)| name != "ifindex")
            .collect()
    }

    /// Returns the counts of the device since it was created, if it has any.
    pub(super) fn counters(&self) -> BTreeMap<String, u64> {
        let folder = format!("/sys/class/infiniband/{}/ports/1/hw_counters", self.0);
        let Ok(files) = std::fs::read_dir(folder) else { return BTreeMap::new() };
        files
            .flatten()
            .filter_map(|file| {
                let count = std::fs::read_to_string(file.path()).ok()?.trim().parse().ok()?;
                Some((file.file_name().into_string().ok()?, count))
            })
            // How long the kernel keeps counters before it reads them again, and no count.
            .filter(|(name, _)| name != "lifespan")
            .collect()
    }
}

/// Returns the output of the tool `rdma` for one kind of objects; nothing if it is not installed.
fn shown(kind: &str) -> Vec<serde_json::Value> {
    let output = Command::new("rdma").args(["-j", "resource", "show", kind]).output();
    output.ok().and_then(|output| serde_json::from_slice(&output.stdout).ok()).unwrap_or_default()
}

pub(super) fn objects_of(pid: u32) -> Objects {
    // By kind: the counts of a whole device do not tell processes apart.
    ["pd", "cq", "qp", "mr", "cm_id"]
        .into_iter()
        .map(|kind| (kind.to_string(), shown(kind).iter().filter(|one| one["pid"] == pid).count() as u64))
        .collect()
}

pub(super) fn listening() -> u64 {
    shown("cm_id").iter().filter(|one| one["state"] == "LISTEN").count() as u64
}

pub(super) fn more(now: &Objects, before: &Objects) -> Option<String> {
    let grown: Vec<String> = now
        .iter()
        .filter_map(|(name, count)| {
            let was = before.get(name).copied().unwrap_or(0);
            (*count > was).then(|| format!("{count} {name}, at the beginning {was}"))
        })
        .collect();
    (!grown.is_empty()).then(|| grown.join("; "))
}

/// Repeats the check until it finds nothing, for at most `limit`.
pub(super) fn settled(limit: Duration, complaint: impl Fn() -> Option<String>) -> Option<String> {
    let begun = Instant::now();
    loop {
        let complaint = complaint()?;
        if begun.elapsed() > limit {
            return Some(complaint);
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Describes the growth of memory in use, if the maximum of a run's second half exceeds that of the
/// first by more than a quarter and 16 MiB.
pub(super) fn growth(resident_kib: &[u64]) -> Option<String> {
    let (first, second) = resident_kib.split_at(resident_kib.len() / 2);
    let (first, second) = (first.iter().max()?, second.iter().max()?);
    (*second > first + first / 4 + (16 << 10))
        .then(|| format!("at most {first} KiB in the first half of the run, {second} KiB in the second"))
}

pub(super) struct Log {
    begun: Instant,
    file: Mutex<File>,
}

impl Log {
    /// Creates a file, when both sides begin: the clocks of two machines may differ.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { begun: Instant::now(), file: Mutex::new(File::create(path)?) })
    }

    pub(super) fn now(&self) -> f64 {
        (self.begun.elapsed().as_secs_f64() * 10.0).round() / 10.0
    }

    /// Appends a line. The file's reader notices if one is missing.
    pub(super) fn write(&self, line: &Line) {
        let Ok(mut text) = serde_json::to_string(line) else { return };
        text.push('\n');
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = file.write_all(text.as_bytes()) {
            eprintln!("cannot write down what was measured: {error}");
        }
    }
}

pub(super) fn read(files: &[PathBuf]) -> io::Result<Vec<Line>> {
    let mut lines = Vec::new();
    for file in files {
        for text in std::fs::read_to_string(file)?.lines() {
            lines.push(serde_json::from_str(text)?);
        }
    }
    Ok(lines)
}
