//! One descriptor for all that an endpoint waits for.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use super::queues::QueueId;
use crate::error::Error;

/// An epoll instance that is readable when the event channel or a completion channel is.
pub(super) struct Watch(OwnedFd);

/// Who has something to take out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Woken {
    Events,
    Queue(QueueId),
}

/// Stands for the event channel; queues are numbered from 0.
const EVENTS: u64 = u64::MAX;
/// Descriptors asked for at a time.
pub(super) const MANY: usize = 64;

impl Watch {
    /// Watches `events`.
    pub(super) fn new(events: &impl AsFd) -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let watch = Self(epoll);
        watch.watch(events, EVENTS)?;
        Ok(watch)
    }

    /// Watches a completion queue for as long as it lives.
    pub(super) fn add(&self, id: QueueId, queue: &impl AsFd) -> Result<(), Error> {
        self.watch(queue, id.0)
    }

    fn watch(&self, source: &impl AsFd, data: u64) -> Result<(), Error> {
        epoll::add(&self.0, source, epoll::EventData::new_u64(data), epoll::EventFlags::IN).map_err(failed)
    }

    /// Who has something to take out now, at most [`MANY`]; ask again then.
    pub(super) fn woken(&self) -> Result<Vec<Woken>, Error> {
        let mut events = Vec::with_capacity(MANY);
        match epoll::wait(&self.0, spare_capacity(&mut events), Some(&Timespec::default())) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let woken = events.iter().map(|event| match event.data.u64() {
            EVENTS => Woken::Events,
            queue => Woken::Queue(QueueId(queue)),
        });
        Ok(woken.collect())
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn failed(errno: Errno) -> Error {
    Error::Wait(Arc::new(errno.into()))
}
