use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rdma_process::UnsharedFd;
use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;

/// A handle that ends a wait from any thread.
///
/// It ends the wait of the [`Endpoint`](crate::Endpoint) or [`Listener`](crate::Listener) that
/// returned it, and any wait on the waker's own descriptor ([`AsFd`]). This descriptor is readable
/// from a wake-up until [`Waker::clear`]. All clones share one descriptor.
#[derive(Clone, Debug)]
pub struct Waker(Arc<UnsharedFd>);

impl Waker {
    /// Returns a waker for the caller's own wait.
    ///
    /// # Errors
    /// Returns an error if the process has no descriptor left.
    pub fn new() -> Result<Self, Error> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        event
            .map(|event| Self(Arc::new(UnsharedFd::new(event))))
            .map_err(|errno| Error::Wait(Arc::new(errno.into())))
    }

    /// Returns a waker that writes to a descriptor of the program.
    pub(crate) fn of(descriptor: OwnedFd) -> Self {
        Self(Arc::new(UnsharedFd::new(descriptor)))
    }

    pub(crate) fn descriptor(&self) -> Arc<UnsharedFd> {
        Arc::clone(&self.0)
    }

    /// Ends the current wait, or the next one. Several calls may end the same wait.
    ///
    /// [`Endpoint::wait`](crate::Endpoint::wait) and
    /// [`Endpoint::progress`](crate::Endpoint::progress) consume wake-ups. After either of them,
    /// check what the wake-up was for.
    pub fn wake(&self) {
        // Fails only if a wake-up is pending already: the counter is at its maximum, eventfd(2).
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Consumes the wake-ups so far. Endpoints do this for their own wakers.
    pub fn clear(&self) {
        // Fails only if there are none.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
