use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counters of a bridge. They only grow, except `open`.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) accepted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) unreachable: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) ended: AtomicU64,
    pub(crate) forward: AtomicU64,
    pub(crate) backward: AtomicU64,
}

/// A snapshot of [`Counters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Clients that were accepted, including refused ones.
    pub accepted: u64,
    /// Clients refused because the limit was reached.
    pub refused: u64,
    /// Clients for whom the server could not be reached.
    pub unreachable: u64,
    /// Connections ended by an error or a time-out, on either side.
    pub failed: u64,
    /// Connections that ended in order.
    pub ended: u64,
    /// Current connections, including those being made.
    pub open: u64,
    /// Bytes from clients to the server.
    pub forward: u64,
    /// Bytes from the server to clients.
    pub backward: u64,
}

impl Counters {
    pub(crate) fn one_more(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Reads the counters.
    pub fn snapshot(&self) -> Snapshot {
        // Read the ends before the starts, so that `open` never falls below zero.
        let refused = self.refused.load(Ordering::Acquire);
        let unreachable = self.unreachable.load(Ordering::Acquire);
        let failed = self.failed.load(Ordering::Acquire);
        let ended = self.ended.load(Ordering::Acquire);
        let accepted = self.accepted.load(Ordering::Acquire);
        Snapshot {
            accepted,
            refused,
            unreachable,
            failed,
            ended,
            open: accepted.saturating_sub(refused + unreachable + failed + ended),
            forward: self.forward.load(Ordering::Relaxed),
            backward: self.backward.load(Ordering::Relaxed),
        }
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { accepted, refused, unreachable, failed, ended, open, forward, backward } = self;
        write!(
            f,
            "open={open} accepted={accepted} ended={ended} failed={failed} unreachable={unreachable} \
             refused={refused}\nbytes_forward={forward} bytes_backward={backward}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_no_wider_than_a_page() {
        let connections = 9_999_999_999;
        let snapshot = Snapshot {
            accepted: connections,
            refused: connections,
            unreachable: connections,
            failed: connections,
            ended: connections,
            open: connections,
            forward: u64::MAX,
            backward: u64::MAX,
        };
        assert!(snapshot.to_string().lines().all(|line| line.len() <= 120), "{snapshot}");
    }
}
