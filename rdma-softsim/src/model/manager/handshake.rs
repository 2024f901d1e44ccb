//! Messages of the connection manager, which connect and disconnect two identifiers.
//!
//! The names are those of InfiniBand's communication manager. A request (REQ) is answered by a
//! reply (REP), and that by a ready-to-use (RTU). A reject (REJ) ends an unfinished connection, a
//! disconnect (DREQ) and its reply (DREP) end an established one. A message on a dead link is
//! repeated until [`Parameters::cm_timeout`](crate::Parameters::cm_timeout) has passed.

use core::time::Duration;

use rdma_backend::{ConnectParams, reject};

use super::Manager;
use super::event_channel::NoticeKind;
use super::identifier::{Identifier, Phase, REJECT_DATA, REPLY_DATA, REQUEST_DATA, padded};
use super::packet::{Body, Packet, as_received};
use crate::error::Error;
use crate::model::base::environment::Environment;
use crate::model::base::event::Event;
use crate::model::base::ids::{ChannelId, IdentifierId, PairId};
use crate::model::hosts::Hosts;
use crate::model::pairs::Pairs;
use crate::model::pairs::path::Path;
use crate::model::pairs::queue_pair::QueuePairState;
use crate::state::Offered;

impl Manager {
    /// Checks a call with connection parameters, and returns the identifier's queue pair.
    pub(in crate::model) fn offer(
        &self,
        hosts: &Hosts,
        id: IdentifierId,
        phase: Phase,
        params: &ConnectParams,
        data: (usize, usize),
    ) -> Result<PairId, Error> {
        let identifier = self.find(id)?;
        if identifier.phase != phase {
            return Err(Error::State("the identifier is not in a state to connect or accept"));
        }
        // Devices have a bound for each direction (`rdma_connect(3)`). Here one is for both.
        let depth = hosts.alive(identifier.host)?.limits.max_read_depth;
        if params.responder_resources.max(params.initiator_depth) > depth {
            return Err(Error::Argument("more RDMA READs than Limits::max_read_depth"));
        }
        let (len, max) = data;
        if len > max {
            return Err(Error::Argument(
                "too much private data: 56 bytes to connect, 196 to accept, 148 to reject",
            ));
        }
        identifier.pair.ok_or(Error::State("the identifier has no queue pair"))
    }

    pub(in crate::model) fn join(&mut self, pairs: &mut Pairs, id: IdentifierId, pair: PairId) {
        if let (Some(identifier), Some(made)) = (self.get_mut(id), pairs.get_mut(pair)) {
            identifier.pair = Some(pair);
            made.identifier = Some(id);
            // `RDMA_OPTION_ID_ACK_TIMEOUT` may be set before there is a queue pair.
            made.requester.ack_timeout = identifier.ack_timeout.or(made.requester.ack_timeout);
        }
    }

    /// `rdma_connect(3)` or `rdma_accept(3)` with a queue pair made on the device.
    pub(in crate::model) fn lend_pair(
        &mut self,
        pairs: &mut Pairs,
        id: IdentifierId,
        pair: PairId,
    ) -> Result<(), Error> {
        let identifier = self.find(id)?;
        let queue_pair = pairs.find(pair)?;
        if queue_pair.host != identifier.host
            || queue_pair.state != QueuePairState::Idle
            || queue_pair.key.is_some()
        {
            return Err(Error::State("a queue pair is connected from INIT, on its own device"));
        }
        // One that was destroyed does not claim it any more.
        if queue_pair.identifier.is_some_and(|other| other != id && self.get(other).is_some()) {
            return Err(Error::State("another identifier connects this queue pair"));
        }
        self.join(pairs, id, pair);
        Ok(())
    }

    /// Like [`Manager::lend_pair`], with a queue pair whose owner changes its state.
    pub(in crate::model) fn lend_external(
        &mut self,
        pairs: &mut Pairs,
        id: IdentifierId,
        pair: PairId,
    ) -> Result<(), Error> {
        let host = pairs.find(pair)?.host;
        let identifier = self.find_mut(id)?;
        if identifier.host != host {
            return Err(Error::State("a queue pair is connected on its own device"));
        }
        identifier.external = true;
        self.join(pairs, id, pair);
        Ok(())
    }

