//! `doctor`: what this machine has for runs on a device, and everything that is missing.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use rdma_backend::{Backend as _, EventChannel as _, Identifier as _};
use rdma_verbs::{EventChannel, Verbs, locality};
use serde::Serialize;

use crate::blackbox::environment;
use crate::exit::{DONE, INTERNAL, NO_ENVIRONMENT};
use suite::terminal;

/// Looks at this machine.
#[derive(Args, Clone, Debug)]
pub struct Doctor {
    /// Also see whether one can listen at this address of a device (ADDRESS:PORT; port 0 takes
    /// any).
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Finding {
    what: &'static str,
    /// Absent for information.
    ok: Option<bool>,
    told: String,
}

impl Finding {
    fn needed(what: &'static str, found: Result<String, String>) -> Self {
        let ok = Some(found.is_ok());
        Self { what, ok, told: found.unwrap_or_else(|missing| missing) }
    }

    const fn told(what: &'static str, told: String) -> Self {
        Self { what, ok: None, told }
    }
}

const HANGING: usize = 9;

/// Prints its findings. Succeeds if a run on a device is possible.
pub fn doctor(options: &Doctor) -> ExitCode {
    let findings = look(options.listen);
    let possible = findings.iter().all(|finding| finding.ok != Some(false));
    if options.json {
        match serde_json::to_string_pretty(&findings) {
            Ok(json) => println!("{json}"),
            Err(_) => return ExitCode::from(INTERNAL),
        }
    } else {
        let columns = terminal::columns();
        for Finding { what, ok, told } in &findings {
            let mark = match ok {
                Some(true) => "ok",
                Some(false) => "MISSING",
                None => "",
            };
            println!("{}", terminal::fold(&format!("{mark:7}  {what}: {told}"), HANGING, columns));
        }
        if !possible {
            let so = "so: runs use the embedded fabric only; on a device they end with status";
            println!("{}", terminal::fold(&format!("{so} {NO_ENVIRONMENT}"), 0, columns));
        }
    }
    ExitCode::from(if possible { DONE } else { NO_ENVIRONMENT })
}

fn look(listen: Option<SocketAddr>) -> Vec<Finding> {
    let verbs = Verbs::load().map_err(|error| error.to_string());
    let channel = match &verbs {
        Ok(verbs) => verbs.event_channel().map_err(|error| error.to_string()),
        Err(_) => Err("needs the libraries".into()),
    };
    let [kernel, devices] = provided(std::env::var_os(SOFTRDMA));
    let relaxed = verbs.as_ref().ok().map(Verbs::has_relaxed_ordering);
    let mut findings = vec![
        Finding::told("embedded fabric", "here, as everywhere".into()),
        Finding::needed("libraries", verbs.map(|_| "librdmacm and libibverbs are loaded".into())),
        kernel,
        devices,
        Finding::needed("connection manager", channel.as_ref().map(|_| "opens".into()).map_err(Clone::clone)),
        Finding::told("options of connections", connection_options(channel.as_ref().ok())),
        Finding::told("relaxed ordering", relaxed_ordering(relaxed).into()),
        Finding::told("huge pages", huge_pages(Path::new("/sys/kernel/mm"))),
        Finding::told("locked memory", locked_memory()),
        Finding::told("Valkey", valkey()),
    ];
    findings.extend(locality::devices().iter().map(|device| {
        let chosen = listen.is_some_and(|address| device.has(address.ip()));
        let so = if chosen { ": listening there is on this one" } else { "" };
        Finding::told("near", format!("{device}{so}"))
    }));
    if let Some(address) = listen {
        let listens = channel.and_then(|channel| {
            channel
                .listen(address, 0)
                .map(|_| address.to_string())
                .map_err(|error| format!("{address}: {error}"))
        });
        findings.push(Finding::needed("listening", listens));
    }
    findings
}

/// The environment variable by which programs under softrdma find their fabric.
const SOFTRDMA: &str = "SOFTRDMA_SOCKET";

/// Returns the findings about devices: softrdma's if this program runs under it, else the kernel's.
fn provided(softrdma: Option<OsString>) -> [Finding; 2] {
    match softrdma {
        Some(socket) => [
            Finding::told("kernel", "not needed under softrdma".into()),
            Finding::needed("devices", Ok(format!("softrdma's, of the fabric at {}", socket.display()))),
        ],
        None => [
            Finding::needed("kernel", kernel()),
            Finding::needed("devices", devices(Path::new(environment::DEVICES))),
        ],
    }
}

/// Finds the module behind librdmacm.
fn kernel() -> Result<String, String> {
    let node =
        ["/dev/infiniband/rdma_cm", "/sys/class/misc/rdma_cm"].iter().find(|path| Path::new(path).exists());
    node.map(|node| format!("{node} is there"))
        .ok_or_else(|| "no rdma_cm: put `softrdma run --` before a command to try it without (no root); with a device, `modprobe rdma_ucm`, and in a container pass in /dev/infiniband".into())
}

fn devices(folder: &Path) -> Result<String, String> {
    let devices = environment::devices(folder);
    if devices.is_empty() {
        return Err(format!(
            "none in {}: put `softrdma run --` before a command to try it without (no root); as root, `rdma link add rxe0 type rxe \
             netdev eth0` makes a soft-RoCE one",
            folder.display()
        ));
    }
    Ok(devices.join(", "))
}

/// Finds whether `Options::traffic_class` and `Options::ack_timeout` are supported.
fn connection_options(channel: Option<&EventChannel>) -> String {
    let Some(channel) = channel else { return "need a connection manager".into() };
    let id = match channel.create_id() {
        Ok(id) => id,
        Err(error) => return error.to_string(),
    };
    let told = |what: &str, set: Result<(), rdma_verbs::Error>| match set {
        Ok(()) => format!("{what} can be set"),
        Err(error) => format!("{what} cannot be set ({error})"),
    };
    // Any value will do, because no connection is established.
    let [class, timeout] = [id.set_traffic_class(0), id.set_ack_timeout(14)];
    format!("{}; {}", told("traffic class", class), told("time-out of acknowledgements", timeout))
}

const fn relaxed_ordering(has: Option<bool>) -> &'static str {
    match has {
        Some(true) => {
            "can be asked for; the device and the kernel do not tell whether they do it, so measure with and without"
        }
        Some(false) => "the libraries are too old to be asked (rdma-core 28); bytes are written in order",
        None => "needs the libraries",
    }
}

