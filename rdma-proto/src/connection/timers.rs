//! What a connection does because time passes.

use core::time::Duration;

use crate::config::{Config, UNACKNOWLEDGED};
use crate::time::Instant;

/// What the peer has to do before something that waits can leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum HeldUp {
    /// Register its first window.
    NoWindow,
    /// Register a new one.
    WindowFull,
    /// Take notifications.
    NoReceives,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Timers {
    /// When the next keepalive of a regular series is due.
    keepalive_at: Option<Instant>,
    keepalive_due: bool,
    /// The slot count after the last keepalive, until it is acknowledged. Never more than one is under way, so a peer
    /// that takes none makes them pile up nowhere (VR-KEEP-004).
    keepalive_in_flight: Option<u64>,
    /// Since when one is due or under way.
    asked: Instant,
    /// When the peer or its device last showed life, ...
    alive: Instant,
    /// ... and when the peer itself last sent something.
    heard: Instant,
    /// What waits for the peer, and since when.
    held_up: Option<(HeldUp, Instant)>,
    close_by: Option<Instant>,
}

impl Timers {
    pub(super) const fn new() -> Self {
        let zero = Instant::from_start(Duration::ZERO);
        Self {
            keepalive_at: None,
            keepalive_due: false,
            keepalive_in_flight: None,
            asked: zero,
            alive: zero,
            heard: zero,
            held_up: None,
            close_by: None,
        }
    }

    pub(super) const fn start(&mut self, now: Instant, config: &Config) {
        self.heard(now);
        if let Some(every) = config.keepalive.every {
            self.keepalive_at = Some(now.after(every));
        }
    }

    pub(super) const fn heard(&mut self, now: Instant) {
        self.heard = now;
        self.alive = now;
    }

    pub(super) const fn window_came(&mut self) {
        self.held_up = None;
    }

    pub(super) const fn receives_came(&mut self) {
        if let Some((HeldUp::NoReceives, _)) = self.held_up {
            self.held_up = None;
        }
    }

    pub(super) const fn acknowledged(&mut self, now: Instant, slots_done: u64) {
        self.alive = now;
        if let Some(slot) = self.keepalive_in_flight
            && slot <= slots_done
        {
            self.keepalive_in_flight = None;
        }
    }

    pub(super) const fn close_by(&mut self, deadline: Instant) {
        self.close_by = Some(deadline);
    }

    /// Whether a keepalive is to be sent now, as the request after which the slot count is `slot`.
    pub(super) const fn take_keepalive(&mut self, slot: u64) -> bool {
        let take = self.keepalive_due && self.keepalive_in_flight.is_none();
        if take {
            self.keepalive_due = false;
            self.keepalive_in_flight = Some(slot);
        }
        take
    }

    pub(super) fn note_held_up(&mut self, now: Instant, held_up: Option<HeldUp>) {
        self.held_up = held_up.map(|cause| match self.held_up {
            Some((same, since)) if same == cause => (cause, since),
            _ => (cause, now),
        });
    }

    pub(super) fn next(&self, config: &Config) -> Option<Instant> {
        let limit = |limit: Option<Duration>, since: Instant| limit.map(|limit| since.after(limit));
        [
            self.keepalive_at,
            self.probe_at(config),
            limit(config.keepalive.limit, self.heard),
            self.held_up.and_then(|(_, since)| limit(config.stall_limit, since)),
            self.close_by,
            self.unacknowledged_since().map(|since| since.after(UNACKNOWLEDGED)),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    const fn probe_at(&self, config: &Config) -> Option<Instant> {
        match config.keepalive.probe {
            Some(probe) if self.keepalive_in_flight.is_none() && !self.keepalive_due => {
                Some(self.alive.after(probe))
            }
            _ => None,
        }
    }

    pub(super) fn close_is_due(&self, now: Instant) -> bool {
        self.close_by.is_some_and(|deadline| now >= deadline)
    }

    pub(super) fn silent(&self, now: Instant, config: &Config) -> Option<Duration> {
        config.keepalive.limit.filter(|limit| now.since(self.heard) >= *limit)
    }

    pub(super) fn stalled(&self, now: Instant, config: &Config) -> Option<(HeldUp, Duration)> {
        let (cause, since) = self.held_up?;
        config.stall_limit.filter(|limit| now.since(since) >= *limit).map(|limit| (cause, limit))
    }

    /// Since when a sign of life of the peer's device is awaited, if one is.
    fn unacknowledged_since(&self) -> Option<Instant> {
        (self.keepalive_due || self.keepalive_in_flight.is_some()).then(|| self.asked.max(self.alive))
    }

    pub(super) fn unacknowledged(&self, now: Instant) -> Option<Duration> {
        let since = self.unacknowledged_since()?;
        (now.since(since) >= UNACKNOWLEDGED).then_some(UNACKNOWLEDGED)
    }

    /// Decides on keepalives.
    pub(super) fn tick(&mut self, now: Instant, config: &Config) {
        let awaited = self.keepalive_due || self.keepalive_in_flight.is_some();
        if let (Some(every), Some(at)) = (config.keepalive.every, self.keepalive_at)
            && now >= at
        {
            self.keepalive_due = self.keepalive_in_flight.is_none();
            // From now, not from `at`: after a long sleep one keepalive is enough.
            self.keepalive_at = Some(now.after(every));
        }
        if self.probe_at(config).is_some_and(|at| now >= at) {
            self.keepalive_due = true;
        }
        if !awaited {
            self.asked = now;
        }
    }
}
