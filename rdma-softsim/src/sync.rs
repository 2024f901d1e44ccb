//! Thread synchronisation: a locked state, a thread that sleeps until it changes, and time.
//!
//! Under `--cfg shuttle` locks, sleeps, threads and lock-free data are those of a scheduler that
//! tries one interleaving after another, and time is what was slept; see `tests/interleavings.rs`.

use core::time::Duration;
use std::sync::TryLockError;
#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::atomic::AtomicBool,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::{Builder, JoinHandle},
};

#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::atomic::AtomicBool,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread::{Builder, JoinHandle},
};

/// A locked state, and a way to sleep until it changes.
pub(crate) struct Monitor<T> {
    state: Mutex<T>,
    changed: Condvar,
    calm: Condvar,
}

impl<T> Monitor<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { state: Mutex::new(state), changed: Condvar::new(), calm: Condvar::new() }
    }

    /// Locks the state. The model has no invariant that a panic elsewhere could have broken
    /// half-way without its checks noticing, so a poisoned lock is usable.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state like [`Monitor::lock`], in a forked child.
    ///
    /// # Panics
    /// Panics if another thread of the parent held the lock: the child has no such thread.
    #[cold]
    pub(crate) fn lock_in_child(&self) -> MutexGuard<'_, T> {
        match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => panic!("{}", rdma_process::FORKED),
        }
    }

    /// Ends one sleep.
    pub(crate) fn notify(&self) {
        // One thread sleeps on it: the fabric's own.
        self.changed.notify_one();
    }

    /// Ends all waits for calm.
    pub(crate) fn notify_calm(&self) {
        // Each waits for a condition of its own.
        self.calm.notify_all();
    }

    /// Sleeps until notified of calm, possibly spuriously.
    ///
    /// # Panics
    /// Panics in a forked child, which has no thread that would notify it.
    pub(crate) fn wait_for_calm<'a>(&self, state: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        assert!(!rdma_process::is_child(), "{}", rdma_process::FORKED);
        self.calm.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps like [`Monitor::wait_for_calm`], for the given limit at most.
    #[cfg(not(shuttle))]
    pub(crate) fn wait_for_calm_within<'a>(
        &self,
        state: MutexGuard<'a, T>,
        most: Duration,
    ) -> MutexGuard<'a, T> {
        self.calm.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Sleeps without a limit: no test of interleavings has memory in other processes.
    #[cfg(shuttle)]
    pub(crate) fn wait_for_calm_within<'a>(
        &self,
        state: MutexGuard<'a, T>,
        _most: Duration,
    ) -> MutexGuard<'a, T> {
        self.wait_for_calm(state)
    }

    /// Sleeps until notified or for the given limit, possibly spuriously.
    #[cfg(not(shuttle))]
    pub(crate) fn sleep<'a>(
        &self,
        state: MutexGuard<'a, T>,
        most: Option<Duration>,
        _ticks: &Ticks,
    ) -> MutexGuard<'a, T> {
        match most {
            Some(most) => self.changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Sleeps while time stands still. A sleep with a limit ends when the others had a turn, and
    /// only then has its time passed. A sleep without one ends by a notification or never, which
    /// the scheduler reports as a deadlock.
    #[cfg(shuttle)]
    pub(crate) fn sleep<'a>(
        &'a self,
        state: MutexGuard<'a, T>,
        most: Option<Duration>,
        ticks: &Ticks,
    ) -> MutexGuard<'a, T> {
        let Some(most) = most else {
            return self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        shuttle::thread::yield_now();
        ticks.pass(most);
        self.lock()
    }
}

/// Time since a fabric began.
#[cfg(not(shuttle))]
pub(crate) struct Ticks(std::time::Instant);

#[cfg(not(shuttle))]
impl Ticks {
    pub(crate) fn begin() -> Self {
        Self(std::time::Instant::now())
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Time that was slept since a fabric began.
#[cfg(shuttle)]
pub(crate) struct Ticks(core::sync::atomic::AtomicU64);

#[cfg(shuttle)]
impl Ticks {
    pub(crate) const fn begin() -> Self {
        Self(core::sync::atomic::AtomicU64::new(0))
    }

    pub(crate) fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.0.load(core::sync::atomic::Ordering::Relaxed))
    }

    fn pass(&self, time: Duration) {
        self.0.fetch_add(time.as_nanos() as u64, core::sync::atomic::Ordering::Relaxed);
    }
}
