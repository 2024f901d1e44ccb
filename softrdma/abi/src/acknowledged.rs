//! Counts events that the program has read but not yet acknowledged.
//!
//! The destruction of an object waits until its events are acknowledged (`ibv_get_cq_event(3)`,
//! `ibv_get_async_event(3)`, `rdma_get_cm_event(3)`).

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The unacknowledged events of one object.
#[derive(Default)]
pub(crate) struct Unacknowledged {
    count: Mutex<u32>,
    fewer: Condvar,
}

impl Unacknowledged {
    fn lock(&self) -> MutexGuard<'_, u32> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn read(&self) {
        let mut count = self.lock();
        *count = count.saturating_add(1);
    }

    pub(crate) fn acknowledge(&self, events: u32) {
        let mut count = self.lock();
        *count = count.saturating_sub(events);
        self.fewer.notify_all();
    }

    pub(crate) fn wait(&self) {
        let mut count = self.lock();
        while *count > 0 {
            count = self.fewer.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
