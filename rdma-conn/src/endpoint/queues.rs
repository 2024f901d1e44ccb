//! Completion queues that connections share.
//!
//! A queue can never overrun: each connection reserves room for all its completions. Connections of
//! a device fill one queue after another, so a failed queue affects only its own.

use rdma_backend::{Backend, Completion, CompletionQueue, DeviceKey, Identifier};

use super::ConnectionId;
use super::watch::{Descriptors, Watch, Watched};
use crate::connection::BATCH;
use crate::error::Error;
use crate::options::Options;

pub(super) struct Queue<B: Descriptors> {
    completions: Watched<B::CompletionQueue>,
    device: DeviceKey,
    vector: u32,
    capacity: u32,
    booked: u32,
    /// Sorted by queue pair number.
    pairs: Vec<(u32, ConnectionId)>,
    armed: bool,
    /// Whether it was empty when polled after arming. The next completion then causes a wake-up.
    idle: bool,
    /// Whether its place is in [`Queues::awake`].
    listed: bool,
    /// Upper bound on completions left by destroyed queue pairs.
    stale: u32,
    /// Whether a call on it failed: it yields no more completions and takes no more connections.
    lost: bool,
}

/// Room for the completions of a poll.
pub(super) type Batch<B> = <<B as Backend>::CompletionQueue as CompletionQueue<B>>::Batch;

/// A number that no connected queue pair has. The ocrdma device gives it to flushed requests whose
/// queue pair it does not know.
pub(super) const UNNAMED: u32 = 0;

/// Connections that share the first queue of an endpoint.
const FEW: u32 = 4;

pub(super) struct Lost {
    pub(super) error: Error,
    pub(super) owners: Vec<ConnectionId>,
}

impl<B: Descriptors> Queue<B> {
    pub(super) fn completions(&self) -> &B::CompletionQueue {
        &self.completions
    }

    #[inline]
    pub(super) fn owner(&self, pair: u32) -> Option<ConnectionId> {
        // A stream's queue has one connection, which needs no search.
        if let [(number, id)] = *self.pairs {
            return (number == pair).then_some(id);
        }
        let at = self.pairs.binary_search_by_key(&pair, |(number, _)| *number).ok()?;
        self.pairs.get(at).map(|(_, id)| *id)
    }

    pub(super) fn owners(&self) -> Vec<ConnectionId> {
        self.pairs.iter().map(|(_, id)| *id).collect()
    }

    pub(super) fn enter(&mut self, pair: u32, connection: ConnectionId) {
        let at = self.pairs.partition_point(|(number, _)| *number < pair);
        self.pairs.insert(at, (pair, connection));
    }

    /// Returns whether completions of a destroyed queue pair may remain. Take them out before
    /// making another: it may reuse the number.
    pub(super) const fn is_stale(&self) -> bool {
        self.stale > 0
    }

    pub(super) const fn is_lost(&self) -> bool {
        self.lost
    }

    #[inline(always)]
    pub(super) fn poll<'a>(
        &mut self,
        batch: &'a mut Batch<B>,
    ) -> Result<impl ExactSizeIterator<Item = Completion> + Clone + use<'a, B>, Box<Lost>> {
        let polled = match self.completions.poll_batch(batch) {
            Ok(polled) => polled,
            Err(error) => return Err(self.lose("ibv_poll_cq", error)),
        };
        // Fewer than there was room for: the queue is empty.
        let emptied = polled.len() < BATCH;
        if self.stale > 0 {
            self.stale = if emptied { 0 } else { self.stale.saturating_sub(BATCH as u32) };
        }
        self.idle |= emptied && self.armed;
        Ok(polled)
    }

    #[inline]
    pub(super) fn take_wakeups(&mut self) -> Result<(), Box<Lost>> {
        // A wake-up disarms the queue (ibv_req_notify_cq(3)): one for each arming.
        let taken = self.completions.take_events().map_err(|error| self.lose("ibv_get_cq_event", error))?;
        self.armed &= taken == 0;
        self.idle &= self.armed;
        Ok(())
    }

    #[inline]
    pub(super) fn arm(&mut self) -> Result<(), Box<Lost>> {
        self.completions.arm().map_err(|error| self.lose("ibv_req_notify_cq", error))?;
        self.armed = true;
        Ok(())
    }

    /// Returns whether the queue can be left alone until its wake-up.
    pub(super) const fn is_idle(&self) -> bool {
        self.idle || self.lost
    }

    /// Returns whether a completion would cause no wake-up.
    #[inline]
    pub(super) const fn is_deaf(&self) -> bool {
        !self.armed && !self.lost
    }

    #[cold]
    fn lose(&mut self, call: &'static str, error: B::Error) -> Box<Lost> {
        self.lost = true;
        // Stale completions do not come any more: a loop that waits for them would not end.
        self.stale = 0;
        Box::new(Lost { error: Error::backend(call)(error), owners: self.owners() })
    }
}

