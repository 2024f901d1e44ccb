//! A backend that records what passes it: queue pairs and completion queues.
//!
//! Of what a peer sends, only completions tell. Where its bytes are, the recorder knows from the receives that were posted and
//! from the windows that were announced, and it takes the bytes from there when the completion is polled.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};

use rdma_proto::backend::{
    self, Backend, Completed, Completion, CompletionStatus, PostError, QueuePair as _, RecvRequest, RnrTimer,
    SendOp, SendRequest, Slice,
};
use rdma_proto::wire::{Message, Window};

use super::backend::{End, Recorded, Region, lock};
use super::recording::{Op, Outcome, Remote, Request, What};
use crate::vectors::data::Bytes;

/// What is known of a queue pair.
pub(super) struct Pair<B: Backend> {
    end: Arc<End<B>>,
    inbound: Mutex<Inbound<B::Region>>,
}

/// Where the peer's bytes arrive. Weakly, so that recording keeps nothing registered.
struct Inbound<R> {
    receives: HashMap<u64, Place<R>>,
    /// The window announced last, and how much of it was notified.
    window: Option<(Window, Weak<R>, u32)>,
    /// The one to come when that is full: a peer may have been given it early.
    next: Option<(Window, Weak<R>)>,
}

struct Place<R> {
    region: Weak<R>,
    offset: usize,
    len: usize,
}

impl<R: backend::Region> Place<R> {
    fn bytes(&self, len: usize, most: usize) -> Vec<u8> {
        let len = len.min(self.len).min(most);
        self.region.upgrade().map(|region| bytes(&*region, self.offset, len)).unwrap_or_default()
    }
}

fn bytes(region: &impl backend::Region, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    if region.memory().read(offset, &mut bytes) { bytes } else { Vec::new() }
}

impl<B: Backend> Pair<B> {
    pub(super) fn new(end: Arc<End<B>>) -> Self {
        let inbound = Inbound { receives: HashMap::new(), window: None, next: None };
        Self { end, inbound: Mutex::new(inbound) }
    }

    fn posting(&self, request: &SendRequest<'_, Region<B>>) {
        let Some(most) = self.end.book.recorder.bytes() else { return };
        let &SendRequest { id, op, local: Slice { region, offset, len }, signaled, .. } = request;
        let bytes = match op {
            SendOp::Read(_) => Vec::new(),
            // Messages are kept whole, for what follows from them.
            SendOp::Send | SendOp::SendImmediate(_) => bytes(region, offset, len.min(most.max(32))),
            SendOp::Write(_) | SendOp::WriteImmediate(..) => bytes(region, offset, len.min(most)),
        };
        if let (SendOp::Send, Ok(Message::RegisterXferMemory(window))) = (op, Message::decode(&bytes)) {
            lock(&self.inbound).announce(window, self.end.book.region(window.rkey));
        }
        self.end.record(What::Posted(Request::new(id, op, len, signaled, bytes)));
    }

    fn receiving(&self, requests: &[RecvRequest<'_, Region<B>>]) {
        if self.end.book.recorder.bytes().is_none() {
            return;
        }
        let mut inbound = lock(&self.inbound);
        for &RecvRequest { id, local: Slice { region, offset, len } } in requests {
            let region = Arc::downgrade(&region.inner);
            inbound.receives.insert(id, Place { region, offset, len });
        }
        drop(inbound);
        self.end.record(What::Receives { count: requests.len() });
    }

    fn polled(&self, completion: &Completion) {
        let Some(most) = self.end.book.recorder.bytes() else { return };
        let id = completion.id;
        let mut inbound = lock(&self.inbound);
        let outcome = match completion.result {
            Ok(Completed::Send) => Outcome::Done { op: Op::Send },
            Ok(Completed::Write) => Outcome::Done { op: Op::Write },
            Ok(Completed::Read) => Outcome::Done { op: Op::Read },
            Ok(Completed::Recv { len, immediate }) => {
                let place = inbound.receives.remove(&id);
                let bytes = place.map(|place| place.bytes(len as usize, most.max(32))).unwrap_or_default();
                Outcome::Received { len, immediate: immediate.map(|it| it.0), bytes: Bytes(bytes) }
            }
            Ok(Completed::RecvWrite { immediate }) => {
                inbound.receives.remove(&id);
                let (place, bytes) = inbound.notified(immediate.0, most);
                Outcome::Notified { immediate: immediate.0, place, bytes: Bytes(bytes) }
            }
            Err(error)
                if error.status == CompletionStatus::WR_FLUSH_ERR
                    && inbound.receives.remove(&id).is_some() =>
            {
                drop(inbound);
                return self.end.record(What::Flushed { count: 1 });
            }
            Err(error) => Outcome::Failed { status: error.status.0, vendor: error.vendor },
        };
        drop(inbound);
        self.end.record(What::Completed { id, outcome });
    }
}

impl<R: backend::Region> Inbound<R> {
    fn announce(&mut self, window: Window, region: Weak<R>) {
        match self.window {
            Some((current, _, filled)) if filled < current.length => self.next = Some((window, region)),
            _ => self.window = Some((window, region, 0)),
        }
    }

