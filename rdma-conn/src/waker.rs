//! Ending a wait from elsewhere.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;

/// Ends a wait, from any thread: that of [`Endpoint::wait`](crate::Endpoint::wait), or any other that watches its descriptor
/// ([`AsFd`]), which is readable from a wake-up until [`Waker::clear`]. Clones are one waker.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// Returns a waker for a wait of the caller's own.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> Result<Self, Error> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        event.map(|event| Self(Arc::new(event))).map_err(|errno| Error::Wait(Arc::new(errno.into())))
    }

    /// Ends the wait that is under way, or the next one. Several calls may end one wait. An endpoint takes wake-ups in
    /// [`Endpoint::progress`](crate::Endpoint::progress), too, so look after either for what they are about.
    pub fn wake(&self) {
        // A counter that can grow no more says it already, and nothing else can be wrong with it, eventfd(2).
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the wake-ups until now, for a wait of the caller's own. Endpoints take those of their wakers themselves.
    pub fn clear(&self) {
        // It fails only when there are none.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
