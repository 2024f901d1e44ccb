//! Ends of connections and of their identifiers, and the messages and events that lead to them.

use core::time::Duration;

use rdma_backend::{AsyncEvent, reject};

use super::base::target::{Party, Target};
use super::hosts::context::About;
use super::manager::event_channel::{Notice, NoticeKind, Taken};
use super::manager::identifier::{Phase, REJECT_TIMEOUT, TIMED_OUT};
use super::manager::packet::{Body, Packet};
use super::pairs::queue_pair::Owner;
use super::{ChannelId, Event, HostId, IdentifierId, Model, PairId};
use crate::error::Error;
use crate::failure_class::FailureClass;
use crate::faults::{Fault, Site};
use crate::trace::EntryKind;

/// Repetitions of a message within the time-out.
const REPETITIONS: u32 = 8;

impl Model {
    /// Handles a message that arrives, or would if the link were up.
    pub(super) fn packet(&mut self, packet: Box<Packet>) {
        if self.hosts.cut(packet.source, packet.target.ip()) {
            let left = packet.until.since(self.env.now());
            if left.is_zero() {
                self.undeliverable(&packet);
            } else {
                // Never zero, or the packet would be tried for ever without time passing.
                let pause =
                    (self.env.parameters().cm_timeout / REPETITIONS).max(Duration::from_nanos(1)).min(left);
                self.env.schedule(pause, Event::Packet(packet));
            }
            return;
        }
        let Some(mut packet) = self.strike_packet(packet) else { return };
        let data = core::mem::take(&mut packet.data);
        match (packet.body, packet.to) {
            (Body::Request { params, pair }, _) => {
                self.manager.requested(&mut self.env, &self.hosts, &packet, params, pair, data);
            }
            (Body::Reply { params, pair }, Some(to)) => {
                self.manager.replied(&mut self.env, to, params, pair, data);
            }
            (Body::Ready, Some(to)) => self.manager.peer_ready(&mut self.env, to),
            (Body::Reject(reason), Some(to)) => self.rejected(to, reason, data),
            (Body::Disconnect, Some(to)) => self.peer_disconnects(packet.from, to),
            (Body::Goodbye, Some(to)) => self.manager.parted(&mut self.env, to),
            // Only a request finds its receiver by address.
            (_, None) => {}
        }
    }

    /// Lets faults strike an arriving message. Returns it, or `None` if it comes late or not at
    /// all.
    fn strike_packet(&mut self, packet: Box<Packet>) -> Option<Box<Packet>> {
        let from = self.manager.managed_party(&self.pairs, packet.from);
        let to = packet.to.and_then(|to| self.manager.managed_party(&self.pairs, to));
        let strikes = |party: Option<Party>, on: &Target| party.is_some_and(|party| party.is(on));
        let body = packet.body;
        let struck = self.env.strike(Site::Packet, |fault, on| match (fault, body) {
            (Fault::Unreachable | Fault::Rejected { .. }, Body::Request { .. }) => strikes(from, on),
            (Fault::ConnectError, Body::Reply { .. }) | (Fault::SlowReady { .. }, Body::Ready) => {
                strikes(to, on)
            }
            _ => false,
        });
        match struck {
            Some(Fault::Unreachable) => self.undeliverable(&packet),
            Some(Fault::Rejected { reason }) => {
                self.manager.answer_without_identifier(&mut self.env, packet.from, Body::Reject(reason));
            }
            Some(Fault::ConnectError) => {
                if let Some(to) = packet.to.filter(|to| self.manager.in_phase(*to, &[Phase::Connecting])) {
                    // As the kernel, if it cannot make the queue pair ready (`cma_rep_recv`).
                    self.end(to, NoticeKind::ConnectError(TIMED_OUT), Box::default());
                    self.manager.send_packet(&mut self.env, to, Body::Reject(reject::CONSUMER_DEFINED));
                }
            }
            Some(Fault::SlowReady { micros }) => {
                self.env.schedule(Duration::from_micros(micros.into()), Event::Packet(packet));
            }
            _ => return Some(packet),
        }
        None
    }

