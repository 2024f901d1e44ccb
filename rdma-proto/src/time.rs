//! Time, as an argument.

use core::time::Duration;

/// A moment on a monotonic clock, counted from an arbitrary start. This crate never reads a clock: whoever drives a
/// machine says what time it is, in an order that never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(Duration);

impl Instant {
    /// The moment `since_start` after the clock's start.
    pub const fn from_start(since_start: Duration) -> Self {
        Self(since_start)
    }

    /// How long after the clock's start this is.
    pub const fn since_start(self) -> Duration {
        self.0
    }

    /// This moment and `later` (saturating: a time-out of "for ever" never wraps).
    #[must_use]
    pub const fn after(self, later: Duration) -> Self {
        Self(self.0.saturating_add(later))
    }

    /// How long it is from `earlier` to this moment; zero if that lies later.
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}
