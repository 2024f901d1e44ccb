//! Events that were read and wait for their acknowledgement, which destruction of their object waits for (`ibv_get_cq_event(3)`,
//! `ibv_get_async_event(3)`, `rdma_get_cm_event(3)`).

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The events of one object.
#[derive(Default)]
pub(crate) struct Unacknowledged {
    count: Mutex<u32>,
    fewer: Condvar,
}

impl Unacknowledged {
    fn lock(&self) -> MutexGuard<'_, u32> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event was read.
    pub(crate) fn read(&self) {
        let mut count = self.lock();
        *count = count.saturating_add(1);
    }

    /// So many were acknowledged.
    pub(crate) fn acknowledge(&self, events: u32) {
        let mut count = self.lock();
        *count = count.saturating_sub(events);
        self.fewer.notify_all();
    }

    /// Waits until all were.
    pub(crate) fn wait(&self) {
        let mut count = self.lock();
        while *count > 0 {
            count = self.fewer.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
