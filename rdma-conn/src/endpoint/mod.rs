//! Many connections in one event loop. Every stream type is built on this.

mod awake;
mod calls;
mod ids;
mod making;
mod member;
mod newcomers;
mod observed;
mod queues;
mod shared;
mod spin;
mod turn;
mod watch;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rdma_backend::time::Instant;
use rdma_backend::{CompletionQueue, IdentifierKey};
use rdma_process::UnsharedFd;
use slotmap::SlotMap;

use crate::budget::{Budget, Limits};
use crate::connection::{BATCH, Connection};
use crate::deadlines::Deadlines;
use crate::error::Error;
use crate::waker::Waker;

use awake::Awake;
use ids::MemberKey;
use making::Listening;
use member::Member;
use newcomers::Newcomers;
use queues::{Batch, Queues};
use shared::{Sharer, Source};
use watch::Watch;

pub use ids::{ConnectionId, ConnectionMap};
pub use shared::SharedEvents;
pub use watch::Descriptors;
pub(crate) use watch::readable;

/// Connections per completion queue, where the device's queues are long enough.
const SHARERS: u32 = 64;

/// Requests answered in one turn. Each registers memory while connections wait (VR-RES-007).
const ACCEPTS: u32 = 16;

/// Connection-manager events handled in one turn. At the end of a connection each may take all of a
/// completion queue (VR-RES-007).
const EVENTS: u32 = 32;

/// Identifies a listener of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(IdentifierKey);

/// An event of an endpoint.
///
/// One event may stand for several occurrences of its kind. An event may also be spurious. After an
/// event, read until [`Endpoint::read`] has nothing, or write until [`Endpoint::write`] takes
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A connection is open: one from [`Endpoint::connect`] or [`Endpoint::accept_request`], or one
    /// that a listener accepted.
    Opened {
        /// The connection.
        id: ConnectionId,
        /// The listener that accepted it, if one did.
        listener: Option<ListenerId>,
    },
    /// Bytes have arrived.
    Readable(ConnectionId),
    /// An incomplete write, lend or flush can continue.
    Writable(ConnectionId),
    /// A lent part of a buffer has come back.
    Returned(ConnectionId),
    /// The connection has ended, or a connect failed. Read what arrived before, then forget the
    /// connection with [`Endpoint::abort`].
    Ended(ConnectionId),
    /// A listener could not accept, for a reason that no peer caused: the process has no descriptor
    /// or memory left, events could not be read, or the device failed or was removed. A listener
    /// ends with its device. [`Endpoint::take_accept_error`] returns the reason.
    AcceptFailed(ListenerId),
}

/// All events of one connection, or of one listener, that [`Endpoint::next_event`] would return one
/// by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Events {
    /// The kinds of events, as bits: [`Events::OPENED`] and the other constants.
    pub kinds: u32,
    /// The connection; `None` if they are of a listener.
    pub id: Option<ConnectionId>,
    /// The listener that accepted the connection, with [`Events::OPENED`]. The listener that could
    /// not accept, with [`Events::ACCEPT_FAILED`]. Otherwise `None`.
    pub listener: Option<ListenerId>,
}

impl Events {
    /// The bit of [`Event::Opened`].
    pub const OPENED: u32 = member::OPENED as u32;
    /// The bit of [`Event::Readable`].
    pub const READABLE: u32 = member::READABLE as u32;
    /// The bit of [`Event::Writable`].
    pub const WRITABLE: u32 = member::WRITABLE as u32;
    /// The bit of [`Event::Returned`].
    pub const RETURNED: u32 = member::RETURNED as u32;
    /// The bit of [`Event::Ended`].
    pub const ENDED: u32 = member::ENDED as u32;
    /// The bit of [`Event::AcceptFailed`].
    pub const ACCEPT_FAILED: u32 = 32;
}

/// Counts of an endpoint's resources and operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Current connections, including those that are being made or closed.
    pub connections: usize,
    /// Bytes registered now.
    pub registered_bytes: u64,
    /// Completion queues now, each with a channel.
    pub completion_queues: usize,
    /// Requests for a connection that were accepted.
    pub accepted: u64,
    /// Requests rejected by a limit or for want of resources. Also accepted ones whose connections
    /// were ended for that before the program used them: both counts have these.
    pub rejected: u64,
    /// Times [`Endpoint::progress`] or [`Endpoint::wait`] was called.
    pub turns: u64,
    /// Times a completion queue was polled.
    pub polls: u64,
    /// Times a completion queue was armed, `ibv_req_notify_cq(3)`.
    pub arms: u64,
    /// Times the endpoint asked the kernel for events, with or without sleeping.
    pub sleeps: u64,
}

