//! What this process holds of the system: descriptors and pinned memory.

use std::fmt;
use std::time::{Duration, Instant};

/// Open descriptors and memory pinned for RDMA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    descriptors: usize,
    /// `VmPin` of `/proc/self/status`: what registered regions pin on a real device.
    pinned_kib: u64,
}

impl Ledger {
    /// As it stands.
    pub fn now() -> Self {
        Self::of("self")
    }

    /// What another process on this machine holds; nothing if there is none.
    pub fn of_process(pid: u32) -> Self {
        Self::of(&pid.to_string())
    }

    fn of(process: &str) -> Self {
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count);
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let pinned = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
        let pinned_kib = pinned.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0);
        Self { descriptors, pinned_kib }
    }

    /// Memory pinned, in KiB.
    pub const fn pinned_kib(&self) -> u64 {
        self.pinned_kib
    }

    /// Whether more of anything is held than in `other`.
    pub fn exceeds(&self, other: Self) -> bool {
        self.descriptors > other.descriptors || self.pinned_kib > other.pinned_kib
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} descriptors, {} KiB pinned", self.descriptors, self.pinned_kib)
    }
}

/// Waits until what is held no longer shrinks: the peer, if it lives in this process, closes its side a little later.
pub fn settle() {
    let mut last = Ledger::now();
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let now = Ledger::now();
        if !last.exceeds(now) {
            return;
        }
        last = now;
    }
}

/// Waits for at most 5 s until no more is held than `before`; what is held then.
pub fn await_no_more_than(before: Ledger) -> Ledger {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let now = Ledger::now();
        if !now.exceeds(before) || Instant::now() >= deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
