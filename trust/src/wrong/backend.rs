//! A backend that makes a mistake: connections and memory.

use std::any::Any;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rdma_proto::backend::{
    self, Access, Backend, Capabilities, CmEvent, CmEventKind, ConnectParams, DeviceKey, Domain as _,
    IdentifierKey, QueuePairLimits,
};
use rdma_proto::memory::SharedMemory;
use rdma_proto::time::Instant;
use rdma_softsim::SoftSim;

use super::Mistake;
use super::data_path::{CompletionQueue, QueuePair, WIDE};

/// The embedded fabric, with one mistake.
#[derive(Clone)]
pub struct Wrong(pub(super) Arc<Shared>);

/// What all handles share.
pub(super) struct Shared {
    inner: SoftSim,
    pub(super) mistake: Option<Mistake>,
    domain: OnceLock<Arc<<SoftSim as Backend>::Domain>>,
    /// What should have been given back.
    kept: Mutex<Vec<Box<dyn Any + Send>>>,
    /// Requests for connections that came.
    requests: AtomicU32,
    /// When it was made.
    made: Instant,
    /// Called before each look for an event.
    before_events: Option<BeforeEvents>,
}

/// What happens before a look for an event; it is given the channel's descriptor.
type BeforeEvents = Box<dyn Fn(BorrowedFd<'_>) + Send + Sync>;

impl Shared {
    pub(super) fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    /// Keeps for ever what is being dropped, if that is the mistake.
    pub(super) fn keep(&self, when: Mistake, handle: impl Any + Send) {
        if self.is(when) {
            self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(handle));
        }
    }
}

impl Wrong {
    /// `inner` with a mistake, or without.
    pub fn new(inner: SoftSim, mistake: Option<Mistake>) -> Self {
        Self::with(inner, mistake, None)
    }

    /// `inner` without a mistake, on which `what` happens before each look for an event, which is given the channel's
    /// descriptor: what comes between a look at the completions and one at the events can be arranged there.
    pub fn before_events(inner: SoftSim, what: impl Fn(BorrowedFd<'_>) + Send + Sync + 'static) -> Self {
        Self::with(inner, None, Some(Box::new(what)))
    }

    fn with(inner: SoftSim, mistake: Option<Mistake>, before_events: Option<BeforeEvents>) -> Self {
        let (domain, kept, made) = (OnceLock::new(), Mutex::default(), inner.now());
        Self(Arc::new(Shared {
            inner,
            mistake,
            domain,
            kept,
            requests: AtomicU32::new(0),
            made,
            before_events,
        }))
    }
}

type Error = <SoftSim as Backend>::Error;

impl Backend for Wrong {
    type Error = Error;
    type EventChannel = EventChannel;
    type Identifier = Identifier;
    type Domain = Domain;
    type Region = Region;
    type CompletionQueue = CompletionQueue;
    type QueuePair = QueuePair;

    fn event_channel(&self) -> Result<EventChannel, Error> {
        Ok(EventChannel { inner: self.0.inner.event_channel()?, shared: Arc::clone(&self.0) })
    }

    fn now(&self) -> Instant {
        if self.0.is(Mistake::ClockStands) { self.0.made } else { self.0.inner.now() }
    }
}

/// A channel of connection-manager events.
pub struct EventChannel {
    inner: <SoftSim as Backend>::EventChannel,
    shared: Arc<Shared>,
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl EventChannel {
    fn identifier(&self, inner: <SoftSim as Backend>::Identifier) -> Identifier {
        Identifier { inner: Some(inner), shared: Arc::clone(&self.shared) }
    }
}

impl backend::EventChannel<Wrong> for EventChannel {
    fn create_id(&self) -> Result<Identifier, Error> {
        Ok(self.identifier(self.inner.create_id()?))
    }

    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Identifier, Error> {
        Ok(self.identifier(self.inner.listen(address, backlog)?))
    }

    fn next_event(&self) -> Result<Option<CmEvent<Wrong>>, Error> {
        if let Some(what) = &self.shared.before_events {
            what(self.as_fd());
        }
        let Some(CmEvent { id, kind }) = self.inner.next_event()? else { return Ok(None) };
        match (self.shared.mistake, &kind) {
            (
                Some(mistake @ (Mistake::FewConnections | Mistake::TwoConnections)),
                CmEventKind::ConnectRequest { .. },
            ) => {
                let most = if mistake == Mistake::TwoConnections { 2 } else { 10 };
                if self.shared.requests.fetch_add(1, Ordering::Relaxed) >= most {
                    // Dropping the identifier rejects the request.
                    return Ok(None);
                }
            }
            (Some(Mistake::EndPanics), CmEventKind::Disconnected | CmEventKind::Rejected { .. }) => {
                panic!("a mistake that was asked for");
            }
            _ => {}
        }
        let kind = kind.map_identifier(|id| self.identifier(id));
        Ok(Some(CmEvent { id, kind }))
    }
}

/// An identifier.
pub struct Identifier {
    /// There until it is dropped.
    inner: Option<<SoftSim as Backend>::Identifier>,
    shared: Arc<Shared>,
}

impl Drop for Identifier {
    fn drop(&mut self) {
        self.shared.keep(Mistake::NeverLetsGo, self.inner.take());
    }
}

impl Identifier {
    fn inner(&self) -> &<SoftSim as Backend>::Identifier {
        self.inner.as_ref().expect("there until it is dropped")
    }

