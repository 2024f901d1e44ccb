//! Connections that listeners have accepted and the program does not have yet.
//!
//! A request costs a server an identifier, like a TCP connection in the backlog. A handshake costs
//! it a queue pair with its receives. A window, which is most of a connection, is registered in the
//! turn after the program has taken [`Event::Opened`](super::Event::Opened) or, on tokio, after a
//! task has accepted it. By then the program has counted the connection, or has closed it.
//! [`Limits::backlog`](crate::Limits::backlog) bounds those that it has not counted.

use std::collections::VecDeque;
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_backend::{Identifier, IdentifierKey};

use super::member::Member;
use super::{ACCEPTS, ConnectionId, Descriptors, Endpoint, ListenerId};
use crate::budget::Newcomer;
use crate::error::Error;

/// How long a newcomer may take at least, also while requests wait. It is much longer than a
/// handshake, and much shorter than a peer waits for an answer.
const GRACE: Duration = Duration::from_millis(100);

/// Requests that wait for a place in the backlog. The next ones are rejected.
const WAITING: usize = 1024;

pub(super) struct Newcomers<B: Descriptors> {
    /// Requests that wait for a place, with their listeners, longest first.
    waiting: VecDeque<(IdentifierKey, B::Identifier)>,
    dispensable: Dispensable,
    /// Connections that the program has taken, and that get their windows.
    taken: VecDeque<ConnectionId>,
    /// When there is something to do. Each turn asks.
    due: Instant,
}

/// Handshakes and closed newcomers, longest first, each with the time since when it is that. Also
/// entries that do not hold any more, because it is none of them, or is it since a later time: at
/// most as many again, and [`Dispensable::FEW`].
struct Dispensable {
    all: VecDeque<(Instant, ConnectionId)>,
    /// At this length, entries that do not hold are taken out.
    full: usize,
}

impl Dispensable {
    const FEW: usize = 64;

    const fn new() -> Self {
        Self { all: VecDeque::new(), full: Self::FEW }
    }

    fn push(&mut self, since: Instant, id: ConnectionId, still: impl Fn(Instant, ConnectionId) -> bool) {
        if self.all.len() >= self.full {
            self.all.retain(|(since, id)| still(*since, *id));
            // Doubled, so that `retain` costs each entry amortised constant time.
            self.full = Self::FEW + 2 * self.all.len();
        }
        self.all.push_back((since, id));
    }

    fn first(&self) -> Option<(Instant, ConnectionId)> {
        self.all.front().copied()
    }

    fn pop(&mut self) {
        self.all.pop_front();
    }
}

impl<B: Descriptors> Newcomers<B> {
    pub(super) fn new() -> Self {
        let (waiting, taken) = Default::default();
        Self { waiting, dispensable: Dispensable::new(), taken, due: Instant::NEVER }
    }

    #[inline]
    pub(super) const fn due(&self) -> Instant {
        self.due
    }

    /// Records that the program has a connection.
    pub(super) fn take(&mut self, id: ConnectionId) {
        self.taken.push_back(id);
        self.due = Instant::default();
    }

    /// Records that a place in the backlog may have become free.
    pub(super) fn has_room(&mut self) {
        if !self.waiting.is_empty() {
            self.due = Instant::default();
        }
    }

    /// Forgets the requests in a forked child, without an end of what is its parent's.
    pub(super) fn forget_waiting(&mut self) {
        std::mem::forget(std::mem::take(&mut self.waiting));
    }

    pub(super) fn close_listener(&mut self, listener: IdentifierKey) {
        self.waiting.retain(|(other, _)| *other != listener);
    }
}