    /// Returns what `rdma_init_qp_attr(3)` tells of a connection: both addresses, the number of the
    /// peer's queue pair, what the peer has passed, and how often this side retries without an
    /// acknowledgement.
    pub(in crate::model) fn offered(&self, pairs: &Pairs, id: IdentifierId) -> Result<Offered, Error> {
        let identifier = self.find(id)?;
        let (local, remote) = self.ends(id).ok_or(Error::State("the identifier has no peer"))?;
        Ok(Offered {
            local,
            remote: remote.ip(),
            peer: identifier.peer_pair.map_or(0, |pair| pairs.number(pair)),
            theirs: identifier.theirs,
            retry: identifier.retry,
        })
    }

    pub(in crate::model) fn connect(
        &mut self,
        env: &mut Environment,
        hosts: &Hosts,
        id: IdentifierId,
        params: &ConnectParams,
        data: &[u8],
    ) -> Result<(), Error> {
        let pair = self.offer(hosts, id, Phase::RouteResolved, params, (data.len(), REQUEST_DATA))?;
        self.note_call(env, id, "connect");
        if let Some(identifier) = self.get_mut(id) {
            identifier.ours = *params;
            identifier.retry = params.retry_count;
            identifier.phase = Phase::Connecting;
        }
        self.send_packet_with(env, id, Body::Request { params: *params, pair }, padded(data, REQUEST_DATA));
        Ok(())
    }

    pub(in crate::model) fn accept(
        &mut self,
        env: &mut Environment,
        hosts: &Hosts,
        pairs: &mut Pairs,
        id: IdentifierId,
        params: &ConnectParams,
        data: &[u8],
    ) -> Result<(), Error> {
        let pair = self.offer(hosts, id, Phase::Requested, params, (data.len(), REPLY_DATA))?;
        self.note_call(env, id, "accept");
        let mut params = *params;
        if let Some(retries) = env.simulation().and_then(|simulation| simulation.settings.accept_rnr_retry) {
            params.rnr_retry_count = retries;
        }
        if let Some(identifier) = self.get_mut(id) {
            identifier.ours = params;
            identifier.phase = Phase::Accepted;
        }
        // Before the REP leaves, as in librdmacm: the peer may send as soon as it has that.
        self.make_ready(pairs, id);
        self.send_packet_with(env, id, Body::Reply { params, pair }, padded(data, REPLY_DATA));
        Ok(())
    }

    pub(in crate::model) fn reject(
        &mut self,
        env: &mut Environment,
        id: IdentifierId,
        data: &[u8],
    ) -> Result<(), Error> {
        if self.find(id)?.phase != Phase::Requested {
            return Err(Error::State("only a connect request can be rejected"));
        }
        if data.len() > REJECT_DATA {
            return Err(Error::Argument("too much private data: 148 bytes to reject"));
        }
        self.set_phase(id, Phase::Closed);
        self.send_packet_with(env, id, Body::Reject(reject::CONSUMER_DEFINED), padded(data, REJECT_DATA));
        Ok(())
    }

    /// Sends a message from `from` to its peer. Without a peer, the failure is reported when the
    /// request gets there.
    pub(in crate::model) fn send_packet(&mut self, env: &mut Environment, from: IdentifierId, body: Body) {
        self.send_packet_with(env, from, body, Box::default());
    }

    /// Sends a message like [`Manager::send_packet`], with private data.
    pub(in crate::model) fn send_packet_with(
        &mut self,
        env: &mut Environment,
        from: IdentifierId,
        body: Body,
        data: Box<[u8]>,
    ) {
        let Some((source, target)) = self.ends(from) else { return };
        let to = self.get(from).and_then(|identifier| identifier.peer);
        let until = env.now().after(env.parameters().cm_timeout);
        let travel = self.packet_travel(env, from);
        env.schedule(travel, Event::Packet(Box::new(Packet { from, to, source, target, body, data, until })));
    }

