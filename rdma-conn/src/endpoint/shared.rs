//! Where an endpoint's connection-manager events come from: a channel of its own, or a shared one.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

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
    /// Locked from the read of an event until it is in its inbox, so that two threads do not swap
    /// the events of a connection.
    reading: Mutex<()>,
    /// Locked while an identifier is made: it has an inbox before it can have an event.
    inboxes: Mutex<HashMap<IdentifierKey, Arc<Inbox<B>>>>,
}

/// The events that an endpoint has not taken yet.
pub(super) struct Inbox<B: Descriptors> {
    events: Mutex<VecDeque<CmEvent<B>>>,
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
        let (reading, inboxes) = Default::default();
        Ok(Arc::new(Self { channel, backend: backend.clone(), reading, inboxes }))
    }

    /// Hands events to their endpoints, and wakes these. A call is bounded: while events are left,
    /// the descriptor stays readable.
    ///
    /// It does not wait for an event. It waits while another thread hands events out. On a device
    /// it also waits, for at most a second, for an asynchronous event that another thread is
    /// taking. Meanwhile endpoints can connect.
    ///
    /// # Errors
    /// Returns an error if an event cannot be read.
    pub fn dispatch(&self) -> Result<(), Error> {
        Error::unless_forked()?;
        for _ in 0..MOST {
            let _reading = self.reading.lock();
            let event = self.channel.next_event().map_err(Error::backend("reading connection events"))?;
            let Some(event) = event else { break };
            let inbox = self.inboxes.lock().get(&event.id).cloned();
            // Events of an identifier that has left are dropped.
            if let Some(inbox) = inbox {
                inbox.events.lock().push_back(event);
                // After the event is there, so that an endpoint which is woken finds it.
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
        let mut shown = f.debug_struct("SharedEvents");
        // In a forked child, the thread that holds the lock may not exist.
        if let Some(inboxes) = self.inboxes.try_lock() {
            shown.field("identifiers", &inboxes.len());
        }
        shown.finish_non_exhaustive()
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
    keys: HashSet<IdentifierKey>,
}

impl<B: Descriptors> Sharer<B> {
    pub(super) fn new(all: &Arc<SharedEvents<B>>, waker: Waker) -> Self {
        let inbox = Inbox { events: Mutex::default(), waker };
        Self { all: Arc::clone(all), inbox: Arc::new(inbox), keys: HashSet::new() }
    }

    fn create_id(&mut self) -> Result<B::Identifier, B::Error> {
        let mut inboxes = self.all.inboxes.lock();
        let id = self.all.channel.create_id()?;
        inboxes.insert(id.key(), Arc::clone(&self.inbox));
        self.keys.insert(id.key());
        Ok(id)
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
            Self::Shared(sharer) => sharer.create_id(),
        }
    }

    pub(super) fn forget(&mut self, key: IdentifierKey) {
        let Self::Shared(sharer) = self else { return };
        sharer.keys.remove(&key);
        sharer.all.inboxes.lock().remove(&key);
    }

    /// Returns the channel, if it is the endpoint's own.
    pub(super) fn own(&self) -> Option<&B::EventChannel> {
        match self {
            Self::Own(channel) => Some(channel),
            Self::Shared(_) => None,
        }
    }

    /// Returns whether the inbox has events. An own channel reports them by epoll.
    pub(super) fn is_filled(&self) -> bool {
        match self {
            Self::Own(_) => false,
            Self::Shared(sharer) => !sharer.inbox.events.lock().is_empty(),
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
