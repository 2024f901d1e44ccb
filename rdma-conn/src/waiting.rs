//! Who waits for a connection.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

/// At most one task that reads and one that writes. What moves a connection may let either go on, whoever noticed it, so both
/// are always woken together; a task that was woken for nothing tries, and waits again. Waking only the one whose descriptor
/// became readable is how the other is forgotten.
#[derive(Debug, Default)]
pub(crate) struct Waiting(Mutex<[Option<Waker>; 2]>);

/// What a task wants to do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Want {
    Read,
    Write,
}

impl Waiting {
    /// Notes that the task behind `waker` waits.
    pub(crate) fn add(&self, want: Want, waker: &Waker) {
        let [reader, writer] = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = match want {
            Want::Read => reader,
            Want::Write => writer,
        };
        match place {
            Some(noted) if noted.will_wake(waker) => {}
            other => *other = Some(waker.clone()),
        }
    }

    /// Wakes whoever waits.
    pub(crate) fn wake(&self) {
        let tasks = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        // Not under the lock: a waker may run its task at once.
        tasks.into_iter().flatten().for_each(Waker::wake);
    }
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        Self::wake(&self);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        Self::wake(self);
    }
}