impl<B: Descriptors> Endpoint<B> {
    /// Accepts a request, at once or when there is a place in the backlog.
    pub(super) fn request(&mut self, listener: IdentifierKey, identifier: B::Identifier, now: Instant) {
        let Some(listening) = self.listeners.get(&listener) else { return };
        if listening.hands_over {
            self.accepts -= 1;
            self.requests = Some(identifier);
        } else if self.newcomers.waiting.len() < WAITING {
            self.newcomers.waiting.push_back((listener, identifier));
            let lacks_place = self.accept_waiting(now);
            if lacks_place {
                // By then the oldest handshake has had its time, and can be given up.
                self.newcomers.due = self.newcomers.due.min(now.after(GRACE));
            } else {
                self.newcomers.has_room();
            }
        } else {
            self.accepts -= 1;
            self.usage.rejected += 1;
            // Dropping the identifier rejects the peer (VR-RES-006).
            tracing::warn!(peer = ?identifier.peer_addr(), "a connection was rejected: too many wait");
        }
    }

    #[cold]
    pub(super) fn see_to_newcomers(&mut self, now: Instant) {
        self.admit_taken(now);
        // A turn does only so much.
        let left = !self.newcomers.taken.is_empty();
        self.newcomers.due = if left { Instant::default() } else { Instant::NEVER };
        while self.accept_waiting(now) {
            // An event that was not read may say that the oldest handshake is complete.
            if self.awake.events_wait() {
                if now < self.rests_until {
                    self.newcomers.due = self.newcomers.due.min(self.rests_until);
                    return;
                }
                break;
            }
            if let Err(again_at) = self.give_one_up(now) {
                self.newcomers.due = self.newcomers.due.min(again_at);
                return;
            }
        }
        self.newcomers.has_room();
    }

    /// Accepts waiting requests, as many as a turn may. Returns whether one lacks only a place.
    fn accept_waiting(&mut self, now: Instant) -> bool {
        while self.accepts > 0 && !self.newcomers.waiting.is_empty() {
            let Some(newcomer) = self.budget.newcomer() else { return true };
            let Some((listener, identifier)) = self.newcomers.waiting.pop_front() else { break };
            self.accepts -= 1;
            self.accept_one(listener, identifier, newcomer, now);
        }
        false
    }

    fn accept_one(
        &mut self,
        listener: IdentifierKey,
        identifier: B::Identifier,
        newcomer: Newcomer,
        now: Instant,
    ) {
        let Some(listening) = self.listeners.get(&listener) else { return };
        let options = listening.options;
        let peer = identifier.peer_addr();
        // Dropping an identifier rejects its peer, so it learns of every error (VR-RES-006).
        let accepted = self.budget.place().and_then(|place| {
            self.accept(identifier, options, place, Some((ListenerId(listener), newcomer)))
        });
        match accepted {
            Ok(id) => {
                self.usage.accepted += 1;
                self.may_go(now, id);
            }
            Err(error) => {
                tracing::warn!(?peer, %error, "a connection was rejected");
                self.usage.rejected += 1;
                // For the next one, if newcomers hold what is lacking.
                if error.is_scarcity() {
                    _ = self.give_one_up(now);
                }
                if error.concerns_everybody() {
                    self.accept_failed(listener, error);
                }
            }
        }
    }

    /// Records a handshake, or a newcomer that the program has closed.
    fn may_go(&mut self, now: Instant, id: ConnectionId) {
        let Some(member) = self.members.get_mut(id.0) else { return };
        member.set_dispensable(now);
        let members = &self.members;
        self.newcomers
            .dispensable
            .push(now, id, |since, id| members.get(id.0).is_some_and(|member| member.is_dispensable(since)));
    }

    /// Registers the windows of connections that the program has taken, of a few in a turn.
    fn admit_taken(&mut self, now: Instant) {
        for _ in 0..ACCEPTS {
            let Some(id) = self.newcomers.taken.pop_front() else { break };
            let mut admitted = self.admit(id);
            // Those that the program does not have yet make room for this one.
            while admitted.as_ref().is_err_and(Error::is_scarcity) && self.give_one_up(now).is_ok() {
                admitted = self.admit(id);
            }
            if let Err(error) = admitted {
                self.usage.rejected += 1;
                let Some(member) = self.members.get_mut(id.0) else { continue };
                tracing::warn!(peer = %member.peer, %error, "a connection has no window");
                let listener = member.listener();
                member.fail(error.clone());
                if let Some(ListenerId(listener)) = listener
                    && error.concerns_everybody()
                {
                    self.accept_failed(listener, error);
                }
            }
            self.newcomers.has_room();
            self.settle(id);
        }
    }

