//! A connection that a stream and the keeper share.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::keeper::Kept;
use crate::link::Link;
#[cfg(feature = "tokio")]
use crate::waiting::Waiting;
use rdma_proto::State;
use rdma_proto::backend::Backend;

/// A call on a stream holds the lock while it runs, and a blocking one while it waits, so the keeper only finds idle
/// connections.
pub(crate) struct Shared<B: Backend> {
    link: Mutex<Link<B>>,
    /// Tasks to wake when the keeper has moved something.
    #[cfg(feature = "tokio")]
    pub(crate) waiting: std::sync::Arc<Waiting>,
}

impl<B: Backend> Shared<B> {
    pub(crate) fn new(link: Link<B>) -> Self {
        Self {
            link: Mutex::new(link),
            #[cfg(feature = "tokio")]
            waiting: Default::default(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Link<B>> {
        // A panic between two calls on a link leaves it whole: the machine changes its state in single steps.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> Kept for Shared<B> {
    fn tend(&self) -> bool {
        let mut link = match self.link.try_lock() {
            Ok(link) => link,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        let moved = link.take_events() | link.progress();
        let lives = matches!(link.state(), State::Connecting | State::Open | State::Closing);
        drop(link);
        #[cfg(feature = "tokio")]
        if moved {
            self.waiting.wake();
        }
        #[cfg(not(feature = "tokio"))]
        let _nobody_else_waits = moved;
        lives
    }
}
