//! Points in time, passed as arguments.

use core::time::Duration;

/// A point in time on a monotonic clock, counted from an arbitrary start.
///
/// This crate never reads a clock: the driver of a machine passes the time, which must never go
/// back. The resolution is a nanosecond, the range 584 years; later times saturate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant {
    nanos: u64,
}

impl Instant {
    /// Later than any clock shows.
    pub const NEVER: Self = Self { nanos: u64::MAX };

    /// Returns the instant `since_start` after the clock's start.
    pub const fn from_start(since_start: Duration) -> Self {
        Self { nanos: nanos(since_start) }
    }

    /// Returns the instant at these parts after the clock's start, as of `clock_gettime(2)`.
    #[inline]
    pub const fn from_parts(seconds: u32, nanos: u32) -> Self {
        // Less than 2^62 and 2^32, which a u64 holds.
        Self { nanos: (seconds as u64).wrapping_mul(1_000_000_000).wrapping_add(nanos as u64) }
    }

    /// Returns the time since the clock's start.
    pub const fn since_start(self) -> Duration {
        Duration::from_nanos(self.nanos)
    }

    /// Returns this instant plus `later`. Saturates, so that a time-out of "for ever" never wraps.
    #[must_use]
    #[inline]
    pub const fn after(self, later: Duration) -> Self {
        Self { nanos: self.nanos.saturating_add(nanos(later)) }
    }

    /// Returns the time since `earlier`, or zero if that is later.
    #[inline]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.nanos.saturating_sub(earlier.nanos))
    }
}

#[inline]
const fn nanos(duration: Duration) -> u64 {
    duration.as_secs().saturating_mul(1_000_000_000).saturating_add(duration.subsec_nanos() as u64)
}
