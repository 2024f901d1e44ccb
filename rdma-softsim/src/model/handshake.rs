//! Messages of the connection manager, which connect and disconnect two identifiers.
//!
//! The names are those of InfiniBand's communication manager. A request (REQ) is answered by a
//! reply (REP), and that by a ready-to-use (RTU). A reject (REJ) ends an unfinished connection, a
//! disconnect (DREQ) and its reply (DREP) end an established one. A message on a dead link is
//! repeated until [`Parameters::cm_timeout`](crate::Parameters::cm_timeout) has passed.

use core::time::Duration;
use std::net::{IpAddr, SocketAddr};

use rdma_backend::time::Instant;
use rdma_backend::{ConnectParams, reject};

use super::events::NoticeKind;
use super::identifier::{Identifier, Phase, TIMED_OUT};
use super::party::{Party, Target};
use super::queue_pair::{Path, QueuePairState};
use super::{Event, IdentifierId, Model, PairId};
use crate::Error;
use crate::failure_class::FailureClass;
use crate::faults::{Fault, Site};

/// Repetitions of a message within the time-out.
const REPETITIONS: u32 = 8;

pub(crate) struct Packet {
    from: IdentifierId,
    /// The peer; `None` in a request, which finds it by address.
    to: Option<IdentifierId>,
    source: IpAddr,
    target: SocketAddr,
    body: Body,
    data: Box<[u8]>,
    until: Instant,
}

#[derive(Clone, Copy)]
pub(super) enum Body {
    Request { params: ConnectParams, pair: PairId },
    Reply { params: ConnectParams, pair: PairId },
    Ready,
    Reject(i32),
    Disconnect,
    Goodbye,
}

/// Converts parameters to the receiver's view: what the other side may have outstanding, this one
/// must answer, and the reverse (`rdma_get_cm_event(3)`).
pub(super) const fn as_received(params: ConnectParams) -> ConnectParams {
    let ConnectParams { responder_resources, initiator_depth, .. } = params;
    ConnectParams { responder_resources: initiator_depth, initiator_depth: responder_resources, ..params }
}

impl Model {
    /// Sends a message from `from` to its peer. Without a peer, the failure is reported when the
    /// request gets there.
    pub(super) fn send_packet(&mut self, from: IdentifierId, body: Body) {
        self.send_packet_with(from, body, Box::default());
    }

    /// Sends a message like [`Model::send_packet`], with private data.
    pub(super) fn send_packet_with(&mut self, from: IdentifierId, body: Body, data: Box<[u8]>) {
        let Some((source, target)) = self.ends(from) else { return };
        let to = self.identifiers.get(from).and_then(|identifier| identifier.peer);
        let until = self.event_queue.now().after(self.parameters.cm_timeout);
        let travel = self.packet_travel(from);
        self.post_packet(travel, Box::new(Packet { from, to, source, target, body, data, until }));
    }

    /// Returns the latency of a message of `from`. Messages do not overtake each other, because
    /// each answers the one before or is repeated until answered.
    fn packet_travel(&mut self, from: IdentifierId) -> Duration {
        let travel = self.parameters.latency + self.by_duration(|simulation| simulation.settings.cm_jitter);
        let now = self.event_queue.now();
        let Some(identifier) = self.identifiers.get_mut(from) else { return travel };
        identifier.arrival = identifier.arrival.max(now.after(travel));
        identifier.arrival.since(now)
    }

    fn post_packet(&mut self, delay: Duration, packet: Box<Packet>) {
        self.event_queue.schedule(delay, Event::Packet(packet));
    }

