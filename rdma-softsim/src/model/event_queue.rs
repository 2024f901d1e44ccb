//! Events to come, in one total order: by time, then by the order in which they were decided.

use core::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use rdma_backend::time::Instant;

/// Events to come. What is due at once takes a plain queue past the heap: without latency that is all of the data path.
pub(crate) struct EventQueue<E> {
    /// The moment of whatever happens now.
    now: Instant,
    /// Due now.
    due: VecDeque<E>,
    /// Due later.
    later: BinaryHeap<Entry<E>>,
    /// Entries ever put in `later`.
    count: u64,
}

struct Entry<E> {
    at: Instant,
    number: u64,
    event: E,
}

impl<E> EventQueue<E> {
    pub(crate) fn new() -> Self {
        Self { now: Instant::default(), due: VecDeque::new(), later: BinaryHeap::new(), count: 0 }
    }

    pub(crate) const fn now(&self) -> Instant {
        self.now
    }

    /// Puts `event` in, `delay` from now.
    pub(crate) fn schedule(&mut self, delay: core::time::Duration, event: E) {
        if delay.is_zero() {
            self.due.push_back(event);
        } else {
            self.later.push(Entry { at: self.now.after(delay), number: self.count, event });
            self.count += 1;
        }
    }

    /// The next event not later than `until`, with the clock moved to its moment; without one the clock moves to `until`.
    pub(crate) fn next(&mut self, until: Instant) -> Option<E> {
        // An entry of `later` that has come due was decided before the clock came here, so before all of `due`.
        if self.due.is_empty() || self.later.peek().is_some_and(|entry| entry.at <= self.now) {
            if let Some(entry) = self.later.peek()
                && entry.at <= until.max(self.now)
            {
                self.now = self.now.max(entry.at);
                return self.later.pop().map(|entry| entry.event);
            }
            self.now = self.now.max(until);
            return None;
        }
        self.due.pop_front()
    }

    /// When the next event is.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.due.is_empty() { self.later.peek().map(|entry| entry.at) } else { Some(self.now) }
    }
}

/// The greatest entry is the one to come first, as `BinaryHeap` has it.
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}
