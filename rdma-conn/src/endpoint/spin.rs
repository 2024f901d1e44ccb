//! Busy-polling for a bounded time before a wake-up is requested.
//!
//! A wake-up takes a call of the device (`ibv_req_notify_cq(3)`) and two system calls. On a NIC
//! that is longer than a round trip, so polling a little longer can be faster than sleeping. After
//! a wait within the limit, the next may poll for the whole limit. Each longer wait halves it.

use std::num::NonZero;
use std::sync::LazyLock;
use std::thread::available_parallelism;
use std::time::Duration;

use rdma_backend::time::Instant;

/// Busy-polling for less than this is not worthwhile.
const SHORTEST: Duration = Duration::from_micros(1);

/// With one processor, busy-polling keeps the sender from running.
static ALONE: LazyLock<bool> = LazyLock::new(|| available_parallelism().map_or(1, NonZero::get) == 1);

/// How long an endpoint keeps polling when it finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spin {
    /// The limit, [`Options::spin`](crate::Options::spin), unless that is zero.
    most: Option<Duration>,
    /// The time that recent waits justify.
    worth: Duration,
    /// When a look last found something, or else the time of the first look. `None` before that.
    idle_since: Option<Instant>,
}

impl Spin {
    pub(super) const fn never() -> Self {
        Self { most: None, worth: Duration::ZERO, idle_since: None }
    }

    pub(super) fn raise(&mut self, most: Duration) {
        if most > self.most.unwrap_or_default() && !*ALONE {
            self.limit(most);
        }
    }

    pub(super) const fn limit(&mut self, most: Duration) {
        self.most = Some(most);
        self.worth = most;
    }

    #[inline]
    pub(super) const fn is_off(&self) -> bool {
        self.most.is_none()
    }

    /// Records whether a look at `now` found anything. Returns whether to look again, not to sleep.
    #[inline]
    pub(super) fn goes_on(&mut self, found: bool, now: Instant) -> bool {
        self.most.is_some_and(|most| self.learn(most, found, now))
    }

    fn learn(&mut self, most: Duration, found: bool, now: Instant) -> bool {
        let since = *self.idle_since.get_or_insert(now);
        if found {
            self.idle_since = Some(now);
            self.worth = match now.since(since) <= most {
                true => most,
                false if self.worth < SHORTEST * 2 => Duration::ZERO,
                false => self.worth / 2,
            };
            return !self.worth.is_zero();
        }
        now.since(since) < self.worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(128);

    fn at(micros: u64) -> Instant {
        Instant::from_start(Duration::from_micros(micros))
    }

    fn spin() -> Spin {
        let mut spin = Spin::never();
        spin.limit(MOST);
        spin
    }

    #[test]
    fn without_a_limit_there_is_no_spinning() {
        let mut spin = Spin::never();
        assert!(!spin.goes_on(false, at(0)) && !spin.goes_on(true, at(1)));
    }

    #[test]
    fn a_spin_has_an_end() {
        let mut spin = spin();
        assert!(spin.goes_on(true, at(5)));
        assert!(spin.goes_on(false, at(132)));
        assert!(!spin.goes_on(false, at(133)));
    }

    /// After longer waits, the endpoint soon sleeps at once. A short one restores the limit.
    #[test]
    fn how_long_is_learned_from_the_last_wait() {
        let mut spin = spin();
        let mut now = 0;
        assert!(spin.goes_on(true, at(now)));
        for worth in [64, 32, 16, 8, 4, 2, 1, 0, 0] {
            assert_eq!(spin.goes_on(true, at(now + 1000)), worth > 0);
            now += 1000;
            assert!(!spin.goes_on(false, at(now + worth)), "{worth}");
            assert_eq!(worth > 0 && spin.goes_on(false, at(now + worth - 1)), worth > 0, "{worth}");
        }
        assert!(spin.goes_on(true, at(now + 100)));
        assert!(spin.goes_on(false, at(now + 227)));
    }
}
