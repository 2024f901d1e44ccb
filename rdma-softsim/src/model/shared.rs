//! Shared receive queues (`ibv_create_srq(3)`): receives of several queue pairs.

use std::collections::VecDeque;

use rdma_backend::AsyncEvent;

use super::context::About;
use super::queue_pair::PostedReceive;
use super::responder::ReceiveWork;
use super::{ContextId, DomainId, HostId, Model, PairId, RegionId, SharedId};
use crate::Error;

/// `IBV_EVENT_SRQ_LIMIT_REACHED` and `IBV_EVENT_QP_LAST_WQE_REACHED` of `ibv_get_async_event(3)`.
const LIMIT_REACHED: AsyncEvent = AsyncEvent::Other(15);
pub(super) const LAST_REACHED: AsyncEvent = AsyncEvent::Other(16);

pub(crate) struct SharedQueue {
    pub(super) host: HostId,
    /// Who opened the device, and its name for the queue.
    owner: (ContextId, u64),
    depth: u32,
    receives: VecDeque<ReceiveWork>,
    /// Holding fewer receives than this raises one event; 0 is no limit.
    limit: u32,
}

impl SharedQueue {
    /// Returns whether the device may still access a region for posted receives.
    pub(super) fn uses(&self, region: RegionId) -> bool {
        self.receives.iter().any(|receive| receive.local.touch(region))
    }
}

impl Model {
    pub(crate) fn create_shared(
        &mut self,
        context: ContextId,
        name: u64,
        domain: DomainId,
        depth: u32,
        limit: u32,
    ) -> Result<SharedId, Error> {
        let host = self.opened(context)?;
        let most = self.alive(host)?.limits.max_queue_depth;
        if self.domains.get(domain).ok_or(Error::Gone("protection domain"))?.host != host {
            return Err(Error::Argument("the domain is of another device"));
        }
        if depth == 0 || depth > most || limit > depth {
            return Err(Error::Argument("a shared queue holds 1 to Limits::max_queue_depth receives"));
        }
        if self.strikes_creation(host) {
            return Err(Error::Exhausted { what: "shared receive queues", limit: "", value: 0 });
        }
        let (owner, receives) = ((context, name), VecDeque::new());
        Ok(self.shared.insert(SharedQueue { host, owner, depth, receives, limit }))
    }

    pub(crate) fn destroy_shared(&mut self, id: SharedId) {
        self.shared.remove(id);
    }

    fn shared_queue(&mut self, id: SharedId) -> Result<&mut SharedQueue, Error> {
        self.shared.get_mut(id).ok_or(Error::Gone("shared receive queue"))
    }

    /// `ibv_modify_srq(3)`: sets when an event comes.
    pub(crate) fn set_shared_limit(&mut self, id: SharedId, limit: u32) -> Result<(), Error> {
        let queue = self.shared_queue(id)?;
        if limit > queue.depth {
            return Err(Error::Argument("the limit is beyond the queue's depth"));
        }
        queue.limit = limit;
        Ok(())
    }

    /// `ibv_query_srq(3)`: the limit, 0 once its event has come.
    pub(crate) fn shared_limit(&mut self, id: SharedId) -> Result<u32, Error> {
        Ok(self.shared_queue(id)?.limit)
    }

    /// `ibv_post_srq_recv(3)`.
    pub(crate) fn post_shared(&mut self, id: SharedId, request: &PostedReceive) -> Result<(), Error> {
        let queue = self.shared_queue(id)?;
        if queue.receives.len() >= queue.depth as usize {
            return Err(Error::QueueFull { queue: "shared receive", depth: queue.depth });
        }
        queue.receives.push_back(ReceiveWork { id: request.id, local: request.local.clone() });
        Ok(())
    }

    /// Returns the receive that the next notification to this queue pair will consume.
    pub(super) fn next_receive(&self, id: PairId) -> Option<&ReceiveWork> {
        let pair = self.pairs.get(id)?;
        if let Some(reserved) = &pair.responder.reserved {
            return Some(reserved);
        }
        match pair.shared {
            Some(shared) => self.shared.get(shared)?.receives.front(),
            None => pair.responder.receives.front(),
        }
    }

    /// Consumes that receive. Raises an event if a shared queue then has fewer than its limit.
    pub(super) fn consume_receive(&mut self, id: PairId) -> Option<ReceiveWork> {
        let pair = self.pairs.get_mut(id)?;
        let Some(shared) = pair.shared else { return pair.responder.receives.pop_front() };
        let reserved = pair.responder.reserved.take();
        let queue = self.shared.get_mut(shared)?;
        let receive = reserved.or_else(|| queue.receives.pop_front());
        if queue.receives.len() < queue.limit as usize {
            queue.limit = 0;
            let (context, name) = queue.owner;
            self.tell(context, LIMIT_REACHED, About::Shared(name));
        }
        receive
    }

    /// Reserves the next receive while a message's bytes are moved to it, so that no other queue
    /// pair of a shared queue takes it.
    pub(super) fn reserve_receive(&mut self, id: PairId) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if let Some(queue) = pair.shared.and_then(|shared| self.shared.get_mut(shared))
            && pair.responder.reserved.is_none()
        {
            pair.responder.reserved = queue.receives.pop_front();
        }
    }

    /// Returns a reserved receive that was not consumed.
    pub(super) fn return_receive(&mut self, id: PairId) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if let Some(receive) = pair.responder.reserved.take()
            && let Some(queue) = pair.shared.and_then(|shared| self.shared.get_mut(shared))
        {
            queue.receives.push_front(receive);
        }
    }
}
