//! Connection-manager identifiers, and the calls of their owners.

use core::time::Duration;
use std::net::{IpAddr, SocketAddr};

use rdma_backend::time::Instant;

use rdma_backend::{Capabilities, ConnectParams, DeviceKey, IdentifierKey, QueuePairLimits, reject};

use super::events::NoticeKind;
use super::handshake::Body;
use super::objects::PairAttributes;
use super::party::Target;
use super::queue_pair::Owner;
use super::{ChannelId, DomainId, Event, HostId, IdentifierId, Model, PairId, QueueId};
use crate::Error;
use crate::faults::{Fault, Site};
use crate::request::Service;
use crate::trace::EntryKind;

/// `-ETIMEDOUT`.
pub(super) const TIMED_OUT: i32 = -110;
/// `-ENETUNREACH`.
const NET_UNREACHABLE: i32 = -101;
/// A listener's default backlog, `net.rdma_ucm.max_backlog`.
const MAX_BACKLOG: u32 = 1024;
/// Reject reason of a side that stopped waiting (InfiniBand CM, table of REJ reasons).
const REJECT_TIMEOUT: i32 = 4;

/// Maximum private data of a request, a reply and a reject (`rdma_connect(3)`, `rdma_accept(3)`,
/// `rdma_reject(3)`).
const REQUEST_DATA: usize = 56;
const REPLY_DATA: usize = 196;
const REJECT_DATA: usize = 148;

/// Private data as received: its field has a fixed length, so the sent length is unknown.
fn padded(data: &[u8], room: usize) -> Box<[u8]> {
    let mut field = vec![0; room];
    if let Some(front) = field.get_mut(..data.len()) {
        front.copy_from_slice(data);
    }
    field.into()
}

pub(crate) struct Identifier {
    pub(super) host: HostId,
    pub(super) channel: ChannelId,
    pub(super) key: IdentifierKey,
    pub(super) phase: Phase,
    /// How many resolutions of its address or route have ended.
    resolutions: u64,
    pub(super) bound: Option<SocketAddr>,
    pub(super) local: Option<SocketAddr>,
    pub(super) remote: Option<SocketAddr>,
    pub(super) pair: Option<PairId>,
    /// The traffic class of what its connection sends.
    pub(super) traffic_class: u8,
    /// The acknowledgement timeout of its queue pair, if its owner sets one.
    pub(super) ack_timeout: Option<Duration>,
    /// Whether its owner changes the queue pair's state, and says when the connection can be used
    /// (`rdma_establish(3)`).
    pub(super) external: bool,
    pub(super) peer: Option<IdentifierId>,
    pub(super) peer_pair: Option<PairId>,
    /// When its last message reaches the peer.
    pub(super) arrival: Instant,
    /// The parameters of both sides, as each passed them.
    pub(super) ours: ConnectParams,
    pub(super) theirs: ConnectParams,
}

/// The phase of an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    ResolvingAddress,
    /// No host has the remote address. One that joins in time may.
    AwaitingHost,
    AddressResolved,
    ResolvingRoute,
    RouteResolved,
    Listening {
        backlog: u32,
    },
    /// The active side has sent its request.
    Connecting,
    /// The active side was accepted, and its owner has not read that.
    Answered,
    /// The passive side has an undecided request.
    Requested,
    /// The passive side has accepted and waits for the active one to be ready.
    Accepted,
    Connected,
    /// It has ended the connection and waits for the peer to do so.
    Disconnecting,
    /// The peer has ended the connection.
    PeerGone,
    Closed,
}

const NO_PARAMS: ConnectParams =
    ConnectParams { responder_resources: 0, initiator_depth: 0, retry_count: 0, rnr_retry_count: 0 };

/// Returns the acknowledgement timeout for a code of `ibv_modify_qp(3)`.
pub(super) const fn ack_timeout(code: u8) -> Result<Duration, Error> {
    /// The field has five bits.
    const MOST: u8 = 31;
    match code {
        0 => Ok(Duration::MAX),
        1..=MOST => Ok(Duration::from_nanos(4096 << code)),
        _ => Err(Error::Argument("the time-out is at most 31")),
    }
}

