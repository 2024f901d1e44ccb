use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};

use rdma_backend::memory::{CallerMemory, SharedMemory};
use rdma_backend::{
    self, Access, Backend, Completion, Pages, PostError, QueuePair as _, RecvRequest, Region as _, RnrTimer,
    SendRequest, Slice,
};

use super::{Inner, Intercepted, Interceptor, lock};

/// The queue pair below an interceptor.
pub struct LowerQueuePair<'a, B: Backend>(&'a Arc<B::QueuePair>);

impl<B: Backend> LowerQueuePair<'_, B> {
    /// Posts a chain of requests.
    ///
    /// # Errors
    /// The errors of the queue pair.
    pub fn post_send(&self, requests: &[SendRequest<'_, Region<B>>]) -> Result<(), PostError<B::Error>> {
        let chain: Vec<_> = requests
            .iter()
            .map(|&SendRequest { id, op, local, signaled, inline }| SendRequest {
                id,
                op,
                local: within(local),
                signaled,
                inline,
            })
            .collect();
        self.0.post_send(&chain)
    }

    /// Posts a chain of receives.
    ///
    /// # Errors
    /// The errors of the queue pair.
    pub fn post_recv(&self, requests: &[RecvRequest<'_, Region<B>>]) -> Result<(), PostError<B::Error>> {
        let chain: Vec<_> = requests
            .iter()
            .map(|&RecvRequest { id, local }| RecvRequest { id, local: within(local) })
            .collect();
        self.0.post_recv(&chain)
    }
}

fn within<B: Backend>(slice: Slice<'_, Region<B>>) -> Slice<'_, B::Region> {
    Slice { region: &slice.region.inner, offset: slice.offset, len: slice.len }
}

/// An intercepted protection domain.
pub struct Domain<B: Backend, I> {
    pub(super) inner: Arc<B::Domain>,
    pub(super) shared: Arc<Inner<B, I>>,
}

impl<B: Backend, I: Interceptor<B>> rdma_backend::Domain<Intercepted<B, I>> for Domain<B, I> {
    fn register(&self, len: usize, access: Access) -> Result<Region<B>, B::Error> {
        let (more, access) = self.shared.by.registering(len, access);
        let inner = Arc::new(self.inner.register(more, access)?);
        self.shared.by.registered(&inner);
        Ok(Region { inner, len })
    }

    fn register_huge(&self, len: usize, access: Access) -> Result<Region<B>, B::Error> {
        let (more, access) = self.shared.by.registering(len, access);
        let inner = Arc::new(self.inner.register_huge(more, access)?);
        self.shared.by.registered(&inner);
        Ok(Region { inner, len })
    }

    /// The length is fixed; an interceptor changes only the rights.
    fn register_memory<M: CallerMemory>(&self, memory: M, access: Access) -> Result<Region<B>, B::Error> {
        let len = memory.shared().len();
        let (_, access) = self.shared.by.registering(len, access);
        let inner = Arc::new(self.inner.register_memory(memory, access)?);
        self.shared.by.registered(&inner);
        Ok(Region { inner, len })
    }
}

/// A region of the requested length.
pub struct Region<B: Backend> {
    /// The region registered by the backend below.
    pub inner: Arc<B::Region>,
    pub(super) len: usize,
}

impl<B: Backend> Region<B> {
    /// Wraps all of a region of the backend below, for an interceptor's own requests.
    pub fn whole(inner: B::Region) -> Self {
        Self { len: inner.len(), inner: Arc::new(inner) }
    }
}

impl<B: Backend> rdma_backend::Region for Region<B> {
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

    fn pages(&self) -> Pages {
        self.inner.pages()
    }
}

pub(super) struct Kept<Q, K> {
    pub(super) inner: Arc<Q>,
    pub(super) kept: K,
}

type KeptPair<B, I> = Kept<<B as Backend>::QueuePair, <I as Interceptor<B>>::QueuePair>;

/// The queue pairs of a completion queue, by number.
type Pairs<B, I> = Arc<Mutex<HashMap<u32, Weak<KeptPair<B, I>>>>>;

/// An intercepted completion queue.
pub struct CompletionQueue<B: Backend, I: Interceptor<B>> {
    pub(super) inner: Arc<B::CompletionQueue>,
    pub(super) pairs: Pairs<B, I>,
    pub(super) shared: Arc<Inner<B, I>>,
}

type LowerQueue<B> = <B as Backend>::CompletionQueue;

/// Room for the completions of a poll.
pub struct Batch<B: Backend> {
    lower: <LowerQueue<B> as rdma_backend::CompletionQueue<B>>::Batch,
    delivered: Vec<Completion>,
    most: usize,
}

impl<B: Backend<CompletionQueue: AsFd>, I: Interceptor<B>> AsFd for CompletionQueue<B, I> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<B: Backend, I: Interceptor<B>> CompletionQueue<B, I> {
    fn is_delivered(&self, completion: &mut Completion) -> bool {
        let pair = lock(&self.pairs).get(&completion.queue_pair).and_then(Weak::upgrade);
        pair.is_none_or(|pair| self.shared.by.polled(&pair.kept, LowerQueuePair(&pair.inner), completion))
    }
}

impl<B: Backend, I: Interceptor<B>> rdma_backend::CompletionQueue<Intercepted<B, I>>
    for CompletionQueue<B, I>
{
    type Batch = Batch<B>;

    fn batch(most: usize) -> Batch<B> {
        Batch { lower: LowerQueue::<B>::batch(1), delivered: Vec::with_capacity(most), most }
    }

    /// One at a time: fewer than there is room for must mean that the queue is empty.
    fn poll_batch<'a>(
        &self,
        batch: &'a mut Batch<B>,
    ) -> Result<impl ExactSizeIterator<Item = Completion> + Clone + use<'a, B, I>, B::Error> {
        self.shared.by.before_poll();
        let Batch { lower, delivered, most } = batch;
        delivered.clear();
        while delivered.len() < *most {
            let one = match self.inner.poll_batch(lower) {
                Err(error) if delivered.is_empty() => return Err(error),
                // A lost queue says so again.
                polled => polled.ok().and_then(|mut polled| polled.next()),
            };
            let Some(mut completion) = one else { break };
            if self.is_delivered(&mut completion) {
                delivered.push(completion);
            }
        }
        Ok(delivered.iter().copied())
    }

    fn arm(&self) -> Result<(), B::Error> {
        self.inner.arm()
    }

    fn take_events(&self) -> Result<u32, B::Error> {
        self.inner.take_events()
    }
}

