//! One descriptor for everything an endpoint waits for. Only this module sleeps.

use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::Backend;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use crate::error::Error;
use crate::waker::Waker;

/// A backend whose channels have pollable descriptors, as endpoints and streams need.
pub trait Descriptors: Backend<EventChannel: AsFd, CompletionQueue: AsFd> {}

impl<B: Backend<EventChannel: AsFd, CompletionQueue: AsFd>> Descriptors for B {}

/// An epoll instance that is readable when the event channel or a completion channel is.
pub(super) struct Watch {
    epoll: Arc<OwnedFd>,
    waker: Option<Watched<Waker>>,
}

/// A source that an epoll instance watches until this is dropped.
///
/// Closing the descriptor does not end the watch while a forked child holds it, until it executes
/// another program. The instance would report events that cannot be taken out, epoll(7).
pub(super) struct Watched<S: AsFd> {
    source: S,
    epoll: Arc<OwnedFd>,
}

impl<S: AsFd> Deref for Watched<S> {
    type Target = S;

    #[inline]
    fn deref(&self) -> &S {
        &self.source
    }
}

impl<S: AsFd> Drop for Watched<S> {
    fn drop(&mut self) {
        // It was added, and only this removes it.
        _ = epoll::delete(&self.epoll, &self.source);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    Events,
    Waker,
    Queue(usize),
}

/// Token of the event channel. Queues are numbered from 0.
const EVENTS: u64 = u64::MAX;
const WAKER: u64 = u64::MAX - 1;

pub(super) type Sources = [MaybeUninit<epoll::Event>; MANY];

/// Sources that one call of epoll_wait(2) names.
pub(super) const MANY: usize = 64;

impl From<&epoll::Event> for Woken {
    #[inline]
    fn from(event: &epoll::Event) -> Self {
        match event.data.u64() {
            EVENTS => Self::Events,
            WAKER => Self::Waker,
            queue => Self::Queue(usize::try_from(queue).unwrap_or(usize::MAX)),
        }
    }
}

impl Watch {
    pub(super) fn new() -> Result<Self, Error> {
        Ok(Self { epoll: Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?), waker: None })
    }

    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.epoll)
    }

    pub(super) fn events<S: AsFd>(&self, events: S) -> Result<Watched<S>, Error> {
        self.watch(events, EVENTS)
    }

    pub(super) fn queue<S: AsFd>(&self, index: usize, queue: S) -> Result<Watched<S>, Error> {
        self.watch(queue, index as u64)
    }

    pub(super) fn waker(&mut self) -> Result<Waker, Error> {
        if let Some(waker) = &self.waker {
            return Ok(Waker::clone(waker));
        }
        let waker = Waker::new()?;
        self.waker = Some(self.watch(waker.clone(), WAKER)?);
        Ok(waker)
    }

    fn watch<S: AsFd>(&self, source: S, data: u64) -> Result<Watched<S>, Error> {
        epoll::add(&self.epoll, &source, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
            .map_err(failed)?;
        Ok(Watched { source, epoll: Arc::clone(&self.epoll) })
    }

    /// Sleeps until a source has something to take out, for at most `limit`, and names the sources
    /// ([`Woken`]). If there are [`MANY`], take out what they have and call again.
    #[inline]
    pub(super) fn sleep<'a>(
        &self,
        limit: Option<Duration>,
        sources: &'a mut Sources,
    ) -> Result<&'a [epoll::Event], Error> {
        let limit = limit.map(in_millis);
        match epoll::wait(&self.epoll, &mut sources[..], limit.as_ref()) {
            Ok((events, _)) => Ok(events),
            Err(Errno::INTR) => Ok(&[]),
            Err(errno) => Err(failed(errno)),
        }
    }

    pub(super) fn clear_waker(&self) {
        self.waker.iter().for_each(|waker| waker.clear());
    }
}

/// Converts to whole milliseconds, rounded up. Waking too early would only spin.
#[inline]
fn in_millis(limit: Duration) -> Timespec {
    // The common case in an event loop.
    if limit.is_zero() {
        return Timespec::default();
    }
    let limit = limit.saturating_add(Duration::from_nanos(999_999));
    Timespec {
        // The kernel's timeout is an i32 of milliseconds, 24 days. A longer sleep starts again.
        tv_sec: limit.as_secs().min(1 << 20).cast_signed(),
        tv_nsec: i64::from(limit.subsec_millis()) * 1_000_000,
    }
}

pub(crate) fn readable(descriptor: &impl AsFd, limit: Option<Duration>) -> Result<(), Error> {
    let mut polled = [PollFd::new(descriptor, PollFlags::IN)];
    match poll(&mut polled, limit.map(in_millis).as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(failed(errno)),
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn failed(errno: Errno) -> Error {
    Error::Wait(Arc::new(errno.into()))
}