    fn admit(&mut self, id: ConnectionId) -> Result<(), Error> {
        self.members.get_mut(id.0).map_or(Ok(()), Member::admit)
    }

    /// Records that the program has closed a newcomer.
    pub(super) fn refused(&mut self, id: ConnectionId) {
        if self.members.get(id.0).is_some_and(Member::is_newcomer) {
            self.may_go(self.backend.now(), id);
        }
    }

    /// Ends the newcomer that is dispensable for the longest time, if that is long enough.
    /// Otherwise returns when to try again.
    fn give_one_up(&mut self, now: Instant) -> Result<(), Instant> {
        while let Some((since, id)) = self.newcomers.dispensable.first() {
            // A handshake that became a closed connection has another entry, of its close.
            let member = self.members.get(id.0).filter(|member| member.is_dispensable(since));
            // They are in the order of their times: if the first may stay, all may.
            if member.is_some() && now < since.after(GRACE) {
                return Err(since.after(GRACE));
            }
            self.newcomers.dispensable.pop();
            if let Some(member) = member {
                tracing::debug!(peer = %member.peer, "given up for those who wait");
                self.usage.rejected += 1;
                self.abort(id);
                return Ok(());
            }
        }
        // All others are open, and the program is about to take them.
        Err(now.after(GRACE))
    }
}

#[cfg(test)]
mod tests {
    use rdma_softsim::{DeviceKind, Simulation, SimulationSettings};
    use slotmap::SlotMap;

    use super::super::ids::MemberKey;
    use super::*;
    use crate::budget::Limits;
    use crate::options::Options;

    /// After a shortage no event is read for a while. A request that lacks a place waits, too.
    #[test]
    fn a_request_does_not_spin_while_no_event_is_read() {
        let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), Vec::new());
        let [server, client] =
            [1, 2].map(|last| sim.host(&[[192, 0, 2, last].into()], rdma_softsim::Limits::default()));
        let address = ([192, 0, 2, 1], 6379).into();
        let mut server = Endpoint::new(&server, Limits::NONE.backlog(0)).expect("a device");
        server.listen(address, Options::default()).expect("a free address");
        let mut client = Endpoint::new(&client, Limits::NONE).expect("a device");
        client.connect(address, None, Duration::from_secs(60), Options::default()).expect("begins");
        while server.newcomers.waiting.is_empty() {
            assert!(sim.now().since_start() < Duration::from_secs(1), "no request");
            sim.advance(sim.now().after(Duration::from_micros(100)));
            client.progress().expect("the fabric stays");
            server.progress().expect("the fabric stays");
        }
        let rests_until = sim.now().after(Duration::from_millis(20));
        server.rests_until = rests_until;
        server.awake.set_events_wait(true);
        server.newcomers.has_room();
        server.progress().expect("the fabric stays");
        assert_eq!(server.next_timeout(), Some(rests_until));
        // The event is read, and all that is left is to ask again for a place.
        sim.advance(rests_until);
        server.progress().expect("the fabric stays");
        assert_eq!(server.next_timeout(), Some(rests_until.after(GRACE)));
    }

    /// One that lingers for an hour does not keep those that came and went after it.
    #[test]
    fn those_that_have_left_are_forgotten_behind_one_that_stays() {
        let mut ids = SlotMap::<MemberKey, ()>::with_key();
        let mut dispensable = Dispensable::new();
        let mut next = || ConnectionId(ids.insert(()));
        let stays = next();
        dispensable.push(Instant::default(), stays, |_, _| true);
        for _ in 0..10_000 {
            dispensable.push(Instant::default(), next(), |_, id| id == stays);
            assert!(dispensable.all.len() <= 2 + Dispensable::FEW);
        }
        assert_eq!(dispensable.first(), Some((Instant::default(), stays)));
    }
}
