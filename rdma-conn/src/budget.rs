//! Limits on what connections use together.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rdma_backend::memory::{CallerMemory, DmaBuf, SharedMemory};
use rdma_backend::{Access, Backend, Domain};

use crate::domain::ProtectionDomain;
use crate::error::Error;
use crate::options::setters;

/// Limits on what the connections of an endpoint, or those that a listener has accepted, use together.
/// Start from [`Limits::default`] or [`Limits::NONE`]; fields can be assigned, or set in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Connections at the same time, those included that are being made and those on their way to their end. Whoever asks
    /// for one more is rejected.
    pub connections: usize,
    /// Bytes of registered memory of all connections together, before anybody has authenticated (VR-SEC-007). A peer whose
    /// connection does not fit is rejected; a connection that needs more than there is makes do with less, or fails.
    pub registered_bytes: u64,
}

impl Limits {
    /// Half of the memory that a machine with 4 GiB has for programs: about 1900 idle connections with windows of
    /// 1 MiB, as many as 10,000 with windows of 128 KiB, and still so little that strangers who connect and say nothing
    /// cannot make a small machine swap. A server that means to have more says so.
    pub const REGISTERED_BYTES: u64 = 2 << 30;

    /// No limits, for whoever decides about each connection itself.
    pub const NONE: Self = Self { connections: usize::MAX, registered_bytes: u64::MAX };

    setters! {
        connections: usize,
        registered_bytes: u64,
    }
}

impl Default for Limits {
    /// 10,000 connections, as Valkey's `maxclients`, and [`Limits::REGISTERED_BYTES`].
    fn default() -> Self {
        Self { connections: 10_000, registered_bytes: Self::REGISTERED_BYTES }
    }
}

/// How many connections there may be and how much memory they may register, taken together, whether their peers have
/// authenticated or not (VR-SEC-007).
#[derive(Debug)]
pub(crate) struct Budget {
    limits: Limits,
    connections: AtomicUsize,
    bytes: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, connections: AtomicUsize::new(0), bytes: AtomicU64::new(0) })
    }

    /// Returns the number of bytes that are registered now.
    pub(crate) fn used(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns a place for one more connection. Nothing has been allocated for it yet.
    pub(crate) fn place(self: &Arc<Self>) -> Result<Place, Error> {
        let limit = self.limits.connections;
        self.connections
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| (used < limit).then_some(used + 1))
            .map(|_| Place { budget: Arc::clone(self) })
            .map_err(|_| Error::TooManyConnections { limit })
    }

    /// Whether there is room for so many bytes.
    pub(crate) fn has(&self, bytes: u64) -> Result<(), Error> {
        let limit = self.limits.registered_bytes;
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

/// A connection that counts, until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    budget: Arc<Budget>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.budget.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A part of a budget, given back when dropped.
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

/// A region and the share of the budget that it takes.
#[derive(Debug)]
pub(crate) struct CountedRegion<R> {
    pub(crate) region: R,
    _share: Share,
}

/// Registers `len` bytes, as far as `budget` goes, on huge pages if the system has them and they are `huge`.
pub(crate) fn register<B: Backend>(
    domain: &ProtectionDomain<B>,
    budget: &Arc<Budget>,
    (len, huge): (usize, bool),
    access: Access,
) -> Result<CountedRegion<B::Region>, Error> {
    let share = budget.take(len)?;
    let domain = domain.lower();
    let region = if huge { domain.register_huge(len, access) } else { domain.register(len, access) };
    Ok(CountedRegion { region: region.map_err(Error::backend(REGISTERING))?, _share: share })
}

/// Registers memory that the application has, as far as `budget` goes.
pub(crate) fn register_memory<B: Backend>(
    domain: &ProtectionDomain<B>,
    budget: &Arc<Budget>,
    memory: impl CallerMemory,
    access: Access,
) -> Result<CountedRegion<B::Region>, Error> {
    let share = budget.take(memory.shared().len())?;
    let memory = Contained(Some(memory));
    let region = domain.lower().register_memory(memory, access).map_err(Error::backend(REGISTERING))?;
    Ok(CountedRegion { region, _share: share })
}

/// Memory of a program that may panic when it is dropped. That comes when the last part of it has
/// arrived, or a connection ends: in the middle of what an endpoint does for others, too, who must
/// not suffer by it.
struct Contained<M: CallerMemory>(Option<M>);

impl<M: CallerMemory> CallerMemory for Contained<M> {
    fn shared(&self) -> SharedMemory<'_> {
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
