//! The messages whose bytes are in flight, and where to find each of them.

pub(super) mod bulk;
pub(super) mod carried;
pub(super) mod freight;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use rdma_backend::time::Instant;

use super::base::arena::visit;
use super::base::environment::Environment;
use super::base::event::Event;
use super::base::event_queue::Key;
use super::base::ids::{PairId, RegionId};
use bulk::Bulk;
use carried::{Carried, ENDS};
use freight::{Freight, Origin, Store, Stretch};

/// Messages by number. A call finds those that it is about, however many others there are.
#[derive(Default)]
pub(super) struct Flights {
    all: BTreeMap<u64, Carried>,
    /// The messages from and to a queue pair.
    of: BTreeSet<(PairId, u64)>,
    /// The messages that write to a region.
    writing: BTreeSet<(RegionId, u64)>,
    /// When each message without an outcome is looked at next.
    looks: BTreeSet<(Instant, u64)>,
    /// The next sweep for late ones.
    sweep: Option<Key>,
    /// Bytes of long messages to copy.
    bulks: VecDeque<Bulk>,
    /// Bytes of messages with an end in another process to move.
    freights: VecDeque<Freight>,
    /// Whether a driver does either, so that it need not be done at once.
    driven: bool,
    /// Number of all messages with an end in another process.
    count: u64,
    /// What they share.
    pub(super) store: Arc<Store>,
}

impl Flights {
    pub(super) fn insert(&mut self, number: u64, carried: Carried) {
        for end in ENDS {
            self.of.insert((carried.pair(end), number));
            for part in carried.written(end).into_iter().flat_map(|parts| parts.list()) {
                self.writing.insert((part.region, number));
            }
        }
        // One with an outcome only waits for its mover.
        if carried.open {
            self.looks.insert((carried.next_look, number));
        }
        self.all.insert(number, carried);
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<Carried> {
        let carried = self.all.remove(&number)?;
        for end in ENDS {
            self.of.remove(&(carried.pair(end), number));
            for part in carried.written(end).into_iter().flat_map(|parts| parts.list()) {
                self.writing.remove(&(part.region, number));
            }
        }
        // Found by its time, which only changes while the message is taken out (`Model::sweep`).
        self.looks.remove(&(carried.next_look, number));
        Some(carried)
    }

    /// Returns the messages from and to a queue pair.
    pub(super) fn of(&self, pair: PairId) -> impl Iterator<Item = (u64, &Carried)> {
        self.list(self.of.range((pair, 0)..=(pair, u64::MAX)).map(|(_, number)| *number))
    }

    /// Returns the messages that write to a region.
    pub(super) fn writing_to(&self, region: RegionId) -> impl Iterator<Item = (u64, &Carried)> {
        self.list(self.writing.range((region, 0)..=(region, u64::MAX)).map(|(_, number)| *number))
    }

    fn list(&self, numbers: impl Iterator<Item = u64>) -> impl Iterator<Item = (u64, &Carried)> {
        // Tests count these, so that a call never looks at messages of others.
        numbers.inspect(|_| visit()).filter_map(|number| Some((number, self.all.get(&number)?)))
    }

    /// Returns when the next message is to be looked at.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.looks.first().map(|(at, _)| *at)
    }

    /// Takes out the next message that is to be looked at by `now`.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<(u64, Carried)> {
        visit();
        let &(_, number) = self.looks.first().filter(|(at, _)| *at <= now)?;
        Some((number, self.remove(number)?))
    }

    /// Passes bytes to a driver from now on.
    pub(super) const fn drive(&mut self) {
        self.driven = true;
    }

    pub(super) const fn is_driven(&self) -> bool {
        self.driven
    }

    /// Returns the bytes of a new message with an end in another process.
    pub(super) fn load(
        &mut self,
        reads: bool,
        bytes: (Origin, Option<Vec<Stretch>>, usize),
        [captured, keeps]: [bool; 2],
    ) -> Freight {
        self.count += 1;
        Freight::new(self.count, reads, bytes, [captured, keeps], &self.store)
    }

    pub(super) fn push_freight(&mut self, freight: Freight) {
        self.freights.push_back(freight);
    }

    /// Returns bytes that the caller must move from now on.
    pub(super) fn next_freight(&mut self) -> Option<Freight> {
        self.freights.pop_front()
    }

    pub(super) fn push_bulk(&mut self, bulk: Bulk) {
        self.bulks.push_back(bulk);
    }

    /// Returns bytes to copy.
    pub(super) fn next_bulk(&mut self) -> Option<Bulk> {
        self.bulks.pop_front()
    }

    /// Returns whether a message of this queue pair may be being written to its owner's memory.
    pub(super) fn lands_for(&self, pair: PairId) -> bool {
        self.of(pair).any(|(_, carried)| {
            carried.is_inside(|end| carried.pair(end) == pair && carried.written(end).is_some())
        })
    }

    /// Returns whether this deregistered region may be being written.
    pub(super) fn lands_in(&self, region: RegionId) -> bool {
        self.writing_to(region).any(|(_, carried)| carried.is_inside(|end| carried.writes_to(end, region)))
    }

    /// Schedules a sweep for late messages at `at` or earlier.
    pub(super) fn sweep_at(&mut self, env: &mut Environment, at: Instant) {
        if self.sweep.is_none_or(|sweep| at < sweep.at) {
            // One sweep at a time is enough: it finds all messages that are due.
            if let Some(later) = self.sweep.take() {
                env.cancel(later);
            }
            let now = env.now();
            self.sweep = env.schedule(at.since(now), Event::Sweep);
        }
    }

    /// Begins a sweep. A later one is scheduled by [`Flights::sweep_at`].
    pub(super) fn begin_sweep(&mut self) {
        self.sweep = None;
    }
}
