//! Where an endpoint's connection-manager events come from: a channel of its own, or a shared one.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rdma_backend::{CmEvent, EventChannel, Identifier, IdentifierKey};

use super::watch::{Descriptors, Watched};
use crate::error::Error;
use crate::waker::Waker;

/// Events that one call of [`SharedEvents::dispatch`] hands out.
const MOST: usize = 64;

/// One event channel for many endpoints, which
/// [`Endpoint::with_events`](crate::Endpoint::with_events)
/// creates.
///
/// Some thread waits until the descriptor ([`AsFd`]) is readable, and calls
/// [`SharedEvents::dispatch`], which wakes the endpoints that have events.
pub struct SharedEvents<B: Descriptors> {
    channel: B::EventChannel,
    pub(super) backend: B,
    /// Locked while an event is read or an identifier enters: no event comes before its inbox.
    inboxes: Mutex<HashMap<IdentifierKey, Arc<Inbox<B>>>>,
}

/// The events that an endpoint has not taken yet.
pub(super) struct Inbox<B: Descriptors> {
    events: Mutex<VecDeque<CmEvent<B>>>,
    /// Whether events came since the endpoint last asked.
    filled: AtomicBool,
    waker: Waker,
}

impl<B: Descriptors> SharedEvents<B> {
    /// Returns an event channel that no endpoint uses yet.
    ///
    /// # Errors
    /// Returns an error if there is no RDMA device or the process has no descriptor left.
    pub fn new(backend: &B) -> Result<Arc<Self>, Error> {
        Error::unless_forked()?;
        rdma_process::watch_forks();
        let channel = backend.event_channel().map_err(Error::backend("opening RDMA"))?;
        Ok(Arc::new(Self { channel, backend: backend.clone(), inboxes: Mutex::default() }))
    }

    /// Hands events to their endpoints, and wakes these. Does not wait. A call is bounded: while
    /// events are left, the descriptor stays readable.
    ///
    /// # Errors
    /// Returns an error if an event cannot be read.
    pub fn dispatch(&self) -> Result<(), Error> {
        Error::unless_forked()?;
        for _ in 0..MOST {
            // Locked for one event at a time: endpoints that make an identifier need it, too.
            let inboxes = self.inboxes.lock();
            let event = self.channel.next_event().map_err(Error::backend("reading connection events"))?;
            let Some(event) = event else { break };
            let inbox = inboxes.get(&event.id).cloned();
            drop(inboxes);
            // Events of an identifier that has left are dropped.
            if let Some(inbox) = inbox {
                inbox.events.lock().push_back(event);
                // After the event is there, so that an endpoint which sees this finds it.
                inbox.filled.store(true, Ordering::Release);
                inbox.waker.wake();
            }
        }
        Ok(())
    }
}

impl<B: Descriptors> AsFd for SharedEvents<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

impl<B: Descriptors> std::fmt::Debug for SharedEvents<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedEvents")
            .field("identifiers", &self.inboxes.lock().len())
            .finish_non_exhaustive()
    }
}

pub(super) enum Source<B: Descriptors> {
    Own(Watched<B::EventChannel>),
    Shared(Sharer<B>),
}

/// An endpoint's part in shared events, which ends with it.
pub(super) struct Sharer<B: Descriptors> {
    all: Arc<SharedEvents<B>>,
    inbox: Arc<Inbox<B>>,
    keys: Vec<IdentifierKey>,
}

impl<B: Descriptors> Sharer<B> {
    pub(super) fn new(all: &Arc<SharedEvents<B>>, waker: Waker) -> Self {
        let inbox = Inbox { events: Mutex::default(), filled: AtomicBool::new(false), waker };
        Self { all: Arc::clone(all), inbox: Arc::new(inbox), keys: Vec::new() }
    }

    /// Makes an identifier or moves one to the channel, and has its events from the first one.
    fn enter<T>(
        &mut self,
        make: impl FnOnce(&B::EventChannel) -> Result<(IdentifierKey, T), B::Error>,
    ) -> Result<T, B::Error> {
        let mut inboxes = self.all.inboxes.lock();
        let (key, made) = make(&self.all.channel)?;
        inboxes.insert(key, Arc::clone(&self.inbox));
        self.keys.push(key);
        Ok(made)
    }
}

impl<B: Descriptors> Drop for Sharer<B> {
    fn drop(&mut self) {
        // A lock may be held for ever in a forked child.
        if rdma_process::is_child() {
            return;
        }
        let mut inboxes = self.all.inboxes.lock();
        for key in &self.keys {
            inboxes.remove(key);
        }
    }
}

impl<B: Descriptors> Source<B> {
    pub(super) fn create_id(&mut self) -> Result<B::Identifier, B::Error> {
        match self {
            Self::Own(channel) => channel.create_id(),
            Self::Shared(sharer) => sharer.enter(|channel| {
                let id = channel.create_id()?;
                Ok((id.key(), id))
            }),
        }
    }

    /// Moves an identifier to this source.
    pub(super) fn migrate(&mut self, id: &B::Identifier) -> Result<(), B::Error> {
        match self {
            Self::Own(channel) => id.migrate(channel),
            Self::Shared(sharer) => sharer.enter(|channel| {
                id.migrate(channel)?;
                Ok((id.key(), ()))
            }),
        }
    }

    pub(super) fn forget(&mut self, key: IdentifierKey) {
        let Self::Shared(sharer) = self else { return };
        sharer.keys.retain(|other| *other != key);
        sharer.all.inboxes.lock().remove(&key);
    }

    /// Returns the channel, if it is the endpoint's own.
    pub(super) fn own(&self) -> Option<&B::EventChannel> {
        match self {
            Self::Own(channel) => Some(channel),
            Self::Shared(_) => None,
        }
    }

    /// Returns whether events came since the last call. An own channel reports them by epoll.
    pub(super) fn take_filled(&self) -> bool {
        match self {
            Self::Own(_) => false,
            Self::Shared(sharer) => sharer.inbox.filled.swap(false, Ordering::Acquire),
        }
    }

    pub(super) fn next_event(&self) -> Result<Option<CmEvent<B>>, Error> {
        match self {
            Self::Own(channel) => channel.next_event().map_err(Error::backend("reading connection events")),
            Self::Shared(Sharer { all, inbox, .. }) => {
                let next = inbox.events.lock().pop_front();
                if next.is_some() {
                    return Ok(next);
                }
                // The cause of a failure may still be in the channel.
                all.dispatch()?;
                Ok(inbox.events.lock().pop_front())
            }
        }
    }
}
