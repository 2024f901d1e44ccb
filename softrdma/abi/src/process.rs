//! What belongs to this process alone: a child begins without it (`ibv_fork_init(3)`: a child may use nothing of its parent's).

use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32};
use std::sync::Once;

/// A value that is made when it is first needed, anew in every process. It is never freed.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<T>);

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value of this process. Of two threads that make it at a time one's is dropped.
    pub(crate) fn get(&self, make: impl FnOnce() -> T) -> &'static T {
        let mut found = self.0.load(Acquire);
        if found.is_null() {
            let made = Box::into_raw(Box::new(make()));
            found = match self.0.compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
                Ok(_null) => made,
                Err(other) => {
                    // SAFETY: made above, and seen by nobody.
                    drop(unsafe { Box::from_raw(made) });
                    other
                }
            };
        }
        // SAFETY: not null, so made above by some thread from a box that is never freed.
        unsafe { &*found }
    }

    /// The child's of a process that forks is another. The parent's stays where it is, whatever state its locks are in.
    fn forget(&self) {
        self.0.store(ptr::null_mut(), Release);
    }
}

/// How many forks this process is away from the first.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A number that a parent and its child do not have in common.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Relaxed)
}

extern "C" fn forked() {
    GENERATION.fetch_add(1, Relaxed);
    crate::link::LINK.forget();
    crate::names::OBJECTS.forget();
}

/// From now on children begin anew.
pub(crate) fn watch_forks() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: pthread_atfork(3): a function for the child that stores to atomics and does nothing else.
        let _registered = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
}