/// Connections that share an event channel and completion queues, driven by one event loop.
///
/// Only [`Endpoint::wait`] blocks. An event loop waits until the descriptor ([`AsFd`]) is readable
/// or [`Endpoint::next_timeout`] has passed. It then calls [`Endpoint::progress`], and takes events
/// with [`Endpoint::next_event`] until there is none. The descriptor may be watched level-triggered
/// or edge-triggered. A call returns `None` while it has no result, and an event follows when it
/// has one. Until a connection has a queue pair, most calls find no such connection.
///
/// An epoll instance stops watching the descriptor when the endpoint is dropped. The
/// [crate page](crate#forks) says what a forked child may do.
///
/// Each connection has its own [`ProtectionDomain`](crate::ProtectionDomain) (VR-SEC-002), unless
/// [`Endpoint::connect_in`] made it. An idle one keeps little memory
/// ([`Options::keep_memory`](crate::Options::keep_memory)).
pub struct Endpoint<B: Descriptors> {
    // Connections drop before their queues, and queues before the channel.
    members: SlotMap<MemberKey, Member<B>>,
    listeners: HashMap<IdentifierKey, Listening<B>>,
    /// A request that a listener hands over.
    requests: Option<B::Identifier>,
    newcomers: Newcomers<B>,
    queues: Queues<B>,
    events: Source<B>,
    watch: Watch,
    /// The place of the completion channel's descriptor until there is a channel.
    place: Option<UnsharedFd>,
    backend: B,
    budget: Arc<Budget>,
    identifiers: HashMap<IdentifierKey, ConnectionId>,
    /// When each connection must be handled, at its [`Member::due`].
    timers: Deadlines<Instant, ConnectionId>,
    /// Connections whose due times may have changed since they were recorded.
    touched: Vec<ConnectionId>,
    /// Latest time to record them.
    note_by: Instant,
    telling: VecDeque<ConnectionId>,
    /// Of listeners: [`Event::AcceptFailed`] only.
    notices: VecDeque<Event>,
    /// Failed connections whose cause an event may explain.
    suspects: Vec<ConnectionId>,
    /// Whether events are turned off, for a stream that asks its one connection directly.
    quiet: bool,
    accepts: u32,
    events_left: u32,
    failures: u32,
    /// After a temporary failure, no event is read before this time.
    rests_until: Instant,
    usage: Usage,
    awake: Awake,
    batch: Batch<B>,
}

impl<B: Descriptors> Endpoint<B> {
    /// Returns an endpoint without connections.
    ///
    /// # Errors
    /// Returns an error if there is no RDMA device or the process has no descriptor left.
    pub fn new(backend: &B, limits: Limits) -> Result<Self, Error> {
        Self::with(backend, Budget::new(limits), SHARERS)
    }

    /// Returns another endpoint on the same device, for example for another thread. The connections
    /// of both count towards the same limits, and [`Usage::registered_bytes`] covers both.
    ///
    /// # Errors
    /// Returns an error if there is no RDMA device or the process has no descriptor left.
    pub fn sharing_limits(&self) -> Result<Self, Error> {
        Self::with(&self.backend, Arc::clone(&self.budget), SHARERS)
    }

    pub(crate) fn of_one(backend: &B, budget: Arc<Budget>) -> Result<Self, Error> {
        Self::with(backend, budget, 1)
    }

    fn with(backend: &B, budget: Arc<Budget>, sharers: u32) -> Result<Self, Error> {
        Error::unless_forked()?;
        // Before there is anything that a child must not use.
        rdma_process::watch_forks();
        let events = backend.event_channel().map_err(Error::backend("opening RDMA"))?;
        let watch = Watch::new()?;
        Ok(Self::of_parts(backend, budget, sharers, Source::Own(watch.events(events)?), watch))
    }

