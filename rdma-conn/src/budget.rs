use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rdma_backend::memory::{CallerMemory, DmaBuf, SharedMemory};
use rdma_backend::{Access, Backend, Domain};

use crate::domain::ProtectionDomain;
use crate::error::Error;

/// Limits on all connections of an endpoint, or on all that a listener accepted.
///
/// Start from [`Limits::default`] or [`Limits::NONE`], then assign fields or chain their setters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The most connections at once, including those being made or closed. A further request is
    /// rejected, and a further connect fails.
    pub connections: usize,
    /// The most registered bytes of all connections together. Caps what unauthenticated peers cost
    /// (VR-SEC-007).
    ///
    /// A request that would exceed the limit is rejected. An open connection continues without its
    /// second window, and with a send buffer of a page. A call that registers a buffer fails.
    pub registered_bytes: u64,
    /// The most connections that an endpoint's listeners have accepted and the program does not
    /// have yet, like the backlog of `listen(2)`. None of them has a window.
    ///
    /// These are handshakes, connections whose [`Event::Opened`](crate::Event::Opened) was not
    /// taken or, on tokio, that no task has accepted, and connections that the program closed
    /// before its next turn. Further requests wait.
    /// While requests wait, a handshake or a closed connection is ended after a tenth of a second.
    /// So peers that never complete a handshake cannot keep others out. Connections accepted by a
    /// [`Listener`](crate::Listener) or
    /// [`Endpoint::accept_request`](crate::Endpoint::accept_request)
    /// do not count.
    pub backlog: usize,
}

impl Limits {
    /// The default of [`Limits::registered_bytes`]: 2 GiB, half the memory of a machine with 4 GiB.
    ///
    /// It holds about 1900 idle connections with windows of 1 MiB, or 10,000 with windows of 128
    /// KiB. Idle strangers then cannot make a small machine swap. Raise it for larger servers.
    pub const REGISTERED_BYTES: u64 = 2 << 30;

    /// The default of [`Limits::backlog`]: 256, which register 12 MiB with the default options.
    pub const BACKLOG: usize = 256;

    /// No limits, for programs that decide about each connection themselves.
    pub const NONE: Self = Self { connections: usize::MAX, registered_bytes: u64::MAX, backlog: usize::MAX };

    rdma_proto::setters! {
        connections: usize,
        registered_bytes: u64,
        backlog: usize,
    }
}

impl Default for Limits {
    /// 10,000 connections, like Valkey's `maxclients`, [`Limits::REGISTERED_BYTES`] and
    /// [`Limits::BACKLOG`].
    fn default() -> Self {
        Self { connections: 10_000, registered_bytes: Self::REGISTERED_BYTES, backlog: Self::BACKLOG }
    }
}

/// Counts all connections and their memory, before their peers authenticate too (VR-SEC-007).
#[derive(Debug)]
pub(crate) struct Budget {
    limits: Limits,
    connections: AtomicUsize,
    newcomers: AtomicUsize,
    bytes: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        let (connections, newcomers, bytes) = Default::default();
        Arc::new(Self { limits, connections, newcomers, bytes })
    }

    pub(crate) fn used(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn place(self: &Arc<Self>) -> Result<Place, Error> {
        let limit = self.limits.connections;
        // In one step, because endpoints of other threads share the limit. The count guards no
        // memory, so that no order is needed.
        self.connections
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| (used < limit).then_some(used + 1))
            .map(|_| Place { budget: Arc::clone(self) })
            .map_err(|_| Error::TooManyConnections { limit })
    }

    /// Returns a place in the backlog, if there is one.
    pub(crate) fn newcomer(self: &Arc<Self>) -> Option<Newcomer> {
        let limit = self.limits.backlog;
        self.newcomers
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| (used < limit).then_some(used + 1))
            .map(|_| Newcomer { budget: Arc::clone(self) })
            .ok()
    }

    pub(crate) fn has(&self, bytes: u64) -> Result<(), Error> {
        let limit = self.limits.registered_bytes;
        // Takes nothing. It refuses before a connection is half made, where `take` would refuse
        // later.
        let within = self.used().checked_add(bytes).is_some_and(|used| used <= limit);
        if within { Ok(()) } else { Err(Error::RegisteredMemory { limit }) }
    }

    fn take(self: &Arc<Self>, bytes: usize) -> Result<Share, Error> {
        let bytes = bytes as u64;
        let limit = self.limits.registered_bytes;
        let within = |used: u64| used.checked_add(bytes).filter(|used| *used <= limit);
        self.bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, within)
            .map(|_| Share { budget: Arc::clone(self), bytes })
            .map_err(|_| Error::RegisteredMemory { limit })
    }
}

#[derive(Debug)]
pub(crate) struct Place {
    budget: Arc<Budget>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.budget.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct Newcomer {
    budget: Arc<Budget>,
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        self.budget.newcomers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct CountedRegion<R> {
    // In drop order: memory counts until it is deregistered.
    pub(crate) region: R,
    _share: Share,
}

pub(crate) fn register<B: Backend>(
    domain: &ProtectionDomain<B>,
    budget: &Arc<Budget>,
    (len, huge): (usize, bool),
    access: Access,
) -> Result<CountedRegion<B::Region>, Error> {
    Error::unless_forked()?;
    // Before anything is pinned (VR-SEC-007).
    let share = budget.take(len)?;
    let domain = domain.lower();
    let region = if huge { domain.register_huge(len, access) } else { domain.register(len, access) };
    Ok(CountedRegion { region: region.map_err(Error::backend(REGISTERING))?, _share: share })
}

pub(crate) fn register_memory<B: Backend>(
    domain: &ProtectionDomain<B>,
    budget: &Arc<Budget>,
    memory: impl CallerMemory,
    access: Access,
) -> Result<CountedRegion<B::Region>, Error> {
    Error::unless_forked()?;
    let share = budget.take(memory.shared().len())?;
    let memory = Contained(Some(memory));
    let region = domain.lower().register_memory(memory, access).map_err(Error::backend(REGISTERING))?;
    Ok(CountedRegion { region, _share: share })
}

/// Application memory. If its drop panics, other connections of the endpoint must not be affected.
struct Contained<M: CallerMemory>(Option<M>);

impl<M: CallerMemory> CallerMemory for Contained<M> {
    fn shared(&self) -> SharedMemory<'_> {
        // `None` only during `drop`.
        self.0.as_ref().map_or_else(|| SharedMemory::new(&[]), M::shared)
    }

    fn dma_buf(&self) -> Option<DmaBuf> {
        self.0.as_ref()?.dma_buf()
    }
}

impl<M: CallerMemory> Drop for Contained<M> {
    fn drop(&mut self) {
        let memory = self.0.take();
        if catch_unwind(AssertUnwindSafe(|| drop(memory))).is_err() {
            tracing::error!("registered memory of the program panicked when it was dropped");
        }
    }
}

const REGISTERING: &str = "registering memory";