    fn undeliverable(&mut self, packet: &Packet) {
        let unreachable = |model: &mut Self, id: IdentifierId, phase: Phase| {
            if model.manager.in_phase(id, &[phase]) {
                model.end(id, NoticeKind::Unreachable(TIMED_OUT), Box::default());
            }
        };
        match (packet.body, packet.to) {
            (Body::Request { .. }, _) => unreachable(self, packet.from, Phase::Connecting),
            (Body::Reply { .. }, _) => unreachable(self, packet.from, Phase::Accepted),
            // The receiver gets nothing, and gives up as well.
            (Body::Ready, Some(to)) => unreachable(self, to, Phase::Accepted),
            (Body::Reject(_), Some(to)) => unreachable(self, to, Phase::Connecting),
            // As if it were answered: the owner need not wait for a peer that is out of reach.
            (Body::Disconnect, _) => self.manager.parted(&mut self.env, packet.from),
            (Body::Goodbye, Some(to)) => self.manager.parted(&mut self.env, to),
            (_, None) => {}
        }
    }

    /// Ends a failed connect. Like with librdmacm, its queue pair goes to the error state.
    fn end(&mut self, id: IdentifierId, kind: NoticeKind, data: Box<[u8]>) {
        let Some(identifier) = self.manager.get_mut(id) else { return };
        identifier.phase = Phase::Closed;
        // The owner of an external queue pair changes its state itself.
        if let Some(pair) = identifier.pair.filter(|_| !identifier.external) {
            self.enter_error(pair);
        }
        self.manager.notify_with(&mut self.env, id, kind, data);
    }

    fn rejected(&mut self, id: IdentifierId, reason: i32, data: Box<[u8]>) {
        if self.manager.in_phase(id, &[Phase::Answered]) {
            // Accepted and revoked before the owner read of it.
            self.manager.withdraw(id, |kind| {
                matches!(kind, NoticeKind::Established(_) | NoticeKind::ConnectResponse)
            });
        }
        // Its accept will fail. Before that, the kernel reports nothing (`ucma_event_handler`).
        if self.manager.in_phase(id, &[Phase::Requested]) {
            return self.manager.set_phase(id, Phase::Closed);
        }
        // Connected, too: the owner may have read of the accept before the peer took it back.
        let open = [Phase::Connecting, Phase::Answered, Phase::Accepted, Phase::Connected];
        if self.manager.in_phase(id, &open) {
            self.end(id, NoticeKind::Rejected(reason), data);
        }
    }

    /// Handles a DREQ: the owner is notified, and everything else stays until it disconnects too.
    fn peer_disconnects(&mut self, from: IdentifierId, id: IdentifierId) {
        match self.manager.get(id).map(|identifier| identifier.phase) {
            Some(Phase::Connected | Phase::Accepted) => {
                // Accepted, too: a link or a fault may hold the RTU back for longer than the DREQ.
                if let Some(pair) = self.manager.get(id).and_then(|identifier| identifier.pair) {
                    if self.ends_in_the_middle(pair) {
                        self.env.count_injected(FailureClass::DisconnectMidWrite);
                    }
                    // Completions acknowledged before the peer disconnected come before its event.
                    self.report_all(pair);
                }
                if let Some(identifier) = self.manager.get_mut(id) {
                    identifier.phase = Phase::PeerGone;
                }
                self.manager.notify(&mut self.env, id, NoticeKind::Disconnected);
            }
            // Both at once: each DREQ is the answer to the other (case `verbs.part.both-at-once`).
            Some(Phase::Disconnecting) => self.manager.parted(&mut self.env, id),
            // Nothing is connected here any more. The kernel answers, so that the peer's wait ends.
            _ => self.manager.answer_without_identifier(&mut self.env, from, Body::Goodbye),
        }
    }

    pub(crate) fn disconnect(&mut self, id: IdentifierId) -> Result<(), Error> {
        let identifier = self.manager.find(id)?;
        let (pair, phase) = (identifier.pair.filter(|_| !identifier.external), identifier.phase);
        let (next, body) = match phase {
            Phase::Connected => (Phase::Disconnecting, Body::Disconnect),
            Phase::PeerGone => (Phase::Closed, Body::Goodbye),
            _ => return Err(Error::State("the identifier is not connected")),
        };
        self.manager.note_call(&mut self.env, id, "disconnect");
        // librdmacm moves the queue pair to ERR before the DREQ leaves (`ucma_shutdown`).
        if let Some(pair) = pair {
            self.enter_error(pair);
        }
        self.manager.set_phase(id, next);
        self.manager.send_packet(&mut self.env, id, body);
        // Nothing answers a DREP, so its sender's timewait begins with it.
        if next == Phase::Closed {
            self.env.schedule(self.env.parameters().timewait, Event::TimewaitExit(id));
        }
        Ok(())
    }

