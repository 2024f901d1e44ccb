//! Shared receive queues (`ibv_create_srq(3)`): receives of several queue pairs.

use std::collections::VecDeque;

use rdma_backend::AsyncEvent;

use super::responder::ReceiveWork;
use crate::model::base::arena::OnHost;
use crate::model::base::ids::{ContextId, HostId, RegionId};

/// `IBV_EVENT_SRQ_LIMIT_REACHED` and `IBV_EVENT_QP_LAST_WQE_REACHED` of `ibv_get_async_event(3)`.
pub(in crate::model) const LIMIT_REACHED: AsyncEvent = AsyncEvent::Other(15);
pub(in crate::model) const LAST_REACHED: AsyncEvent = AsyncEvent::Other(16);

pub(crate) struct SharedQueue {
    pub(in crate::model) host: HostId,
    /// Who opened the device, and its name for the queue.
    pub(in crate::model) owner: (ContextId, u64),
    pub(in crate::model) depth: u32,
    pub(in crate::model) receives: VecDeque<ReceiveWork>,
    /// Holding fewer receives than this raises one event; 0 is no limit.
    pub(in crate::model) limit: u32,
}

impl OnHost for SharedQueue {
    const NAME: &'static str = "shared receive queue";

    fn host(&self) -> HostId {
        self.host
    }
}

impl SharedQueue {
    /// Returns whether the device may still access a region for posted receives.
    pub(in crate::model) fn uses(&self, region: RegionId) -> bool {
        self.receives.iter().any(|receive| receive.local.touch(region))
    }
}
