//! RDMA as a connection type, on any backend.
//!
//! All connections of a type on one loop share an [`Endpoint`](rdma_conn::Endpoint), with its
//! completion queues, descriptor and budget. A [`Listener`] hands out bare requests, which are
//! examined before anything is allocated.

mod endpoint;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use rdma_conn::{Descriptors, Limits, Listener, Options, Request, is_one_machine};

use crate::address::Address;
use crate::transport::{
    Accepted, Carrier, ConnectionType, Interest, Kind, Listening, LoopId, Source, Transport,
};
use endpoint::SharedEndpoint;

/// Default limit on how long data may wait for a peer that takes nothing (VR-RES-004).
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// The completion vector, and so the interrupt, that signals a connection's completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vector {
    /// A random one for each connection.
    #[default]
    Random,
    /// Always this one, modulo the device's number of vectors.
    Fixed(u32),
}

impl Vector {
    fn choose(self) -> u32 {
        match self {
            Self::Fixed(vector) => vector,
            // The hasher's random seed is random enough to spread connections.
            Self::Random => RandomState::new().hash_one(()) as u32,
        }
    }
}

/// Settings of [`Rdma`]. Start from [`RdmaSettings::default`], then assign fields or chain setters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaSettings {
    /// Options of accepted connections. [`RdmaSettings::vector`] sets their completion vector.
    pub server: Options,
    /// Options of outgoing connections. [`RdmaSettings::vector`] sets their completion vector.
    pub client: Options,
    /// The completion vector of connections.
    pub vector: Vector,
    /// Time limit for connecting.
    pub connect_timeout: Duration,
    /// Limits on memory and connections of all peers on one loop together, authenticated or not
    /// (VR-SEC-007). A loop's first listener or connection of the type fixes them for that loop.
    pub limits: Limits,
}

impl RdmaSettings {
    /// Default limit on registered memory of all connections on one loop: 2 GiB, about 1900 idle
    /// clients with the default window of 1 MiB.
    pub const REGISTERED_BYTES: u64 = 2 << 30;

    rdma_proto::setters! {
        server: Options,
        client: Options,
        vector: Vector,
        connect_timeout: Duration,
        limits: Limits,
    }
}

impl Default for RdmaSettings {
    /// A server ends a connection whose peer lets data wait for 60 s, and registers at most
    /// [`RdmaSettings::REGISTERED_BYTES`] on a loop.
    fn default() -> Self {
        let mut server = Options::default();
        server.protocol.stall_limit = Some(STALL_LIMIT);
        let limits = Limits::default().registered_bytes(Self::REGISTERED_BYTES);
        Self {
            server,
            client: Options::default(),
            vector: Vector::Random,
            connect_timeout: Duration::from_secs(5),
            limits,
        }
    }
}

type PerLoop<B> = Vec<(LoopId, Weak<SharedEndpoint<B>>)>;

/// RDMA on a backend.
#[derive(Debug)]
pub struct Rdma<B: Descriptors> {
    backend: B,
    settings: Arc<Mutex<RdmaSettings>>,
    shared: Arc<Mutex<PerLoop<B>>>,
}