/// Finds how many huge pages of 2 MiB are reserved and free, and whether the kernel makes others.
fn huge_pages(folder: &Path) -> String {
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap_or_default();
    let free = read("hugepages/hugepages-2048kB/free_hugepages");
    let choices = read("transparent_hugepage/enabled");
    let chosen = choices.split(['[', ']']).nth(1).unwrap_or("never");
    let reserved = match free.trim() {
        "" | "0" => "none of 2 MiB is reserved and free".to_owned(),
        free => format!("{free} of 2 MiB are reserved and free"),
    };
    let made = match chosen {
        "never" => "the kernel makes no others",
        _ => "the kernel makes others where it is asked and can",
    };
    format!("{reserved}; {made}")
}

fn locked_memory() -> String {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let memory = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    let words: Vec<_> = memory.unwrap_or("unknown").split_whitespace().collect();
    format!("{} (soft, hard; a run wants about 32 MiB)", words.join(" "))
}

fn valkey() -> String {
    on_path(VALKEY).map_or_else(|| format!("no {VALKEY} on the PATH"), |file| file.display().to_string())
}

const VALKEY: &str = "valkey-server";

fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softrdma_needs_no_kernel() {
        let [kernel, devices] = provided(Some("/run/fabric".into()));
        assert!(kernel.ok.is_none() && devices.ok == Some(true) && devices.told.contains("/run/fabric"));
    }

    #[test]
    fn huge_pages_are_counted() {
        let folder = std::env::temp_dir().join(format!("conformance-huge-pages-{}", std::process::id()));
        assert_eq!(huge_pages(&folder), "none of 2 MiB is reserved and free; the kernel makes no others");
        for (file, text) in [
            ("hugepages/hugepages-2048kB/free_hugepages", "12\n"),
            ("transparent_hugepage/enabled", "always [madvise] never\n"),
        ] {
            let file = folder.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let told = huge_pages(&folder);
        assert!(told.starts_with("12 of 2 MiB are") && told.ends_with("where it is asked and can"), "{told}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn where_no_device_is_it_is_said_how_to_make_one() {
        let told = devices(Path::new("/nonexistent")).unwrap_err();
        assert!(told.contains("`softrdma run --`") && told.contains("rdma link add"), "{told}");
    }
}
