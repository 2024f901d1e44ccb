//! Whole runs in real time. A source or a sink has a thread of its own beside the thread that
//! drives RDMA, so that preparing, moving and applying a snapshot overlap.

mod making;
mod publish;
mod pull;
mod renewal;

use std::time::Duration;

pub use publish::{Publish, publish};
pub use pull::{Pull, Republish, pull};

pub use crate::wait::{Stop, TICK};

/// The progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes published, or read and verified.
    pub bytes: u64,
    /// Bytes of the whole snapshot without the log of later writes, if known.
    pub total: Option<u64>,
    /// Whether the snapshot is complete.
    pub marked: bool,
    /// Readers that are reading now.
    pub readers: usize,
    /// Readers that have received everything.
    pub done: usize,
    /// Snapshots that were published, the last of which new readers get.
    pub snapshots: usize,
    /// Time since the first byte.
    pub elapsed: Duration,
}

impl Progress {
    /// Returns the bytes per second so far.
    #[must_use]
    pub fn rate(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.bytes as f64 / seconds } else { 0.0 }
    }

    /// Returns how long the rest takes at that rate.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        let left = self.total?.saturating_sub(self.bytes) as f64;
        Duration::try_from_secs_f64(left / self.rate()).ok()
    }
}
