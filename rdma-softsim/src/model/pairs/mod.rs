//! Queue pairs, their numbers, and the receive queues that some of them share.

pub(super) mod datagram;
pub(super) mod delivery;
pub(super) mod lending;
pub(super) mod numbers;
pub(super) mod ownership;
pub(super) mod path;
pub(super) mod queue_pair;
pub(super) mod queueing;
pub(super) mod repetitions;
pub(super) mod requester;
pub(super) mod responder;
pub(super) mod routes;
pub(super) mod shared_queue;

use core::cmp::Ordering;
use std::collections::VecDeque;
use std::net::IpAddr;

use super::base::arena::Objects;
use super::base::environment::Environment;
use super::base::ids::{ContextId, HostId, PairId, RegionId, SharedId, kind};
use super::hosts::Hosts;
use super::hosts::context::{About, Contexts};
use crate::error::Error;
use numbers::Numbers;
use path::Path;
use queue_pair::{PostedReceive, QueuePair};
use requester::SendWork;
use responder::ReceiveWork;
use shared_queue::{LIMIT_REACHED, SharedQueue};

pub(super) struct Pairs {
    all: Objects<kind::Pair, QueuePair>,
    numbers: Numbers,
    shared: Objects<kind::Shared, SharedQueue>,
}

impl Pairs {
    pub(super) fn new() -> Self {
        Self { all: Objects::new(), numbers: Numbers::default(), shared: Objects::new() }
    }

    pub(super) fn get(&self, id: PairId) -> Option<&QueuePair> {
        self.all.get(id)
    }

    pub(super) fn get_mut(&mut self, id: PairId) -> Option<&mut QueuePair> {
        self.all.get_mut(id)
    }

    pub(super) fn find(&self, id: PairId) -> Result<&QueuePair, Error> {
        self.all.find(id)
    }

    pub(super) fn find_mut(&mut self, id: PairId) -> Result<&mut QueuePair, Error> {
        self.all.find_mut(id)
    }

    pub(super) const fn all(&self) -> &Objects<kind::Pair, QueuePair> {
        &self.all
    }

    pub(super) const fn shared(&self) -> &Objects<kind::Shared, SharedQueue> {
        &self.shared
    }

    /// Inserts a queue pair, with a number that was freed at least `rest` frees ago.
    pub(super) fn insert(&mut self, rest: usize, new: impl FnOnce(u32) -> QueuePair) -> (PairId, u32) {
        let number = self.numbers.give(rest);
        let pair = self.all.insert(new(number));
        self.numbers.assign(number, pair);
        (pair, number)
    }

    pub(super) fn remove(&mut self, id: PairId) -> Option<QueuePair> {
        // A receive of a shared queue is still there for the other queue pairs.
        self.return_receive(id);
        let pair = self.all.remove(id)?;
        // For the next queue pair, as on devices: an unpolled completion then names another.
        self.numbers.take_back(pair.number);
        Some(pair)
    }

    /// Returns the number of a queue pair; 0 if it is gone.
    pub(super) fn number(&self, id: PairId) -> u32 {
        self.all.get(id).map_or(0, |pair| pair.number)
    }

    /// Returns the queue pair that has this number, or had it last.
    pub(super) fn with_number(&self, number: u32) -> Option<PairId> {
        self.numbers.pair(number)
    }

    /// Returns the number behind the highest one.
    pub(super) fn end_of_numbers(&self) -> u32 {
        self.numbers.end()
    }

    /// Returns the queue pair with this number at an address.
    pub(super) fn numbered(&self, hosts: &Hosts, number: u32, at: IpAddr) -> Option<PairId> {
        let id = self.numbers.pair(number)?;
        let host = hosts.get(self.all.get(id)?.host)?;
        // Numbers are unique in the fabric. On a network, a device knows only its own.
        host.has(at).then_some(id)
    }

    /// Returns a message in flight, if its transmission is still valid.
    pub(super) fn flight(&self, from: PairId, epoch: u32, sequence: u64) -> Option<&SendWork> {
        self.all.get(from)?.requester.flight(epoch, sequence)
    }

    /// Returns whether a device may still access a region for posted requests. Looks at all queue
    /// pairs.
    pub(super) fn use_region(&self, region: RegionId) -> bool {
        self.all.iter().any(|(_, pair)| pair.uses(region))
            || self.shared.iter().any(|(_, queue)| queue.uses(region))
    }

    /// Returns whether the peer's device has had this message, expects it or misses one before it,
    /// if its queue pair is reachable and listens to this one.
    pub(super) fn listening(
        &self,
        hosts: &Hosts,
        from: PairId,
        epoch: u32,
        sequence: u64,
    ) -> Option<Ordering> {
        let pair = self.all.get(from)?;
        let work = pair.requester.flight(epoch, sequence)?;
        let path = pair.path_of(work).filter(|path| !self.is_cut(hosts, from, *path))?;
        // In RESET, INIT and ERR a device is silent: case `verbs.fail.silent-peer`.
        let peer = self.all.get(path.peer).filter(|peer| peer.state.responds())?;
        match work.to {
            // Each stands alone: its key decides.
            Some(to) => (peer.key == Some(to.key)).then_some(Ordering::Equal),
            // A connected queue pair accepts messages only from its peer.
            None if peer.path.is_some_and(|theirs| theirs.peer == from) => {
                Some(sequence.cmp(&peer.responder.expected))
            }
            None => None,
        }
    }

