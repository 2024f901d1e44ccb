//! Sleeping, being woken, and what ends a wait before its time.
//!
//! Nothing in this crate waits without a [`Limit`] or a sleep of at most a [`TICK`]: every wait has
//! a bound, and looks at [`Stop`].

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::Error;

/// How often a run tells how far it is, and looks whether it shall end.
pub const TICK: Duration = Duration::from_millis(200);

/// Ends a run from elsewhere: from another thread or a signal handler.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicU8>);

impl Stop {
    /// Asks for the end. What waits notices within [`TICK`], and what was begun is undone. A second
    /// call ends that too.
    pub fn stop(&self) {
        // Two levels are all there are, so that it never wraps.
        let _full = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |level| (level < 2).then_some(level + 1));
    }

    /// Returns whether it was asked for.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// Returns whether it was asked for twice: what was begun stays as it is.
    #[must_use]
    pub fn is_forced(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 1
    }

    /// Fails once the end was asked for. A [`Sink`](crate::Sink) that waits calls this within every
    /// [`TICK`] and hands the error on.
    ///
    /// # Errors
    /// It was asked for.
    pub fn check(&self) -> io::Result<()> {
        if self.is_stopped() { Err(io::Error::other(Stopped)) } else { Ok(()) }
    }
}

/// What [`Stop::check`] fails with.
#[derive(Debug, thiserror::Error)]
#[error("stopped before it was complete")]
struct Stopped;

/// Returns whether an error is that of [`Stop::check`].
pub(crate) fn is_stop(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Stopped>())
}

/// What ends a wait: time, or the operator.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    by: Instant,
    stop: Stop,
    /// Whether the wait is part of undoing, which only a second call of [`Stop::stop`] ends.
    undoes: bool,
}

impl Limit {
    /// A wait of work, for at most `patience`.
    pub(crate) fn new(stop: &Stop, patience: Duration) -> Self {
        Self { by: Instant::now() + patience, stop: stop.clone(), undoes: false }
    }

    /// A wait that is part of undoing what was begun.
    pub(crate) fn of_undoing(stop: &Stop, patience: Duration) -> Self {
        Self { undoes: true, ..Self::new(stop, patience) }
    }

    /// The same, but for at most `patience` from now.
    pub(crate) fn within(&self, patience: Duration) -> Self {
        Self { by: self.by.min(Instant::now() + patience), ..self.clone() }
    }

    /// How long may be slept before this is asked again.
    ///
    /// # Errors
    /// The time has passed ([`io::ErrorKind::TimedOut`]), or the end was asked for.
    pub(crate) fn nap(&self) -> io::Result<Duration> {
        if !self.undoes || self.stop.is_forced() {
            self.stop.check()?;
        }
        let left = self.by.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left.min(TICK)) }
    }

    /// Sleeps until this can be read, or a nap is over.
    pub(crate) fn until_readable(&self, sources: &[BorrowedFd<'_>]) -> io::Result<()> {
        sleep(sources, self.nap()?).map_err(io::Error::other)
    }

    /// Sleeps until this can be written, or a nap is over.
    pub(crate) fn until_writable(&self, sink: BorrowedFd<'_>) -> io::Result<()> {
        doze(&mut [PollFd::new(&sink, PollFlags::OUT)], self.nap()?).map_err(io::Error::other)
    }

    /// Runs `work`, which may block, on a thread of its own, which is left behind if the wait ends
    /// before it.
    pub(crate) fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (sender, done) = channel();
        std::thread::Builder::new().name("aside".into()).spawn(move || {
            let _nobody = sender.send(work());
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
