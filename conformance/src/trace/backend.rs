//! A backend that records what passes it: the connection manager's half, and memory.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rdma_proto::backend::{
    self, Access, Backend, Capabilities, CmEvent, CmEventKind, ConnectParams, DeviceKey, Identifier as _,
    IdentifierKey, QueuePair as _, QueuePairLimits, Region as _,
};
use rdma_proto::memory::SharedMemory;
use rdma_proto::time::Instant;

use super::data_path::{CompletionQueue, Pair, QueuePair};
use super::recording::{Recorder, What};

/// A backend that does what `B` does and records it.
pub struct Recorded<B: Backend> {
    book: Arc<Book<B>>,
}

impl<B: Backend> Recorded<B> {
    /// `backend`, recorded by `recorder`.
    pub fn new(backend: B, recorder: &Recorder) -> Self {
        let recorder = recorder.clone();
        Self { book: Arc::new(Book { backend, recorder, ends: Mutex::default(), regions: Mutex::default() }) }
    }
}

impl<B: Backend> Clone for Recorded<B> {
    fn clone(&self) -> Self {
        Self { book: Arc::clone(&self.book) }
    }
}

/// What the handles of one backend share.
pub(super) struct Book<B: Backend> {
    backend: B,
    pub(super) recorder: Recorder,
    ends: Mutex<HashMap<IdentifierKey, u32>>,
    /// By rkey.
    regions: Mutex<HashMap<u32, Weak<B::Region>>>,
}

impl<B: Backend> Book<B> {
    pub(super) fn record(&self, end: u32, what: What) {
        self.recorder.record(|| self.backend.now(), end, what);
    }

