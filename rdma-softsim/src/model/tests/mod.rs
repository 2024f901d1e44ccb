//! The rules, one by one, in virtual time.

mod access;
mod asynchronous;
mod connecting;
mod costs;
mod datagrams;
mod devices;
mod disconnecting;
mod event_queue;
mod faults;
mod freight;
mod queues;
mod reads;
mod rnr;
mod walk;

use core::time::Duration;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rdma_backend::{
    Access, Completed, Completion, CompletionStatus, ConnectParams, Immediate, QueuePairLimits,
    RemoteAddress, SendOp,
};

use super::manager::packet::as_received;
use super::*;
use crate::Error;
use crate::settings::{Limits, Link, Resources};

pub(super) const PORT: u16 = 6379;
/// Small, because zeroing it costs most under Miri.
const REGION: usize = if cfg!(miri) { 12 * 1024 } else { 64 * 1024 };

pub(super) fn ip(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

pub(super) fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

pub(super) const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 1, initiator_depth: 1, retry_count: 7, rnr_retry_count: 7 };

/// Parameters of a test world.
pub(super) struct Setup {
    pub(super) parameters: Parameters,
    /// The parameters that the active side passes to connect.
    pub(super) connect: ConnectParams,
    /// The parameters that the passive side passes to accept.
    pub(super) accept: ConnectParams,
    pub(super) limits: QueuePairLimits,
    pub(super) completions: u32,
    pub(super) access: Access,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            parameters: Parameters::default(),
            connect: PARAMS,
            accept: PARAMS,
            limits: QueuePairLimits { send_depth: 8, recv_depth: 8, inline: 64 },
            completions: 64,
            access: Access::REMOTE_WRITE.and(Access::REMOTE_READ),
        }
    }
}

pub(super) struct Side {
    pub(super) host: HostId,
    pub(super) channel: ChannelId,
    pub(super) id: IdentifierId,
    pub(super) domain: DomainId,
    pub(super) queue: QueueId,
    pub(super) pair: PairId,
    pub(super) number: u32,
    pub(super) memory: Arc<Memory>,
    pub(super) region: Registration,
}

/// Two hosts, the active one first, with a connection between them.
pub(super) struct World {
    pub(super) model: Model,
    pub(super) a: Side,
    pub(super) b: Side,
    pub(super) listener: IdentifierId,
}

/// Queue pair and memory for an identifier that has a device.
pub(super) fn equip(
    model: &mut Model,
    host: HostId,
    channel: ChannelId,
    id: IdentifierId,
    setup: &Setup,
) -> Side {
    let domain = model.create_domain(id).unwrap();
    let queue = model.create_queue(id, setup.completions).unwrap();
    let (pair, number, _) = model.create_pair(id, domain, queue, setup.limits).unwrap();
    let memory = Arc::new(Memory::zeroed(REGION).unwrap());
    let region = model.register(domain, Arc::clone(&memory), setup.access).unwrap();
    Side { host, channel, id, domain, queue, pair, number, memory, region }
}

pub(super) fn hosts(parameters: Parameters) -> (Model, HostId, HostId) {
    let mut model = Model::new(parameters);
    let a = model.add_host(&[ip(1)], Limits::default());
    let b = model.add_host(&[ip(2)], Limits::default());
    (model, a, b)
}

pub(super) fn pass(model: &mut Model, by: Duration) {
    let then = model.now().after(by);
    model.advance(then);
}

pub(super) fn notice(model: &mut Model, channel: ChannelId) -> Option<NoticeKind> {
    model.take_notice(channel).unwrap().notice.map(|notice| notice.kind)
}

/// An identifier with its route resolved.
pub(super) fn resolved(model: &mut Model, channel: ChannelId, to: IpAddr) -> IdentifierId {
    let (id, _) = model.create_identifier(channel).unwrap();
    model.resolve_address(id, None, SocketAddr::new(to, PORT), millis(100)).unwrap();
    pass(model, model.env.parameters().latency);
    assert_eq!(notice(model, channel), Some(NoticeKind::AddressResolved));
    model.resolve_route(id).unwrap();
    pass(model, model.env.parameters().latency);
    assert_eq!(notice(model, channel), Some(NoticeKind::RouteResolved));
    id
}

impl World {
    pub(super) fn new(setup: &Setup) -> Self {
        let mut world = Self::half_open(setup);
        let model = &mut world.model;
        let latency = setup.parameters.latency;
        model.accept(world.b.id, &setup.accept, &[]).unwrap();
        pass(model, latency);
        assert_eq!(notice(model, world.a.channel), Some(NoticeKind::Established(as_received(setup.accept))));
        pass(model, latency);
        assert_eq!(notice(model, world.b.channel), Some(NoticeKind::Established(as_received(setup.connect))));
        model.wakes().for_each(drop);
        world
    }