    /// Returns the latency of a message of `from`. Messages do not overtake each other, because
    /// each answers the one before or is repeated until answered.
    pub(in crate::model) fn packet_travel(&mut self, env: &mut Environment, from: IdentifierId) -> Duration {
        let travel = env.parameters().latency + env.by_duration(|simulation| simulation.settings.cm_jitter);
        let now = env.now();
        let Some(identifier) = self.get_mut(from) else { return travel };
        identifier.arrival = identifier.arrival.max(now.after(travel));
        identifier.arrival.since(now)
    }

    /// Answers a message without an identifier, as a host's kernel does.
    pub(in crate::model) fn answer_without_identifier(
        &mut self,
        env: &mut Environment,
        to: IdentifierId,
        body: Body,
    ) {
        let Some((source, target)) = self.ends(to) else { return };
        let until = env.now().after(env.parameters().cm_timeout);
        // The link is the same both ways.
        let answer = Packet { from: to, to: Some(to), source, target, body, data: Box::default(), until };
        env.schedule(env.parameters().latency, Event::Packet(Box::new(answer)));
    }

    /// Handles a REQ: the listener gets a new identifier.
    pub(in crate::model) fn requested(
        &mut self,
        env: &mut Environment,
        hosts: &Hosts,
        packet: &Packet,
        params: ConnectParams,
        pair: PairId,
        data: Box<[u8]>,
    ) {
        // Its sender has given up meanwhile.
        if !self.in_phase(packet.from, &[Phase::Connecting]) {
            return;
        }
        let host = hosts.at(packet.target.ip());
        let listener = host.and_then(|host| hosts.get(host)?.listeners.at(packet.target));
        let found = host.zip(listener.and_then(|id| Some((id, self.get(id)?))));
        let Some((host, (listener, &Identifier { phase: Phase::Listening { backlog }, .. }))) = found else {
            return self.answer_without_identifier(
                env,
                packet.from,
                Body::Reject(reject::INVALID_SERVICE_ID),
            );
        };
        if self.unread_requests(listener) >= backlog {
            // The kernel destroys an identifier that finds no room, and destruction rejects.
            return self.answer_without_identifier(env, packet.from, Body::Reject(reject::CONSUMER_DEFINED));
        }
        let key = self.next_key();
        let mut child = Identifier::new(host, ChannelId::NONE, key, Phase::Requested);
        child.local = Some(packet.target);
        if let Some(active) = self.get(packet.from) {
            child.remote = active.local;
            // REQ carries the path's class, which applies to both directions.
            child.traffic_class = active.traffic_class;
        }
        child.peer = Some(packet.from);
        child.peer_pair = Some(pair);
        child.theirs = params;
        child.retry = params.retry_count;
        let id = self.insert(child);
        // From now on its REJ or DREQ finds the passive side.
        if let Some(active) = self.get_mut(packet.from) {
            active.peer = Some(id);
        }
        let kind = NoticeKind::ConnectRequest { id, key, peer: as_received(params) };
        self.notify_with(env, listener, kind, data);
    }

    /// Handles a REP. The owner must read it before the connection can be used, because it is
    /// librdmacm, in `rdma_get_cm_event(3)`, that makes the queue pair ready.
    pub(in crate::model) fn replied(
        &mut self,
        env: &mut Environment,
        id: IdentifierId,
        params: ConnectParams,
        pair: PairId,
        data: Box<[u8]>,
    ) {
        // It may have given up meanwhile.
        let Some(active) = self.get_mut(id).filter(|active| active.phase == Phase::Connecting) else {
            return;
        };
        active.phase = Phase::Answered;
        active.theirs = params;
        active.peer_pair = Some(pair);
        // librdmacm reports the response itself only if it has no queue pair to make ready
        // (`rdma_get_cm_event(3)`).
        let kind = match active.external {
            false => NoticeKind::Established(as_received(params)),
            true => NoticeKind::ConnectResponse,
        };
        self.notify_with(env, id, kind, data);
    }

