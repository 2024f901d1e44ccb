//! Threads that handle no signals.

use core::mem::MaybeUninit;
use core::ptr;
use std::io;
use std::thread::{Builder, JoinHandle};

/// Starts a thread in which all signals are blocked.
///
/// The program's signal handlers therefore run in the program's own threads. In one of these, a
/// handler that calls `exit(3)` would run the exit handlers of a process in which this thread is
/// interrupted for ever, with the locks that it holds.
///
/// # Errors
/// Returns an error if the system cannot start a thread.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // A new thread has the mask of the thread that starts it (pthread_create(3)).
    let _blocked = Blocked::new();
    Builder::new().name(name.into()).spawn(run)
}

/// Blocks the calling thread's signals until it is dropped.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn new() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::zeroed());
        // Miri has no signals.
        if cfg!(not(miri)) {
            // SAFETY: sigfillset(3): a place for the set, which is written.
            unsafe { libc::sigfillset(all.as_mut_ptr()) };
            // SAFETY: pthread_sigmask(3): an initialised set, and a place for the former one.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        }
        // SAFETY: integers, which are zeros or were written by the call.
        Self(unsafe { before.assume_init() })
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        if cfg!(not(miri)) {
            // SAFETY: pthread_sigmask(3): the set of this thread before; no place for the other.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
        }
    }
}