impl<B: Descriptors> Clone for Rdma<B> {
    fn clone(&self) -> Self {
        Self {
            backend: self.backend.clone(),
            settings: Arc::clone(&self.settings),
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<B: Descriptors> Rdma<B> {
    /// Returns RDMA on `backend` with default settings.
    pub fn new(backend: B) -> Self {
        Self { backend, settings: Arc::default(), shared: Arc::default() }
    }

    fn shared(&self, on: LoopId) -> io::Result<Arc<SharedEndpoint<B>>> {
        let limits = locked(&self.settings).limits;
        let mut all = locked(&self.shared);
        // An endpoint ends with its last connection and listener. The loop may make another.
        all.retain(|(_, shared)| shared.strong_count() > 0);
        if let Some(shared) = all.iter().find_map(|(id, shared)| (*id == on).then(|| shared.upgrade())?) {
            return Ok(shared);
        }
        let shared = Arc::new(SharedEndpoint::new(&self.backend, limits)?);
        all.push((on, Arc::downgrade(&shared)));
        Ok(shared)
    }
}

fn locked<T>(settings: &Mutex<T>) -> MutexGuard<'_, T> {
    settings.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Descriptors> ConnectionType for Rdma<B> {
    type Settings = RdmaSettings;

    fn kind(&self) -> Kind {
        KIND
    }

    fn configure(&self, settings: RdmaSettings) -> io::Result<()> {
        for options in [&settings.server, &settings.client] {
            options.check()?;
        }
        *locked(&self.settings) = settings;
        Ok(())
    }

    fn listen(&self, on: LoopId, at: &Address) -> io::Result<Box<dyn Listening>> {
        // From the first listener on, so that its limits hold for the loop.
        let shared = self.shared(on)?;
        let listener = Listener::bind(&self.backend, at.ip()?)?;
        Ok(Box::new(RdmaListener { listener, shared, settings: Arc::clone(&self.settings) }))
    }

    fn connect(&self, on: LoopId, to: &Address, from: Option<&Address>) -> io::Result<Box<dyn Transport>> {
        let settings = *locked(&self.settings);
        let options = settings.client.completion_vector(settings.vector.choose());
        let from = from.map(Address::ip).transpose()?;
        let shared = self.shared(on)?;
        let id = shared.connect(to.ip()?, from, settings.connect_timeout, options)?;
        let peer = Some(to.clone());
        Ok(Box::new(RdmaTransport { shared, peer, step: Step::Member(id), waker: None, closing: false }))
    }
}

const KIND: Kind = Kind { carrier: Carrier::Rdma, tls: false };

struct RdmaListener<B: Descriptors> {
    listener: Listener<B>,
    shared: Arc<SharedEndpoint<B>>,
    settings: Arc<Mutex<RdmaSettings>>,
}

impl<B: Descriptors> Listening for RdmaListener<B> {
    fn accept(&mut self) -> io::Result<Accepted> {
        let request = match self.listener.try_request() {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(Accepted::Nobody),
            Err(error) if self.listener.is_over() => return Ok(Accepted::Over(error.into())),
            Err(error) => return Err(error.into()),
        };
        let settings = *locked(&self.settings);
        // Chosen for each connection, so that random vectors spread the interrupts.
        let options = settings.server.completion_vector(settings.vector.choose());
        Ok(Accepted::Connection(Box::new(RdmaTransport {
            shared: Arc::clone(&self.shared),
            peer: request.peer_addr().map(Address::from),
            step: Step::Requested { request, options },
            waker: None,
            closing: false,
        })))
    }

    fn local_addr(&self) -> Option<Address> {
        self.listener.local_addr().map(Into::into)
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

struct RdmaTransport<B: Descriptors> {
    shared: Arc<SharedEndpoint<B>>,
    peer: Option<Address>,
    step: Step<B>,
    waker: Option<Waker>,
    closing: bool,
}

enum Step<B: Descriptors> {
    /// The peer's request. Nothing else exists; dropping it rejects the peer (VR-RES-006).
    Requested { request: Request<B>, options: Options },
    /// A connection of the endpoint, established or not.
    Member(rdma_conn::ConnectionId),
    /// No connection any more.
    Over,
}

/// Options for a peer that is only told why it is refused: a page each for window, text, messages.
fn brief(mut options: Options) -> Options {
    const PAGE: u32 = 4096;
    options.protocol.window = PAGE;
    options.protocol.windows = 1;
    options.protocol.grow_to = None;
    options.protocol.send_buffer = PAGE;
    options.protocol.send_depth = options.protocol.send_depth.min(64);
    // The peer sends little before it has read the text. More than that waits (VR-CONN-004).
    options.receives = options.receives.min(64);
    options
}

impl<B: Descriptors> RdmaTransport<B> {
    fn id(&self) -> io::Result<rdma_conn::ConnectionId> {
        match self.step {
            Step::Member(id) => Ok(id),
            Step::Requested { .. } | Step::Over => Err(ErrorKind::NotConnected.into()),
        }
    }
}

impl<B: Descriptors> Transport for RdmaTransport<B> {
    fn kind(&self) -> Kind {
        KIND
    }

    fn set_waker(&mut self, waker: &Waker) {
        self.waker = Some(waker.clone());
        if let Step::Member(id) = self.step {
            self.shared.set_waker(id, waker);
        }
    }

    fn economize(&mut self) {
        // Once it is accepted, the connection's memory is registered.
        if let Step::Requested { options, .. } = &mut self.step {
            *options = brief(*options);
        }
    }

    fn establish(&mut self) -> io::Result<bool> {
        // Looked at before it is taken: no other step may be replaced.
        if let Step::Requested { .. } = self.step
            && let Step::Requested { request, options } = std::mem::replace(&mut self.step, Step::Over)
        {
            let id = self.shared.accept(request, options)?;
            self.step = Step::Member(id);
            // It was set when there was no connection to wake by it.
            if let Some(waker) = &self.waker {
                self.shared.set_waker(id, waker);
            }
        }
        self.shared.is_open(self.id()?)
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.shared.read(self.id()?, into)
    }

    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.shared.write(self.id()?, from)
    }

    fn shutdown(&mut self, linger: Duration) {
        match self.step {
            Step::Member(id) => self.shared.shutdown(id, linger),
            // Dropping a request rejects the peer.
            Step::Requested { .. } | Step::Over => self.step = Step::Over,
        }
    }

    fn begin_close(&mut self, linger: Duration) {
        self.closing = true;
        self.shutdown(linger);
    }

    fn is_over(&mut self) -> bool {
        self.id().map_or(true, |id| self.shared.has_ended(id))
    }

    fn local_addr(&self) -> Option<Address> {
        let address = match &self.step {
            Step::Requested { request, .. } => request.local_addr(),
            Step::Member(id) => self.shared.with(*id, |connection| connection.local_addr()).flatten(),
            Step::Over => None,
        };
        address.map(Into::into)
    }

    fn peer_addr(&self) -> Option<Address> {
        self.peer.clone()
    }

    fn is_local(&self) -> bool {
        match &self.step {
            // The peer's own claim: a peer that does not even claim to be local is not.
            Step::Requested { request, .. } => {
                let path = request.local_addr().zip(request.peer_addr());
                path.is_some_and(|(here, there)| is_one_machine(here.ip(), there.ip()))
            }
            // VR-SEC-008: a device has no loopback interface: "local" is a path that leads back.
            Step::Member(id) => self.shared.with(*id, |connection| connection.is_local()).unwrap_or(false),
            Step::Over => false,
        }
    }

    fn source(&self, _want: Interest) -> Source<'_> {
        // Whatever the owner wants: keepalives, receives and windows need driving.
        Source::Shared(Arc::clone(&self.shared) as _)
    }

    fn drive(&mut self, _fired: Interest) {}

    fn ready(&mut self) -> Interest {
        let Step::Member(id) = self.step else { return Interest::NONE };
        // Nothing is read any more, and only the end is awaited.
        if self.closing {
            return Interest { read: self.shared.has_ended(id), write: false };
        }
        self.shared.ready(id)
    }
}

impl<B: Descriptors> Drop for RdmaTransport<B> {
    fn drop(&mut self) {
        if let Step::Member(id) = self.step {
            self.shared.remove(id);
        }
    }
}
