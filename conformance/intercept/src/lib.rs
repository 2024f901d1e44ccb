//! A backend around a backend. Every call passes an [`Interceptor`], which can observe or change
//! it. Each hook's default changes nothing. The result is a [`Backend`], so that interceptors nest.

mod gate;
pub mod mistakes;
mod queues;
pub mod trace;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_backend::{
    self, Access, Backend, Capabilities, CmEvent, CmEventKind, Completion, ConnectParams, DeviceKey,
    EventChannel as _, IdentifierKey, PostError, QueuePair as _, QueuePairLimits, RecvRequest, SendRequest,
};

pub use gate::{Frozen, Gate};
use queues::Kept;
pub use queues::{Batch, CompletionQueue, Domain, LowerQueuePair, QueuePair, Region};

/// Observes or changes the calls of a backend `B`. To keep a handle alive, it keeps an `Arc`.
pub trait Interceptor<B: Backend>: Send + Sync + 'static {
    /// The interceptor's state for each identifier.
    type Identifier: Send + Sync;
    /// The interceptor's state for each queue pair.
    type QueuePair: Send + Sync;

    /// Called when an identifier was created.
    fn identifier(&self, inner: &Arc<B::Identifier>, origin: Origin) -> Self::Identifier;

    /// Called when a queue pair was created for `id` in `domain`, with these requested limits.
    ///
    /// # Errors
    /// An object that the interceptor needs for the queue pair cannot be created.
    fn queue_pair(
        &self,
        id: &Self::Identifier,
        inner: &Arc<B::QueuePair>,
        domain: &B::Domain,
        limits: QueuePairLimits,
    ) -> Result<Self::QueuePair, B::Error>;

    /// Returns the clock's time at `now`.
    fn clock(&self, now: Instant) -> Instant {
        now
    }

    /// Called before the next event is requested.
    fn before_events(&self, _inner: &B::EventChannel) {}

    /// Called for an event, which it may change. If false, the event is dropped or refused.
    fn event(&self, _id: IdentifierKey, _kind: &mut CmEventKind<B>) -> bool {
        true
    }

    /// Called before a call to the connection manager. If false, the call is skipped and succeeds.
    fn call(&self, _id: &Self::Identifier, _inner: &B::Identifier, _call: Call<'_>) -> bool {
        true
    }

    /// Returns the domain to use after `own` was created.
    fn domain(&self, own: B::Domain) -> Arc<B::Domain> {
        Arc::new(own)
    }

    /// Returns the depth of a completion queue for a requested `depth`.
    fn completions(&self, depth: u32) -> u32 {
        depth
    }

    /// Called when a completion queue was created.
    fn completion_queue(&self, _inner: &Arc<B::CompletionQueue>) {}

    /// Returns the limits of a queue pair.
    fn limits(&self, limits: QueuePairLimits) -> QueuePairLimits {
        limits
    }

    /// Returns the length and the access flags to register for the requested ones.
    fn registering(&self, len: usize, access: Access) -> (usize, Access) {
        (len, access)
    }

    /// Called when a region was registered.
    fn registered(&self, _inner: &Arc<B::Region>) {}

    /// Called to post a chain of requests to `below`.
    ///
    /// # Errors
    /// The errors of `below`.
    fn post_send(
        &self,
        _pair: &Self::QueuePair,
        below: LowerQueuePair<'_, B>,
        requests: &[SendRequest<'_, Region<B>>],
    ) -> Result<(), PostError<B::Error>> {
        below.post_send(requests)
    }

    /// Called to post a chain of receives to `below`.
    ///
    /// # Errors
    /// The errors of `below`.
    fn post_recv(
        &self,
        _pair: &Self::QueuePair,
        below: LowerQueuePair<'_, B>,
        requests: &[RecvRequest<'_, Region<B>>],
    ) -> Result<(), PostError<B::Error>> {
        below.post_recv(requests)
    }

    /// Called before a completion queue is polled.
    fn before_poll(&self) {}

    /// Called for a polled completion. If false, it is dropped.
    fn polled(
        &self,
        _pair: &Self::QueuePair,
        _below: LowerQueuePair<'_, B>,
        _completion: &mut Completion,
    ) -> bool {
        true
    }
}

/// The origin of an identifier.
#[derive(Clone, Copy, Debug)]
pub enum Origin {
    /// It was created, for an outgoing connection.
    Created,
    /// It listens.
    Listening,
    /// It came with a connect request, which offered these parameters.
    Requested(ConnectParams),
}

/// A call of an identifier.
#[derive(Debug)]
pub enum Call<'a> {
    /// `rdma_resolve_addr(3)`
    ResolveAddress(SocketAddr),
    /// `rdma_resolve_route(3)`
    ResolveRoute,
    /// `rdma_connect(3)`, with private data
    Connect(&'a mut ConnectParams, &'a mut Box<[u8]>),
    /// `rdma_accept(3)`, with private data
    Accept(&'a mut ConnectParams, &'a mut Box<[u8]>),
    /// `rdma_reject(3)`
    Reject,
    /// `rdma_notify(3)`
    Notify,
    /// `rdma_disconnect(3)`
    Disconnect,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `B`, with every call passing `I`.
pub struct Intercepted<B: Backend, I>(Arc<Inner<B, I>>);

struct Inner<B, I> {
    inner: B,
    by: I,
}

impl<B: Backend, I: Interceptor<B>> Intercepted<B, I> {
    /// Returns `inner`, with every call passing the interceptor.
    pub fn by(inner: B, by: I) -> Self {
        Self(Arc::new(Inner { inner, by }))
    }
}

impl<B: Backend, I> Clone for Intercepted<B, I> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: Backend, I: Interceptor<B>> Backend for Intercepted<B, I> {
    type Error = B::Error;
    type EventChannel = EventChannel<B, I>;
    type Identifier = Identifier<B, I>;
    type Domain = Domain<B, I>;
    type Region = Region<B>;
    type CompletionQueue = CompletionQueue<B, I>;
    type QueuePair = QueuePair<B, I>;

    fn event_channel(&self) -> Result<EventChannel<B, I>, B::Error> {
        Ok(EventChannel { inner: self.0.inner.event_channel()?, shared: Arc::clone(&self.0) })
    }

    fn now(&self) -> Instant {
        self.0.by.clock(self.0.inner.now())
    }
}

/// An intercepted channel of connection-manager events.
pub struct EventChannel<B: Backend, I> {
    inner: B::EventChannel,
    shared: Arc<Inner<B, I>>,
}

impl<B: Backend<EventChannel: AsFd>, I> AsFd for EventChannel<B, I> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<B: Backend, I: Interceptor<B>> EventChannel<B, I> {
    fn identifier(&self, inner: B::Identifier, origin: Origin) -> Identifier<B, I> {
        let inner = Arc::new(inner);
        let kept = self.shared.by.identifier(&inner, origin);
        Identifier { inner, kept, shared: Arc::clone(&self.shared) }
    }

    fn next_told(&self) -> Result<Option<CmEvent<B>>, B::Error> {
        loop {
            self.shared.by.before_events(&self.inner);
            match self.inner.next_event()? {
                Some(mut event) => {
                    if self.shared.by.event(event.id, &mut event.kind) {
                        return Ok(Some(event));
                    }
                }
                None => return Ok(None),
            }
        }
    }
}

impl<B: Backend, I: Interceptor<B>> rdma_backend::EventChannel<Intercepted<B, I>> for EventChannel<B, I> {
    fn create_id(&self) -> Result<Identifier<B, I>, B::Error> {
        Ok(self.identifier(self.inner.create_id()?, Origin::Created))
    }

    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Identifier<B, I>, B::Error> {
        Ok(self.identifier(self.inner.listen(address, backlog)?, Origin::Listening))
    }

    fn next_event(&self) -> Result<Option<CmEvent<Intercepted<B, I>>>, B::Error> {
        let Some(CmEvent { id, kind, private_data }) = self.next_told()? else { return Ok(None) };
        let origin = match &kind {
            CmEventKind::ConnectRequest { peer, .. } => Origin::Requested(*peer),
            _ => Origin::Created,
        };
        let kind = kind.map_identifier(|id| self.identifier(id, origin));
        Ok(Some(CmEvent { id, kind, private_data }))
    }
}

/// An intercepted identifier.
pub struct Identifier<B: Backend, I: Interceptor<B>> {
    inner: Arc<B::Identifier>,
    kept: I::Identifier,
    shared: Arc<Inner<B, I>>,
}

impl<B: Backend, I: Interceptor<B>> Identifier<B, I> {
    fn passes(&self, call: Call<'_>) -> bool {
        self.shared.by.call(&self.kept, &self.inner, call)
    }

    fn make(
        &self,
        call: Call<'_>,
        to: impl FnOnce(&B::Identifier) -> Result<(), B::Error>,
    ) -> Result<(), B::Error> {
        if self.passes(call) { to(&self.inner) } else { Ok(()) }
    }
}

impl<B: Backend, I: Interceptor<B>> rdma_backend::Identifier<Intercepted<B, I>> for Identifier<B, I> {
    fn key(&self) -> IdentifierKey {
        self.inner.key()
    }

    fn set_traffic_class(&self, class: u8) -> Result<(), B::Error> {
        self.inner.set_traffic_class(class)
    }

    fn set_ack_timeout(&self, code: u8) -> Result<(), B::Error> {
        self.inner.set_ack_timeout(code)
    }

    fn resolve_address(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        timeout: Duration,
    ) -> Result<(), B::Error> {
        self.make(Call::ResolveAddress(remote), |inner| inner.resolve_address(local, remote, timeout))
    }

    fn resolve_route(&self, timeout: Duration) -> Result<(), B::Error> {
        self.make(Call::ResolveRoute, |inner| inner.resolve_route(timeout))
    }

    fn device(&self) -> Result<DeviceKey, B::Error> {
        self.inner.device()
    }

    fn capabilities(&self) -> Result<Capabilities, B::Error> {
        self.inner.capabilities()
    }

    fn create_domain(&self) -> Result<Domain<B, I>, B::Error> {
        let inner = self.shared.by.domain(self.inner.create_domain()?);
        Ok(Domain { inner, shared: Arc::clone(&self.shared) })
    }

    fn create_completion_queue(&self, depth: u32, vector: u32) -> Result<CompletionQueue<B, I>, B::Error> {
        let depth = self.shared.by.completions(depth);
        let inner = Arc::new(self.inner.create_completion_queue(depth, vector)?);
        self.shared.by.completion_queue(&inner);
        Ok(CompletionQueue { inner, pairs: Arc::default(), shared: Arc::clone(&self.shared) })
    }

    fn create_queue_pair(
        &self,
        domain: &Domain<B, I>,
        completions: &CompletionQueue<B, I>,
        limits: QueuePairLimits,
    ) -> Result<QueuePair<B, I>, B::Error> {
        let by = &self.shared.by;
        let inner = self.inner.create_queue_pair(&domain.inner, &completions.inner, by.limits(limits))?;
        let inner = Arc::new(inner);
        let kept = by.queue_pair(&self.kept, &inner, &domain.inner, limits)?;
        let pair = Arc::new(Kept { inner, kept });
        lock(&completions.pairs).insert(pair.inner.number(), Arc::downgrade(&pair));
        Ok(QueuePair { pair, pairs: Arc::clone(&completions.pairs), shared: Arc::clone(&self.shared) })
    }

    fn connect(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), B::Error> {
        let (mut params, mut private_data) = (*params, private_data.into());
        let passes = self.passes(Call::Connect(&mut params, &mut private_data));
        if passes { self.inner.connect(&params, &private_data) } else { Ok(()) }
    }

    fn accept(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), B::Error> {
        let (mut params, mut private_data) = (*params, private_data.into());
        let passes = self.passes(Call::Accept(&mut params, &mut private_data));
        if passes { self.inner.accept(&params, &private_data) } else { Ok(()) }
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), B::Error> {
        self.make(Call::Reject, |inner| inner.reject(private_data))
    }

    fn notify_established(&self) -> Result<(), B::Error> {
        self.make(Call::Notify, B::Identifier::notify_established)
    }

    fn disconnect(&self) -> Result<(), B::Error> {
        self.make(Call::Disconnect, B::Identifier::disconnect)
    }

    fn migrate(&self, to: &EventChannel<B, I>) -> Result<(), B::Error> {
        self.inner.migrate(&to.inner)
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.inner.local_addr()
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        self.inner.peer_addr()
    }
}