    /// Handles a message that arrives, or would if the link were up.
    pub(super) fn packet(&mut self, packet: Box<Packet>) {
        if self.cut(packet.source, packet.target.ip()) {
            let left = packet.until.since(self.event_queue.now());
            if left.is_zero() {
                self.undeliverable(&packet);
            } else {
                let pause = (self.parameters.cm_timeout / REPETITIONS).max(Duration::from_nanos(1)).min(left);
                self.post_packet(pause, packet);
            }
            return;
        }
        let Some(mut packet) = self.strike_packet(packet) else { return };
        let data = core::mem::take(&mut packet.data);
        match (packet.body, packet.to) {
            (Body::Request { params, pair }, _) => self.requested(&packet, params, pair, data),
            (Body::Reply { params, pair }, Some(to)) => self.replied(to, params, pair, data),
            (Body::Ready, Some(to)) => self.peer_ready(to),
            (Body::Reject(reason), Some(to)) => self.rejected(to, reason, data),
            (Body::Disconnect, Some(to)) => self.peer_disconnects(packet.from, to),
            (Body::Goodbye, Some(to)) => self.parted(to),
            (_, None) => {}
        }
    }

    /// Lets faults strike an arriving message. Returns it, or `None` if it comes late or not at
    /// all.
    fn strike_packet(&mut self, packet: Box<Packet>) -> Option<Box<Packet>> {
        let from = self.managed_party(packet.from);
        let to = packet.to.and_then(|to| self.managed_party(to));
        let strikes = |party: Option<Party>, on: &Target| party.is_some_and(|party| party.is(on));
        let body = packet.body;
        let struck = self.strike(Site::Packet, |fault, on| match (fault, body) {
            (Fault::Unreachable | Fault::Rejected { .. }, Body::Request { .. }) => strikes(from, on),
            (Fault::ConnectError, Body::Reply { .. }) | (Fault::SlowReady { .. }, Body::Ready) => {
                strikes(to, on)
            }
            _ => false,
        });
        match struck {
            Some(Fault::Unreachable) => self.undeliverable(&packet),
            Some(Fault::Rejected { reason }) => {
                self.answer_for_nobody(packet.from, Body::Reject(reason));
            }
            Some(Fault::ConnectError) => {
                if let Some(to) = packet.to.filter(|to| self.in_phase(*to, &[Phase::Connecting])) {
                    self.end(to, NoticeKind::ConnectError(TIMED_OUT), Box::default());
                    self.send_packet(to, Body::Reject(reject::CONSUMER_DEFINED));
                }
            }
            Some(Fault::SlowReady { micros }) => {
                self.post_packet(Duration::from_micros(micros.into()), packet);
            }
            _ => return Some(packet),
        }
        None
    }

    fn undeliverable(&mut self, packet: &Packet) {
        let unreachable = |model: &mut Self, id: IdentifierId, phase: Phase| {
            if model.in_phase(id, &[phase]) {
                model.end(id, NoticeKind::Unreachable(TIMED_OUT), Box::default());
            }
        };
        match (packet.body, packet.to) {
            (Body::Request { .. }, _) => unreachable(self, packet.from, Phase::Connecting),
            (Body::Reply { .. }, _) => unreachable(self, packet.from, Phase::Accepted),
            // The receiver gets nothing, and gives up as well.
            (Body::Ready, Some(to)) => unreachable(self, to, Phase::Accepted),
            (Body::Reject(_), Some(to)) => unreachable(self, to, Phase::Connecting),
            (Body::Disconnect, _) => self.parted(packet.from),
            (Body::Goodbye, Some(to)) => self.parted(to),
            (_, None) => {}
        }
    }

    /// Returns whether the queue pair's owner may not know yet that it is connected.
    pub(super) fn is_half_open(&self, pair: PairId) -> bool {
        let identifier = self.pairs.get(pair).and_then(|pair| pair.identifier);
        identifier.is_some_and(|id| self.in_phase(id, &[Phase::Accepted]))
    }

    fn in_phase(&self, id: IdentifierId, phases: &[Phase]) -> bool {
        self.identifiers.get(id).is_some_and(|identifier| phases.contains(&identifier.phase))
    }

    /// Ends a failed connect. Like with librdmacm, its queue pair goes to the error state.
    fn end(&mut self, id: IdentifierId, kind: NoticeKind, data: Box<[u8]>) {
        let Some(identifier) = self.identifiers.get_mut(id) else { return };
        identifier.phase = Phase::Closed;
        if let Some(pair) = identifier.pair.filter(|_| !identifier.external) {
            self.enter_error(pair);
        }
        self.notify_with(id, kind, data);
    }

