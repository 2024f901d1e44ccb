//! Verbs below the seam, for programs that speak verbs themselves rather than through
//! [`Backend`](rdma_backend::Backend).
//!
//! Objects are made on an opened [`Device`], and memory belongs to the program ([`ForeignMemory`]).
//! Work requests name it by address and key, and queue pairs change state as their owner says. The
//! caller's [`Signal`] wakes sleepers. The model is the same. The C ABI of `softrdma` is built on
//! this.

use core::fmt;
use core::net::SocketAddr;
use std::net::IpAddr;
use std::sync::Arc;

use rdma_backend::{AsyncEvent, ConnectParams, Identifier as _, PostError, QueuePairLimits, SendOp};

use crate::connection::{EventChannel, Identifier};
use crate::driver::{Driver, Signal};
use crate::error::Error;
use crate::fabric::SoftSim;
use crate::model::{
    About, Bytes, ContextId, ForeignMemory, HostId, Mirror, PairAttributes, Payload, PostedReceive,
    Registration, Request, Wake,
};
use crate::request::{Local, NamedReceive, NamedSend, Op, Rights, Service, Transition};
use crate::settings::Limits;
use crate::shared::{SharedInner, SharedReceives};
use crate::state::{Offered, PairState};
use crate::verbs::{CompletionQueue, Domain, DomainInner, QueuePair, chain};

impl SoftSim {
    /// Adds a device to this machine, with these addresses: another port on another network.
    /// Objects belong to one of the machine's devices. Event channels, identifiers without an
    /// address, and listeners without one belong to the machine.
    #[must_use]
    pub fn add_device(&self, addresses: &[IpAddr], limits: Limits) -> Self {
        let host = self.driver.peek(|model| model.add_device(self.host, addresses, limits));
        Self { driver: Arc::clone(&self.driver), host }
    }

    /// `ibv_open_device(3)`. `signal` reports asynchronous events.
    pub fn open(&self, signal: Arc<dyn Signal>) -> Result<Device, Error> {
        let host = self.host;
        let id =
            self.driver.create_signalling(&signal, |model| model.open(host), |id| Wake::Asynchronous(*id))?;
        Ok(Device { driver: Arc::clone(&self.driver), host, id, signal })
    }

    /// `rdma_create_event_channel(3)`, with the caller's signal.
    pub fn event_channel_with(&self, signal: Arc<dyn Signal>) -> Result<EventChannel, Error> {
        EventChannel::signalling(&self.driver, self.host, signal)
    }
}

/// An opened device.
pub struct Device {
    pub(crate) driver: Arc<Driver>,
    host: HostId,
    pub(crate) id: ContextId,
    signal: Arc<dyn Signal>,
}

impl Drop for Device {
    fn drop(&mut self) {
        self.driver.release(|driver| {
            driver.destroy_waking(Wake::Asynchronous(self.id), |model| model.close(self.id));
        });
    }
}

impl Device {
    /// Returns the limits of the device.
    pub fn limits(&self) -> Result<Limits, Error> {
        self.driver.peek(|model| model.limits(self.host))
    }

    /// `ibv_alloc_pd(3)`.
    pub fn create_domain(&self) -> Result<Domain, Error> {
        Ok(Domain::new(&self.driver, self.driver.with(|model| model.create_domain_in(self.id))?))
    }

    /// `ibv_create_cq(3)`. Asynchronous events use `name` for the queue. Completion events raise
    /// `signal`, and the program finds its completions in `mirror`.
    pub fn create_completion_queue(
        &self,
        name: u64,
        depth: u32,
        signal: Arc<dyn Signal>,
        mirror: Box<dyn Mirror>,
    ) -> Result<CompletionQueue, Error> {
        let id = self.driver.create_signalling(
            &signal,
            |model| {
                let id = model.create_queue_in(self.id, name, depth)?;
                // In the same step: no completion may come before the program can find it.
                model.set_mirror(id, mirror);
                Ok(id)
            },
            |id| Wake::Completions(*id),
        )?;
        Ok(CompletionQueue::new(&self.driver, id, signal))
    }

