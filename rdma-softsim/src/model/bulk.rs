//! Long messages within this process, whose bytes are copied without the fabric's lock.
//!
//! The copy counts as part of the transfer: a message arrives once its bytes are there, and only
//! then is it checked and executed, in one step like any other. Later messages of its queue pair
//! wait, so that the order stays. Until the copy has ended neither queue pair is flushed. A thread
//! that takes memory away or changes the state of a queue pair waits
//! ([`Driver`](crate::driver::Driver)).

use std::sync::Arc;

use rdma_backend::{Access, SendOp};

use super::memory::{Bytes, Memory};
use super::parts::Parts;
use super::queue_pair::QueuePairState;
use super::requester::Source;
use super::responder::Arrival;
use super::{Event, Model, PairId};

/// From this length on, a copy takes longer than releasing and retaking the lock.
pub(super) const LONG: usize = 4096;

pub(crate) struct Bulk {
    from: PairId,
    to: PairId,
    epoch: u32,
    sequence: u64,
    source: (Arc<Memory>, usize),
    target: (Arc<Memory>, usize),
    len: usize,
}

impl Bulk {
    /// Copies the bytes. Returns false if they could not be accessed.
    pub(crate) fn copy(&self) -> bool {
        let ((source, offset), (target, at)) = (&self.source, &self.target);
        source.shared().copy_to(*offset, target.shared(), *at, self.len)
    }
}

impl Model {
    /// Enables [`Model::next_bulk`]: a driver copies from now on.
    pub(crate) const fn carry_bulks(&mut self) {
        self.carries = true;
    }

    /// Returns bytes to copy. Call [`Model::end_bulk`] afterwards.
    pub(crate) fn next_bulk(&mut self) -> Option<Bulk> {
        self.bulks.pop_front()
    }

    /// Lets the message of copied, or inaccessible, bytes arrive.
    pub(crate) fn end_bulk(&mut self, bulk: &Bulk, copied: bool) {
        let Bulk { from, to, epoch, sequence, .. } = *bulk;
        for end in [from, to] {
            if let Some(pair) = self.pairs.get_mut(end) {
                pair.bulks -= 1;
            }
        }
        if let Some(pair) = self.pairs.get_mut(from) {
            pair.requester.carrying = false;
        }
        let moved = copied.then_some(Ok(()));
        self.arrive_with(from, epoch, sequence, Arrival { moved, carried: true, ..Arrival::default() });
        if let Some(pair) = self.pairs.get_mut(from) {
            for (epoch, sequence) in pair.requester.behind.drain(..) {
                self.event_queue
                    .schedule(core::time::Duration::ZERO, Event::Arrive { from, epoch, sequence });
            }
        }
        for end in [from, to] {
            if self.pairs.get(end).is_some_and(|pair| pair.state == QueuePairState::Error) {
                self.begin_flush(end);
            }
        }
    }

    /// Starts copying the bytes of an executable message. Returns false if it must be executed at
    /// once.
    pub(super) fn begin_bulk(&mut self, from: PairId, to: PairId, epoch: u32, sequence: u64) -> bool {
        let Some(bulk) = self.bulk(from, to, epoch, sequence) else { return false };
        for end in [from, to] {
            if let Some(pair) = self.pairs.get_mut(end) {
                pair.bulks += 1;
            }
        }
        if let Some(pair) = self.pairs.get_mut(from) {
            pair.requester.carrying = true;
        }
        self.bulks.push_back(bulk);
        true
    }

    /// Returns the bytes of a message if they are many, no intermediate state of their copy is
    /// visible, and the message is valid.
    fn bulk(&self, from: PairId, to: PairId, epoch: u32, sequence: u64) -> Option<Bulk> {
        if !self.carries
            || self.simulation.is_some()
            || self.capture.is_some()
            || !self.parameters.latency.is_zero()
        {
            return None;
        }
        let work = self.pairs.get(from)?.requester.flight(epoch, sequence)?;
        let remote = match work.op {
            SendOp::Write(remote) => remote,
            SendOp::WriteImmediate(remote, _) if self.next_receive(to).is_some() => remote,
            _ => return None,
        };
        let Source::Memory(Parts::One(part)) = &work.source else { return None };
        let (region, offset) =
            self.remote(self.pairs.get(to)?, remote, work.len, Access::REMOTE_WRITE.into())?;
        let (Bytes::Own(source), Bytes::Own(target)) =
            (self.local(part.region, Access::NONE)?, self.local(region, Access::LOCAL_WRITE)?)
        else {
            return None;
        };
        Some(Bulk {
            from,
            to,
            epoch,
            sequence,
            source: (Arc::clone(source), part.offset),
            target: (Arc::clone(target), offset),
            len: work.len,
        })
    }
}
