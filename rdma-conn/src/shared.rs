//! A connection that a stream and the keeper share.

use std::ops::{Deref, DerefMut};
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
    /// None once its stream is gone, though the keeper may hold on to the rest for a moment longer.
    link: Mutex<Option<Link<B>>>,
    /// Tasks to wake when the keeper has moved something.
    #[cfg(feature = "tokio")]
    pub(crate) waiting: std::sync::Arc<Waiting>,
}

impl<B: Backend> Shared<B> {
    pub(crate) fn new(link: Link<B>) -> Self {
        Self {
            link: Mutex::new(Some(link)),
            #[cfg(feature = "tokio")]
            waiting: Default::default(),
        }
    }

    pub(crate) fn lock(&self) -> Locked<'_, B> {
        // A panic between two calls on a link leaves it whole: the machine changes its state in single steps.
        Locked(self.link.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Gives the connection's resources back, now. Only for the drop of its stream, since nobody can lock it afterwards.
    pub(crate) fn release(&self) {
        let link = self.link.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(link);
    }
}

/// A connection that the caller has for itself.
pub(crate) struct Locked<'a, B: Backend>(MutexGuard<'a, Option<Link<B>>>);

impl<B: Backend> Deref for Locked<'_, B> {
    type Target = Link<B>;

    fn deref(&self) -> &Link<B> {
        let Some(link) = &*self.0 else { unreachable!("a stream locks its connection only while it lives") };
        link
    }
}

impl<B: Backend> DerefMut for Locked<'_, B> {
    fn deref_mut(&mut self) -> &mut Link<B> {
        let Some(link) = &mut *self.0 else {
            unreachable!("a stream locks its connection only while it lives")
        };
        link
    }
}

impl<B: Backend> Kept for Shared<B> {
    fn tend(&self) -> bool {
        let mut slot = match self.link.try_lock() {
            Ok(slot) => slot,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return true,
        };
        let Some(link) = &mut *slot else { return false };
        let moved = link.take_events() | link.progress();
        let lives = matches!(link.state(), State::Connecting | State::Open | State::Closing);
        drop(slot);
        #[cfg(feature = "tokio")]
        if moved {
            self.waiting.wake();
        }
        #[cfg(not(feature = "tokio"))]
        let _nobody_else_waits = moved;
        lives
    }
}
