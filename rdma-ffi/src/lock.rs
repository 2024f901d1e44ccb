//! A lock that a panic closes for good.
//!
//! `std::sync::Mutex` asks in each call whether the thread panics already, before and after, and
//! whether another did. A call of C does not begin in a panic, and a closed lock is one that cannot
//! be taken: so nothing is asked here, which saves a write or a read some 15 instructions.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::mem::forget;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use rustix::thread::futex::{Flags, wait, wake};

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Taken, and others may sleep until it is free.
const WANTED: u32 = 2;
/// Whoever had it last has panicked.
const CLOSED: u32 = 3;

/// How often it is looked at before sleeping: calls are short.
const LOOKS: u32 = 100;

/// What one call at a time may use.
pub(crate) struct Lock<T> {
    state: AtomicU32,
    inside: UnsafeCell<T>,
}

// SAFETY: `with` gives what is inside to one thread at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Closes the lock when it is dropped, which only a panic does.
struct Closes<'a>(&'a AtomicU32);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.store(CLOSED, Release);
        // Fails for no address that is one.
        _ = wake(self.0, Flags::PRIVATE, i32::MAX.cast_unsigned());
    }
}

impl<T> Lock<T> {
    pub(crate) const fn new(inside: T) -> Self {
        Self { state: AtomicU32::new(FREE), inside: UnsafeCell::new(inside) }
    }

    /// Runs `act` on what is inside, alone. `None`, and nothing is done, if an earlier one has panicked.
    #[inline(always)]
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.state.compare_exchange(FREE, TAKEN, Acquire, Relaxed).is_err() && !self.take() {
            return None;
        }
        let closes = Closes(&self.state);
        // SAFETY: this thread has taken the lock, and nobody else can before it gives it back.
        let done = act(unsafe { &mut *self.inside.get() });
        forget(closes);
        if self.state.swap(FREE, Release) == WANTED {
            self.wake_one();
        }
        Some(done)
    }

    /// Takes it when others have it. Returns false if it is closed.
    #[cold]
    fn take(&self) -> bool {
        for _ in 0..LOOKS {
            match self.state.load(Relaxed) {
                TAKEN => spin_loop(),
                FREE if self.state.compare_exchange(FREE, TAKEN, Acquire, Relaxed).is_ok() => return true,
                _ => break,
            }
        }
        loop {
            let took = match self.state.load(Relaxed) {
                CLOSED => return false,
                // Others may sleep still: whoever gives it back next wakes one of them.
                FREE => self.state.compare_exchange(FREE, WANTED, Acquire, Relaxed),
                TAKEN => self.state.compare_exchange(TAKEN, WANTED, Relaxed, Relaxed),
                other => Ok(other),
            };
            match took {
                Ok(FREE) => return true,
                // futex(2): it sleeps only where the word is still that, and is woken by who changes it.
                Ok(_) => _ = wait(&self.state, Flags::PRIVATE, WANTED, None),
                Err(_) => {}
            }
        }
    }

    #[cold]
    fn wake_one(&self) {
        _ = wake(&self.state, Flags::PRIVATE, 1);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread::{scope, yield_now};

    use super::*;

    #[test]
    fn one_thread_at_a_time_has_it() {
        let lock = Lock::new(0);
        scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        lock.with(|count| {
                            let before = *count;
                            if before % 64 == 0 {
                                yield_now();
                            }
                            *count = before + 1;
                        });
                    }
                });
            }
        });
        assert_eq!(lock.with(|count| *count), Some(40_000));
    }

    /// Those that wait for it learn of the panic as well.
    #[test]
    fn a_panic_closes_it() {
        let lock = Lock::new(());
        scope(|scope| {
            let mut waiting = Vec::new();
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                lock.with(|()| {
                    waiting.extend((0..3).map(|_| scope.spawn(|| lock.with(|()| ()))));
                    while lock.state.load(Relaxed) != WANTED {
                        yield_now();
                    }
                    panic!("as it may");
                })
            }));
            assert!(panicked.is_err());
            for one in waiting {
                assert_eq!(one.join().expect("no panic"), None);
            }
        });
        assert_eq!(lock.with(|()| ()), None);
    }
}
