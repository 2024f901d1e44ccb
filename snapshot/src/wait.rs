//! Sleeping, waking, and early ends of a wait.
//!
//! Every wait in this crate has a [`Limit`] or is a sleep of at most a [`TICK`]. So every wait has
//! a bound, and checks [`Stop`].

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::Error;

/// How often a run reports its progress, and checks whether it must end.
pub const TICK: Duration = Duration::from_millis(200);

/// Ends a run from elsewhere: from another thread or a signal handler.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicU8>);

impl Stop {
    /// Requests the end. Waits notice within [`TICK`], and the run undoes its changes. A second
    /// call ends that, too.
    pub fn stop(&self) {
        // Two levels suffice, so it never wraps.
        let _full = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |level| (level < 2).then_some(level + 1));
    }

    /// Returns whether the end was requested.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// Returns whether it was requested twice: changes stay as they are.
    #[must_use]
    pub fn is_forced(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 1
    }

    /// Fails once the end was requested. A waiting [`Sink`](crate::Sink) calls this within every
    /// [`TICK`] and returns the error.
    ///
    /// # Errors
    /// The end was requested.
    pub fn check(&self) -> io::Result<()> {
        if self.is_stopped() { Err(io::Error::other(Stopped)) } else { Ok(()) }
    }
}

/// The error of [`Stop::check`].
#[derive(Debug, thiserror::Error)]
#[error("stopped before it was complete")]
struct Stopped;

/// Returns whether an error is that of [`Stop::check`].
pub(crate) fn is_stop(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Stopped>())
}

/// The end of a wait: by time, or by the operator.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    by: Instant,
    stop: Stop,
    /// Whether the wait is part of undoing, which only a second call of [`Stop::stop`] ends.
    undoes: bool,
}

impl Limit {
    /// Returns the limit of an ordinary wait, of at most `patience`.
    pub(crate) fn new(stop: &Stop, patience: Duration) -> Self {
        Self { by: Instant::now() + patience, stop: stop.clone(), undoes: false }
    }

    /// Returns the limit of a wait that is part of undoing.
    pub(crate) fn of_undoing(stop: &Stop, patience: Duration) -> Self {
        Self { undoes: true, ..Self::new(stop, patience) }
    }

    /// Returns the same limit, but at most `patience` from now.
    pub(crate) fn within(&self, patience: Duration) -> Self {
        Self { by: self.by.min(Instant::now() + patience), ..self.clone() }
    }

    /// Returns how long to sleep before the next check.
    ///
    /// # Errors
    /// The time has passed ([`io::ErrorKind::TimedOut`]), or the end was requested.
    pub(crate) fn nap(&self) -> io::Result<Duration> {
        if !self.undoes || self.stop.is_forced() {
            self.stop.check()?;
        }
        let left = self.by.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left.min(TICK)) }
    }

    /// Sleeps until a source is readable, or for one nap.
    pub(crate) fn until_readable(&self, sources: &[BorrowedFd<'_>]) -> io::Result<()> {
        sleep(sources, self.nap()?).map_err(io::Error::other)
    }

    /// Sleeps until the sink is writable, or for one nap.
    pub(crate) fn until_writable(&self, sink: BorrowedFd<'_>) -> io::Result<()> {
        doze(&mut [PollFd::new(&sink, PollFlags::OUT)], self.nap()?).map_err(io::Error::other)
    }

    /// Runs `work`, which may block, on a thread of its own, which is left behind if the wait ends
    /// first.
    pub(crate) fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (sender, done) = channel();
        std::thread::Builder::new().name("aside".into()).spawn(move || {
            let _not_awaited = sender.send(work());
        })?;
        loop {
            match done.recv_timeout(self.nap()?) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(io::Error::other("its thread ended early"));
                }
            }
        }
    }
}

/// Sleeps until a source is readable, for at most `limit`.
pub(crate) fn sleep(sources: &[BorrowedFd<'_>], limit: Duration) -> Result<(), Error> {
    let mut polled: Vec<_> = sources.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    doze(&mut polled, limit)
}

fn doze(polled: &mut [PollFd<'_>], limit: Duration) -> Result<(), Error> {
    let limit = limit.min(Duration::from_secs(3600));
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    match poll(polled, Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

fn failed(errno: Errno) -> Error {
    Error::Wait(Arc::new(errno.into()))
}
