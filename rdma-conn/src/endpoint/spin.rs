//! Looking again and again, for a bounded time, before anybody is asked to be woken.
//!
//! To be woken by a completion takes a call of the device (`ibv_req_notify_cq(3)`) and two of the kernel, which on a NIC is more than a
//! round trip takes. Whoever is about to sleep can look again for a while instead. How long that is worth is learned from how long the
//! last wait took: one that was over within the limit is waited for in full next time, and each longer one halves the time.

use std::num::NonZero;
use std::sync::LazyLock;
use std::thread::available_parallelism;
use std::time::Duration;

use rdma_backend::time::Instant;

/// Shorter than this is not worth a second look.
const SHORTEST: Duration = Duration::from_micros(1);

/// With one processor, whoever could bring something does not run while somebody spins.
static ALONE: LazyLock<bool> = LazyLock::new(|| available_parallelism().map_or(1, NonZero::get) == 1);

/// How long an endpoint goes on looking when it finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spin {
    /// The limit, [`Options::spin`](crate::Options::spin).
    most: Duration,
    /// The part of it that the last waits were worth.
    worth: Duration,
    /// Since when nothing has come; `None` before the first look.
    idle_since: Option<Instant>,
}

impl Spin {
    /// Returns one that never spins.
    pub(super) const fn never() -> Self {
        Self { most: Duration::ZERO, worth: Duration::ZERO, idle_since: None }
    }

    /// Raises the limit to `most`, where there is more than one processor.
    pub(super) fn raise(&mut self, most: Duration) {
        if most > self.most && !*ALONE {
            self.limit(most);
        }
    }

    pub(super) const fn limit(&mut self, most: Duration) {
        self.most = most;
        self.worth = most;
    }

    /// Returns whether it never looks again.
    #[inline]
    pub(super) const fn is_off(&self) -> bool {
        self.most.is_zero()
    }

    /// Notes whether a look at `now` has found anything. Returns whether to look again rather than to be woken.
    #[inline]
    pub(super) fn goes_on(&mut self, found: bool, now: Instant) -> bool {
        !self.is_off() && self.learn(found, now)
    }

    fn learn(&mut self, found: bool, now: Instant) -> bool {
        let since = *self.idle_since.get_or_insert(now);
        if found {
            self.idle_since = Some(now);
            self.worth = match now.since(since) <= self.most {
                true => self.most,
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
    fn without_a_limit_nobody_spins() {
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

    /// Waits that are longer than the limit are soon slept through at once, and the first short one is worth all of it again.
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
