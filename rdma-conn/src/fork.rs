//! Locks in a forked child. The README has the table of what a child may do.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::error::Error;

/// Locks, also a poisoned lock. A call that can fail asks [`Error::unless_forked`] first.
///
/// # Panics
/// Panics in a forked child if another thread of its parent held the lock: the child has no such
/// thread, so a wait would never end.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    if rdma_process::is_child() {
        return match mutex.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => never_unlocked(),
        };
    }
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cold]
pub(crate) fn never_unlocked() -> ! {
    panic!("{}", Error::Forked)
}
