//! Completion queues that connections share.
//!
//! A queue is made for so many connections that it can never overrun: each books room for every completion it can have
//! waiting. Connections of one device fill one queue after the other, so that what goes wrong with a queue concerns
//! those in it and nobody else.

use std::collections::{BTreeMap, HashMap};

use rdma_proto::backend::{Backend, Completion, CompletionQueue, DeviceKey, Identifier};

use super::ConnectionId;
use super::watch::Watch;
use crate::connection::BATCH;
use crate::error::Error;
use crate::options::Options;
use crate::wait::Descriptors;

/// Connections per queue, where the device's queues are long enough.
const SHARERS: u32 = 64;

/// Names a queue of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueueId(pub(super) u64);

struct Shared<B: Backend> {
    completions: B::CompletionQueue,
    device: DeviceKey,
    vector: u32,
    capacity: u32,
    booked: u32,
    /// Which connection a queue pair belongs to.
    pairs: HashMap<u32, ConnectionId>,
    armed: bool,
    /// How many completions of queue pairs that are gone may still be in it.
    stale: u32,
    /// Whether a call on it has failed: nothing more comes out of it, and nobody else gets a place in it.
    lost: bool,
}

/// A call on a queue that failed, and the connections whose queue it was.
pub(super) struct Lost {
    pub(super) call: &'static str,
    pub(super) owners: Vec<ConnectionId>,
}

impl<B: Backend> Shared<B> {
    fn lose(&mut self, call: &'static str, error: &B::Error) -> Lost {
        tracing::debug!(%error, call, "a completion queue");
        self.lost = true;
        self.stale = 0;
        Lost { call, owners: self.pairs.values().copied().collect() }
    }
}

/// The queues of an endpoint.
pub(super) struct Queues<B: Backend> {
    queues: BTreeMap<QueueId, Shared<B>>,
    next: u64,
}

/// Completions of one queue pair, and whose they are.
pub(super) struct Batch {
    completions: [Completion; BATCH],
    len: usize,
}

impl<B: Descriptors> Queues<B> {
    pub(super) const fn new() -> Self {
        Self { queues: BTreeMap::new(), next: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.queues.len()
    }

    pub(super) fn ids(&self) -> Vec<QueueId> {
        self.queues.keys().copied().collect()
    }

    /// The queue itself, for a queue pair to report to.
    pub(super) fn completions(&self, queue: QueueId) -> Option<&B::CompletionQueue> {
        self.queues.get(&queue).map(|shared| &shared.completions)
    }

    /// Books room for a connection on `id`'s device with `options`, in a new queue if need be.
    pub(super) fn book(
        &mut self,
        id: &B::Identifier,
        options: &Options,
        watch: &Watch,
    ) -> Result<QueueId, Error> {
        let device = id.device().map_err(Error::backend("asking for the device"))?;
        let (need, vector) = (options.completions(), options.completion_vector);
        let fits = |shared: &&mut Shared<B>| {
            !shared.lost
                && shared.device == device
                && shared.vector == vector
                && shared.capacity - shared.booked >= need
        };
        if let Some((id, shared)) =
            self.queues.iter_mut().find_map(|(id, shared)| fits(&shared).then_some((id, shared)))
        {
            shared.booked += need;
            return Ok(*id);
        }
        let limits = id.capabilities().map_err(Error::backend("asking for the device's limits"))?;
        let capacity = need.saturating_mul(SHARERS).min(limits.max_completions).max(need);
        let completions = id
            .create_completion_queue(capacity, vector)
            .map_err(Error::backend("creating a completion queue"))?;
        let queue = QueueId(self.next);
        watch.add(queue, &completions)?;
        self.next += 1;
        let shared = Shared {
            completions,
            device,
            vector,
            capacity,
            booked: need,
            pairs: HashMap::new(),
            armed: false,
            stale: 0,
            lost: false,
        };
        self.queues.insert(queue, shared);
        Ok(queue)
    }

    /// Notes whose completions those of the queue pair with this number are.
    pub(super) fn enter(&mut self, queue: QueueId, pair: u32, connection: ConnectionId) {
        if let Some(shared) = self.queues.get_mut(&queue) {
            shared.pairs.insert(pair, connection);
        }
    }

    /// Gives back what was booked, after the queue pair is gone; its number, if it had entered. A queue that nobody uses goes
    /// with it.
    pub(super) fn leave(&mut self, queue: QueueId, pair: Option<u32>, options: &Options) {
        let Some(shared) = self.queues.get_mut(&queue) else { return };
        if let Some(pair) = pair {
            shared.pairs.remove(&pair);
        }
        shared.stale = if shared.lost { 0 } else { shared.capacity };
        shared.booked = shared.booked.saturating_sub(options.completions());
        if shared.booked == 0 {
            self.queues.remove(&queue);
        }
    }

    /// Whether completions of a queue pair that is gone may be in `queue`. Take them out before another is made: it may
    /// get the same number.
    pub(super) fn is_stale(&self, queue: QueueId) -> bool {
        self.queues.get(&queue).is_some_and(|shared| shared.stale > 0)
    }

    /// Takes completions; none if there are none.
    pub(super) fn poll(&mut self, queue: QueueId) -> Result<Batch, Lost> {
        let mut batch = Batch { completions: [Completion::EMPTY; BATCH], len: 0 };
        if let Some(shared) = self.queues.get_mut(&queue).filter(|shared| !shared.lost) {
            let polled = shared.completions.poll(&mut batch.completions);
            batch.len = polled.map_err(|error| shared.lose("ibv_poll_cq", &error))?;
            let taken = if batch.len == 0 { shared.stale } else { batch.len as u32 };
            shared.stale = shared.stale.saturating_sub(taken);
        }
        Ok(batch)
    }

    /// Whose completions those of this queue pair are; nobody's once it is gone.
    pub(super) fn owner(&self, queue: QueueId, pair: u32) -> Option<ConnectionId> {
        self.queues.get(&queue)?.pairs.get(&pair).copied()
    }

    /// Takes the wake-ups of a queue off its channel.
    pub(super) fn take_wakeups(&mut self, queue: QueueId) -> Result<(), Lost> {
        let Some(shared) = self.queues.get_mut(&queue) else { return Ok(()) };
        let taken = shared.completions.take_events();
        let taken = taken.map_err(|error| shared.lose("ibv_get_cq_event", &error))?;
        shared.armed &= taken == 0;
        Ok(())
    }

    /// Arms a queue that has had its wake-up. True if it did: poll again then.
    pub(super) fn arm(&mut self, queue: QueueId) -> Result<bool, Lost> {
        let armable = self.queues.get_mut(&queue).filter(|shared| !shared.armed && !shared.lost);
        let Some(shared) = armable else { return Ok(false) };
        shared.completions.arm().map_err(|error| shared.lose("ibv_req_notify_cq", &error))?;
        shared.armed = true;
        Ok(true)
    }
}

impl Batch {
    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Runs of completions that belong to one queue pair, with its number.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u32, &[Completion])> {
        let taken = self.completions.get(..self.len).unwrap_or_default();
        let runs = taken.chunk_by(|one, next| one.queue_pair == next.queue_pair);
        runs.filter_map(|run| Some((run.first()?.queue_pair, run)))
    }
}
