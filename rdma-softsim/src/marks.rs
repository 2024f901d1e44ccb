//! Which kinds of failure a run has met.

/// The classes of failure that a reliable connection can meet, by number; the first place is nobody's.
pub const CLASSES: [&str; 31] = [
    "",
    "receiver not ready",
    "retries exceeded",
    "bad key, bounds or stale window",
    "zero-length WRITE",
    "receive buffer too small",
    "receive memory gone",
    "local protection error",
    "region deregistered with work in flight",
    "unsignaled work fails",
    "flush semantics",
    "contents of error completions",
    "completion queue overrun",
    "send queue full",
    "device limits",
    "order of completions",
    "one-shot notification race",
    "event coalescing",
    "event acknowledgement",
    "data visibility",
    "send buffer ownership",
    "lost and duplicated packets",
    "connection setup faults",
    "establishment races",
    "disconnect in the middle of writes",
    "abrupt events",
    "teardown order",
    "resource exhaustion",
    "slow consumer, stalled peer",
    "protocol adversary",
    "scheduling",
];

/// How often each class was brought about, and how often whoever uses the fabric was confronted with it. A fault that is
/// injected and never observed has tested nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Marks {
    injected: [u64; CLASSES.len()],
    observed: [u64; CLASSES.len()],
}

impl Marks {
    /// Notes that `class` was brought about.
    pub const fn inject(&mut self, class: usize) {
        self.injected[class] += 1;
    }

    /// Notes that somebody had to deal with it.
    pub const fn observe(&mut self, class: usize) {
        self.observed[class] += 1;
    }

    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        for (sum, count) in self.injected.iter_mut().zip(other.injected) {
            *sum += count;
        }
        for (sum, count) in self.observed.iter_mut().zip(other.observed) {
            *sum += count;
        }
    }

    /// Number, name, and how often each class was brought about and observed.
    pub fn classes(&self) -> impl Iterator<Item = (usize, &'static str, u64, u64)> {
        (1..CLASSES.len()).map(|class| (class, CLASSES[class], self.injected[class], self.observed[class]))
    }
}