    /// Returns an endpoint that takes its events from `events`. Of its own it has a descriptor for
    /// each connection ([`Endpoint::completions_fd`]), and `waker`, which is its [`AsFd`].
    ///
    /// A wake-up writes eight bytes to `waker`, without blocking: a non-blocking eventfd, or one
    /// end of a socket pair. The event loop takes them out, and calls [`Endpoint::progress`] when
    /// they come and when the descriptor of a connection is readable. [`Endpoint::wait`] returns
    /// without sleeping.
    ///
    /// # Errors
    /// Returns an error if the process has no descriptor left for a connection, or if `waker` is a
    /// pipe.
    pub fn with_events(events: &Arc<SharedEvents<B>>, limits: Limits, waker: OwnedFd) -> Result<Self, Error> {
        Error::unless_forked()?;
        // Taken now, so that the limit is an error of this call and not of a connection later.
        let place = waker.try_clone().map_err(|error| Error::Wait(Arc::new(error)))?;
        let waker = Waker::of(waker)?;
        let source = Source::Shared(Sharer::new(events, waker.clone()));
        let watch = Watch::Outside(waker);
        // One connection a queue: a program that waits for it sleeps on its queue alone
        // (docs/decisions.md, 10).
        let mut endpoint = Self::of_parts(&events.backend, Budget::new(limits), 1, source, watch);
        endpoint.place = Some(UnsharedFd::new(place));
        Ok(endpoint)
    }

    fn of_parts(backend: &B, budget: Arc<Budget>, sharers: u32, events: Source<B>, watch: Watch) -> Self {
        Self {
            members: SlotMap::with_key(),
            listeners: HashMap::new(),
            requests: None,
            newcomers: Newcomers::new(),
            queues: Queues::new(sharers),
            events,
            watch,
            place: None,
            backend: backend.clone(),
            budget,
            identifiers: HashMap::new(),
            timers: Deadlines::new(),
            touched: Vec::new(),
            note_by: Instant::default(),
            telling: VecDeque::new(),
            notices: VecDeque::new(),
            suspects: Vec::new(),
            quiet: false,
            accepts: ACCEPTS,
            events_left: EVENTS,
            failures: 0,
            rests_until: Instant::default(),
            usage: Usage::default(),
            awake: Awake::new(),
            batch: B::CompletionQueue::batch(BATCH),
        }
    }

    pub(crate) fn set_quiet(&mut self, quiet: bool) {
        // Events so far are dropped: a new owner asks the connection before it waits for one.
        while self.next_event().is_some() {}
        self.quiet = quiet;
    }

    /// Returns a connection, to inspect it. `None` if it is gone or not made yet.
    pub fn connection(&self, id: ConnectionId) -> Option<&Connection<B>> {
        self.members.get(id.0)?.connection.as_deref()
    }

    /// Returns whether a connection is open, or was open before it ended.
    pub fn is_open(&self, id: ConnectionId) -> bool {
        self.members.get(id.0).is_some_and(Member::is_open)
    }

    /// Returns the peer of a connection.
    pub fn peer_addr(&self, id: ConnectionId) -> Option<SocketAddr> {
        self.members.get(id.0).map(|member| member.peer)
    }

    /// Returns counts of the endpoint's resources and operations.
    pub fn usage(&self) -> Usage {
        Usage {
            connections: self.members.len(),
            registered_bytes: self.budget.used(),
            completion_queues: self.queues.len(),
            ..self.usage
        }
    }

    /// Returns the latest time for the next call of [`Endpoint::progress`].
    pub fn next_timeout(&self) -> Option<Instant> {
        let tells = !self.telling.is_empty() || !self.notices.is_empty();
        // Events that the program has not taken wait for no arrival: it must come back at once.
        if self.awake.is_unfinished() || tells {
            return Some(self.backend.now());
        }
        let reads = self.awake.events_wait() || !self.suspects.is_empty();
        let read_at = reads.then(|| self.rests_until.max(self.backend.now()));
        let newcomers = self.newcomers.due();
        let newcomers = (newcomers != Instant::NEVER).then(|| newcomers.max(self.backend.now()));
        read_at.into_iter().chain(newcomers).chain(self.next_timer()).min()
    }

    fn next_timer(&self) -> Option<Instant> {
        // Times that are not recorded yet count, too.
        let touched = self.touched.iter().filter_map(|id| self.members.get(id.0)?.next_timeout());
        touched.chain(self.timers.nearest()).min()
    }