impl Identifier {
    pub(super) const fn new(host: HostId, channel: ChannelId, key: IdentifierKey, phase: Phase) -> Self {
        Self {
            host,
            channel,
            key,
            phase,
            resolutions: 0,
            bound: None,
            local: None,
            remote: None,
            pair: None,
            traffic_class: 0,
            ack_timeout: None,
            external: false,
            peer: None,
            peer_pair: None,
            arrival: Instant::from_start(Duration::ZERO),
            ours: NO_PARAMS,
            theirs: NO_PARAMS,
        }
    }

    /// Moves to the device of its address. A wildcard stays where it is.
    pub(super) const fn take_device(&mut self, devices: &[HostId]) {
        if let &[device] = devices {
            self.host = device;
        }
    }
}

impl Model {
    pub(super) fn next_key(&mut self) -> IdentifierKey {
        self.keys += 1;
        IdentifierKey(self.keys)
    }

    fn identifier(&self, id: IdentifierId) -> Result<&Identifier, Error> {
        self.identifiers.get(id).ok_or(Error::Gone("identifier"))
    }

    fn set_phase(&mut self, id: IdentifierId, phase: Phase) {
        if let Some(identifier) = self.identifiers.get_mut(id) {
            identifier.phase = phase;
        }
    }

    pub(crate) fn create_identifier(
        &mut self,
        channel: ChannelId,
    ) -> Result<(IdentifierId, IdentifierKey), Error> {
        let host = self.channels.get(channel).ok_or(Error::Gone("event channel"))?.host;
        let key = self.next_key();
        Ok((self.identifiers.insert(Identifier::new(host, channel, key, Phase::Idle)), key))
    }