    /// `rdma_establish(3)`: the owner of an external queue pair has made it ready.
    pub(in crate::model) fn establish_external(
        &mut self,
        env: &mut Environment,
        pairs: &mut Pairs,
        id: IdentifierId,
    ) -> Result<(), Error> {
        if !self.get(id).is_some_and(|id| id.external && id.phase == Phase::Answered) {
            return Err(Error::State(
                "only who connects an external queue pair and was answered establishes",
            ));
        }
        self.establish(env, pairs, id);
        Ok(())
    }

    /// Handles that the active side's owner reads `Established`.
    pub(in crate::model) fn establish(&mut self, env: &mut Environment, pairs: &mut Pairs, id: IdentifierId) {
        let Some(active) = self.get_mut(id).filter(|active| active.phase == Phase::Answered) else {
            return;
        };
        active.phase = Phase::Connected;
        // Before the RTU leaves: with it the peer may send.
        self.make_ready(pairs, id);
        self.send_packet(env, id, Body::Ready);
    }

    /// Handles an RTU: the passive side is connected.
    pub(in crate::model) fn peer_ready(&mut self, env: &mut Environment, id: IdentifierId) {
        // Not twice: `rdma_notify(3)` may have come before the RTU.
        let Some(passive) = self.get_mut(id).filter(|passive| passive.phase == Phase::Accepted) else {
            return;
        };
        passive.phase = Phase::Connected;
        let params = passive.theirs;
        self.notify(env, id, NoticeKind::Established(as_received(params)));
    }

    /// `rdma_notify(3)`: a message of the peer has arrived, so it is connected even without its
    /// RTU.
    pub(in crate::model) fn notify_established(
        &mut self,
        env: &mut Environment,
        id: IdentifierId,
    ) -> Result<(), Error> {
        self.note_call(env, id, "notify");
        if !self.in_phase(id, &[Phase::Accepted]) {
            return Err(Error::State("only an accepted connection waits for its peer's word"));
        }
        self.peer_ready(env, id);
        Ok(())
    }

    /// Handles a DREP, or that its sender is gone.
    pub(in crate::model) fn parted(&mut self, env: &mut Environment, id: IdentifierId) {
        let Some(identifier) = self.get_mut(id).filter(|i| i.phase == Phase::Disconnecting) else {
            return;
        };
        identifier.phase = Phase::Closed;
        self.notify(env, id, NoticeKind::Disconnected);
        env.schedule(env.parameters().timewait, Event::TimewaitExit(id));
    }

    /// Connects the identifier's queue pair to the peer's: RTS, with what the connection manager
    /// negotiated.
    pub(in crate::model) fn make_ready(&mut self, pairs: &mut Pairs, id: IdentifierId) {
        let Some(identifier) = self.get(id).filter(|id| !id.external) else { return };
        let (Some(pair), Some(peer)) = (identifier.pair, identifier.peer_pair) else { return };
        let Some((local, remote)) = self.ends(id) else { return };
        let (ours, theirs, retry) = (identifier.ours, identifier.theirs, identifier.retry);
        // As many as this side may send and the other answers (`rdma_connect(3)`).
        let read_depth = ours.initiator_depth.min(theirs.responder_resources);
        let host = identifier.host;
        let loopback = pairs.get(peer).is_some_and(|peer| peer.host == host);
        // Not one that has failed meanwhile, which stays in the error state.
        if let Some(pair) = pairs.get_mut(pair).filter(|pair| pair.state == QueuePairState::Idle) {
            pair.state = QueuePairState::Ready;
            pair.path = Some(Path { peer, local, remote: remote.ip(), loopback });
            // Each side uses the rnr_retry_count that the other one passed.
            pair.requester.configure(retry, theirs.rnr_retry_count, read_depth);
        }
    }
}