    /// Returns a waker that ends [`Endpoint::wait`] and makes the descriptor readable.
    ///
    /// # Errors
    /// Returns an error if the process has no descriptor left.
    pub fn waker(&mut self) -> Result<Waker, Error> {
        self.watch.waker()
    }

    /// Returns the descriptor of a connection's completion queue, which is readable when there is
    /// something to do. `None` while the connection has no queue. Event loops need it only for
    /// [`Endpoint::with_events`].
    pub fn completions_fd(&self, id: ConnectionId) -> Option<BorrowedFd<'_>> {
        Some(self.queues.get(self.members.get(id.0)?.queue?)?.completions().as_fd())
    }

    /// Returns the time of the backend's clock, which [`Endpoint::next_timeout`] uses.
    pub fn now(&self) -> Instant {
        self.backend.now()
    }

    pub(crate) fn descriptor(&self) -> Arc<UnsharedFd> {
        self.watch.descriptor()
    }

    /// Returns the next event, if there is one.
    // An event loop calls it in one place. As a function of its own, it costs 25 instructions more
    // (`benches/peer/counts`).
    #[inline(always)]
    pub fn next_event(&mut self) -> Option<Event> {
        let event = self.next_untaken();
        if let Some(Event::Opened { id, listener: Some(_) }) = event {
            self.take(id);
        }
        event
    }

    /// Like [`Endpoint::next_event`], for a caller that calls [`Endpoint::take`] when the program
    /// takes a connection.
    #[inline(always)]
    pub(crate) fn next_untaken(&mut self) -> Option<Event> {
        if let Some(notice) = self.notices.pop_front() {
            return Some(notice);
        }
        while let Some(id) = self.telling.pop_front() {
            let Some(member) = self.members.get_mut(id.0) else { continue };
            let told = member.tell(id);
            if member.is_telling() {
                self.telling.push_front(id);
            }
            if told.is_some() {
                return told;
            }
        }
        None
    }

    /// Records that the program has a connection of a listener, and counts it from here on. Its
    /// window is registered in the next turn.
    pub(crate) fn take(&mut self, id: ConnectionId) {
        self.newcomers.take(id);
    }

    /// Returns all events of the next connection or listener that has any, for a program that
    /// handles them together.
    #[inline]
    pub fn next_events(&mut self) -> Option<Events> {
        if let Some(Event::AcceptFailed(listener)) = self.notices.pop_front() {
            return Some(Events { kinds: Events::ACCEPT_FAILED, id: None, listener: Some(listener) });
        }
        while let Some(id) = self.telling.pop_front() {
            let Some(member) = self.members.get_mut(id.0) else { continue };
            let (kinds, listener) = member.tell_all();
            if listener.is_some() {
                self.take(id);
            }
            if kinds != 0 {
                return Some(Events { kinds, id: Some(id), listener });
            }
        }
        None
    }

    fn settle(&mut self, id: ConnectionId) {
        let Some(member) = self.members.get_mut(id.0) else { return };
        member.advance();
        if member.is_over() {
            self.abort(id);
            return;
        }
        member.note(id, &mut self.touched, (!self.quiet).then_some(&mut self.telling));
    }

    fn touch(&mut self, id: ConnectionId) {
        if let Some(member) = self.members.get_mut(id.0) {
            member.touch(id, &mut self.touched);
        }
    }

    fn member(&mut self, id: ConnectionId) -> Result<&mut Member<B>, Error> {
        Error::unless_forked()?;
        self.members.get_mut(id.0).ok_or(Error::NoSuchConnection)
    }
}

impl<B: Descriptors> Drop for Endpoint<B> {
    fn drop(&mut self) {
        // A forked child ends nothing of its parent's, and takes no lock that another thread may
        // have held: of a backend, of a subscriber of traces, of a recorder of metrics.
        if rdma_process::is_child() {
            std::mem::forget(std::mem::replace(&mut self.members, SlotMap::with_key()));
            std::mem::forget(std::mem::take(&mut self.listeners));
            std::mem::forget(self.requests.take());
            self.newcomers.forget_waiting();
        }
    }
}

impl<B: Descriptors> AsFd for Endpoint<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }
}

impl<B: Descriptors> std::fmt::Debug for Endpoint<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint")
            .field("listeners", &self.listeners.len())
            .field("connections", &self.usage().connections)
            .finish_non_exhaustive()
    }
}