    /// `ibv_create_qp(3)`, of this service, in RESET. Asynchronous events use `name` for the queue
    /// pair. Completions go to `queues`, those of sends to the first. Receives are in `shared`, if
    /// given.
    pub fn create_queue_pair(
        &self,
        name: u64,
        service: Service,
        domain: &Domain,
        queues: [&CompletionQueue; 2],
        shared: Option<&SharedReceives>,
        limits: QueuePairLimits,
    ) -> Result<QueuePair, Error> {
        let [sends, receives] = queues;
        let others = [domain.driver(), sends.driver(), receives.driver()];
        for other in others.into_iter().chain(shared.map(|shared| &shared.inner.driver)) {
            self.driver.same_fabric(other)?;
        }
        let (send_queue, receive_queue) = (sends.id(), receives.id());
        let attributes = PairAttributes {
            domain: domain.id(),
            send_queue,
            receive_queue,
            shared: shared.map(|shared| shared.inner.id),
            service,
            limits,
        };
        let (id, number, inline) =
            self.driver.with(|model| model.create_pair_in(self.id, name, &attributes))?;
        let shared =
            shared.map(|shared| -> Arc<dyn Send + Sync> { Arc::<SharedInner>::clone(&shared.inner) });
        Ok(QueuePair::new(&self.driver, id, number, inline, shared, domain, queues))
    }

    /// `ibv_create_srq(3)`: room for `depth` receives. Asynchronous events use `name` for the
    /// queue. One comes when it holds fewer than `limit` receives, unless that is 0.
    pub fn create_shared_receives(
        &self,
        name: u64,
        domain: &Domain,
        depth: u32,
        limit: u32,
    ) -> Result<SharedReceives, Error> {
        self.driver.same_fabric(domain.driver())?;
        let id = self.driver.with(|model| model.create_shared(self.id, name, domain.id(), depth, limit))?;
        Ok(SharedReceives::new(&self.driver, id, domain))
    }

    /// `ibv_get_async_event(3)`; `None` if none waits.
    pub fn next_event(&self) -> Result<Option<(AsyncEvent, About)>, Error> {
        self.driver.with(|model| {
            let (notice, last) = model.take_async(self.id)?;
            // Under the lock: an event that comes later raises the signal after this.
            if notice.is_some() && last {
                self.signal.clear();
            }
            Ok(notice.map(|notice| (notice.event, notice.about)))
        })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("id", &self.id).finish_non_exhaustive()
    }
}

/// A registered region of memory in another process.
pub struct ForeignRegion {
    registration: Registration,
    domain: Arc<DomainInner>,
}

impl ForeignRegion {
    /// The key, local and remote.
    #[must_use]
    pub const fn key(&self) -> u32 {
        self.registration.rkey
    }

    /// `ibv_dereg_mr(3)`. Waits while bytes may be written to the memory. Dropping the region does
    /// not.
    ///
    /// # Errors
    /// [`Error::Landing`] after [`Parameters::reach`](crate::Parameters::reach). Its keys are
    /// invalid then.
    pub fn deregister(&self) -> Result<(), Error> {
        let DomainInner { driver, .. } = &*self.domain;
        // First no further message finds it, then those that have begun are awaited.
        driver.with(|model| model.deregister(self.registration.id));
        driver.wait_while(|model| model.lands_in(self.registration.id))
    }
}

impl Drop for ForeignRegion {
    fn drop(&mut self) {
        self.domain.driver.release(|driver| driver.with(|model| model.deregister(self.registration.id)));
    }
}

impl fmt::Debug for ForeignRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignRegion").field("key", &self.key()).finish_non_exhaustive()
    }
}

impl Domain {
    /// `ibv_reg_mr(3)`: registers `len` bytes of `memory`, which work requests and peers name by
    /// `address`.
    pub fn register_foreign(
        &self,
        address: u64,
        len: usize,
        memory: Arc<dyn ForeignMemory>,
        rights: impl Into<Rights>,
    ) -> Result<ForeignRegion, Error> {
        let rights = rights.into();
        let DomainInner { driver, id } = &*self.inner;
        let bytes = Bytes::Foreign { memory, len };
        let registration = driver.with(|model| model.register_at(*id, address, bytes, rights))?;
        Ok(ForeignRegion { registration, domain: Arc::clone(&self.inner) })
    }

