use std::time::{Duration, Instant};

/// Requests of an open loop: each thread sends its share regularly, from its clients in turn.
pub(crate) struct Schedule {
    begun: Instant,
    interval: f64,
    pub(crate) sent: u64,
    pub(crate) next: usize,
    pub(crate) over: bool,
}

impl Schedule {
    pub(crate) fn new(begun: Instant, rate: f64, threads: usize) -> Self {
        Self { begun, interval: threads as f64 / rate, sent: 0, next: 0, over: false }
    }

    /// Returns when the next request is due; `None` if that is beyond what the clock counts.
    pub(crate) fn due(&self) -> Option<Instant> {
        let after = Duration::try_from_secs_f64(self.sent as f64 * self.interval).ok()?;
        self.begun.checked_add(after)
    }
}

/// Returns how long to sleep when nothing is due for `wait`. A sleep ends a little late, so a
/// thread stays awake for the last millisecond: its requests would leave as one burst.
pub(crate) fn sleep(wait: Duration) -> Duration {
    const AWAKE: u64 = 1;
    let millis = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(millis.saturating_sub(AWAKE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sleep is whole milliseconds, so that rounding adds none, and leaves at least one.
    #[test]
    fn the_last_millisecond_is_not_slept_through() {
        for (wait, slept) in
            [(0, 0), (50, 0), (999, 0), (1_000, 0), (1_999, 0), (2_000, 1), (2_999, 1), (100_000, 99)]
        {
            assert_eq!(sleep(Duration::from_micros(wait)), Duration::from_millis(slept), "{wait}");
        }
        assert!(sleep(Duration::MAX) > Duration::from_secs(1 << 40));
    }

    #[test]
    fn requests_are_due_at_regular_moments_or_never() {
        let begun = Instant::now();
        let at = |rate, sent| Schedule { sent, ..Schedule::new(begun, rate, 2) }.due();
        assert_eq!(at(4.0, 0), Some(begun));
        assert_eq!(at(4.0, 3), Some(begun + Duration::from_millis(1500)));
        for slow in [1e-19, 1e-25, f64::MIN_POSITIVE] {
            assert_eq!(at(slow, 1), None, "{slow}");
        }
    }
}
