//! Calls of the connection manager by programs.

use core::time::Duration;
use std::net::SocketAddr;

use rdma_backend::{Capabilities, ConnectParams, DeviceKey, IdentifierKey, QueuePairLimits};

use super::manager::identifier::Phase;
use super::pairs::queue_pair::{Owner, PairAttributes};
use super::{ChannelId, DomainId, HostId, IdentifierId, Model, PairId, QueueId};
use crate::error::Error;
use crate::request::Service;
use crate::state::Offered;

impl Model {
    pub(crate) fn create_channel(&mut self, host: HostId) -> Result<ChannelId, Error> {
        self.hosts.alive(host)?;
        if self.env.strikes_creation(host) {
            // A channel is a descriptor, and that is what a process runs out of.
            return Err(Error::Descriptor(rustix::io::Errno::MFILE));
        }
        Ok(self.manager.create_channel(host))
    }

    pub(crate) fn device_key(&self, id: IdentifierId) -> Result<DeviceKey, Error> {
        Ok(DeviceKey(self.manager.device(id)?.to_bits()))
    }

    pub(crate) fn capabilities(&self, id: IdentifierId) -> Result<Capabilities, Error> {
        Ok(self.hosts.alive(self.manager.device(id)?)?.limits.capabilities())
    }

    pub(crate) fn create_domain(&mut self, id: IdentifierId) -> Result<DomainId, Error> {
        let host = self.manager.device(id)?;
        self.regions.create_domain(&mut self.env, host)
    }

    pub(crate) fn create_queue(&mut self, id: IdentifierId, depth: u32) -> Result<QueueId, Error> {
        let host = self.manager.device(id)?;
        self.make_queue(host, depth, None)
    }

    /// `rdma_create_qp(3)`: returns the pair, its number and its granted inline bytes.
    pub(crate) fn create_pair(
        &mut self,
        id: IdentifierId,
        domain: DomainId,
        queue: QueueId,
        limits: QueuePairLimits,
    ) -> Result<(PairId, u32, usize), Error> {
        let host = self.manager.device(id)?;
        let identifier = self.manager.find(id)?;
        let early = [Phase::AddressResolved, Phase::ResolvingRoute, Phase::RouteResolved, Phase::Requested];
        if identifier.pair.is_some() || !early.contains(&identifier.phase) {
            return Err(Error::State("an identifier gets one queue pair, before it is connected"));
        }
        let attributes = PairAttributes {
            domain,
            // `rdma_backend` has one queue for both; a `Device` can separate them.
            send_queue: queue,
            receive_queue: queue,
            shared: None,
            service: Service::Connected,
            limits,
        };
        let made = self.make_pair(host, &attributes, Owner::Identifier(id))?;
        self.manager.join(&mut self.pairs, id, made.0);
        Ok(made)
    }

    pub(crate) fn create_identifier(
        &mut self,
        channel: ChannelId,
    ) -> Result<(IdentifierId, IdentifierKey), Error> {
        self.manager.create_identifier(channel)
    }

    pub(crate) fn listen(
        &mut self,
        channel: ChannelId,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<(IdentifierId, IdentifierKey), Error> {
        self.manager.listen(&mut self.hosts, channel, address, backlog)
    }

    pub(crate) fn resolve_address(
        &mut self,
        id: IdentifierId,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        timeout: Duration,
    ) -> Result<(), Error> {
        let (env, hosts, ends) = (&mut self.env, &mut self.hosts, (local, remote));
        self.manager.resolve_address(env, hosts, &self.pairs, id, ends, timeout)
    }

    pub(crate) fn resolve_route(&mut self, id: IdentifierId) -> Result<(), Error> {
        self.manager.resolve_route(&mut self.env, &self.pairs, id)
    }

    /// `rdma_set_option(3)`, `RDMA_OPTION_ID_TOS`.
    pub(crate) fn set_traffic_class(&mut self, id: IdentifierId, class: u8) -> Result<(), Error> {
        self.manager.set_traffic_class(id, class)
    }

    /// `rdma_set_option(3)`, `RDMA_OPTION_ID_ACK_TIMEOUT`.
    pub(crate) fn set_identifier_timeout(&mut self, id: IdentifierId, code: u8) -> Result<(), Error> {
        self.manager.set_identifier_timeout(id, code)
    }

    pub(crate) fn connect(
        &mut self,
        id: IdentifierId,
        params: &ConnectParams,
        data: &[u8],
    ) -> Result<(), Error> {
        self.manager.connect(&mut self.env, &self.hosts, id, params, data)
    }

    pub(crate) fn accept(
        &mut self,
        id: IdentifierId,
        params: &ConnectParams,
        data: &[u8],
    ) -> Result<(), Error> {
        self.manager.accept(&mut self.env, &self.hosts, &mut self.pairs, id, params, data)
    }

    pub(crate) fn reject(&mut self, id: IdentifierId, data: &[u8]) -> Result<(), Error> {
        self.manager.reject(&mut self.env, id, data)
    }

    pub(crate) fn local_addr(&self, id: IdentifierId) -> Option<SocketAddr> {
        self.manager.local_addr(id)
    }

    pub(crate) fn peer_addr(&self, id: IdentifierId) -> Option<SocketAddr> {
        self.manager.peer_addr(id)
    }

    /// `rdma_bind_addr(3)`.
    pub(crate) fn bind(&mut self, id: IdentifierId, address: SocketAddr) -> Result<(), Error> {
        self.manager.bind(&mut self.hosts, id, address)
    }

    /// `rdma_listen(3)` on a bound identifier.
    pub(crate) fn listen_on(&mut self, id: IdentifierId, backlog: u32) -> Result<(), Error> {
        self.manager.listen_on(&mut self.hosts, id, backlog)
    }

    /// `rdma_connect(3)` or `rdma_accept(3)` with a queue pair made on the device.
    pub(crate) fn lend_pair(&mut self, id: IdentifierId, pair: PairId) -> Result<(), Error> {
        self.manager.lend_pair(&mut self.pairs, id, pair)
    }

    /// Like [`Model::lend_pair`], with a queue pair whose owner changes its state.
    pub(crate) fn lend_external(&mut self, id: IdentifierId, pair: PairId) -> Result<(), Error> {
        self.manager.lend_external(&mut self.pairs, id, pair)
    }

    /// Returns what `rdma_init_qp_attr(3)` tells of a connection: both addresses, the number of the
    /// peer's queue pair, what the peer has passed, and how often this side retries without an
    /// acknowledgement.
    pub(crate) fn offered(&self, id: IdentifierId) -> Result<Offered, Error> {
        self.manager.offered(&self.pairs, id)
    }

    /// `rdma_establish(3)`: the owner of an external queue pair has made it ready.
    pub(crate) fn establish_external(&mut self, id: IdentifierId) -> Result<(), Error> {
        self.manager.establish_external(&mut self.env, &mut self.pairs, id)
    }

    /// `rdma_notify(3)`: a message of the peer has arrived, so it is connected even without its
    /// RTU.
    pub(crate) fn notify_established(&mut self, id: IdentifierId) -> Result<(), Error> {
        self.manager.notify_established(&mut self.env, id)
    }

    pub(crate) fn has_notices(&self, id: ChannelId) -> bool {
        self.manager.has_notices(id)
    }

    /// `rdma_migrate_id(3)`: unread events move along.
    pub(crate) fn migrate(&mut self, identifier: IdentifierId, to: ChannelId) -> Result<(), Error> {
        self.manager.migrate(&mut self.env, &self.hosts, identifier, to)
    }
}
