//! Completion queues that connections share.
//!
//! A queue is made for so many connections that it can never overrun: each reserves room for every completion it can have
//! waiting. Connections of one device fill one queue after the other, so that what goes wrong with a queue concerns
//! those in it and nobody else.

use rdma_backend::{Completion, CompletionQueue, DeviceKey, Identifier};

use super::ConnectionId;
use super::watch::{Descriptors, Watch, Watched};
use crate::connection::BATCH;
use crate::error::Error;
use crate::options::Options;

/// A completion queue, and the connections whose queue pairs report to it.
pub(super) struct Queue<B: Descriptors> {
    completions: Watched<B::CompletionQueue>,
    device: DeviceKey,
    vector: u32,
    capacity: u32,
    booked: u32,
    /// The connection of each queue pair, by the queue pair's number.
    pairs: Vec<(u32, ConnectionId)>,
    armed: bool,
    /// Whether nothing was in it when it was looked at after arming: what comes from then on brings a wake-up.
    idle: bool,
    /// How many completions of queue pairs that are gone may still be in it.
    stale: u32,
    /// Whether a call on it has failed: nothing more comes out of it, and nobody else gets a place in it.
    lost: bool,
}

/// The number of no connected queue pair: what a device (ocrdma) says of requests whose flush it
/// does not attribute.
pub(super) const UNNAMED: u32 = 0;

/// A call on a queue that failed, and the connections whose queue it was.
pub(super) struct Lost {
    pub(super) error: Error,
    pub(super) owners: Vec<ConnectionId>,
}

impl<B: Descriptors> Queue<B> {
    /// Returns the completion queue, for a queue pair to report to.
    pub(super) fn completions(&self) -> &B::CompletionQueue {
        &self.completions
    }

    /// Returns the connection of a queue pair; `None` once it is gone.
    #[inline]
    pub(super) fn owner(&self, pair: u32) -> Option<ConnectionId> {
        if let [(number, id)] = *self.pairs {
            return (number == pair).then_some(id);
        }
        let at = self.pairs.binary_search_by_key(&pair, |(number, _)| *number).ok()?;
        self.pairs.get(at).map(|(_, id)| *id)
    }

    /// Returns the connections whose queue it is.
    pub(super) fn owners(&self) -> Vec<ConnectionId> {
        self.pairs.iter().map(|(_, id)| *id).collect()
    }

    /// Notes whose completions those of the queue pair with this number are.
    pub(super) fn enter(&mut self, pair: u32, connection: ConnectionId) {
        let at = self.pairs.partition_point(|(number, _)| *number < pair);
        self.pairs.insert(at, (pair, connection));
    }

    /// Returns whether completions of a queue pair that is gone may be in the queue. Take them out before another is made: it may
    /// get the number of the first.
    pub(super) const fn is_stale(&self) -> bool {
        self.stale > 0
    }

    /// Returns whether a call on it has failed: nothing comes out of it any more.
    pub(super) const fn is_lost(&self) -> bool {
        self.lost
    }

    /// Takes completions; how many.
    #[inline]
    pub(super) fn poll(&mut self, into: &mut [Completion; BATCH]) -> Result<usize, Box<Lost>> {
        if self.lost {
            return Ok(0);
        }
        let count = match self.completions.poll(into) {
            Ok(count) => count,
            Err(error) => return Err(self.lose("ibv_poll_cq", error)),
        };
        // Fewer than there was room for: it is empty.
        let emptied = count < BATCH;
        if self.stale > 0 {
            self.stale = if emptied { 0 } else { self.stale.saturating_sub(BATCH as u32) };
        }
        self.idle |= emptied && self.armed;
        Ok(count)
    }

    /// Takes the queue's wake-ups off its channel.
    #[inline]
    pub(super) fn take_wakeups(&mut self) -> Result<(), Box<Lost>> {
        let taken = self.completions.take_events().map_err(|error| self.lose("ibv_get_cq_event", error))?;
        self.armed &= taken == 0;
        self.idle &= self.armed;
        Ok(())
    }

