//! Future events, in one total order: by time, then by the order in which they were decided.

use core::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use rdma_backend::time::Instant;

/// Future events. Immediate ones bypass the heap in a plain queue: without latency that is the
/// whole data path.
pub(crate) struct EventQueue<E> {
    /// The current time.
    now: Instant,
    due: VecDeque<E>,
    later: BinaryHeap<Entry<E>>,
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

    pub(crate) fn schedule(&mut self, delay: core::time::Duration, event: E) {
        if delay.is_zero() {
            self.due.push_back(event);
        } else {
            self.later.push(Entry { at: self.now.after(delay), number: self.count, event });
            self.count += 1;
        }
    }

    /// Returns the next event not later than `until`, and moves the clock to its time. Without one,
    /// moves the clock to `until`.
    pub(crate) fn next(&mut self, until: Instant) -> Option<E> {
        // A due entry of `later` was decided before the clock came here, so before all of `due`.
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

    pub(crate) fn deadline(&self) -> Option<Instant> {
        if self.due.is_empty() { self.later.peek().map(|entry| entry.at) } else { Some(self.now) }
    }
}

/// Reversed: `BinaryHeap` pops the greatest entry first.
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
