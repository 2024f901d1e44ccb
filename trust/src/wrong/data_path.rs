//! A backend that makes a mistake: queue pairs and completion queues.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rdma_proto::backend::{
    self, Backend, Completed, Completion, PostError, QueuePair as _, RecvRequest, Region as _, RnrTimer,
    SendOp, SendRequest, Slice,
};
use rdma_softsim::SoftSim;

use super::Mistake;
use super::backend::{Region, Shared, Wrong};
use super::tamper::{Came, Leaves, Tamper};

type Error = <SoftSim as Backend>::Error;
type Inner = <SoftSim as Backend>::Region;

/// The id of requests that a mistake adds.
const ADDED: u64 = u64::MAX;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long receives are that take messages of any length.
pub(super) const WIDE: usize = 4096;

/// What is known of a queue pair.
struct Pair {
    tamper: Mutex<Tamper>,
    /// Where receives put what comes, by work request id, and their numbers.
    receives: Mutex<HashMap<u64, (Weak<Inner>, usize, usize)>>,
    inner: <SoftSim as Backend>::QueuePair,
    /// Memory for messages of a mistake's own.
    spare: Arc<Inner>,
    /// Receives that take messages of any length, if that is the mistake, and how many are in use.
    wide: Option<Arc<Inner>>,
}

impl Pair {
    /// Where the receive `id` puts what comes, which belongs at `place`.
    fn widened(&self, id: u64, place: (Weak<Inner>, usize)) -> Option<(Arc<Inner>, usize)> {
        let wide = self.wide.as_ref()?;
        let mut receives = lock(&self.receives);
        let slots = receives.len();
        let slot = receives.get(&id).map_or(slots, |(.., slot)| *slot);
        receives.insert(id, (place.0, place.1, slot));
        Some((Arc::clone(wide), slot * WIDE))
    }

    /// Sends what a mistake adds.
    fn add(&self, message: &[u8]) {
        let written = self.spare.memory().write(0, message);
        debug_assert!(written, "as long as a message");
        let local = Slice { region: &*self.spare, offset: 0, len: message.len() };
        let request = SendRequest { id: ADDED, op: SendOp::Send, local, signaled: false, inline: false };
        // If there is no room for it, the mistake is not made this time.
        let _added = self.inner.post_send(&[request]);
    }
}

/// A queue pair.
pub struct QueuePair {
    pair: Option<Arc<Pair>>,
    shared: Arc<Shared>,
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.shared.keep(Mistake::NeverLetsGo, self.pair.take());
    }
}

impl QueuePair {
    pub(super) fn new(
        inner: <SoftSim as Backend>::QueuePair,
        (spare, wide): (Arc<Inner>, Option<Arc<Inner>>),
        completions: &CompletionQueue,
        shared: &Arc<Shared>,
    ) -> Self {
        let number = inner.number();
        let tamper = Mutex::new(Tamper::new(shared.mistake));
        let pair = Arc::new(Pair { tamper, receives: Mutex::default(), inner, spare, wide });
        lock(&completions.pairs).insert(number, Arc::downgrade(&pair));
        Self { pair: Some(pair), shared: Arc::clone(shared) }
    }

    fn pair(&self) -> &Pair {
        self.pair.as_ref().expect("there until it is dropped")
    }
}

impl backend::QueuePair<Wrong> for QueuePair {
    fn number(&self) -> u32 {
        self.pair().inner.number()
    }

    fn max_inline(&self) -> usize {
        self.pair().inner.max_inline()
    }

