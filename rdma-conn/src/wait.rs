//! Waiting for a connection's descriptors.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rdma_proto::backend::Backend;
use rdma_proto::time::Instant;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::dial::Dial;
use crate::error::Error;
use crate::link::Link;

/// A backend whose channels have descriptors to wait on: what blocking and event-driven streams need.
pub trait Descriptors: Backend<EventChannel: AsFd, CompletionQueue: AsFd> {}

impl<B: Backend<EventChannel: AsFd, CompletionQueue: AsFd>> Descriptors for B {}

/// Which of `fds` are readable, waiting for the first for at most `timeout`.
pub(crate) fn readable<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> Result<[bool; N], Error> {
    // Rounded up: waking too early would only spin.
    let timeout = timeout.map(|timeout| timeout.saturating_add(Duration::from_nanos(999_999)).as_millis());
    let timeout = timeout.map(|millis| Timespec {
        tv_sec: i64::try_from(millis / 1000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(millis % 1000 * 1_000_000).unwrap_or(0),
    });
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    match poll(&mut polled, timeout.as_ref()) {
        Ok(_) => Ok(polled.map(|fd| !fd.revents().is_empty())),
        Err(Errno::INTR) => Ok([false; N]),
        Err(errno) => Err(Error::Wait(std::sync::Arc::new(errno.into()))),
    }
}

/// Waits for a connection to be made.
pub(crate) fn dialed<B: Descriptors>(backend: &B, mut dial: Dial<B>) -> Result<Link<B>, Error> {
    loop {
        if let Some(link) = dial.progress()? {
            return Ok(link);
        }
        let left = Some(dial.deadline().since(backend.now()));
        match dial.sources() {
            Some((events, None)) => readable([events.as_fd()], left).map(|[_woken]| ())?,
            Some((events, Some(completions))) => {
                readable([events.as_fd(), completions.as_fd()], left).map(|[_woken, _as_well]| ())?;
            }
            None => {}
        }
    }
}

/// Repeats `step` until it has a result, sleeping in between until the connection has moved: waiting for a peer takes no
/// processor time (VR-FLOW-013).
///
/// # Errors
/// `step`'s own, or a time-out at `deadline` while `doing`.
pub(crate) fn until<B: Descriptors, T>(
    link: &mut Link<B>,
    timeout: Option<Duration>,
    doing: &'static str,
    mut step: impl FnMut(&mut Link<B>) -> Result<Option<T>, Error>,
) -> Result<T, Error> {
    if let Some(done) = step(link)? {
        return Ok(done);
    }
    link.progress();
    if let Some(done) = step(link)? {
        return Ok(done);
    }
    let deadline = timeout.map(|timeout| (link.now().after(timeout), timeout));
    loop {
        // A completion that comes after this call wakes us; one that came before it is found by `progress`.
        link.arm();
        link.progress();
        if let Some(done) = step(link)? {
            return Ok(done);
        }
        let now = link.now();
        if let Some((_, after)) = deadline.filter(|(at, _)| now >= *at) {
            return Err(Error::TimedOut { doing, after });
        }
        let wake = [link.next_timeout(), deadline.map(|(at, _)| at)].into_iter().flatten().min();
        let [completions, events] = readable(
            [link.completion_queue().as_fd(), link.event_channel().as_fd()],
            wake.map(|at: Instant| at.since(now)),
        )?;
        if completions {
            link.take_completion_events();
        }
        if events {
            link.take_events();
        }
    }
}