    /// Handles a REQ: the listener gets a new identifier.
    fn requested(&mut self, packet: &Packet, params: ConnectParams, pair: PairId, data: Box<[u8]>) {
        if !self.in_phase(packet.from, &[Phase::Connecting]) {
            return;
        }
        let host = self.host_at(packet.target.ip());
        let listener = host.and_then(|host| self.hosts.get(host)?.listener(packet.target));
        let found = host.zip(listener.and_then(|id| Some((id, self.identifiers.get(id)?))));
        let Some((host, (listener, &Identifier { channel, phase: Phase::Listening { backlog }, .. }))) =
            found
        else {
            return self.answer_for_nobody(packet.from, Body::Reject(reject::INVALID_SERVICE_ID));
        };
        if self.unread_requests(listener) >= backlog as usize {
            // The kernel destroys an identifier that finds no room, and destruction rejects.
            return self.answer_for_nobody(packet.from, Body::Reject(reject::CONSUMER_DEFINED));
        }
        let key = self.next_key();
        let mut child = Identifier::new(host, channel, key, Phase::Requested);
        child.local = Some(packet.target);
        if let Some(active) = self.identifiers.get(packet.from) {
            child.remote = active.local;
            // REQ carries the path's class, which applies to both directions.
            child.traffic_class = active.traffic_class;
        }
        child.peer = Some(packet.from);
        child.peer_pair = Some(pair);
        child.theirs = params;
        let id = self.identifiers.insert(child);
        if let Some(active) = self.identifiers.get_mut(packet.from) {
            active.peer = Some(id);
        }
        let kind = NoticeKind::ConnectRequest { id, key, peer: as_received(params) };
        self.notify_with(listener, kind, data);
    }

    /// Answers a message without an identifier, as a host's kernel does.
    fn answer_for_nobody(&mut self, to: IdentifierId, body: Body) {
        let Some((source, target)) = self.ends(to) else { return };
        let until = self.event_queue.now().after(self.parameters.cm_timeout);
        // The link is the same both ways.
        let answer = Packet { from: to, to: Some(to), source, target, body, data: Box::default(), until };
        self.post_packet(self.parameters.latency, Box::new(answer));
    }

    /// Handles a REP. The owner must read it before the connection can be used, because it is
    /// librdmacm, in `rdma_get_cm_event(3)`, that makes the queue pair ready.
    fn replied(&mut self, id: IdentifierId, params: ConnectParams, pair: PairId, data: Box<[u8]>) {
        let Some(active) = self.identifiers.get_mut(id).filter(|active| active.phase == Phase::Connecting)
        else {
            return;
        };
        active.phase = Phase::Answered;
        active.theirs = params;
        active.peer_pair = Some(pair);
        let kind = match active.external {
            false => NoticeKind::Established(as_received(params)),
            true => NoticeKind::ConnectResponse,
        };
        self.notify_with(id, kind, data);
    }

    /// `rdma_establish(3)`: the owner of an external queue pair has made it ready.
    pub(crate) fn establish_external(&mut self, id: IdentifierId) -> Result<(), Error> {
        if !self.identifiers.get(id).is_some_and(|id| id.external && id.phase == Phase::Answered) {
            return Err(Error::State(
                "only who connects an external queue pair and was answered establishes",
            ));
        }
        self.establish(id);
        Ok(())
    }

    /// Handles that the active side's owner reads `Established`.
    pub(super) fn establish(&mut self, id: IdentifierId) {
        let Some(active) = self.identifiers.get_mut(id).filter(|active| active.phase == Phase::Answered)
        else {
            return;
        };
        active.phase = Phase::Connected;
        self.make_ready(id);
        self.send_packet(id, Body::Ready);
    }