pub(super) struct Queues<B: Descriptors> {
    queues: Vec<Option<Queue<B>>>,
    /// Places of all queues that are not idle, and some others. A turn polls only these.
    awake: Vec<usize>,
    sharers: u32,
}

impl<B: Descriptors> Queues<B> {
    pub(super) const fn new(sharers: u32) -> Self {
        Self { queues: Vec::new(), awake: Vec::new(), sharers }
    }

    #[cfg(feature = "tokio")]
    pub(super) fn share(&mut self) {
        self.sharers = super::SHARERS;
    }

    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Queue<B>> {
        self.queues.iter().flatten()
    }

    #[inline]
    pub(super) fn take_wakeups(&mut self, at: usize) -> Result<(), Box<Lost>> {
        let Some(Some(queue)) = self.queues.get_mut(at) else { return Ok(()) };
        if !std::mem::replace(&mut queue.listed, true) {
            self.awake.push(at);
        }
        queue.take_wakeups()
    }

    /// Returns the `nth` non-idle place. Removes idle and destroyed queues on the way.
    #[inline]
    pub(super) fn awake(&mut self, nth: usize) -> Option<usize> {
        loop {
            let at = *self.awake.get(nth)?;
            if let Some(queue) = self.get_mut(at) {
                if !queue.is_idle() {
                    return Some(at);
                }
                queue.listed = false;
            }
            self.awake.swap_remove(nth);
        }
    }

    pub(super) fn any_deaf(&self) -> bool {
        let awake = self.awake.iter().filter_map(|at| self.queues.get(*at)?.as_ref());
        awake.into_iter().any(Queue::is_deaf)
    }

    pub(super) const fn places(&self) -> usize {
        self.queues.len()
    }

    pub(super) fn get(&self, at: usize) -> Option<&Queue<B>> {
        self.queues.get(at)?.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Queue<B>> {
        self.queues.get_mut(at)?.as_mut()
    }

    pub(super) fn batches(&self, at: usize) -> u32 {
        self.get(at).map_or(0, |queue| queue.capacity.div_ceil(BATCH as u32))
    }

    /// Reserves room for a connection on the device of `id`, in a new queue if necessary.
    pub(super) fn book(
        &mut self,
        id: &B::Identifier,
        options: &Options,
        watch: &Watch,
    ) -> Result<usize, Error> {
        let device = id.device().map_err(Error::backend("asking for the device"))?;
        let (need, vector) = (options.completions(), options.completion_vector);
        let fits = |queue: &Queue<B>| {
            let room = queue.capacity.saturating_sub(queue.booked);
            !queue.lost && queue.device == device && queue.vector == vector && room >= need
        };
        if let Some(at) = self.queues.iter().position(|queue| queue.as_ref().is_some_and(fits))
            && let Some(queue) = self.get_mut(at)
        {
            queue.booked += need;
            return Ok(at);
        }
        let limits = id.capabilities().map_err(Error::backend("asking for the device's limits"))?;
        // A queue takes memory for all that may share it. Most endpoints have few connections.
        let is_first = self.iter().all(|queue| queue.device != device || queue.vector != vector);
        let sharers = if is_first { self.sharers.min(FEW) } else { self.sharers };
        // Never less than one connection needs: a device may refuse that, but it must not overrun
        // (VR-RES-011).
        let capacity = need.saturating_mul(sharers).min(limits.max_completions).max(need);
        let completions = id
            .create_completion_queue(capacity, vector)
            .map_err(Error::backend("creating a completion queue"))?;
        let at = self.queues.iter().position(Option::is_none).unwrap_or_else(|| {
            self.queues.push(None);
            self.queues.len() - 1
        });
        let queue = Queue {
            completions: watch.queue(at, completions)?,
            device,
            vector,
            capacity,
            booked: need,
            pairs: Vec::new(),
            armed: false,
            idle: false,
            listed: true,
            stale: 0,
            lost: false,
        };
        if let Some(place) = self.queues.get_mut(at) {
            *place = Some(queue);
        }
        // The place of a destroyed queue may still be there.
        if !self.awake.contains(&at) {
            self.awake.push(at);
        }
        Ok(at)
    }

    /// Releases a reservation after the queue pair is destroyed. `pair` is its number, if recorded.
    pub(super) fn leave(&mut self, at: usize, pair: Option<u32>, options: &Options) {
        let Some(place) = self.queues.get_mut(at) else { return };
        let Some(queue) = place else { return };
        queue.pairs.retain(|(number, _)| Some(*number) != pair);
        queue.stale = if queue.lost { 0 } else { queue.capacity };
        queue.booked = queue.booked.saturating_sub(options.completions());
        if queue.booked == 0 {
            *place = None;
        }
    }
}