    /// The region that a peer reaches by this key.
    pub(super) fn region(&self, rkey: u32) -> Weak<B::Region> {
        lock(&self.regions).get(&rkey).cloned().unwrap_or_default()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One end of a connection, for as long as events for it can come.
pub(super) struct End<B: Backend> {
    pub(super) book: Arc<Book<B>>,
    key: IdentifierKey,
    number: u32,
}

impl<B: Backend> End<B> {
    fn new(book: &Arc<Book<B>>, key: IdentifierKey, first: What) -> Arc<Self> {
        let number = book.recorder.end();
        lock(&book.ends).insert(key, number);
        let end = Self { book: Arc::clone(book), key, number };
        end.record(first);
        Arc::new(end)
    }

    pub(super) fn record(&self, what: What) {
        self.book.record(self.number, what);
    }
}

impl<B: Backend> Drop for End<B> {
    fn drop(&mut self) {
        lock(&self.book.ends).remove(&self.key);
    }
}

impl<B: Backend> Backend for Recorded<B> {
    type Error = B::Error;
    type EventChannel = EventChannel<B>;
    type Identifier = Identifier<B>;
    type Domain = Domain<B>;
    type Region = Region<B>;
    type CompletionQueue = CompletionQueue<B>;
    type QueuePair = QueuePair<B>;

    fn event_channel(&self) -> Result<EventChannel<B>, B::Error> {
        Ok(EventChannel { inner: self.book.backend.event_channel()?, book: Arc::clone(&self.book) })
    }

    fn now(&self) -> Instant {
        self.book.backend.now()
    }
}

/// A recorded channel of connection-manager events.
pub struct EventChannel<B: Backend> {
    inner: B::EventChannel,
    book: Arc<Book<B>>,
}

impl<B: Backend<EventChannel: AsFd>> AsFd for EventChannel<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<B: Backend> EventChannel<B> {
    fn identifier(&self, inner: B::Identifier, first: What) -> Identifier<B> {
        let end = End::new(&self.book, inner.key(), first);
        Identifier { inner, end: Some(end), book: Arc::clone(&self.book) }
    }
}

impl<B: Backend> backend::EventChannel<Recorded<B>> for EventChannel<B> {
    fn create_id(&self) -> Result<Identifier<B>, B::Error> {
        Ok(self.identifier(self.inner.create_id()?, What::Created))
    }

    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Identifier<B>, B::Error> {
        let inner = self.inner.listen(address, backlog)?;
        Ok(Identifier { inner, end: None, book: Arc::clone(&self.book) })
    }

    fn next_event(&self) -> Result<Option<CmEvent<Recorded<B>>>, B::Error> {
        let Some(CmEvent { id, kind }) = self.inner.next_event()? else { return Ok(None) };
        let told = match &kind {
            CmEventKind::Established { peer } => format!("Established, rnr_retry {}", peer.rnr_retry_count),
            other => format!("{other:?}"),
        };
        let first = match &kind {
            CmEventKind::ConnectRequest { peer, .. } => What::Requested { peer: (*peer).into() },
            _ => {
                let end = lock(&self.book.ends).get(&id).copied().unwrap_or_default();
                self.book.record(end, What::Event { event: told });
                What::Created
            }
        };
        Ok(Some(CmEvent { id, kind: kind.map_identifier(|id| self.identifier(id, first)) }))
    }
}

/// A recorded identifier.
pub struct Identifier<B: Backend> {
    inner: B::Identifier,
    /// None if it listens.
    end: Option<Arc<End<B>>>,
    book: Arc<Book<B>>,
}

impl<B: Backend> Identifier<B> {
    fn record(&self, what: What) {
        if let Some(end) = &self.end {
            end.record(what);
        }
    }

    fn called(&self, call: &str) {
        self.record(What::Called { call: call.into() });
    }

    fn connecting(&self, params: &ConnectParams) {
        let (local, peer) = (self.inner.local_addr(), self.inner.peer_addr());
        self.record(What::Connecting { local, peer, params: (*params).into() });
    }
}

impl<B: Backend> backend::Identifier<Recorded<B>> for Identifier<B> {
    fn key(&self) -> IdentifierKey {
        self.inner.key()
    }

    fn resolve_address(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        timeout: Duration,
    ) -> Result<(), B::Error> {
        self.called(&format!("resolve_addr({remote})"));
        self.inner.resolve_address(local, remote, timeout)
    }

    fn resolve_route(&self, timeout: Duration) -> Result<(), B::Error> {
        self.called("resolve_route");
        self.inner.resolve_route(timeout)
    }

    fn device(&self) -> Result<DeviceKey, B::Error> {
        self.inner.device()
    }

    fn capabilities(&self) -> Result<Capabilities, B::Error> {
        self.inner.capabilities()
    }

    fn create_domain(&self) -> Result<Domain<B>, B::Error> {
        Ok(Domain { inner: self.inner.create_domain()?, book: Arc::clone(&self.book) })
    }

    fn create_completion_queue(&self, depth: u32, vector: u32) -> Result<CompletionQueue<B>, B::Error> {
        Ok(CompletionQueue::new(self.inner.create_completion_queue(depth, vector)?))
    }

    fn create_queue_pair(
        &self,
        domain: &Domain<B>,
        completions: &CompletionQueue<B>,
        limits: QueuePairLimits,
    ) -> Result<QueuePair<B>, B::Error> {
        let inner = self.inner.create_queue_pair(&domain.inner, completions.inner(), limits)?;
        let number = inner.number();
        let QueuePairLimits { send_depth, recv_depth, .. } = limits;
        self.record(What::QueuePair { number, sends: send_depth, receives: recv_depth });
        let pair = self.end.as_ref().map(|end| Arc::new(Pair::new(Arc::clone(end))));
        Ok(QueuePair::new(inner, pair, completions))
    }

    fn connect(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), B::Error> {
        self.connecting(params);
        self.inner.connect(params, private_data)
    }

    fn accept(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), B::Error> {
        self.connecting(params);
        self.inner.accept(params, private_data)
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), B::Error> {
        self.called("reject");
        self.inner.reject(private_data)
    }

    fn notify_established(&self) -> Result<(), B::Error> {
        self.called("notify");
        self.inner.notify_established()
    }

    fn disconnect(&self) -> Result<(), B::Error> {
        self.called("disconnect");
        self.inner.disconnect()
    }

    fn migrate(&self, to: &EventChannel<B>) -> Result<(), B::Error> {
        self.inner.migrate(&to.inner)
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.inner.local_addr()
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        self.inner.peer_addr()
    }
}

/// A recorded protection domain.
pub struct Domain<B: Backend> {
    inner: B::Domain,
    book: Arc<Book<B>>,
}

impl<B: Backend> backend::Domain<Recorded<B>> for Domain<B> {
    fn register(&self, len: usize, access: Access) -> Result<Region<B>, B::Error> {
        let inner = Arc::new(self.inner.register(len, access)?);
        lock(&self.book.regions).insert(inner.rkey(), Arc::downgrade(&inner));
        Ok(Region { inner, book: Arc::clone(&self.book) })
    }
}

/// A recorded region. The recorder itself keeps no region alive.
pub struct Region<B: Backend> {
    pub(super) inner: Arc<B::Region>,
    book: Arc<Book<B>>,
}

impl<B: Backend> Drop for Region<B> {
    fn drop(&mut self) {
        let mut regions = lock(&self.book.regions);
        // The key may be another region's by now, if that was registered on another device.
        if regions.get(&self.inner.rkey()).is_some_and(|region| region.as_ptr() == Arc::as_ptr(&self.inner)) {
            regions.remove(&self.inner.rkey());
        }
    }
}

impl<B: Backend> backend::Region for Region<B> {
    fn len(&self) -> usize {
        self.inner.len()
    }

    fn address(&self) -> u64 {
        self.inner.address()
    }

    fn rkey(&self) -> u32 {
        self.inner.rkey()
    }

    fn memory(&self) -> SharedMemory<'_> {
        self.inner.memory()
    }
}
