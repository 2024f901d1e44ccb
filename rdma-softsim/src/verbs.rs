//! Handles of the data path: domains, regions, completion queues and queue pairs.

use core::fmt;
use core::sync::atomic::Ordering::Acquire;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rdma_backend::memory::{CallerMemory, SharedMemory};
use rdma_backend::{Access, Completion, PostError, RecvRequest, RnrTimer, SendRequest, Slice};

use crate::driver::{Driver, Signal};
use crate::error::Error;
use crate::fabric::SoftSim;
use crate::model::{
    DomainId, Memory, PairId, Part, Parts, PostedReceive, QueueId, Registration, Request, Wake,
};
use crate::sync::AtomicBool;

/// A protection domain.
pub struct Domain {
    pub(crate) inner: Arc<DomainInner>,
}

pub(crate) struct DomainInner {
    pub(crate) driver: Arc<Driver>,
    pub(crate) id: DomainId,
}

impl Domain {
    pub(crate) fn new(driver: &Arc<Driver>, id: DomainId) -> Self {
        Self { inner: Arc::new(DomainInner { driver: Arc::clone(driver), id }) }
    }

    pub(crate) fn driver(&self) -> &Arc<Driver> {
        &self.inner.driver
    }

    pub(crate) fn id(&self) -> DomainId {
        self.inner.id
    }

    fn register_bytes(&self, memory: Memory, access: Access) -> Result<Region, Error> {
        let DomainInner { driver, id } = &*self.inner;
        let memory = Arc::new(memory);
        let registration = driver.beside_copies(|model| model.register(*id, Arc::clone(&memory), access))?;
        Ok(Region { registration, memory, domain: Arc::clone(&self.inner) })
    }
}

impl Drop for DomainInner {
    fn drop(&mut self) {
        self.driver.release(|driver| driver.with(|model| model.destroy_domain(self.id)));
    }
}

impl rdma_backend::Domain<SoftSim> for Domain {
    fn register(&self, len: usize, access: Access) -> Result<Region, Error> {
        let DomainInner { driver, id } = &*self.inner;
        driver.beside_copies(|model| model.may_register(*id, len as u64))?;
        // Zeroing takes time, so it is not done under the lock.
        self.register_bytes(Memory::zeroed(len)?, access)
    }

    fn register_memory<M: CallerMemory>(&self, memory: M, access: Access) -> Result<Region, Error> {
        if memory.dma_buf().is_some() {
            return Err(Error::Argument(
                "the fabric in this process has no device that could reach a dma-buf",
            ));
        }
        self.register_bytes(Memory::Caller(Box::new(memory)), access)
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Domain").field("id", &self.inner.id).finish_non_exhaustive()
    }
}

/// A registered memory region.
pub struct Region {
    registration: Registration,
    memory: Arc<Memory>,
    domain: Arc<DomainInner>,
}

impl Drop for Region {
    fn drop(&mut self) {
        // Not `beside_copies`: a copy that is in progress may still write there.
        self.domain.driver.release(|driver| driver.with(|model| model.deregister(self.registration.id)));
    }
}

impl rdma_backend::Region for Region {
    fn len(&self) -> usize {
        self.memory.len()
    }

    fn address(&self) -> u64 {
        self.registration.address
    }

    fn rkey(&self) -> u32 {
        self.registration.rkey
    }

    fn memory(&self) -> SharedMemory<'_> {
        self.memory.shared()
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Registration { address, rkey, .. } = self.registration;
        f.debug_struct("Region")
            .field("address", &format_args!("{address:#x}"))
            .field("len", &self.memory.len())
            .field("rkey", &format_args!("{rkey:#x}"))
            .finish_non_exhaustive()
    }
}

/// A completion queue. Its descriptor is readable while a completion event waits.
pub struct CompletionQueue {
    pub(crate) inner: Arc<QueueInner>,
}

pub(crate) struct QueueInner {
    driver: Arc<Driver>,
    id: QueueId,
    signal: Arc<dyn Signal>,
    /// Whether a poll would return something.
    ready: Arc<AtomicBool>,
}

impl CompletionQueue {
    pub(crate) fn new(driver: &Arc<Driver>, id: QueueId, signal: Arc<dyn Signal>) -> Self {
        let ready = driver.peek(|model| model.ready(id));
        Self { inner: Arc::new(QueueInner { driver: Arc::clone(driver), id, signal, ready }) }
    }

    pub(crate) fn driver(&self) -> &Arc<Driver> {
        &self.inner.driver
    }

    pub(crate) fn id(&self) -> QueueId {
        self.inner.id
    }
}

impl CompletionQueue {
    fn take(&self, into: &mut [Completion]) -> Result<usize, Error> {
        let inner = &self.inner;
        // Without the fabric's lock: a program that polls all the time must not delay others.
        if inner.driver.is_idle() && !inner.ready.load(Acquire) {
            return Ok(0);
        }
        inner.driver.beside_copies(|model| model.poll(inner.id, into))
    }
}

impl Drop for QueueInner {
    fn drop(&mut self) {
        self.driver.release(|driver| {
            driver.destroy_waking(Wake::Completions(self.id), |model| model.destroy_queue(self.id));
        });
    }
}

