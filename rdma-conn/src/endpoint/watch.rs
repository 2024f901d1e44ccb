//! One descriptor for all that an endpoint waits for, and the only place that sleeps.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rdma_proto::backend::Backend;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use crate::error::Error;

/// A backend whose channels have descriptors to wait on: what endpoints and streams need.
pub trait Descriptors: Backend<EventChannel: AsFd, CompletionQueue: AsFd> {}

impl<B: Backend<EventChannel: AsFd, CompletionQueue: AsFd>> Descriptors for B {}

/// An epoll instance that is readable when the event channel or a completion channel is.
pub(super) struct Watch {
    epoll: Arc<OwnedFd>,
}

/// A source that has something to take out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    Events,
    /// The queue with this index.
    Queue(usize),
}

/// Stands for the event channel; queues are numbered from 0.
const EVENTS: u64 = u64::MAX;
/// Descriptors asked for at a time.
const MANY: usize = 64;

impl Watch {
    /// Watches `events`.
    pub(super) fn new(events: &impl AsFd) -> Result<Self, Error> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?);
        let watch = Self { epoll };
        watch.watch(events, EVENTS)?;
        Ok(watch)
    }

    /// Returns the descriptor itself, which stays open for as long as anybody has it.
    pub(super) fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.epoll)
    }

    /// Watches a completion queue for as long as it lives.
    pub(super) fn add(&self, index: usize, queue: &impl AsFd) -> Result<(), Error> {
        self.watch(queue, index as u64)
    }

    fn watch(&self, source: &impl AsFd, data: u64) -> Result<(), Error> {
        epoll::add(&self.epoll, source, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
            .map_err(failed)
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
