//! CPU affinity of the server's thread and of the interrupts behind a device's completion vectors.
//!
//! Valkey's document recommends two arrangements:
//!
//! | | interrupts | server thread | completion vector |
//! |---|---|---|---|
//! | 1: kernel apart | a few CPUs | the other CPUs | random ([`Vector::Random`](crate::Vector)) |
//! | 2: each server apart | vector *n* on CPU *n* | CPU *n* | *n* ([`Vector::Fixed`](crate::Vector)) |
//!
//! [`pin_thread`] and [`Interrupts::pin`] set them up. [`Interrupts`] prints the current state.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A set of CPUs, in the kernel's notation: `0-3,8`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpus(BTreeSet<usize>);

impl Cpus {
    /// Returns the CPUs, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    /// Returns the CPUs that are in both sets.
    #[must_use]
    pub fn common(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<usize> for Cpus {
    fn from_iter<I: IntoIterator<Item = usize>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

/// The text is not a list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a list of CPUs such as 0-3,8, each below {max}", max = CpuSet::MAX_CPU)]
pub struct ParseCpusError(String);

impl FromStr for Cpus {
    type Err = ParseCpusError;

    fn from_str(text: &str) -> Result<Self, ParseCpusError> {
        let mut cpus = BTreeSet::new();
        // The kernel writes an empty set as nothing.
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (first.parse::<usize>(), last.parse::<usize>()) {
                // Beyond that `CpuSet::set` panics, and a range could take all memory.
                (Ok(first), Ok(last)) if first <= last && last < CpuSet::MAX_CPU => cpus.extend(first..=last),
                _ => return Err(ParseCpusError(text.to_owned())),
            }
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{separator}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

/// Restricts the calling thread to these CPUs.
///
/// # Errors
/// Returns an error if none of them exists or this process may use none of them.
pub fn pin_thread(cpus: &Cpus) -> io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(cpu));
    sched_setaffinity(None, &set).map_err(|errno| {
        let error = io::Error::from(errno);
        io::Error::new(error.kind(), format!("cannot run on CPUs {cpus}: {error}"))
    })
}

/// Returns the CPUs that the calling thread may run on.
///
/// # Errors
/// Returns an error if the system call fails.
pub fn thread_cpus() -> io::Result<Cpus> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// An interrupt of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interrupt {
    /// Its number in `/proc/interrupts`.
    pub number: u32,
    /// Its name, given by its driver.
    pub name: String,
    /// The CPUs that may handle it.
    pub allowed: Cpus,
    /// The CPU that does handle it, if the kernel says.
    pub effective: Option<Cpus>,
    /// How often each CPU handled it. CPUs without any are left out.
    pub counts: Vec<(usize, u64)>,
}

/// The interrupts of an RDMA device. Prints as a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interrupts {
    /// The device, as in `rdma link`.
    pub device: String,
    /// Its interrupts, by number.
    pub all: Vec<Interrupt>,
    root: PathBuf,
}

/// Returns the names of this machine's RDMA devices.
pub fn devices() -> Vec<String> {
    names(Path::new("/sys/class/infiniband")).unwrap_or_default().into_iter().collect()
}

fn names(directory: &Path) -> io::Result<BTreeSet<String>> {
    std::fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

impl Interrupts {
    /// Returns the current interrupts of a device.
    ///
    /// # Errors
    /// Returns an error if there is no such device or its files cannot be read.
    pub fn of(device: &str) -> io::Result<Self> {
        Self::below(Path::new("/"), device)
    }

    fn below(root: &Path, device: &str) -> io::Result<Self> {
        let home = root.join("sys/class/infiniband").join(device);
        if !home.exists() {
            return Err(io::Error::new(ErrorKind::NotFound, format!("there is no RDMA device {device}")));
        }
        // A software device has none.
        let numbers = match names(&home.join("device/msi_irqs")) {
            Ok(names) => names.iter().filter_map(|name| name.parse().ok()).collect::<BTreeSet<u32>>(),
            Err(error) if error.kind() == ErrorKind::NotFound => BTreeSet::new(),
            Err(error) => return Err(error),
        };
        let table = std::fs::read_to_string(root.join("proc/interrupts"))?;
        let mut all = Vec::new();
        for number in numbers {
            let settings = root.join("proc/irq").join(number.to_string());
            let cpus = |file: &str| std::fs::read_to_string(settings.join(file)).ok()?.parse::<Cpus>().ok();
            let (counts, name) = row(&table, number).unwrap_or_default();
            all.push(Interrupt {
                number,
                name,
                allowed: cpus("smp_affinity_list").unwrap_or_default(),
                effective: cpus("effective_affinity_list"),
                counts,
            });
        }
        Ok(Self { device: device.to_owned(), all, root: root.to_owned() })
    }

    /// Returns the interrupts that signal completions, in the order of the completion vectors.
    /// Drivers name them so (`mlx5_comp0@pci:…`). If no name matches, returns all of them.
    pub fn completion_vectors(&self) -> Vec<&Interrupt> {
        let named: Vec<_> = self.all.iter().filter(|interrupt| interrupt.name.contains("comp")).collect();
        if named.is_empty() { self.all.iter().collect() } else { named }
    }

    /// Pins completion vector *n* to CPU *n* of `cpus`, cyclically. Needs root. Returns how many.
    ///
    /// # Errors
    /// Returns an error if the system refuses, or if there is no interrupt or no CPU.
    pub fn pin(&self, cpus: &Cpus) -> io::Result<usize> {
        let vectors = self.completion_vectors();
        if cpus.is_empty() || vectors.is_empty() {
            let nothing =
                format!("{} has {} interrupts to send to CPUs '{cpus}'", self.device, vectors.len());
            return Err(io::Error::new(ErrorKind::InvalidInput, nothing));
        }
        for (interrupt, cpu) in vectors.iter().zip(cpus.0.iter().cycle()) {
            let file = self.root.join(format!("proc/irq/{}/smp_affinity_list", interrupt.number));
            std::fs::write(&file, cpu.to_string()).map_err(|error| {
                let text = format!("cannot send interrupt {} to CPU {cpu}: {error}", interrupt.number);
                io::Error::new(error.kind(), text)
            })?;
        }
        Ok(vectors.len())
    }
}

fn row(table: &str, number: u32) -> Option<(Vec<(usize, u64)>, String)> {
    let mut lines = table.lines();
    let cpus: Vec<usize> =
        lines.next()?.split_whitespace().filter_map(|name| name.strip_prefix("CPU")?.parse().ok()).collect();
    let label = format!("{number}:");
    let rest = lines.find_map(|line| line.trim_start().strip_prefix(&label))?;
    let mut words = rest.split_whitespace();
    let counts =
        cpus.into_iter().zip(words.by_ref()).filter_map(|(cpu, count)| Some((cpu, count.parse().ok()?)));
    let counts = counts.filter(|(_, count)| *count > 0).collect();
    // proc(5): behind the counts come the controller and, as the last word, the driver's name.
    Some((counts, words.last().unwrap_or_default().to_owned()))
}

impl fmt::Display for Interrupts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.all.is_empty() {
            return write!(
                f,
                "{}: no interrupts of its own (a device of software); completions come on the CPU that received the packet",
                self.device
            );
        }
        let vectors = self.completion_vectors();
        write!(f, "{}: {} interrupts", self.device, self.all.len())?;
        for interrupt in &self.all {
            let vector = vectors.iter().position(|vector| vector.number == interrupt.number);
            let vector = vector.map_or(String::new(), |vector| format!("completion vector {vector}, "));
            let effective =
                interrupt.effective.as_ref().map_or(String::new(), |cpus| format!(", goes to {cpus}"));
            let mut came = String::new();
            for (cpu, count) in &interrupt.counts {
                write!(came, " CPU{cpu}:{count}")?;
            }
            write!(
                f,
                "\n  {:>5}  {:<32} {vector}may go to {}{effective}; came{}",
                interrupt.number,
                interrupt.name,
                interrupt.allowed,
                if came.is_empty() { " never" } else { &came }
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Cpus, Interrupts, pin_thread, thread_cpus};
    use std::fs;
    use std::path::PathBuf;

    fn cpus(text: &str) -> Cpus {
        text.parse().expect("a list")
    }

    #[test]
    fn lists_of_cpus_are_read_and_written_as_the_kernel_does() {
        for list in ["", "0", "0-3", "0-3,8", "1,3,5-7,1023"] {
            assert_eq!(cpus(list).to_string(), list);
        }
        assert_eq!(cpus("3,1,2\n").to_string(), "1-3");
        assert_eq!(cpus("0-3,8").common(&cpus("2-9")).to_string(), "2-3,8");
        for wrong in ["x", "3-1", "1-", "0-99999999999", "1024", "-1"] {
            assert!(wrong.parse::<Cpus>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_thread_runs_where_it_is_put() {
        // Affinity is per thread, so other tests are not disturbed.
        let may = thread_cpus().expect("a list");
        let last: Cpus = may.iter().last().into_iter().collect();
        pin_thread(&last).expect("one of ours");
        assert_eq!(thread_cpus().expect("a list"), last);
        let error = pin_thread(&cpus("1023")).expect_err("no such CPU");
        assert!(error.to_string().contains("CPUs 1023"), "{error}");
        pin_thread(&may).expect("as before");
    }

    /// A machine with a software device, and a NIC of four interrupts (three completion vectors).
    fn machine(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("rdma-conn-affinity-{name}-{}", std::process::id()));
        let nic = root.join("sys/class/infiniband/mlx5_0/device/msi_irqs");
        fs::create_dir_all(&nic).expect("a directory");
        fs::create_dir_all(root.join("sys/class/infiniband/rxe0")).expect("a directory");
        let mut table =
            "            CPU0       CPU1       CPU3\n   9:   1   2   3   IO-APIC   9-fasteoi   acpi\n"
                .to_owned();
        for (number, name) in
            [(40, "mlx5_async0"), (41, "mlx5_comp0"), (42, "mlx5_comp1"), (43, "mlx5_comp2")]
        {
            fs::write(nic.join(number.to_string()), "msix").expect("a file");
            let irq = root.join(format!("proc/irq/{number}"));
            fs::create_dir_all(&irq).expect("a directory");
            fs::write(irq.join("smp_affinity_list"), "0-3\n").expect("a file");
            fs::write(irq.join("effective_affinity_list"), "1\n").expect("a file");
            table += &format!(
                "  {number}:   7   0   {number}   PCI-MSI 524288-edge      {name}@pci:0000:01:00.0\n"
            );
        }
        fs::write(root.join("proc/interrupts"), table).expect("a file");
        root
    }

    #[test]
    fn the_report_says_which_interrupt_goes_where() {
        let root = machine("report");
        let interrupts = Interrupts::below(&root, "mlx5_0").expect("is there");
        let report = interrupts.to_string();
        assert!(report.starts_with("mlx5_0: 4 interrupts\n"), "{report}");
        let line = report.lines().find(|line| line.contains("mlx5_comp1")).expect("a line");
        assert!(
            line.contains("completion vector 1, may go to 0-3, goes to 1; came CPU0:7 CPU3:42"),
            "{line}"
        );
        assert!(!report.lines().nth(1).expect("a line").contains("vector"), "{report}");
        let software = Interrupts::below(&root, "rxe0").expect("is there").to_string();
        assert!(software.contains("no interrupts of its own"), "{software}");
        assert!(Interrupts::below(&root, "mlx5_9").is_err());
        fs::remove_dir_all(root).expect("ours");
    }

    #[test]
    fn completion_vectors_go_to_the_cpus_in_turn() {
        let root = machine("pin");
        let interrupts = Interrupts::below(&root, "mlx5_0").expect("is there");
        assert_eq!(interrupts.pin(&cpus("2,5")).expect("may write"), 3);
        let now = Interrupts::below(&root, "mlx5_0").expect("is there");
        let allowed: Vec<_> = now.all.iter().map(|interrupt| interrupt.allowed.to_string()).collect();
        assert_eq!(allowed, ["0-3", "2", "5", "2"], "the one that signals no completions stays");
        assert!(interrupts.pin(&cpus("")).is_err());
        let software = Interrupts::below(&root, "rxe0").expect("is there");
        assert!(software.pin(&cpus("0")).is_err());
        fs::remove_dir_all(root).expect("ours");
    }
}