    /// Connects up to a connect request that is read and undecided.
    pub(super) fn half_open(setup: &Setup) -> Self {
        let (mut model, host_a, host_b) = hosts(setup.parameters);
        let channel_b = model.create_channel(host_b).unwrap();
        let (listener, _) = model.listen(channel_b, SocketAddr::new(ip(2), PORT), 0).unwrap();
        let channel_a = model.create_channel(host_a).unwrap();
        let id = resolved(&mut model, channel_a, ip(2));
        let a = equip(&mut model, host_a, channel_a, id, setup);
        model.connect(a.id, &setup.connect, &[]).unwrap();
        pass(&mut model, setup.parameters.latency);
        let Some(NoticeKind::ConnectRequest { id, peer, .. }) = notice(&mut model, channel_b) else {
            panic!("no connect request")
        };
        assert_eq!(peer, as_received(setup.connect));
        let b = equip(&mut model, host_b, channel_b, id, setup);
        Self { model, a, b, listener }
    }

    pub(super) fn pass(&mut self, by: Duration) {
        pass(&mut self.model, by);
    }

    /// Destroys everything like handles do. Nothing may be left.
    pub(super) fn end(mut self) {
        for side in [&self.a, &self.b] {
            self.model.destroy_pair(side.pair);
            self.model.destroy_identifier(side.id);
            self.model.destroy_queue(side.queue);
            self.model.deregister(side.region.id);
            self.model.destroy_domain(side.domain);
        }
        self.model.destroy_identifier(self.listener);
        for side in [&self.a, &self.b] {
            self.model.destroy_channel(side.channel);
        }
        self.pass(Duration::from_secs(10));
        for side in [&self.a, &self.b] {
            assert_eq!(self.model.resources(side.host), Resources::default());
        }
    }
}

impl Side {
    pub(super) fn part(&self, offset: usize, len: usize) -> Part {
        Part { region: self.region.id, offset, len }
    }

    /// Byte `offset` of this side's memory, for the peer.
    pub(super) fn remote(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { address: self.region.address.wrapping_add(offset), rkey: self.region.rkey }
    }

    /// Posts and rings. The work executes when time passes, or at once without latency.
    pub(super) fn post(&self, model: &mut Model, id: u64, op: SendOp, len: usize) -> Result<(), Error> {
        self.post_work(model, Request::new(id, op, true), self.part(0, len), false)
    }

    pub(super) fn post_unsignaled(
        &self,
        model: &mut Model,
        id: u64,
        op: SendOp,
        len: usize,
    ) -> Result<(), Error> {
        self.post_work(model, Request::new(id, op, false), self.part(0, len), false)
    }

    pub(super) fn post_work(
        &self,
        model: &mut Model,
        request: Request,
        part: Part,
        inline: bool,
    ) -> Result<(), Error> {
        model.post_send(self.pair, request, part, inline)?;
        model.ring(self.pair);
        model.settle();
        Ok(())
    }

    /// Posts a receive of `len` bytes at `offset`.
    pub(super) fn receive(&self, model: &mut Model, id: u64, offset: usize, len: usize) -> Result<(), Error> {
        model.post_receive(self.pair, &PostedReceive { id, local: Parts::One(self.part(offset, len)) })
    }

    /// Everything in the completion queue, as id and result.
    pub(super) fn completions(&self, model: &mut Model) -> Vec<(u64, Result<Completed, CompletionStatus>)> {
        let mut into = [Completion::EMPTY; 128];
        let count = model.poll(self.queue, &mut into).unwrap();
        into.iter()
            .take(count)
            .inspect(|completion| assert_eq!(completion.queue_pair, self.number))
            .map(|completion| (completion.id, completion.result.map_err(|error| error.status)))
            .collect()
    }

    pub(super) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(self.memory.shared().read(offset, &mut bytes));
        bytes
    }

    pub(super) fn fill(&self, offset: usize, bytes: &[u8]) {
        assert!(self.memory.shared().write(offset, bytes));
    }
}

/// A receive of `len` bytes without immediate.
pub(super) fn recv(len: u32) -> Completed {
    Completed::Recv { len, immediate: None }
}

pub(super) fn recv_write(immediate: u32) -> Completed {
    Completed::RecvWrite { immediate: Immediate(immediate) }
}
