//! Trials that look at the whole process, its descriptors and its use of the processor: one at a time.

mod own;
mod semantics;
mod wrong;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// While one has this, no other is at work.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
