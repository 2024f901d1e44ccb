//! State that belongs to this process alone. A forked child starts without it, as it may use no
//! object of its parent (`ibv_fork_init(3)`).

use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicPtr, AtomicU32};
use std::sync::Once;

/// A value that each process makes when it first needs it. It is never freed.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<T>);

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the value of this process. If two threads make it at once, one of the two values is
    /// dropped.
    pub(crate) fn get(&self, make: impl FnOnce() -> T) -> &'static T {
        let mut found = self.0.load(Acquire);
        if found.is_null() {
            let made = Box::into_raw(Box::new(make()));
            found = match self.0.compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
                Ok(_null) => made,
                Err(other) => {
                    // SAFETY: made above, and not shared.
                    drop(unsafe { Box::from_raw(made) });
                    other
                }
            };
        }
        // SAFETY: not null, so some thread made it above from a box that is never freed.
        unsafe { &*found }
    }

    /// Forgets the value in a forked child. The parent's value stays in memory, as its locks may be
    /// in any state.
    pub(crate) fn forget(&self) {
        self.0.store(ptr::null_mut(), Release);
    }
}

/// How many forks separate this process from the first.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Returns a number that differs between a parent and its child.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Relaxed)
}

extern "C" fn forked() {
    GENERATION.fetch_add(1, Relaxed);
    crate::link::LINK.forget();
    crate::names::OBJECTS.forget();
    crate::device_file::FILES.forget();
}

/// Makes children start without their parent's state.
pub(crate) fn watch_forks() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: pthread_atfork(3): a function for the child that stores to atomics and does
        // nothing else.
        let _registered = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
}
