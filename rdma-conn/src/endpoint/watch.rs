//! One descriptor for everything an endpoint waits for. Only this module sleeps.

use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::Backend;
use rdma_process::UnsharedFd;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use crate::error::Error;
use crate::waker::Waker;

/// A backend whose channels have pollable descriptors, as endpoints and streams need.
pub trait Descriptors: Backend<EventChannel: AsFd, CompletionQueue: AsFd> {}

impl<B: Backend<EventChannel: AsFd, CompletionQueue: AsFd>> Descriptors for B {}

/// An epoll instance that is readable when the event channel or a completion channel is. Or none:
/// then the event loop watches the completion channels itself, and is woken by its own descriptor.
pub(super) enum Watch {
    Epoll(Arc<UnsharedFd>, Option<Watched<Waker>>),
    Outside(Waker),
}

/// A source that an epoll instance, if there is one, watches until this is dropped.
///
/// Closing the descriptor does not end the watch while another process holds it, such as a child
/// by clone(2). The instance would report events that cannot be taken out, epoll(7).
pub(super) struct Watched<S: AsFd> {
    source: S,
    epoll: Option<Arc<UnsharedFd>>,
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
        if let Some(epoll) = &self.epoll {
            // It was added, and only this removes it.
            _ = epoll::delete(epoll, &self.source);
        }
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
            // A place that no queue has is ignored (`Queues::take_wakeups`).
            queue => Self::Queue(usize::try_from(queue).unwrap_or(usize::MAX)),
        }
    }
}

impl Watch {
    pub(super) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        Ok(Self::Epoll(Arc::new(UnsharedFd::new(epoll)), None))
    }

    pub(super) fn descriptor(&self) -> Arc<UnsharedFd> {
        match self {
            Self::Epoll(epoll, _) => Arc::clone(epoll),
            Self::Outside(waker) => waker.descriptor(),
        }
    }

    pub(super) fn events<S: AsFd>(&self, events: S) -> Result<Watched<S>, Error> {
        self.watch(events, EVENTS)
    }

    pub(super) fn queue<S: AsFd>(&self, index: usize, queue: S) -> Result<Watched<S>, Error> {
        self.watch(queue, index as u64)
    }

    pub(super) fn waker(&mut self) -> Result<Waker, Error> {
        match self {
            Self::Epoll(_, Some(waker)) => Ok(Waker::clone(waker)),
            Self::Outside(waker) => Ok(waker.clone()),
            Self::Epoll(_, None) => {
                // Made now, because most endpoints need none, and each costs a descriptor.
                let waker = Waker::new()?;
                let watched = self.watch(waker.clone(), WAKER)?;
                if let Self::Epoll(_, place) = self {
                    *place = Some(watched);
                }
                Ok(waker)
            }
        }
    }

    fn watch<S: AsFd>(&self, source: S, data: u64) -> Result<Watched<S>, Error> {
        let Self::Epoll(epoll, _) = self else { return Ok(Watched { source, epoll: None }) };
        // Level-triggered: what is not taken out is named again by the next call.
        epoll::add(epoll, &source, epoll::EventData::new_u64(data), epoll::EventFlags::IN).map_err(failed)?;
        Ok(Watched { source, epoll: Some(Arc::clone(epoll)) })
    }

    /// Sleeps until a source has something to take out, for at most `limit`, and names the sources
    /// ([`Woken`]). If there are [`MANY`], take out what they have and call again. `None`: there is
    /// no epoll instance, so each source must be asked.
    #[inline]
    pub(super) fn sleep<'a>(
        &self,
        limit: Option<Duration>,
        sources: &'a mut Sources,
    ) -> Result<Option<&'a [epoll::Event]>, Error> {
        let Self::Epoll(epoll, _) = self else { return Ok(None) };
        let limit = limit.map(in_millis);
        match epoll::wait(epoll, &mut sources[..], limit.as_ref()) {
            Ok((events, _)) => Ok(Some(events)),
            // Like a spurious wake-up: callers look again before they sleep.
            Err(Errno::INTR) => Ok(Some(&[])),
            Err(errno) => Err(failed(errno)),
        }
    }

    pub(super) fn clear_waker(&self) {
        if let Self::Epoll(_, Some(waker)) = self {
            waker.clear();
        }
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
        match self {
            Self::Epoll(epoll, _) => epoll.as_fd(),
            Self::Outside(waker) => waker.as_fd(),
        }
    }
}

fn failed(errno: Errno) -> Error {
    Error::Wait(Arc::new(errno.into()))
}
