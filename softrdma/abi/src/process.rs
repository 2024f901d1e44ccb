//! State that belongs to this process alone. A forked child starts without it, as it may use no
//! object of its parent (`ibv_fork_init(3)`).

use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64};
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
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

/// A descriptor that children close: as long as one holds it, the fabric does not see that this
/// process has closed it, or has executed another program.
pub(crate) struct Own {
    descriptor: AtomicI32,
    inode: AtomicU64,
}

/// The session's socket.
pub(crate) static SESSION: Own = Own::new();
/// The socket of the thread that copies this process's memory.
pub(crate) static COPIER: Own = Own::new();

impl Own {
    const fn new() -> Self {
        Self { descriptor: AtomicI32::new(-1), inode: AtomicU64::new(0) }
    }

    /// Makes children close this descriptor.
    pub(crate) fn keep_from_children(&self, descriptor: BorrowedFd<'_>) {
        self.inode.store(inode(descriptor.as_raw_fd()), Relaxed);
        self.descriptor.store(descriptor.as_raw_fd(), Release);
    }

    /// Closes it in a child, unless the number is of another descriptor by now. Makes only system
    /// calls.
    fn close(&self) {
        let descriptor = self.descriptor.swap(-1, AcqRel);
        if descriptor != -1 && inode(descriptor) == self.inode.load(Relaxed) {
            // SAFETY: close(2): a descriptor of the child, which nothing uses there.
            unsafe { libc::syscall(libc::SYS_close, descriptor) };
        }
    }
}

/// Returns the number of a socket's inode; 0 if there is no such descriptor.
fn inode(descriptor: RawFd) -> u64 {
    // SAFETY: zero is a valid value of a structure of integers.
    let mut told: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: fstat(2): a place for the answer, which has the kernel's form.
    let known = unsafe { libc::syscall(libc::SYS_fstat, descriptor, &raw mut told) } == 0;
    if known { told.st_ino } else { 0 }
}

extern "C" fn forked() {
    GENERATION.fetch_add(1, Relaxed);
    crate::link::LINK.forget();
    crate::names::OBJECTS.forget();
    crate::device_file::FILES.forget();
    crate::locked::forget();
    crate::offer::NUMBER.forget();
    SESSION.close();
    COPIER.close();
}

/// Makes children start without their parent's state.
pub(crate) fn watch_forks() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: pthread_atfork(3): a function for the child that stores to atomics and makes
        // system calls, and does nothing else.
        let _registered = unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    });
}