    fn params(&self, params: &ConnectParams) -> ConnectParams {
        match self.shared.mistake {
            Some(Mistake::NoRnrRetries) => ConnectParams { rnr_retry_count: 0, ..*params },
            Some(Mistake::OddDepths) => {
                ConnectParams { responder_resources: 0, initiator_depth: 3, ..*params }
            }
            _ => *params,
        }
    }
}

impl backend::Identifier<Wrong> for Identifier {
    fn key(&self) -> IdentifierKey {
        self.inner().key()
    }

    fn resolve_address(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        timeout: Duration,
    ) -> Result<(), Error> {
        self.inner().resolve_address(local, remote, timeout)
    }

    fn resolve_route(&self, timeout: Duration) -> Result<(), Error> {
        self.inner().resolve_route(timeout)
    }

    fn device(&self) -> Result<DeviceKey, Error> {
        self.inner().device()
    }

    fn capabilities(&self) -> Result<Capabilities, Error> {
        self.inner().capabilities()
    }

    fn create_domain(&self) -> Result<Domain, Error> {
        let own = Arc::new(self.inner().create_domain()?);
        let shares = matches!(self.shared.mistake, Some(Mistake::OneDomain | Mistake::KeysOutlive));
        let inner = if shares { Arc::clone(self.shared.domain.get_or_init(|| own)) } else { own };
        Ok(Domain { inner, shared: Arc::clone(&self.shared) })
    }

    fn create_completion_queue(&self, depth: u32, vector: u32) -> Result<CompletionQueue, Error> {
        // Room for what a mistake sends besides.
        let inner = self.inner().create_completion_queue(depth + 64, vector)?;
        Ok(CompletionQueue::new(inner, &self.shared))
    }

    fn create_queue_pair(
        &self,
        domain: &Domain,
        completions: &CompletionQueue,
        limits: QueuePairLimits,
    ) -> Result<QueuePair, Error> {
        let limits = QueuePairLimits { send_depth: 2 * limits.send_depth + 64, ..limits };
        let inner = self.inner().create_queue_pair(&domain.inner, completions.inner(), limits)?;
        let spare = Arc::new(domain.inner.register(64, Access::NONE)?);
        let wide = if self.shared.is(Mistake::LongAccepted) {
            Some(Arc::new(domain.inner.register(limits.recv_depth as usize * WIDE, Access::LOCAL_WRITE)?))
        } else {
            None
        };
        Ok(QueuePair::new(inner, (spare, wide), completions, &self.shared))
    }

    fn connect(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), Error> {
        self.inner().connect(&self.params(params), private_data)
    }

    fn accept(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), Error> {
        self.inner().accept(&self.params(params), private_data)
    }

    fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        self.inner().reject(private_data)
    }

    fn notify_established(&self) -> Result<(), Error> {
        self.inner().notify_established()
    }

    fn disconnect(&self) -> Result<(), Error> {
        if self.shared.is(Mistake::NeverLetsGo) { Ok(()) } else { self.inner().disconnect() }
    }

    fn migrate(&self, to: &EventChannel) -> Result<(), Error> {
        self.inner().migrate(&to.inner)
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.inner().local_addr()
    }

    fn peer_addr(&self) -> Option<SocketAddr> {
        self.inner().peer_addr()
    }
}

/// A protection domain.
pub struct Domain {
    inner: Arc<<SoftSim as Backend>::Domain>,
    shared: Arc<Shared>,
}

impl backend::Domain<Wrong> for Domain {
    fn register(&self, len: usize, access: Access) -> Result<Region, Error> {
        let is_window = access.allows(Access::REMOTE_WRITE);
        let (more, access) = match self.shared.mistake {
            Some(Mistake::ReadableWindows) if is_window => (0, access.and(Access::REMOTE_READ)),
            Some(Mistake::WindowsTooOpen) if is_window => (4096, access),
            // Room for a byte behind the last.
            Some(Mistake::WritesBehind) => (8, access),
            _ => (0, access),
        };
        let inner = Arc::new(self.inner.register(len + more, access)?);
        self.shared.keep(Mistake::KeysOutlive, Arc::clone(&inner));
        Ok(Region { inner, len })
    }
}

/// A region.
#[derive(Clone)]
pub struct Region {
    pub(super) inner: Arc<<SoftSim as Backend>::Region>,
    len: usize,
}

impl backend::Region for Region {
    fn len(&self) -> usize {
        self.len
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