    /// Returns whether something still needs it (`EBUSY`).
    #[must_use]
    pub fn is_used(&self) -> bool {
        // Its regions, queue pairs and shared receive queues hold one each.
        Arc::strong_count(&self.inner) > 1
    }
}

impl CompletionQueue {
    /// A call of a program whose [`Mirror`] told it to: what it has done there is done, and what
    /// there is is shown there.
    pub fn called(&self) -> Result<(), Error> {
        self.driver().with(|model| model.called(self.id()))
    }

    /// Returns whether a queue pair still reports to it (`EBUSY`).
    #[must_use]
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.inner) > 1
    }
}

impl QueuePair {
    /// `ibv_modify_qp(3)`.
    pub fn modify(&self, transition: Transition) -> Result<(), Error> {
        self.driver.with(|model| match transition {
            Transition::Reset => model.reset(self.id),
            Transition::Initialise => model.initialise(self.id),
            Transition::Receive { local, remote, number, timer } => {
                model.begin_receiving(self.id, local, remote, number, timer)
            }
            Transition::ReceiveDatagrams => model.begin_receiving_datagrams(self.id),
            Transition::Send { retry, rnr_retry, read_depth } => {
                model.begin_sending(self.id, retry, rnr_retry, read_depth)
            }
            Transition::Drain { notify } => model.drain(self.id, notify),
            Transition::Fail => model.end_pair(self.id),
        })?;
        if matches!(transition, Transition::Reset) {
            // Posted memory then belongs to its owner again.
            self.driver.wait_while(|model| model.lands_for(self.id))?;
        }
        Ok(())
    }

    /// `ibv_query_qp(3)`: its state.
    pub fn state(&self) -> Result<PairState, Error> {
        Ok(self.driver.with(|model| model.state_of(self.id))?.into())
    }

    /// `ibv_query_qp(3)`: its address, its peer's address and the number of the peer's queue pair
    /// (0 if that is gone), once it has a path.
    #[must_use]
    pub fn ends(&self) -> Option<(IpAddr, IpAddr, u32)> {
        self.driver.with(|model| model.ends_of(self.id))
    }