impl rdma_backend::CompletionQueue<SoftSim> for CompletionQueue {
    type Batch = Box<[Completion]>;

    fn batch(most: usize) -> Self::Batch {
        vec![Completion::EMPTY; most].into()
    }

    #[inline]
    fn poll_batch<'a>(
        &self,
        batch: &'a mut Self::Batch,
    ) -> Result<impl ExactSizeIterator<Item = Completion> + Clone + use<'a>, Error> {
        let count = self.take(batch)?;
        Ok(batch.iter().take(count).copied())
    }

    fn arm(&self) -> Result<(), Error> {
        self.inner.driver.beside_copies(|model| model.arm(self.inner.id))
    }

    fn take_events(&self) -> Result<u32, Error> {
        self.inner.driver.beside_copies(|model| {
            let events = model.take_events(self.inner.id)?;
            // Under the lock: a completion that comes later raises the signal after this.
            if events > 0 {
                self.inner.signal.clear();
            }
            Ok(events)
        })
    }
}

impl CompletionQueue {
    /// Returns whether a completion event waits. In real time the descriptor is readable then.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.inner.driver.peek(|model| model.has_events(self.inner.id))
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.signal.as_fd()
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue").field("id", &self.inner.id).finish_non_exhaustive()
    }
}

/// A reliable-connected queue pair.
pub struct QueuePair {
    pub(crate) driver: Arc<Driver>,
    pub(crate) id: PairId,
    number: u32,
    max_inline: usize,
    /// Outlives the queue pair: its identifier, or the shared queue of its receives.
    _keeps: Option<Arc<dyn Send + Sync>>,
    _domain: Arc<DomainInner>,
    _completions: [Arc<QueueInner>; 2],
}

impl QueuePair {
    pub(crate) fn new(
        driver: &Arc<Driver>,
        id: PairId,
        number: u32,
        max_inline: usize,
        keeps: Option<Arc<dyn Send + Sync>>,
        domain: &Domain,
        completions: [&CompletionQueue; 2],
    ) -> Self {
        Self {
            driver: Arc::clone(driver),
            id,
            number,
            max_inline,
            _keeps: keeps,
            _domain: Arc::clone(&domain.inner),
            _completions: completions.map(|queue| Arc::clone(&queue.inner)),
        }
    }

    fn part(&self, slice: &Slice<'_, Region>) -> Result<Part, Error> {
        self.driver.same_fabric(&slice.region.domain.driver)?;
        Ok(Part { region: slice.region.registration.id, offset: slice.offset, len: slice.len })
    }
}

impl QueuePair {
    /// `ibv_destroy_qp(3)`. Waits while bytes may be written to memory of another process
    /// ([`ForeignMemory`](crate::ForeignMemory)) for it. Dropping the queue pair does not.
    ///
    /// # Errors
    /// [`Error::Landing`] after [`Parameters::reach`](crate::Parameters::reach); the queue pair is
    /// in RESET then.
    pub fn destroy(&self) -> Result<(), Error> {
        // First in RESET, so that nothing begins to land any more.
        if !self.driver.with(|model| model.retire_pair(self.id)) {
            self.driver.wait_while(|model| model.lands_for(self.id))?;
            self.driver.with(|model| model.destroy_pair(self.id));
        }
        Ok(())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.driver.release(|driver| driver.with(|model| model.destroy_pair(self.id)));
    }
}

/// Calls `post` for each request, up to the first that fails.
pub(crate) fn chain<T>(
    requests: &[T],
    mut post: impl FnMut(&T) -> Result<(), Error>,
) -> Result<(), PostError<Error>> {
    for (posted, request) in requests.iter().enumerate() {
        post(request).map_err(|error| PostError { posted, error })?;
    }
    Ok(())
}

impl rdma_backend::QueuePair<SoftSim> for QueuePair {
    fn number(&self) -> u32 {
        self.number
    }

    fn max_inline(&self) -> usize {
        self.max_inline
    }

    fn post_send(&self, requests: &[SendRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        self.driver.beside_copies(|model| {
            let result = chain(requests, |request| {
                let &SendRequest { id, op, ref local, signaled, inline } = request;
                model.post_send(self.id, Request::new(id, op, signaled), self.part(local)?, inline)
            });
            // One doorbell for all posted requests.
            model.ring(self.id);
            result
        })
    }

    fn post_recv(&self, requests: &[RecvRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        self.driver.beside_copies(|model| {
            chain(requests, |request| {
                let local = self.part(&request.local)?;
                model.post_receive(self.id, &PostedReceive { id: request.id, local: Parts::One(local) })
            })
        })
    }

    fn set_min_rnr_timer(&self, timer: RnrTimer) -> Result<(), Error> {
        self.driver.with(|model| model.set_min_rnr_timer(self.id, timer))
    }

    fn is_loopback(&self) -> Result<bool, Error> {
        self.driver.with(|model| model.is_loopback(self.id))
    }

    fn has_failed(&self) -> Result<bool, Error> {
        self.driver.with(|model| model.has_failed(self.id))
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("number", &self.number).finish_non_exhaustive()
    }
}
