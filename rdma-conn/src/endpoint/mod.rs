//! Many connections on one thread: what an event loop needs, and what every stream is made of.

mod awake;
mod calls;
mod ids;
mod making;
mod member;
mod observed;
mod queues;
mod spin;
mod turn;
mod watch;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rdma_backend::time::Instant;
use rdma_backend::{Completion, IdentifierKey};
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
use queues::Queues;
use watch::{Watch, Watched};

pub use ids::{ConnectionId, ConnectionMap};
pub use watch::Descriptors;
pub(crate) use watch::readable;

/// Connections per completion queue, where the device's queues are long enough.
const SHARERS: u32 = 64;

/// Requests for a connection that one turn answers: each registers memory, and whoever has a connection waits meanwhile
/// (VR-RES-007).
const ACCEPTS: u32 = 16;

/// Names a listener of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(IdentifierKey);

/// An event of an endpoint.
///
/// Each is said once for what has happened since it was said last: read until [`Endpoint::read`] has nothing, write
/// until [`Endpoint::write`] takes nothing. Any of them may turn out to be for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A connection is there: one that was asked for with [`Endpoint::connect`], or a new one of a listener.
    Opened {
        /// Which.
        id: ConnectionId,
        /// The listener that accepted it, if one did.
        listener: Option<ListenerId>,
    },
    /// Bytes have arrived.
    Readable(ConnectionId),
    /// There is room again, after a write that found too little; or memory can be lent again; or all is flushed.
    Writable(ConnectionId),
    /// Some of what was lent has come back.
    Returned(ConnectionId),
    /// The connection has ended, or one that was asked for did not come about. What arrived before can still be read; then
    /// [`Endpoint::abort`] forgets it.
    Ended(ConnectionId),
    /// A listener could not accept anybody, for a reason that is not a peer's: the process has no
    /// descriptor or memory left, or events could not be read, or the device failed or is gone, and
    /// the listener with it. [`Endpoint::take_accept_error`] says which.
    AcceptFailed(ListenerId),
}

/// Counts of what an endpoint holds and has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Usage {
    /// Connections there are now, those included that are being made or are on their way to their end.
    pub connections: usize,
    /// Bytes registered now.
    pub registered_bytes: u64,
    /// Completion queues, each with a channel, now.
    pub completion_queues: usize,
    /// Requests for a connection that were accepted.
    pub accepted: u64,
    /// Requests that were rejected, because of a limit or for want of resources.
    pub rejected: u64,
    /// Times [`Endpoint::progress`] or [`Endpoint::wait`] was called.
    pub turns: u64,
    /// Times a completion queue was polled.
    pub polls: u64,
    /// Times a completion queue was asked to wake somebody, `ibv_req_notify_cq(3)`.
    pub arms: u64,
    /// Times the kernel was asked what had come, or slept in.
    pub sleeps: u64,
}

/// Connections that share an event channel and completion queues, driven by one event loop. Nothing here blocks but
/// [`Endpoint::wait`].
///
/// The loop is: wait until its descriptor ([`AsFd`]) is readable or [`Endpoint::next_timeout`] has
/// come, call [`Endpoint::progress`], take events with [`Endpoint::next_event`] until there is
/// none. The descriptor may be watched for its level or for its edges. An epoll instance that
/// watches it forgets it when the endpoint is dropped, unless a child that the process has forked
/// holds it still: a process that forks takes it out before (`EPOLL_CTL_DEL`).
///
/// A call that cannot be answered yet returns `None`, and an event follows when it can.
///
/// Connections do not share a protection domain, because an rkey opens a region to every queue pair of its domain: one
/// client could guess its way into another's window (VR-SEC-002). So they share no regions either; instead, an idle one has
/// little ([`Options::keep_memory`](crate::Options::keep_memory)). A client that trusts one server with several connections may
/// say otherwise ([`Endpoint::connect_in`]).
pub struct Endpoint<B: Descriptors> {
    // Connections go before their queues, and those before the channel.
    members: SlotMap<MemberKey, Member<B>>,
    listeners: HashMap<IdentifierKey, Listening<B>>,
    /// A request that a listener hands over.
    requests: Option<B::Identifier>,
    queues: Queues<B>,
    events: Watched<B::EventChannel>,
    watch: Watch,
    backend: B,
    budget: Arc<Budget>,
    /// The connection of each identifier, for connection-manager events.
    identifiers: HashMap<IdentifierKey, ConnectionId>,
    /// When connections want to be looked at, each at its [`Member::due`].
    timers: Deadlines<Instant, ConnectionId>,
    /// Connections whose times may have changed since they were noted.
    touched: Vec<ConnectionId>,
    /// When they are noted at the latest.
    note_by: Instant,
    /// Connections that have something to tell.
    telling: VecDeque<ConnectionId>,
    /// Events of listeners that are due.
    notices: VecDeque<Event>,
    /// Connections that failed in a way that an event may explain.
    suspects: Vec<ConnectionId>,
    /// Whether nobody takes events: a face that asks its one connection itself.
    quiet: bool,
    /// Requests for a connection that this turn may still answer.
    accepts: u32,
    /// Failures to read connection-manager events, one after another.
    failures: u32,
    /// No event is read before, after a failure that goes by itself.
    rests_until: Instant,
    usage: Usage,
    awake: Awake,
    batch: Box<[Completion; BATCH]>,
}