    /// Arms the queue if it has had its wake-up. True if so: look again then.
    #[inline]
    pub(super) fn rearm(&mut self) -> Result<bool, Box<Lost>> {
        if self.armed || self.lost {
            return Ok(false);
        }
        self.completions.arm().map_err(|error| self.lose("ibv_req_notify_cq", error))?;
        self.armed = true;
        Ok(true)
    }

    /// Returns whether there is no need to look at it before it wakes somebody.
    pub(super) const fn is_idle(&self) -> bool {
        self.idle || self.lost
    }

    /// Returns whether a completion would wake nobody.
    pub(super) const fn is_deaf(&self) -> bool {
        !self.armed && !self.lost
    }

    #[cold]
    fn lose(&mut self, call: &'static str, error: B::Error) -> Box<Lost> {
        self.lost = true;
        self.stale = 0;
        Box::new(Lost { error: Error::backend(call)(error), owners: self.owners() })
    }
}

/// The queues of an endpoint, named by their place.
pub(super) struct Queues<B: Descriptors> {
    queues: Vec<Option<Queue<B>>>,
    /// The places of all that are not idle, and perhaps of some that are or are gone: a turn looks at these, so that it costs no more
    /// when there are many idle ones.
    awake: Vec<usize>,
    /// Connections per queue, where the device's queues are long enough.
    sharers: u32,
}

impl<B: Descriptors> Queues<B> {
    pub(super) const fn new(sharers: u32) -> Self {
        Self { queues: Vec::new(), awake: Vec::new(), sharers }
    }

    /// From now on a new queue is made for many connections.
    #[cfg(feature = "tokio")]
    pub(super) fn share(&mut self) {
        self.sharers = super::SHARERS;
    }

    /// Returns the number of queues.
    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Queue<B>> {
        self.queues.iter().flatten()
    }

    /// Takes wake-ups of the queue at `at` off its channel.
    #[inline]
    pub(super) fn take_wakeups(&mut self, at: usize) -> Result<(), Box<Lost>> {
        self.note_awake(at);
        self.get_mut(at).map_or(Ok(()), |queue| queue.take_wakeups())
    }

    #[inline]
    fn note_awake(&mut self, at: usize) {
        // Nearly always it is the only one.
        if self.awake.iter().all(|other| *other != at) {
            self.awake.push(at);
        }
    }

    /// Returns the place of one of those that are awake, of which `nth` counts. Those that have become idle or are gone are forgotten on
    /// the way.
    #[inline]
    pub(super) fn awake(&mut self, nth: usize) -> Option<usize> {
        loop {
            let at = *self.awake.get(nth)?;
            if self.queues.get(at)?.as_ref().is_some_and(|queue| !queue.is_idle()) {
                return Some(at);
            }
            self.awake.swap_remove(nth);
        }
    }

    /// Returns whether a completion in one of them would wake nobody.
    pub(super) fn any_deaf(&self) -> bool {
        let awake = self.awake.iter().filter_map(|at| self.queues.get(*at)?.as_ref());
        awake.into_iter().any(Queue::is_deaf)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Queue<B>> {
        self.queues.get_mut(at)?.as_mut()
    }

    /// Returns how many batches the queue at `at` can hold.
    pub(super) fn batches(&self, at: usize) -> u32 {
        let queue = self.queues.get(at).and_then(Option::as_ref);
        queue.map_or(0, |queue| queue.capacity.div_ceil(BATCH as u32))
    }

    /// Books room for a connection on `id`'s device with `options`, in a new queue if need be.
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
        let capacity = need.saturating_mul(self.sharers).min(limits.max_completions).max(need);
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
            stale: 0,
            lost: false,
        };
        if let Some(place) = self.queues.get_mut(at) {
            *place = Some(queue);
        }
        self.note_awake(at);
        Ok(at)
    }

    /// Gives back what was booked, after the queue pair is gone; its number, if it had entered. A queue that nobody uses goes
    /// with it.
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