    fn post_send(&self, requests: &[SendRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        let pair = self.pair();
        let mut tamper = lock(&pair.tamper);
        let mut chain = Vec::with_capacity(requests.len());
        let mut added = Vec::new();
        for request in requests {
            let SendRequest { id, op, local: Slice { region, offset, len }, signaled, inline } = *request;
            let mut leaves = Leaves { op, offset, len, behind: Vec::new() };
            tamper.leaves(&mut leaves, &region.memory());
            let local = Slice { region: &*region.inner, offset: leaves.offset, len: leaves.len };
            chain.push(SendRequest {
                id,
                op: leaves.op,
                local,
                signaled,
                inline: inline && leaves.len <= len,
            });
            if leaves.empty_immediate() {
                let local = Slice { len: 0, ..local };
                let op = leaves.op;
                chain.push(SendRequest {
                    id: ADDED,
                    op: super::tamper::zero(op),
                    local,
                    signaled: false,
                    inline: false,
                });
            }
            added.append(&mut leaves.behind);
        }
        pair.inner.post_send(&chain)?;
        added.iter().filter(|message| !message.is_empty()).for_each(|message| pair.add(message));
        Ok(())
    }

    fn post_recv(&self, requests: &[RecvRequest<'_, Region>]) -> Result<(), PostError<Error>> {
        let pair = self.pair();
        if self.shared.is(Mistake::NeverReposts) && lock(&pair.tamper).has_heard {
            return Ok(());
        }
        let mut places = Vec::with_capacity(requests.len());
        for RecvRequest { id, local: Slice { region, offset, len } } in requests {
            let place = (Arc::downgrade(&region.inner), *offset);
            let posted = pair.widened(*id, place.clone()).map(|(wide, offset)| (wide, offset, WIDE));
            lock(&pair.receives).entry(*id).or_insert((place.0, place.1, 0));
            places.push((*id, posted.unwrap_or_else(|| (Arc::clone(&region.inner), *offset, *len))));
        }
        let chain: Vec<_> = places
            .iter()
            .map(|(id, (region, offset, len))| RecvRequest {
                id: *id,
                local: Slice { region: &**region, offset: *offset, len: *len },
            })
            .collect();
        pair.inner.post_recv(&chain)
    }

    fn set_min_rnr_timer(&self, timer: RnrTimer) -> Result<(), Error> {
        self.pair().inner.set_min_rnr_timer(timer)
    }

    fn is_loopback(&self) -> Result<bool, Error> {
        self.pair().inner.is_loopback()
    }
}

/// A completion queue.
pub struct CompletionQueue {
    inner: Option<<SoftSim as Backend>::CompletionQueue>,
    pairs: Mutex<HashMap<u32, Weak<Pair>>>,
    shared: Arc<Shared>,
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.shared.keep(Mistake::NeverLetsGo, self.inner.take());
    }
}

impl CompletionQueue {
    pub(super) fn new(inner: <SoftSim as Backend>::CompletionQueue, shared: &Arc<Shared>) -> Self {
        Self { inner: Some(inner), pairs: Mutex::default(), shared: Arc::clone(shared) }
    }

    pub(super) fn inner(&self) -> &<SoftSim as Backend>::CompletionQueue {
        self.inner.as_ref().expect("there until it is dropped")
    }

    /// What the side is told of what came.
    fn told(&self, completion: &mut Completion) {
        let pair = lock(&self.pairs).get(&completion.queue_pair).and_then(Weak::upgrade);
        let Some(pair) = pair else { return };
        let mut tamper = lock(&pair.tamper);
        tamper.has_heard = true;
        let added = match &mut completion.result {
            Ok(Completed::RecvWrite { immediate }) => {
                immediate.0 = tamper.notified(immediate.0);
                None
            }
            Ok(Completed::Recv { len, immediate }) => {
                let place = lock(&pair.receives).get(&completion.id).cloned();
                let Some((region, offset, slot)) =
                    place.and_then(|(region, offset, slot)| Some((region.upgrade()?, offset, slot)))
                else {
                    return;
                };
                let mut bytes = [0; 32];
                let there = bytes.len().min(*len as usize);
                let read = match &pair.wide {
                    None => region.memory().read(offset, &mut bytes[..there]),
                    Some(wide) => wide.memory().read(slot * WIDE, &mut bytes[..there]),
                };
                let mut came = Came { bytes, len: *len, immediate: *immediate, payload: None };
                let added = tamper.came(&mut came);
                let written = region.memory().write(offset, &came.bytes);
                debug_assert!(read && written, "where the receive is");
                *len = came.len;
                if let Some(payload) = came.payload {
                    completion.result = Ok(Completed::RecvWrite { immediate: payload });
                }
                added
            }
            _ => None,
        };
        if let Some(message) = added {
            pair.add(&message);
        }
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner().as_fd()
    }
}

impl backend::CompletionQueue<Wrong> for CompletionQueue {
    fn poll(&self, into: &mut [Completion]) -> Result<usize, Error> {
        let mut count = self.inner().poll(into)?;
        let mut place = 0;
        while place < count {
            if into[place].id == ADDED {
                into.copy_within(place + 1..count, place);
                count -= 1;
            } else {
                self.told(&mut into[place]);
                place += 1;
            }
        }
        Ok(count)
    }

    fn arm(&self) -> Result<(), Error> {
        self.inner().arm()
    }

    fn take_events(&self) -> Result<u32, Error> {
        self.inner().take_events()
    }
}
