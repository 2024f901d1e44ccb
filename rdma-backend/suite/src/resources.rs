//! The resources of a process: descriptors and pinned memory.

use std::fmt;
use std::time::{Duration, Instant};

/// Open descriptors and memory pinned for RDMA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessResources {
    descriptors: usize,
    /// `VmPin` of `/proc/self/status`: the memory that registered regions pin on a real device.
    pinned_kib: u64,
}

impl ProcessResources {
    /// Creates a value from its parts.
    pub const fn new(descriptors: usize, pinned_kib: u64) -> Self {
        Self { descriptors, pinned_kib }
    }

    /// Returns the resources of this process.
    ///
    /// # Panics
    /// If `/proc` does not show this process: no leak could be seen.
    pub fn now() -> Self {
        Self::of("self").expect("/proc shows this process")
    }

    /// Returns the resources of another process on this machine, if visible.
    pub fn of_process(pid: u32) -> Option<Self> {
        Self::of(&pid.to_string())
    }

    fn of(process: &str) -> Option<Self> {
        Some(Self { descriptors: descriptors(process)?, pinned_kib: status(process, "VmPin")? })
    }

    /// Returns the memory pinned, in KiB.
    pub const fn pinned_kib(&self) -> u64 {
        self.pinned_kib
    }

    /// Returns whether it has more of any resource than `other`.
    pub fn exceeds(&self, other: Self) -> bool {
        self.descriptors > other.descriptors || self.pinned_kib > other.pinned_kib
    }
}

impl fmt::Display for ProcessResources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} descriptors, {} KiB pinned", self.descriptors, self.pinned_kib)
    }
}

/// Returns how many descriptors the process with this id has, or `self`; there, one is that of the
/// folder which is read.
pub fn descriptors(process: &str) -> Option<usize> {
    Some(std::fs::read_dir(format!("/proc/{process}/fd")).ok()?.count())
}

/// Returns a number of a process's `/proc/ID/status`; memory is in KiB. `None` if it has no such
/// line, as after its end, until it is waited for.
pub fn status(process: &str, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.split_whitespace().next()?.parse().ok()
}

/// Waits until this process has held no less for 200 ms: a peer in it closes a little later.
pub fn settle() {
    let mut last = ProcessResources::now();
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let now = ProcessResources::now();
        if !last.exceeds(now) {
            return;
        }
        last = now;
    }
}

/// Waits, for at most 5 s, until this process holds no more than `before`; returns what it holds.
pub fn await_no_more_than(before: ProcessResources) -> ProcessResources {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let now = ProcessResources::now();
        if !now.exceeds(before) || Instant::now() >= deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_seen_is_not_nothing() {
        assert!(ProcessResources::of_process(std::process::id()).is_some());
        // Above any limit of Linux.
        assert_eq!(ProcessResources::of_process(u32::MAX), None);
        // It has ended, and its parent has not waited for it.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let stat = format!("/proc/{}/stat", child.id());
        while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
            std::thread::yield_now();
        }
        assert_eq!(ProcessResources::of_process(child.id()), None);
        child.wait().unwrap();
    }
}