    pub(crate) fn listen(
        &mut self,
        channel: ChannelId,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<(IdentifierId, IdentifierKey), Error> {
        let host = self.channels.get(channel).ok_or(Error::Gone("event channel"))?.host;
        let devices = self.devices_at(host, address.ip())?;
        let address = self.claim(&devices, address)?;
        let (id, key) = self.create_identifier(channel)?;
        self.begin_listening(id, address, backlog)?;
        Ok((id, key))
    }

    pub(super) fn begin_listening(
        &mut self,
        id: IdentifierId,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<(), Error> {
        let devices = self.devices_at(self.identifier(id)?.host, address.ip())?;
        // The port may have been taken since it was bound.
        let address = self.claim(&devices, address)?;
        let backlog = if backlog == 0 { MAX_BACKLOG } else { backlog.min(MAX_BACKLOG) };
        let identifier = self.identifiers.get_mut(id).ok_or(Error::Gone("identifier"))?;
        identifier.take_device(&devices);
        identifier.phase = Phase::Listening { backlog };
        identifier.local = Some(address);
        for device in devices {
            if let Some(device) = self.hosts.get_mut(device) {
                device.listeners.insert(address, id);
            }
        }
        Ok(())
    }

    pub(crate) fn resolve_address(
        &mut self,
        id: IdentifierId,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        timeout: Duration,
    ) -> Result<(), Error> {
        let identifier = self.identifier(id)?;
        if identifier.phase != Phase::Idle {
            return Err(Error::State("the address of an identifier is resolved once"));
        }
        let known = self.host_at(remote.ip()).is_some();
        let host = identifier.host;
        let local = local.or(identifier.bound);
        let source = match local {
            Some(local) if !local.ip().is_unspecified() => Some((self.devices_at(host, local.ip())?, local)),
            other => {
                let port = other.map_or(0, |local| local.port());
                let source = self.source_for(host, remote.ip());
                source.map(|(device, ip)| (vec![device], SocketAddr::new(ip, port)))
            }
        };
        let source = match source {
            Some((devices, local)) => {
                let local = self.claim(&devices, local)?;
                if let Some(identifier) = self.identifiers.get_mut(id) {
                    identifier.take_device(&devices);
                }
                Some(local)
            }
            None => None,
        };
        let latency = self.parameters.latency;
        if let Some(identifier) = self.identifiers.get_mut(id) {
            identifier.remote = Some(remote);
        }
        let unresolved = self.strikes_resolution(id, Fault::AddressError);
        let resolving = Phase::ResolvingAddress;
        let (phase, delay, how) = match source {
            Some(_) if unresolved => (resolving, timeout, NoticeKind::AddressError(TIMED_OUT)),
            None => (resolving, latency, NoticeKind::AddressError(NET_UNREACHABLE)),
            Some(_) if !known => (Phase::AwaitingHost, timeout, NoticeKind::AddressError(TIMED_OUT)),
            Some(_) => (resolving, latency, NoticeKind::AddressResolved),
        };
        if let Some(identifier) = self.identifiers.get_mut(id) {
            identifier.phase = phase;
            identifier.local = source;
        }
        self.end_resolution(id, delay, how);
        Ok(())
    }

    /// Ends the present resolution of an identifier after `delay`, unless it has ended before.
    fn end_resolution(&mut self, id: IdentifierId, delay: Duration, how: NoticeKind) {
        if let Some(Identifier { resolutions, .. }) = self.identifiers.get(id) {
            self.event_queue.schedule(delay, Event::Resolved { id, resolution: *resolutions, how });
        }
    }

    /// Resolves the identifiers that await a host with one of these addresses.
    pub(super) fn found(&mut self, addresses: &[IpAddr]) {
        let awaits = |identifier: &Identifier| {
            let remote = identifier.remote.map(|remote| remote.ip());
            identifier.phase == Phase::AwaitingHost
                && remote.is_some_and(|remote| addresses.contains(&remote))
        };
        for id in self.identifiers.select(awaits) {
            self.set_phase(id, Phase::ResolvingAddress);
            self.end_resolution(id, self.parameters.latency, NoticeKind::AddressResolved);
        }
    }

    pub(crate) fn resolve_route(&mut self, id: IdentifierId) -> Result<(), Error> {
        if self.identifier(id)?.phase != Phase::AddressResolved {
            return Err(Error::State("a route is resolved after the address"));
        }
        let how = match self.strikes_resolution(id, Fault::RouteError) {
            true => NoticeKind::RouteError(TIMED_OUT),
            false => NoticeKind::RouteResolved,
        };
        self.set_phase(id, Phase::ResolvingRoute);
        self.end_resolution(id, self.parameters.latency, how);
        Ok(())
    }

    /// Returns whether a fault makes the resolution of the identifier's address or route fail.
    fn strikes_resolution(&mut self, id: IdentifierId, which: Fault) -> bool {
        let party = self.managed_party(id);
        let strikes = |fault: &Fault, on: &Target| *fault == which && party.is_some_and(|party| party.is(on));
        self.strike(Site::Resolve, strikes).is_some()
    }

    /// Ends a resolution. Only its first end counts: its host, or its time-out.
    pub(super) fn resolved(&mut self, id: IdentifierId, resolution: u64, how: NoticeKind) {
        let Some(identifier) = self.identifiers.get_mut(id) else { return };
        if identifier.resolutions != resolution {
            return;
        }
        identifier.resolutions += 1;
        identifier.phase = match how {
            NoticeKind::AddressResolved => Phase::AddressResolved,
            NoticeKind::RouteResolved => Phase::RouteResolved,
            // As with rdma_cm, the owner may try again.
            _ => Phase::Idle,
        };
        self.notify(id, how);
    }

    fn device(&self, id: IdentifierId) -> Result<HostId, Error> {
        let identifier = self.identifier(id)?;
        let bound = identifier.local.is_some_and(|local| !local.ip().is_unspecified());
        if matches!(identifier.phase, Phase::Idle | Phase::ResolvingAddress | Phase::AwaitingHost) || !bound {
            return Err(Error::State("the identifier has no device before its address is resolved"));
        }
        Ok(identifier.host)
    }

    pub(crate) fn device_key(&self, id: IdentifierId) -> Result<DeviceKey, Error> {
        Ok(DeviceKey(self.device(id)?.to_bits()))
    }

    pub(crate) fn capabilities(&self, id: IdentifierId) -> Result<Capabilities, Error> {
        Ok(self.alive(self.device(id)?)?.limits.capabilities())
    }

    pub(crate) fn create_domain(&mut self, id: IdentifierId) -> Result<DomainId, Error> {
        let host = self.device(id)?;
        self.make_domain(host)
    }

    pub(crate) fn create_queue(&mut self, id: IdentifierId, depth: u32) -> Result<QueueId, Error> {
        let host = self.device(id)?;
        self.make_queue(host, depth, None)
    }

    /// `rdma_set_option(3)`, `RDMA_OPTION_ID_TOS`.
    pub(crate) fn set_traffic_class(&mut self, id: IdentifierId, class: u8) -> Result<(), Error> {
        self.identifiers.get_mut(id).ok_or(Error::Gone("identifier"))?.traffic_class = class;
        Ok(())
    }

    /// `rdma_set_option(3)`, `RDMA_OPTION_ID_ACK_TIMEOUT`.
    pub(crate) fn set_identifier_timeout(&mut self, id: IdentifierId, code: u8) -> Result<(), Error> {
        let timeout = ack_timeout(code)?;
        self.identifiers.get_mut(id).ok_or(Error::Gone("identifier"))?.ack_timeout = Some(timeout);
        Ok(())
    }

    /// Returns the traffic class of what this queue pair sends.
    pub(super) fn traffic_class(&self, pair: PairId) -> u8 {
        let identifier = self.pairs.get(pair).and_then(|pair| self.identifiers.get(pair.identifier?));
        identifier.map_or(0, |identifier| identifier.traffic_class)
    }

    /// `rdma_create_qp(3)`: returns the pair, its number and its granted inline bytes.
    pub(crate) fn create_pair(
        &mut self,
        id: IdentifierId,
        domain: DomainId,
        queue: QueueId,
        limits: QueuePairLimits,
    ) -> Result<(PairId, u32, usize), Error> {
        let host = self.device(id)?;
        let identifier = self.identifier(id)?;
        let early = [Phase::AddressResolved, Phase::ResolvingRoute, Phase::RouteResolved, Phase::Requested];
        if identifier.pair.is_some() || !early.contains(&identifier.phase) {
            return Err(Error::State("an identifier gets one queue pair, before it is connected"));
        }
        let attributes = PairAttributes {
            domain,
            send_queue: queue,
            receive_queue: queue,
            shared: None,
            service: Service::Connected,
            limits,
        };
        let made = self.make_pair(host, &attributes, Owner::Identifier(id))?;
        self.join(id, made.0);
        Ok(made)
    }

    pub(super) fn join(&mut self, id: IdentifierId, pair: PairId) {
        if let (Some(identifier), Some(made)) = (self.identifiers.get_mut(id), self.pairs.get_mut(pair)) {
            identifier.pair = Some(pair);
            made.identifier = Some(id);
            made.requester.ack_timeout = identifier.ack_timeout.or(made.requester.ack_timeout);
        }
    }

    /// Checks a call with connection parameters, and returns the identifier's queue pair.
    fn offer(
        &self,
        id: IdentifierId,
        phase: Phase,
        params: &ConnectParams,
        data: (usize, usize),
    ) -> Result<PairId, Error> {
        let identifier = self.identifier(id)?;
        if identifier.phase != phase {
            return Err(Error::State("the identifier is not in a state to connect or accept"));
        }
        let depth = self.alive(identifier.host)?.limits.max_read_depth;
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

    pub(crate) fn connect(
        &mut self,
        id: IdentifierId,
        params: &ConnectParams,
        data: &[u8],
    ) -> Result<(), Error> {
        let pair = self.offer(id, Phase::RouteResolved, params, (data.len(), REQUEST_DATA))?;
        self.note_call(id, "connect");
        if let Some(identifier) = self.identifiers.get_mut(id) {
            identifier.ours = *params;
            identifier.phase = Phase::Connecting;
        }
        self.send_packet_with(id, Body::Request { params: *params, pair }, padded(data, REQUEST_DATA));
        Ok(())
    }

    pub(crate) fn accept(
        &mut self,
        id: IdentifierId,
        params: &ConnectParams,
        data: &[u8],
    ) -> Result<(), Error> {
        let pair = self.offer(id, Phase::Requested, params, (data.len(), REPLY_DATA))?;
        self.note_call(id, "accept");
        let mut params = *params;
        if let Some(retries) =
            self.simulation.as_ref().and_then(|simulation| simulation.settings.accept_rnr_retry)
        {
            params.rnr_retry_count = retries;
        }
        if let Some(identifier) = self.identifiers.get_mut(id) {
            identifier.ours = params;
            identifier.phase = Phase::Accepted;
        }
        self.make_ready(id);
        self.send_packet_with(id, Body::Reply { params, pair }, padded(data, REPLY_DATA));
        Ok(())
    }

    pub(crate) fn reject(&mut self, id: IdentifierId, data: &[u8]) -> Result<(), Error> {
        if self.identifier(id)?.phase != Phase::Requested {
            return Err(Error::State("only a connect request can be rejected"));
        }
        if data.len() > REJECT_DATA {
            return Err(Error::Argument("too much private data: 148 bytes to reject"));
        }
        self.set_phase(id, Phase::Closed);
        self.send_packet_with(id, Body::Reject(reject::CONSUMER_DEFINED), padded(data, REJECT_DATA));
        Ok(())
    }

    pub(crate) fn disconnect(&mut self, id: IdentifierId) -> Result<(), Error> {
        let identifier = self.identifier(id)?;
        let (pair, phase) = (identifier.pair.filter(|_| !identifier.external), identifier.phase);
        let (next, body) = match phase {
            Phase::Connected => (Phase::Disconnecting, Body::Disconnect),
            Phase::PeerGone => (Phase::Closed, Body::Goodbye),
            _ => return Err(Error::State("the identifier is not connected")),
        };
        self.note_call(id, "disconnect");
        if let Some(pair) = pair {
            self.enter_error(pair);
        }
        self.set_phase(id, next);
        self.send_packet(id, body);
        if next == Phase::Closed {
            self.event_queue.schedule(self.parameters.timewait, Event::TimewaitExit(id));
        }
        Ok(())
    }

    /// `rdma_destroy_id(3)`: the peer is notified. The queue pair is destroyed before.
    pub(crate) fn destroy_identifier(&mut self, id: IdentifierId) {
        self.note_call(id, "destroy");
        let Ok(identifier) = self.identifier(id) else { return };
        match identifier.phase {
            Phase::Connecting => self.send_packet(id, Body::Reject(REJECT_TIMEOUT)),
            Phase::Answered | Phase::Requested | Phase::Accepted => {
                self.send_packet(id, Body::Reject(reject::CONSUMER_DEFINED));
            }
            Phase::Connected => self.send_packet(id, Body::Disconnect),
            Phase::PeerGone => self.send_packet(id, Body::Goodbye),
            _ => {}
        }
        self.forget_notices(id);
        let Some(identifier) = self.identifiers.remove(id) else { return };
        if identifier.pair.is_some() {
            let host = identifier.host.index();
            self.note(|| EntryKind::Busy { host, what: "identifier" });
        }
        if let (Phase::Listening { .. }, Some(local)) = (identifier.phase, identifier.local) {
            for device in self.devices(identifier.host) {
                if let Some(device) = self.hosts.get_mut(device) {
                    device.listeners.retain(|address, listener| *address != local || *listener != id);
                }
            }
        }
    }

    pub(crate) fn local_addr(&self, id: IdentifierId) -> Option<SocketAddr> {
        self.identifiers.get(id)?.local
    }

    pub(crate) fn peer_addr(&self, id: IdentifierId) -> Option<SocketAddr> {
        self.identifiers.get(id)?.remote
    }

    /// Returns the addresses between which this identifier's messages travel.
    pub(super) fn ends(&self, id: IdentifierId) -> Option<(IpAddr, SocketAddr)> {
        let identifier = self.identifiers.get(id)?;
        Some((identifier.local?.ip(), identifier.remote?))
    }
}