/// An intercepted queue pair.
pub struct QueuePair<B: Backend, I: Interceptor<B>> {
    pub(super) pair: Arc<KeptPair<B, I>>,
    pub(super) pairs: Pairs<B, I>,
    pub(super) shared: Arc<Inner<B, I>>,
}

impl<B: Backend, I: Interceptor<B>> Drop for QueuePair<B, I> {
    fn drop(&mut self) {
        lock(&self.pairs).remove(&self.pair.inner.number());
    }
}

impl<B: Backend, I: Interceptor<B>> rdma_backend::QueuePair<Intercepted<B, I>> for QueuePair<B, I> {
    fn number(&self) -> u32 {
        self.pair.inner.number()
    }

    fn max_inline(&self) -> usize {
        self.pair.inner.max_inline()
    }

    fn post_send(&self, requests: &[SendRequest<'_, Region<B>>]) -> Result<(), PostError<B::Error>> {
        self.shared.by.post_send(&self.pair.kept, LowerQueuePair(&self.pair.inner), requests)
    }

    fn post_recv(&self, requests: &[RecvRequest<'_, Region<B>>]) -> Result<(), PostError<B::Error>> {
        self.shared.by.post_recv(&self.pair.kept, LowerQueuePair(&self.pair.inner), requests)
    }

    fn set_min_rnr_timer(&self, timer: RnrTimer) -> Result<(), B::Error> {
        self.pair.inner.set_min_rnr_timer(timer)
    }

    fn is_loopback(&self) -> Result<bool, B::Error> {
        self.pair.inner.is_loopback()
    }

    fn has_failed(&self) -> Result<bool, B::Error> {
        self.pair.inner.has_failed()
    }
}
