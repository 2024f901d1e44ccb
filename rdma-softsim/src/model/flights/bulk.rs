//! Long messages within this process, whose bytes are copied without the fabric's lock.
//!
//! The copy counts as part of the transfer: a message arrives once its bytes are there, and only
//! then is it checked and executed, in one step like any other. Later messages of its queue pair
//! wait, so that the order stays. Until the copy has ended neither queue pair is flushed. A thread
//! that takes memory away or changes the state of a queue pair waits
//! ([`Driver`](crate::driver::Driver)).

use std::sync::Arc;

use crate::model::base::ids::PairId;
use crate::model::regions::memory::Memory;

/// From this length on, a copy takes longer than releasing and retaking the lock.
pub(in crate::model) const LONG: usize = 4096;

pub(crate) struct Bulk {
    pub(in crate::model) from: PairId,
    pub(in crate::model) to: PairId,
    pub(in crate::model) epoch: u32,
    pub(in crate::model) sequence: u64,
    pub(in crate::model) source: (Arc<Memory>, usize),
    pub(in crate::model) target: (Arc<Memory>, usize),
    pub(in crate::model) len: usize,
}

impl Bulk {
    /// Copies the bytes. Returns false if they could not be accessed.
    pub(crate) fn copy(&self) -> bool {
        let ((source, offset), (target, at)) = (&self.source, &self.target);
        // A program's memory may be shorter than when it was registered, or panic
        // (`Memory::shared`).
        source.shared().copy_to(*offset, target.shared(), *at, self.len)
    }
}