impl<B: Descriptors> Endpoint<B> {
    /// Returns an endpoint without connections.
    ///
    /// # Errors
    /// There is no RDMA device.
    pub fn new(backend: &B, limits: Limits) -> Result<Self, Error> {
        Self::with(backend, Budget::new(limits), SHARERS)
    }

    /// Returns another endpoint on this one's device, whose connections count towards the same limits: for another thread, for example.
    /// [`Usage::registered_bytes`] is of both.
    ///
    /// # Errors
    /// As [`Endpoint::new`].
    pub fn sharing_limits(&self) -> Result<Self, Error> {
        Self::with(&self.backend, Arc::clone(&self.budget), SHARERS)
    }

    /// Returns an endpoint for one connection, which counts in `budget`.
    pub(crate) fn of_one(backend: &B, budget: Arc<Budget>) -> Result<Self, Error> {
        Self::with(backend, budget, 1)
    }

    fn with(backend: &B, budget: Arc<Budget>, sharers: u32) -> Result<Self, Error> {
        let events = backend.event_channel().map_err(Error::backend("opening RDMA"))?;
        let watch = Watch::new()?;
        Ok(Self {
            members: SlotMap::with_key(),
            listeners: HashMap::new(),
            requests: None,
            queues: Queues::new(sharers),
            events: watch.events(events)?,
            watch,
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
            failures: 0,
            rests_until: Instant::default(),
            usage: Usage::default(),
            awake: Awake::new(),
            batch: Box::new([Completion::EMPTY; BATCH]),
        })
    }

    /// From now on nobody takes events, or somebody does again.
    pub(crate) fn set_quiet(&mut self, quiet: bool) {
        // What was to be told goes to nobody.
        while self.next_event().is_some() {}
        self.quiet = quiet;
    }

    /// Returns a connection, to ask it about itself; `None` if it is gone or not made yet.
    pub fn connection(&self, id: ConnectionId) -> Option<&Connection<B>> {
        self.members.get(id.0)?.connection.as_deref()
    }

    /// Returns whether bytes can flow on a connection, or could before it ended.
    pub fn is_open(&self, id: ConnectionId) -> bool {
        self.members.get(id.0).is_some_and(Member::is_open)
    }

    /// Returns the peer of a connection.
    pub fn peer_addr(&self, id: ConnectionId) -> Option<SocketAddr> {
        self.members.get(id.0).map(|member| member.peer)
    }

    /// Returns the counts of what the endpoint holds and has done.
    pub fn usage(&self) -> Usage {
        Usage {
            connections: self.members.len(),
            registered_bytes: self.budget.used(),
            completion_queues: self.queues.len(),
            ..self.usage
        }
    }

    /// Returns when [`Endpoint::progress`] must be called at the latest.
    pub fn next_timeout(&self) -> Option<Instant> {
        let tells = !self.telling.is_empty() || !self.notices.is_empty();
        if self.awake.is_unfinished() || tells {
            return Some(self.backend.now());
        }
        let reads = self.awake.events_wait() || !self.suspects.is_empty();
        let read_at = reads.then(|| self.rests_until.max(self.backend.now()));
        read_at.into_iter().chain(self.next_timer()).min()
    }

    fn next_timer(&self) -> Option<Instant> {
        let touched = self.touched.iter().filter_map(|id| self.members.get(id.0)?.next_timeout());
        touched.chain(self.timers.nearest()).min()
    }

    /// Returns a waker that ends [`Endpoint::wait`], from any thread. Its calls also make the descriptor readable.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn waker(&mut self) -> Result<Waker, Error> {
        self.watch.waker()
    }

    /// Returns the time by the backend's clock, which [`Endpoint::next_timeout`] goes by.
    pub fn now(&self) -> Instant {
        self.backend.now()
    }

    /// Its descriptor, which stays open for as long as anybody has it.
    pub(crate) fn descriptor(&self) -> Arc<OwnedFd> {
        self.watch.descriptor()
    }

    /// Returns the next event, if there is one.
    #[inline]
    pub fn next_event(&mut self) -> Option<Event> {
        if self.notices.is_empty() && self.telling.is_empty() { None } else { self.next_told() }
    }

    fn next_told(&mut self) -> Option<Event> {
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

    /// Notes what a connection has to tell, and that its times may have changed.
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
        self.members.get_mut(id.0).ok_or(Error::NoSuchConnection)
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
