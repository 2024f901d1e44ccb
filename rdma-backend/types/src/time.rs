//! Time, as an argument.

use core::time::Duration;

/// A moment on a monotonic clock, counted from an arbitrary start. This crate never reads a clock: whoever drives a
/// machine says what time it is, in an order that never goes back. Resolution: a nanosecond; range: 584 years, at the end of which
/// every later moment lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant {
    nanos: u64,
}

impl Instant {
    /// Later than any clock shows.
    pub const NEVER: Self = Self { nanos: u64::MAX };

    /// Returns the moment `since_start` after the clock's start.
    pub const fn from_start(since_start: Duration) -> Self {
        Self { nanos: nanos(since_start) }
    }

    /// Returns the moment so many seconds and nanoseconds after the clock's start, as `clock_gettime(2)` tells it.
    #[inline]
    pub const fn from_parts(seconds: u64, nanos: u64) -> Self {
        Self { nanos: seconds.saturating_mul(1_000_000_000).saturating_add(nanos) }
    }

    /// Returns how long after the clock's start this is.
    pub const fn since_start(self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    /// This moment and `later` (saturating: a time-out of "for ever" never wraps).
    #[must_use]
    #[inline]
    pub const fn after(self, later: Duration) -> Self {
        Self { nanos: self.nanos.saturating_add(nanos(later)) }
    }

    /// Returns how long it is from `earlier` to this moment; zero if that lies later.
    #[inline]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.nanos.saturating_sub(earlier.nanos))
    }
}

#[inline]
const fn nanos(duration: Duration) -> u64 {
    duration.as_secs().saturating_mul(1_000_000_000).saturating_add(duration.subsec_nanos() as u64)
}
