use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::sync::Arc;

use rdma_process::UnsharedFd;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendFlags, send};

use crate::error::Error;

/// A handle that ends a wait from any thread.
///
/// It ends the wait of the [`Endpoint`](crate::Endpoint) or [`Listener`](crate::Listener) that
/// returned it, and any wait on the waker's own descriptor ([`AsFd`]). This descriptor is readable
/// from a wake-up until [`Waker::clear`]. All clones share one descriptor.
#[derive(Clone, Debug)]
pub struct Waker {
    descriptor: Arc<UnsharedFd>,
    is_socket: bool,
}

impl Waker {
    /// Returns a waker for the caller's own wait.
    ///
    /// # Errors
    /// Returns an error if the process has no descriptor left.
    pub fn new() -> Result<Self, Error> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        event
            .map(|event| Self { descriptor: Arc::new(UnsharedFd::new(event)), is_socket: false })
            .map_err(|errno| Error::Wait(Arc::new(errno.into())))
    }

    /// Returns a waker that writes to a descriptor of the program.
    pub(crate) fn of(descriptor: OwnedFd) -> Result<Self, Error> {
        let file = File::from(descriptor);
        let kind = file.metadata().map_err(|error| Error::Wait(Arc::new(error)))?.file_type();
        // A write to a pipe without a reader raises SIGPIPE, pipe(7), which ends a program.
        if kind.is_fifo() {
            return Err(Error::PipeWaker);
        }
        Ok(Self { descriptor: Arc::new(UnsharedFd::new(file.into())), is_socket: kind.is_socket() })
    }

    pub(crate) fn descriptor(&self) -> Arc<UnsharedFd> {
        Arc::clone(&self.descriptor)
    }

    /// Ends the current wait, or the next one. Several calls may end the same wait.
    ///
    /// [`Endpoint::wait`](crate::Endpoint::wait) and
    /// [`Endpoint::progress`](crate::Endpoint::progress) consume wake-ups. After either of them,
    /// check what the wake-up was for.
    pub fn wake(&self) {
        let wake_up = 1_u64.to_ne_bytes();
        // Fails only if a wake-up is pending already (the counter is at its maximum, eventfd(2), or
        // the socket has no room), or if the program has closed the socket's other end.
        let _ = if self.is_socket {
            send(&self.descriptor, &wake_up, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
        } else {
            rustix::io::write(&self.descriptor, &wake_up)
        };
    }

    /// Consumes the wake-ups so far. Endpoints do this for their own wakers.
    pub fn clear(&self) {
        // Fails only if there are none.
        let _ = rustix::io::read(&self.descriptor, &mut [0_u8; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
