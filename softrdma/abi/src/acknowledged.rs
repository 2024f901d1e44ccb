//! Counts events that the program has read but not yet acknowledged.
//!
//! The destruction of an object waits until its events are acknowledged (`ibv_get_cq_event(3)`,
//! `ibv_get_async_event(3)`, `rdma_get_cm_event(3)`).

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The unacknowledged events of one object.
#[derive(Default)]
pub(crate) struct Unacknowledged {
    state: Mutex<State>,
    fewer: Condvar,
}

#[derive(Default)]
struct State {
    count: u32,
    /// Whether a thread waits. Notifying is a system call, even if none does.
    awaited: bool,
}

impl Unacknowledged {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn read(&self) {
        let mut state = self.lock();
        state.count = state.count.saturating_add(1);
    }

    pub(crate) fn acknowledge(&self, events: u32) {
        let mut state = self.lock();
        state.count = state.count.saturating_sub(events);
        if state.awaited {
            self.fewer.notify_all();
        }
    }

    pub(crate) fn wait(&self) {
        let mut state = self.lock();
        while state.count > 0 {
            state.awaited = true;
            state = self.fewer.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