    /// Handles an RTU: the passive side is connected.
    fn peer_ready(&mut self, id: IdentifierId) {
        let Some(passive) = self.identifiers.get_mut(id).filter(|passive| passive.phase == Phase::Accepted)
        else {
            return;
        };
        passive.phase = Phase::Connected;
        let params = passive.theirs;
        self.notify(id, NoticeKind::Established(as_received(params)));
    }

    /// `rdma_notify(3)`: a message of the peer has arrived, so it is connected even without its
    /// RTU.
    pub(crate) fn notify_established(&mut self, id: IdentifierId) -> Result<(), Error> {
        self.note_call(id, "notify");
        if !self.in_phase(id, &[Phase::Accepted]) {
            return Err(Error::State("only an accepted connection waits for its peer's word"));
        }
        self.peer_ready(id);
        Ok(())
    }

    fn rejected(&mut self, id: IdentifierId, reason: i32, data: Box<[u8]>) {
        if self.in_phase(id, &[Phase::Answered]) {
            // Accepted and revoked before the owner read of it.
            self.withdraw(id, |kind| {
                matches!(kind, NoticeKind::Established(_) | NoticeKind::ConnectResponse)
            });
        }
        let open = [Phase::Connecting, Phase::Answered, Phase::Requested, Phase::Accepted, Phase::Connected];
        if self.in_phase(id, &open) {
            self.end(id, NoticeKind::Rejected(reason), data);
        }
    }

    /// Handles a DREQ: the owner is notified, and everything else stays until it disconnects too.
    fn peer_disconnects(&mut self, from: IdentifierId, id: IdentifierId) {
        match self.identifiers.get(id).map(|identifier| identifier.phase) {
            Some(Phase::Connected | Phase::Accepted) => {
                if let Some(pair) = self.identifiers.get(id).and_then(|identifier| identifier.pair) {
                    if self.ends_in_the_middle(pair) {
                        self.count_injected(FailureClass::DisconnectMidWrite);
                    }
                    // Completions acknowledged before the peer disconnected come before its event.
                    self.report_all(pair);
                }
                if let Some(identifier) = self.identifiers.get_mut(id) {
                    identifier.phase = Phase::PeerGone;
                }
                self.notify(id, NoticeKind::Disconnected);
            }
            Some(Phase::Disconnecting) => self.parted(id),
            _ => self.answer_for_nobody(from, Body::Goodbye),
        }
    }

    /// Handles a DREP, or that its sender is gone.
    fn parted(&mut self, id: IdentifierId) {
        let Some(identifier) = self.identifiers.get_mut(id).filter(|i| i.phase == Phase::Disconnecting)
        else {
            return;
        };
        identifier.phase = Phase::Closed;
        self.notify(id, NoticeKind::Disconnected);
        self.event_queue.schedule(self.parameters.timewait, Event::TimewaitExit(id));
    }

    /// Connects the identifier's queue pair to the peer's: RTS, with what the connection manager
    /// negotiated.
    pub(super) fn make_ready(&mut self, id: IdentifierId) {
        let Some(identifier) = self.identifiers.get(id).filter(|id| !id.external) else { return };
        let (Some(pair), Some(peer)) = (identifier.pair, identifier.peer_pair) else { return };
        let Some((local, remote)) = self.ends(id) else { return };
        let (ours, theirs) = (identifier.ours, identifier.theirs);
        // The request's retry_count applies to both sides; rdma_accept(3) ignores its own.
        let retry = if identifier.phase == Phase::Accepted { theirs.retry_count } else { ours.retry_count };
        let read_depth = ours.initiator_depth.min(theirs.responder_resources);
        let host = identifier.host;
        let loopback = self.pairs.get(peer).is_some_and(|peer| peer.host == host);
        if let Some(pair) = self.pairs.get_mut(pair).filter(|pair| pair.state == QueuePairState::Idle) {
            pair.state = QueuePairState::Ready;
            pair.path = Some(Path { peer, local, remote: remote.ip(), loopback });
            // Each side uses the rnr_retry_count that the other one passed.
            pair.requester.configure(retry, theirs.rnr_retry_count, read_depth);
        }
    }
}
