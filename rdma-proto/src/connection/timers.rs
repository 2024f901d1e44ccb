//! The timers of a connection.

use core::time::Duration;

use crate::config::{Config, UNACKNOWLEDGED};
use rdma_types::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Blocked {
    NoWindow,
    WindowFull,
    NoReceives,
}

/// All timers. [`Instant::NEVER`] means never, and so does any instant plus [`Duration::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Timers {
    every: Duration,
    probe: Duration,
    silence: Duration,
    stall: Duration,
    keepalive_at: Instant,
    keepalive_due: bool,
    /// The slot count after the last keepalive, until it is acknowledged: at most one is in flight,
    /// so they do not pile up (VR-KEEP-004).
    keepalive_in_flight: Option<u64>,
    heard_at_keepalive: Instant,
    /// Since when a keepalive is due or in flight.
    asked: Instant,
    /// When the peer or its device last showed life.
    alive: Instant,
    /// When the peer itself last sent something.
    heard: Instant,
    /// What waits for the peer, and since when.
    blocked: Option<(Blocked, Instant)>,
    close_by: Instant,
    /// Whether [`Timers::next`] may have come nearer since that was last asked.
    sooner: bool,
}

impl Timers {
    pub(super) fn new(config: &Config) -> Self {
        let zero = Instant::from_start(Duration::ZERO);
        let keepalive = config.keepalive.unwrap_or(config.role.keepalive());
        Self {
            every: keepalive.every.unwrap_or(Duration::MAX),
            probe: keepalive.probe.unwrap_or(Duration::MAX),
            silence: keepalive.limit.unwrap_or(Duration::MAX),
            stall: config.stall_limit.unwrap_or(Duration::MAX),
            keepalive_at: Instant::NEVER,
            keepalive_due: false,
            keepalive_in_flight: None,
            heard_at_keepalive: zero,
            asked: zero,
            alive: zero,
            heard: zero,
            blocked: None,
            close_by: Instant::NEVER,
            sooner: false,
        }
    }

    pub(super) fn start(&mut self, now: Instant) {
        self.heard(now);
        self.keepalive_at = now.after(self.every);
        self.sooner = true;
    }

    #[inline]
    pub(super) fn heard(&mut self, now: Instant) {
        // This only moves times away, so `sooner` stays as it is.
        self.heard = now;
        self.alive = now;
    }

    pub(super) fn window_came(&mut self) {
        // A window is progress: the limit begins anew (VR-RES-013).
        self.blocked = None;
    }

    pub(super) fn receives_came(&mut self) {
        // A proof is progress of this wait alone (VR-RES-013).
        if let Some((Blocked::NoReceives, _)) = self.blocked {
            self.blocked = None;
        }
    }

    pub(super) fn acknowledged(&mut self, now: Instant, slots_done: u64) {
        self.alive = now;
        if let Some(slot) = self.keepalive_in_flight
            && slot <= slots_done
        {
            // `probe_at` counts again, and may be nearer than the time that is known.
            self.keepalive_in_flight = None;
            self.sooner = true;
        }
    }

    pub(super) fn close_by(&mut self, deadline: Instant) {
        self.close_by = deadline;
        self.sooner = true;
    }

    pub(super) const fn wants_keepalive(&self) -> bool {
        self.keepalive_due && self.keepalive_in_flight.is_none()
    }

    pub(super) fn heard_since_keepalive(&self) -> bool {
        self.heard > self.heard_at_keepalive
    }

    pub(super) fn take_keepalive(&mut self, slot: u64) -> bool {
        let take = self.wants_keepalive();
        if take {
            self.keepalive_due = false;
            self.keepalive_in_flight = Some(slot);
            self.heard_at_keepalive = self.heard;
        }
        take
    }

    #[inline]
    pub(super) fn note_free(&mut self) {
        self.blocked = None;
    }

    pub(super) fn note_blocked(&mut self, now: Instant, blocked: Option<Blocked>) {
        self.blocked = blocked.map(|cause| match self.blocked {
            // A limit counts lack of progress: another cause begins anew (VR-RES-013).
            Some((same, since)) if same == cause => (cause, since),
            _ => {
                self.sooner = true;
                (cause, now)
            }
        });
    }

    pub(super) fn next(&self) -> Option<Instant> {
        let next = self
            .keepalive_at
            .min(self.probe_at())
            .min(self.heard.after(self.silence))
            .min(self.stall_at())
            .min(self.unacknowledged_at())
            .min(self.close_by);
        (next != Instant::NEVER).then_some(next)
    }

    /// Returns whether [`Timers::next`] may have come nearer since the last call.
    #[inline]
    pub(super) fn take_sooner(&mut self) -> bool {
        core::mem::take(&mut self.sooner)
    }

    fn probe_at(&self) -> Instant {
        // One question at a time (VR-KEEP-004). Meanwhile `unacknowledged_at` is the limit.
        if self.keepalive_in_flight.is_some() || self.keepalive_due {
            return Instant::NEVER;
        }
        self.alive.after(self.probe)
    }

    /// When the peer has made no progress for too long (VR-RES-013).
    fn stall_at(&self) -> Instant {
        self.blocked.map_or(Instant::NEVER, |(_, since)| since.after(self.stall))
    }

    pub(super) fn close_at(&self) -> Option<Instant> {
        (self.close_by != Instant::NEVER).then_some(self.close_by)
    }

    pub(super) fn close_is_due(&self, now: Instant) -> bool {
        now >= self.close_by
    }

    pub(super) fn silent(&self, now: Instant) -> Option<Duration> {
        // Not `alive`: acknowledgements by the peer's device do not count (VR-KEEP-005).
        (now >= self.heard.after(self.silence)).then_some(self.silence)
    }

    pub(super) fn stalled(&self, now: Instant) -> Option<(Blocked, Duration)> {
        let (cause, _) = self.blocked.filter(|_| now >= self.stall_at())?;
        Some((cause, self.stall))
    }

    const fn awaits_life(&self) -> bool {
        self.keepalive_due || self.keepalive_in_flight.is_some()
    }

    fn unacknowledged_at(&self) -> Instant {
        if !self.awaits_life() {
            return Instant::NEVER;
        }
        // Whatever the peer or its device sends meanwhile shows that it is there (VR-KEEP-006).
        self.asked.max(self.alive).after(UNACKNOWLEDGED)
    }

    pub(super) fn unacknowledged(&self, now: Instant) -> Option<Duration> {
        (now >= self.unacknowledged_at()).then_some(UNACKNOWLEDGED)
    }

    pub(super) fn tick(&mut self, now: Instant) {
        self.sooner = true;
        if !self.awaits_life() {
            self.asked = now;
        }
        if now >= self.keepalive_at {
            // Not while the last is unacknowledged: they must not pile up (VR-KEEP-001,
            // VR-KEEP-004).
            self.keepalive_due = self.keepalive_in_flight.is_none();
            // From now, not from `at`: after a long sleep one keepalive is enough.
            self.keepalive_at = now.after(self.every);
        }
        if now >= self.probe_at() {
            self.keepalive_due = true;
        }
    }
}
