//! Sleeping, and being woken.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::error::Error;

/// Wakes whoever sleeps on it. Clones wake the same sleeper.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// A waker that nobody has used.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> Result<Self, Error> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self(Arc::new(fd.map_err(failed)?)))
    }

    /// Wakes the sleeper, now or when it next sleeps.
    pub fn wake(&self) {
        // It fails only when the counter is full, and then it is readable.
        let _full = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the wake-ups so far.
    pub fn clear(&self) {
        // It fails only when there are none.
        let _none = rustix::io::read(&self.0, &mut [0_u8; 8][..]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sleeps until a source is readable, for at most `limit`.
pub(crate) fn sleep(sources: &[BorrowedFd<'_>], limit: Duration) -> Result<(), Error> {
    let mut polled: Vec<_> = sources.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let limit = limit.min(Duration::from_secs(3600));
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    match poll(&mut polled, Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

fn failed(errno: Errno) -> Error {
    Error::Wait(Arc::new(errno.into()))
}
