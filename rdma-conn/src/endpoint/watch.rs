//! One descriptor for all that an endpoint waits for, and the only place that sleeps.

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

/// A backend whose channels have descriptors to wait on: what endpoints and streams need.
pub trait Descriptors: Backend<EventChannel: AsFd, CompletionQueue: AsFd> {}

impl<B: Backend<EventChannel: AsFd, CompletionQueue: AsFd>> Descriptors for B {}

/// An epoll instance that is readable when the event channel or a completion channel is.
pub(super) struct Watch {
    epoll: Arc<OwnedFd>,
    /// Made with the first waker.
    waker: Option<Watched<Waker>>,
}

/// A source that an epoll instance watches for as long as this is here.
///
/// To close a descriptor does not end that where somebody else holds it: a child that the process
/// has forked holds all of them, if only until it executes another program. The instance would go
/// on reporting what nobody can take out any more, epoll(7).
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
        // It was added, and nobody else takes it out.
        _ = epoll::delete(&self.epoll, &self.source);
    }
}

/// A source that has something to take out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    Events,
    /// Somebody called [`Waker::wake`].
    Waker,
    /// The queue with this index.
    Queue(usize),
}

/// Stands for the event channel; queues are numbered from 0.
const EVENTS: u64 = u64::MAX;
/// Stands for what wakers write to.
const WAKER: u64 = u64::MAX - 1;
/// Descriptors asked for at a time.
const MANY: usize = 64;

impl Watch {
    /// Returns one that watches nothing.
    pub(super) fn new() -> Result<Self, Error> {
        Ok(Self { epoll: Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?), waker: None })
    }

    /// Returns the descriptor itself, which stays open for as long as anybody has it.
    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.epoll)
    }

    /// Watches the event channel.
    pub(super) fn events<S: AsFd>(&self, events: S) -> Result<Watched<S>, Error> {
        self.watch(events, EVENTS)
    }

    /// Watches a completion queue.
    pub(super) fn queue<S: AsFd>(&self, index: usize, queue: S) -> Result<Watched<S>, Error> {
        self.watch(queue, index as u64)
    }

    /// Returns a waker, whose wake-ups end the sleep.
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

    /// Sleeps until a source has something to take out, for at most `limit`, and names those that have. Returns whether these are all:
    /// otherwise take out what they have, and ask again.
    #[inline(always)]
    pub(super) fn sleep(&self, limit: Option<Duration>, mut woken: impl FnMut(Woken)) -> Result<bool, Error> {
        let mut buffer = [const { MaybeUninit::<epoll::Event>::uninit() }; MANY];
        let limit = limit.map(in_millis);
        let events = match epoll::wait(&self.epoll, &mut buffer[..], limit.as_ref()) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => &mut [],
            Err(errno) => return Err(failed(errno)),
        };
        for event in events.iter() {
            woken(match event.data.u64() {
                EVENTS => Woken::Events,
                WAKER => {
                    self.waker.iter().for_each(|waker| waker.clear());
                    Woken::Waker
                }
                queue => Woken::Queue(usize::try_from(queue).unwrap_or(usize::MAX)),
            });
        }
        Ok(events.len() < MANY)
    }
}

/// Whole milliseconds, rounded up: waking too early would only spin.
#[inline]
fn in_millis(limit: Duration) -> Timespec {
    // As nearly every event loop has it.
    if limit.is_zero() {
        return Timespec::default();
    }
    let limit = limit.saturating_add(Duration::from_nanos(999_999));
    Timespec {
        // A timeout is an i32 of milliseconds for the kernel, which is 24 days; whoever sleeps longer sleeps again.
        tv_sec: limit.as_secs().min(1 << 20).cast_signed(),
        tv_nsec: i64::from(limit.subsec_millis()) * 1_000_000,
    }
}

/// Sleeps until `descriptor` is readable, for at most `limit`.
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