    /// `rdma_destroy_id(3)`: the peer is notified. The queue pair is destroyed before.
    pub(crate) fn destroy_identifier(&mut self, id: IdentifierId) {
        self.manager.note_call(&mut self.env, id, "destroy");
        let Ok(identifier) = self.manager.find(id) else { return };
        match identifier.phase {
            Phase::Connecting => self.manager.send_packet(&mut self.env, id, Body::Reject(REJECT_TIMEOUT)),
            // The kernel rejects for what is not connected: case `verbs.connect.request-dropped`.
            Phase::Answered | Phase::Requested | Phase::Accepted => {
                self.manager.send_packet(&mut self.env, id, Body::Reject(reject::CONSUMER_DEFINED));
            }
            Phase::Connected => self.manager.send_packet(&mut self.env, id, Body::Disconnect),
            Phase::PeerGone => self.manager.send_packet(&mut self.env, id, Body::Goodbye),
            _ => {}
        }
        // Unread events do not keep it: case `verbs.own.unread-events`.
        self.forget_notices(id);
        self.manager.await_no_more(id);
        self.manager.forget_ends(&mut self.env, id);
        let Some(identifier) = self.manager.remove(id) else { return };
        if identifier.pair.is_some() {
            let host = identifier.host.index();
            self.env.note(|| EntryKind::Busy { host, what: "identifier" });
        }
        if let (Phase::Listening { .. }, Some(local)) = (identifier.phase, identifier.local) {
            self.hosts.end_listening(identifier.host, local, id);
        }
    }

    /// Drops all unread events of an identifier, and the identifiers of connect requests among
    /// them.
    pub(super) fn forget_notices(&mut self, identifier: IdentifierId) {
        for notice in self.manager.withdraw(identifier, |_| true) {
            if let Some(child) = notice.kind.child() {
                self.destroy_identifier(child);
            }
        }
    }

    /// Destroys a channel and the unread connect requests on it.
    pub(crate) fn destroy_channel(&mut self, id: ChannelId) {
        // Only an unread event named them. Their destruction rejects the requests.
        for child in self.manager.children(id) {
            self.destroy_identifier(child);
        }
        self.manager.remove_channel(id);
    }

    pub(crate) fn take_notice(&mut self, id: ChannelId) -> Result<Taken, Error> {
        let taken = self.manager.take(id)?;
        if let Some(&Notice { identifier, kind, .. }) = taken.notice.as_ref() {
            if let Some(class) = kind.class() {
                self.env.count_observed(class);
            }
            match kind {
                // As `rdma_get_cm_event(3)`: it makes the queue pair ready, and sends the RTU.
                NoticeKind::Established(_) => {
                    self.manager.establish(&mut self.env, &mut self.pairs, identifier);
                }
                // When it is read: only then has a program met the end.
                NoticeKind::Disconnected if self.env.simulation().is_some() => {
                    let pair = self.manager.get(identifier).and_then(|owner| owner.pair);
                    if pair.is_some_and(|pair| self.ends_in_the_middle(pair)) {
                        self.env.count_observed(FailureClass::DisconnectMidWrite);
                    }
                }
                _ => {}
            }
        }
        Ok(taken)
    }

    pub(super) fn tell_pair(&mut self, pair: PairId, event: AsyncEvent) {
        match (self.pairs.get(pair).map(|pair| pair.owner), event) {
            (Some(Owner::Identifier(identifier)), _) => {
                self.manager.notify(&mut self.env, identifier, NoticeKind::Async(event));
            }
            // It was told that the queue is lost.
            (Some(Owner::Context(..)), AsyncEvent::CqErr) | (None, _) => {}
            (Some(Owner::Context(context, name)), _) => {
                self.contexts.tell(&mut self.env, context, event, About::Pair(name));
            }
        }
    }

    /// Raises an event for every identifier of a host. One of the device also goes to everyone who
    /// opened it.
    pub(super) fn tell_all(&mut self, host: HostId, kind: NoticeKind) {
        if let NoticeKind::Async(event) = kind {
            self.contexts.tell_all(&mut self.env, host, event);
        }
        for identifier in self.manager.identifiers().on(host) {
            self.manager.notify(&mut self.env, identifier, kind);
        }
    }
}
