//! Future events, in one total order: by time, then by the order in which they were decided.

use std::collections::{BTreeMap, VecDeque};

use rdma_backend::time::Instant;

/// Future events. Immediate ones bypass the tree in a plain queue: without latency that is the
/// whole data path.
pub(crate) struct EventQueue<E> {
    /// The current time.
    now: Instant,
    due: VecDeque<E>,
    later: BTreeMap<Key, E>,
    count: u64,
}

/// Names a later event: its time, and how many were decided before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(in crate::model) at: Instant,
    number: u64,
}

impl<E> EventQueue<E> {
    pub(crate) const fn new() -> Self {
        Self {
            now: Instant::from_start(core::time::Duration::ZERO),
            due: VecDeque::new(),
            later: BTreeMap::new(),
            count: 0,
        }
    }

    pub(crate) const fn now(&self) -> Instant {
        self.now
    }

    /// Schedules an event. Returns its key, unless it is immediate.
    pub(crate) fn schedule(&mut self, delay: core::time::Duration, event: E) -> Option<Key> {
        if delay.is_zero() {
            self.due.push_back(event);
            return None;
        }
        let key = Key { at: self.now.after(delay), number: self.count };
        self.later.insert(key, event);
        // Of events at one time, the one that was decided first comes first.
        self.count += 1;
        Some(key)
    }

    /// Drops an event, if its time has not come.
    pub(crate) fn cancel(&mut self, key: Key) {
        self.later.remove(&key);
    }

    /// Returns the next event not later than `until`, and moves the clock to its time. Without one,
    /// moves the clock to `until`.
    pub(crate) fn next(&mut self, until: Instant) -> Option<E> {
        // A due entry of `later` was decided before the clock came here, so before all of `due`.
        let first = self.later.first_key_value().map(|(key, _)| key.at);
        if self.due.is_empty() || first.is_some_and(|at| at <= self.now) {
            if let Some(at) = first.filter(|at| *at <= until.max(self.now)) {
                self.now = self.now.max(at);
                return self.later.pop_first().map(|(_, event)| event);
            }
            self.now = self.now.max(until);
            return None;
        }
        self.due.pop_front()
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        let first = || self.later.first_key_value().map(|(key, _)| key.at);
        if self.due.is_empty() { first() } else { Some(self.now) }
    }

    #[cfg(test)]
    pub(in crate::model) fn len(&self) -> usize {
        self.due.len() + self.later.len()
    }
}