    /// Returns whether messages between a queue pair and its peer are blocked.
    #[inline]
    pub(super) fn is_cut(&self, hosts: &Hosts, id: PairId, path: Path) -> bool {
        let cut = |id: PairId| self.all.get(id).is_some_and(|pair| pair.cut);
        hosts.cut(path.local, path.remote) || cut(id) || cut(path.peer)
    }

    pub(super) fn is_ready_for_receives(&self, id: PairId) -> bool {
        self.all.get(id).is_some_and(|pair| pair.responder.unready == 0)
    }

    pub(super) fn has_receive(&self, id: PairId) -> bool {
        self.next_receive(id).is_some()
    }

    pub(super) fn create_shared(
        &mut self,
        host: HostId,
        owner: (ContextId, u64),
        depth: u32,
        limit: u32,
    ) -> SharedId {
        self.shared.insert(SharedQueue { host, owner, depth, receives: VecDeque::new(), limit })
    }

    pub(super) fn destroy_shared(&mut self, id: SharedId) {
        self.shared.remove(id);
    }

    /// `ibv_modify_srq(3)`: sets when an event comes.
    pub(super) fn set_shared_limit(&mut self, id: SharedId, limit: u32) -> Result<(), Error> {
        let queue = self.shared.find_mut(id)?;
        if limit > queue.depth {
            return Err(Error::Argument("the limit is beyond the queue's depth"));
        }
        queue.limit = limit;
        Ok(())
    }

    /// `ibv_query_srq(3)`: the limit, 0 once its event has come.
    pub(super) fn shared_limit(&self, id: SharedId) -> Result<u32, Error> {
        Ok(self.shared.find(id)?.limit)
    }

    /// `ibv_post_srq_recv(3)`.
    pub(super) fn post_shared(&mut self, id: SharedId, request: &PostedReceive) -> Result<(), Error> {
        let queue = self.shared.find_mut(id)?;
        if queue.receives.len() >= queue.depth as usize {
            return Err(Error::QueueFull { queue: "shared receive", depth: queue.depth });
        }
        queue.receives.push_back(ReceiveWork { id: request.id, local: request.local.clone() });
        Ok(())
    }

    /// Returns the receive that the next notification to this queue pair will consume.
    pub(super) fn next_receive(&self, id: PairId) -> Option<&ReceiveWork> {
        let pair = self.all.get(id)?;
        if let Some(reserved) = &pair.responder.reserved {
            return Some(reserved);
        }
        match pair.shared {
            Some(shared) => self.shared.get(shared)?.receives.front(),
            None => pair.responder.receives.front(),
        }
    }

    /// Consumes that receive. Raises an event if a shared queue then has fewer than its limit.
    pub(super) fn consume_receive(
        &mut self,
        env: &mut Environment,
        contexts: &mut Contexts,
        id: PairId,
    ) -> Option<ReceiveWork> {
        let pair = self.all.get_mut(id)?;
        let Some(shared) = pair.shared else { return pair.responder.receives.pop_front() };
        let reserved = pair.responder.reserved.take();
        let queue = self.shared.get_mut(shared)?;
        let receive = reserved.or_else(|| queue.receives.pop_front());
        if queue.receives.len() < queue.limit as usize {
            // One event for each `ibv_modify_srq(3)`, after which `ibv_query_srq(3)` returns 0.
            queue.limit = 0;
            let (context, name) = queue.owner;
            contexts.tell(env, context, LIMIT_REACHED, About::Shared(name));
        }
        receive
    }

    /// Reserves the next receive while a message's bytes are moved to it, so that no other queue
    /// pair of a shared queue takes it.
    pub(super) fn reserve_receive(&mut self, id: PairId) {
        let Some(pair) = self.all.get_mut(id) else { return };
        // Only of a shared queue: no other message takes from a queue pair's own meanwhile.
        if let Some(queue) = pair.shared.and_then(|shared| self.shared.get_mut(shared))
            && pair.responder.reserved.is_none()
        {
            pair.responder.reserved = queue.receives.pop_front();
        }
    }

    /// Returns a reserved receive that was not consumed.
    pub(super) fn return_receive(&mut self, id: PairId) {
        let Some(pair) = self.all.get_mut(id) else { return };
        if let Some(receive) = pair.responder.reserved.take()
            && let Some(queue) = pair.shared.and_then(|shared| self.shared.get_mut(shared))
        {
            // To its old place: receives are consumed in the order posted.
            queue.receives.push_front(receive);
        }
    }
}