    /// Where the next bytes of the peer are, and the first of them.
    fn notified(&mut self, count: u32, most: usize) -> (Option<Remote>, Vec<u8>) {
        let Some((window, region, filled)) = &mut self.window else { return (None, Vec::new()) };
        let address = window.address.wrapping_add((*filled).into());
        let at = Remote { address, rkey: window.rkey };
        let inside = count.min(window.length.saturating_sub(*filled));
        let bytes = region.upgrade().and_then(|region| {
            let offset = usize::try_from(address.checked_sub(region.address())?).ok()?;
            Some(bytes(&*region, offset, most.min(inside as usize)))
        });
        *filled = filled.saturating_add(inside);
        if *filled == window.length
            && let Some((window, region)) = self.next.take()
        {
            self.window = Some((window, region, 0));
        }
        (Some(at), bytes.unwrap_or_default())
    }
}

type Pairs<B> = Arc<Mutex<HashMap<u32, Arc<Pair<B>>>>>;

/// A recorded completion queue.
pub struct CompletionQueue<B: Backend> {
    inner: B::CompletionQueue,
    pairs: Pairs<B>,
}

impl<B: Backend> CompletionQueue<B> {
    pub(super) fn new(inner: B::CompletionQueue) -> Self {
        Self { inner, pairs: Pairs::default() }
    }

    pub(super) const fn inner(&self) -> &B::CompletionQueue {
        &self.inner
    }
}

impl<B: Backend<CompletionQueue: AsFd>> AsFd for CompletionQueue<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<B: Backend> backend::CompletionQueue<Recorded<B>> for CompletionQueue<B> {
    fn poll(&self, into: &mut [Completion]) -> Result<usize, B::Error> {
        let count = self.inner.poll(into)?;
        for completion in into.iter().take(count) {
            let pair = lock(&self.pairs).get(&completion.queue_pair).cloned();
            if let Some(pair) = pair {
                pair.polled(completion);
            }
        }
        Ok(count)
    }

    fn arm(&self) -> Result<(), B::Error> {
        self.inner.arm()
    }

    fn take_events(&self) -> Result<u32, B::Error> {
        self.inner.take_events()
    }
}

/// A recorded queue pair.
pub struct QueuePair<B: Backend> {
    inner: B::QueuePair,
    pair: Option<Arc<Pair<B>>>,
    pairs: Pairs<B>,
}

impl<B: Backend> QueuePair<B> {
    pub(super) fn new(
        inner: B::QueuePair,
        pair: Option<Arc<Pair<B>>>,
        completions: &CompletionQueue<B>,
    ) -> Self {
        if let Some(pair) = &pair {
            lock(&completions.pairs).insert(inner.number(), Arc::clone(pair));
        }
        Self { inner, pair, pairs: Arc::clone(&completions.pairs) }
    }

    fn refused(&self, requests: usize, error: &PostError<B::Error>) {
        if let Some(pair) = &self.pair {
            let requests = requests.saturating_sub(error.posted);
            pair.end.record(What::Refused { requests, error: error.error.to_string() });
        }
    }
}

impl<B: Backend> Drop for QueuePair<B> {
    fn drop(&mut self) {
        lock(&self.pairs).remove(&self.inner.number());
    }
}

impl<B: Backend> backend::QueuePair<Recorded<B>> for QueuePair<B> {
    fn number(&self) -> u32 {
        self.inner.number()
    }

    fn max_inline(&self) -> usize {
        self.inner.max_inline()
    }

    fn post_send(&self, requests: &[SendRequest<'_, Region<B>>]) -> Result<(), PostError<B::Error>> {
        // Recorded first: what it leads to may be recorded before the call is over.
        if let Some(pair) = &self.pair {
            requests.iter().for_each(|request| pair.posting(request));
        }
        let chain: Vec<_> = requests
            .iter()
            .map(|&SendRequest { id, op, ref local, signaled, inline }| SendRequest {
                id,
                op,
                local: within(local),
                signaled,
                inline,
            })
            .collect();
        self.inner.post_send(&chain).inspect_err(|error| self.refused(requests.len(), error))
    }

    fn post_recv(&self, requests: &[RecvRequest<'_, Region<B>>]) -> Result<(), PostError<B::Error>> {
        if let Some(pair) = &self.pair {
            pair.receiving(requests);
        }
        let chain: Vec<_> = requests
            .iter()
            .map(|request| RecvRequest { id: request.id, local: within(&request.local) })
            .collect();
        self.inner.post_recv(&chain).inspect_err(|error| self.refused(requests.len(), error))
    }

    fn set_min_rnr_timer(&self, timer: RnrTimer) -> Result<(), B::Error> {
        self.inner.set_min_rnr_timer(timer)
    }

    fn is_loopback(&self) -> Result<bool, B::Error> {
        self.inner.is_loopback()
    }
}

/// The same part of the region that is recorded.
fn within<'a, B: Backend>(slice: &Slice<'a, Region<B>>) -> Slice<'a, B::Region> {
    Slice { region: &slice.region.inner, offset: slice.offset, len: slice.len }
}
