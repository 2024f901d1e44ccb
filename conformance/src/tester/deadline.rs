//! Waiting with a deadline.

use std::fmt::Display;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::client::Failure;

/// The end of a wait.
#[derive(Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// Returns a deadline after `patience` from now.
    pub fn after(patience: Duration) -> Self {
        Self(Instant::now() + patience)
    }

    /// Waits until one of the descriptors is readable. Returns false at the deadline.
    pub fn wait(self, one: &impl AsFd, other: &impl AsFd) -> Result<bool, Failure> {
        let left = self.0.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let timeout = Timespec::try_from(left).map_err(wrong("waiting"))?;
        let mut fds = [one.as_fd(), other.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(wrong("waiting")(errno)),
        }
    }
}

/// Creates a failure of the suite's own side, for use with `map_err`.
pub fn wrong<E: Display>(doing: &'static str) -> impl Fn(E) -> Failure {
    move |error| Failure::Environment(format!("the suite's peer, {doing}: {error}"))
}