    /// `ibv_post_send(3)`: posts the requests in order, up to the first refused one.
    pub fn post_named(&self, requests: &[NamedSend<'_>]) -> Result<(), PostError<Error>> {
        self.post_all(requests, true)
    }

    /// Posts like [`QueuePair::post_named`], for a program that is not told of a refusal: no
    /// injected fault refuses a request.
    pub fn submit_named(&self, requests: &[NamedSend<'_>]) -> Result<(), PostError<Error>> {
        self.post_all(requests, false)
    }

    fn post_all(&self, requests: &[NamedSend<'_>], answered: bool) -> Result<(), PostError<Error>> {
        self.driver.with(|model| {
            // Completions that the program has taken give their slots back.
            if (model.send_room(self.id) as usize) < requests.len() {
                model.look_at_sends(self.id);
            }
            let domain = model.domain_of(self.id);
            let posted = chain(requests, |request| {
                let &NamedSend { id, op, signaled, solicited, local } = request;
                let (op, atomic, to) = match op {
                    Op::Connected(op) => (op, None, None),
                    // A READ that changes what it has read. It counts as one (IBA 9.4.5).
                    Op::Atomic(remote, atomic) => (SendOp::Read(remote), Some(atomic), None),
                    Op::Datagram(to, immediate) => {
                        (immediate.map_or(SendOp::Send, SendOp::SendImmediate), None, Some(to))
                    }
                };
                let payload = match local {
                    Local::Inline(bytes) => Payload::Inline(bytes),
                    Local::Memory(list) => Payload::Memory(model.named(domain, list)),
                };
                let request = Request { id, op, atomic, signaled, solicited, to };
                model.post_named(self.id, request, payload, answered)
            });
            // One doorbell for all posted requests.
            model.ring(self.id);
            posted
        })
    }

    /// `qp_access_flags` of `ibv_modify_qp(3)`: what its peer may do. A new queue pair allows all.
    pub fn set_rights(&self, rights: Rights) -> Result<(), Error> {
        self.driver.with(|model| model.set_rights(self.id, rights))
    }

    /// `qkey` of `ibv_modify_qp(3)`: the key of the datagrams that it hears.
    pub fn set_key(&self, key: u32) -> Result<(), Error> {
        self.driver.with(|model| model.set_key(self.id, key))
    }

    /// `timeout` of `ibv_modify_qp(3)`: how long to wait for an acknowledgement, 4.096 µs ·
    /// 2^`code`, or for ever if it is 0. The default is
    /// [`Parameters::ack_timeout`](crate::Parameters::ack_timeout).
    pub fn set_ack_timeout(&self, code: u8) -> Result<(), Error> {
        self.driver.with(|model| model.set_ack_timeout(self.id, code))
    }

    /// Returns how many send requests fit.
    #[must_use]
    pub fn send_room(&self) -> u32 {
        self.driver.with(|model| {
            model.look_at_sends(self.id);
            model.send_room(self.id)
        })
    }

    /// `ibv_post_recv(3)`: posts the requests in order, up to the first refused one.
    pub fn post_named_receives(&self, requests: &[NamedReceive<'_>]) -> Result<(), PostError<Error>> {
        self.driver.with(|model| {
            let domain = model.domain_of(self.id);
            chain(requests, |request| {
                let local = model.named(domain, request.local);
                model.post_named_receive(self.id, &PostedReceive { id: request.id, local })
            })
        })
    }
}

impl Identifier {
    /// `rdma_bind_addr(3)`.
    pub fn bind(&self, address: SocketAddr) -> Result<(), Error> {
        self.inner.driver.with(|model| model.bind(self.inner.id, address))
    }

    /// `rdma_listen(3)`, once bound.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        self.inner.driver.with(|model| model.listen_on(self.inner.id, backlog))
    }

    /// `rdma_connect(3)` with a queue pair made on the device.
    pub fn connect_pair(&self, pair: &QueuePair, params: &ConnectParams, data: &[u8]) -> Result<(), Error> {
        self.lend(pair)?;
        self.connect(params, data)
    }

    /// `rdma_accept(3)` with a queue pair made on the device.
    pub fn accept_pair(&self, pair: &QueuePair, params: &ConnectParams, data: &[u8]) -> Result<(), Error> {
        self.lend(pair)?;
        self.accept(params, data)
    }

    /// Connects like [`Identifier::connect_pair`], with a queue pair whose state the caller
    /// changes. The answer is reported by
    /// [`CmEventKind::Other`](rdma_backend::CmEventKind::Other)`(5)`,
    /// `RDMA_CM_EVENT_CONNECT_RESPONSE`.
    pub fn connect_external(
        &self,
        pair: &QueuePair,
        params: &ConnectParams,
        data: &[u8],
    ) -> Result<(), Error> {
        self.lend_external(pair)?;
        self.connect(params, data)
    }

    /// Accepts like [`Identifier::accept_pair`], with a queue pair whose state the caller changes.
    pub fn accept_external(
        &self,
        pair: &QueuePair,
        params: &ConnectParams,
        data: &[u8],
    ) -> Result<(), Error> {
        self.lend_external(pair)?;
        self.accept(params, data)
    }

    /// `rdma_establish(3)`: tells the peer that such a queue pair is ready.
    pub fn establish(&self) -> Result<(), Error> {
        self.inner.driver.with(|model| model.establish_external(self.inner.id))
    }

    /// Returns what `rdma_init_qp_attr(3)` says of the connection.
    pub fn offered(&self) -> Result<Offered, Error> {
        self.inner.driver.with(|model| model.offered(self.inner.id))
    }

    fn lend_external(&self, pair: &QueuePair) -> Result<(), Error> {
        self.inner.driver.same_fabric(&pair.driver)?;
        self.inner.driver.with(|model| model.lend_external(self.inner.id, pair.id))
    }

    fn lend(&self, pair: &QueuePair) -> Result<(), Error> {
        self.inner.driver.same_fabric(&pair.driver)?;
        self.inner.driver.with(|model| model.lend_pair(self.inner.id, pair.id))
    }
}
