//! What a forked child must leave alone.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Once;

/// The text of the error of every call in a forked child.
pub const FORKED: &str = "this process is a forked child: RDMA belongs to its parent, which used it before the fork. Nothing was \
                          done. A child can use RDMA after execve(2)";

/// Whether this process has something that its children must not use.
static HAS: AtomicBool = AtomicBool::new(false);

/// Whether this process was forked by one that had.
static CHILD: AtomicBool = AtomicBool::new(false);

static FORKS: AtomicU32 = AtomicU32::new(0);

/// As many descriptors as Linux lets a process have (`fs.nr_open`), unless an administrator raises
/// it. Pages without a set bit take no memory.
const DESCRIPTORS: usize = 1 << 20;

/// A bit for each descriptor that children must not hold.
///
/// The handler in the child reads it. It may call only functions that a signal handler may call,
/// because other threads of the parent may have held any lock (fork(2)).
static OURS: [AtomicU64; DESCRIPTORS / 64] = [const { AtomicU64::new(0) }; DESCRIPTORS / 64];

/// The words of `OURS` behind this one have no bits.
static HIGHEST: AtomicUsize = AtomicUsize::new(0);

/// Makes later children of this process known to [`is_child`]. Call it before the process has
/// anything that a child must not use.
///
/// The C library tells of children of `fork(3)`. A child by `vfork(2)`, `posix_spawn(3)` or a plain
/// `clone(2)` is not one. The first two run another program at once, with no descriptor of these,
/// because all are closed at `execve(2)`.
///
/// # Panics
/// Panics if the C library has no memory for the handler.
pub fn watch_forks() {
    HAS.store(true, Relaxed);
    listen();
}

/// Returns how many forks there were on the way from the first caller's process to this one: what
/// was made at another number belongs to a parent.
///
/// # Panics
/// Panics if the C library has no memory for the handler.
pub fn forks() -> u32 {
    listen();
    FORKS.load(Relaxed)
}

fn listen() {
    static LISTENS: Once = Once::new();
    // Miri has no processes.
    if cfg!(miri) {
        return;
    }
    LISTENS.call_once(|| {
        // SAFETY: pthread_atfork(3): the handler exists while the library is loaded; glibc removes
        // it with the library. It does only what a signal handler may do.
        let noticed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        assert_eq!(noticed, 0, "pthread_atfork finds no memory");
    });
}

/// Returns whether this process is a child of one that had called [`watch_forks`].
#[inline(always)]
#[must_use]
pub fn is_child() -> bool {
    CHILD.load(Relaxed)
}

fn bit(descriptor: RawFd) -> Option<(usize, u64)> {
    let at = usize::try_from(descriptor).ok().filter(|at| *at < DESCRIPTORS)?;
    Some((at / 64, 1 << (at % 64)))
}

/// Has this descriptor closed in later children.
///
/// Its number stays in use there: libraries of the child that know the number must not close a file
/// of the child's own by it.
pub fn close_in_children(descriptor: RawFd) {
    let Some((word, bit)) = bit(descriptor) else { return };
    if let Some(word) = OURS.get(word) {
        word.fetch_or(bit, Relaxed);
    }
    HIGHEST.fetch_max(word, Relaxed);
}

/// Undoes [`close_in_children`]. Call it before the descriptor is closed, after which another
/// thread may get its number.
pub fn forget(descriptor: RawFd) {
    let Some((word, bit)) = bit(descriptor) else { return };
    if let Some(word) = OURS.get(word) {
        word.fetch_and(!bit, Relaxed);
    }
}

/// A descriptor that later children do not have, as by [`close_in_children`].
#[derive(Debug)]
pub struct UnsharedFd(OwnedFd);

impl UnsharedFd {
    /// Keeps a descriptor from later children.
    pub fn new(descriptor: OwnedFd) -> Self {
        close_in_children(descriptor.as_raw_fd());
        Self(descriptor)
    }
}

impl AsFd for UnsharedFd {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for UnsharedFd {
    #[inline]
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Drop for UnsharedFd {
    fn drop(&mut self) {
        forget(self.0.as_raw_fd());
    }
}

unsafe extern "C" fn in_child() {
    FORKS.fetch_add(1, Relaxed);
    CHILD.store(HAS.load(Relaxed), Relaxed);
    let mut inert = -1;
    for (at, word) in OURS.iter().enumerate().take(HIGHEST.load(Relaxed) + 1) {
        // A later child must not lose what this one opens.
        let mut bits = word.swap(0, Relaxed);
        while bits != 0 {
            replace((at * 64) as c_int + bits.trailing_zeros().cast_signed(), &mut inert);
            bits &= bits - 1;
        }
    }
    if inert >= 0 {
        // SAFETY: close(2): made below, and known to no other code.
        unsafe { libc::close(inert) };
    }
}

/// Puts an epoll instance that watches nothing in the place of a descriptor: it is never readable,
/// and refuses reads, writes and commands.
fn replace(descriptor: c_int, inert: &mut c_int) {
    if *inert < 0 {
        // SAFETY: epoll_create1(2) has no preconditions.
        *inert = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    }
    // SAFETY: dup3(2): two numbers. It closes what the second one stands for, in this process.
    if *inert < 0 || unsafe { libc::dup3(*inert, descriptor, libc::O_CLOEXEC) } < 0 {
        // All numbers are in use, of which this frees one.
        // SAFETY: close(2): a copy of the parent's descriptor, whose objects nothing here uses.
        unsafe { libc::close(descriptor) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_descriptor_has_a_bit() {
        assert_eq!(bit(0), Some((0, 1)));
        assert_eq!(bit(65), Some((1, 2)));
        assert_eq!(bit((1 << 20) - 1), Some(((1 << 14) - 1, 1 << 63)));
        assert_eq!((bit(-1), bit(1 << 20)), (None, None));
    }
}
