//! Many connections on one thread: what an event loop needs, and what every stream is made of.

mod making;
mod member;
mod queues;
mod watch;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use rdma_proto::backend::{CmEvent, CmEventKind, Completion, EventChannel, IdentifierKey};
use rdma_proto::time::Instant;
use slotmap::SlotMap;

use crate::budget::{Budget, Limits};
use crate::connection::{BATCH, Connection};
use crate::error::{Error, OPENING};
use crate::lend::RegisteredBuffer;

use making::Listening;
use member::Member;
use queues::{Lost, Queues};
use watch::{Watch, Woken};

pub use watch::Descriptors;
pub(crate) use watch::readable;

/// Connections per completion queue, where the device's queues are long enough.
const SHARERS: u32 = 64;

/// Times that [`Endpoint::progress`] looks at its queues before it lets the event loop have a turn.
const ROUNDS: u32 = 64;

/// Requests for a connection that one turn answers: each registers memory, and whoever has a connection waits meanwhile
/// (VR-RES-007).
const ACCEPTS: u32 = 16;

slotmap::new_key_type! {
    /// Names a connection of an endpoint. The id of one that is gone names no other.
    pub struct ConnectionId;
}

/// Names a listener of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(IdentifierKey);

/// What an endpoint has to tell.
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
        /// Who accepted it.
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
    /// A listener could not accept anybody, for a reason that is not a peer's: the process has no descriptor or memory left, or the
    /// device failed or is gone, and the listener with it. [`Endpoint::take_accept_error`] says which.
    AcceptFailed(ListenerId),
}

/// What an endpoint holds and has done.
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
    /// Times [`Endpoint::progress`] was called.
    pub turns: u64,
    /// Times a completion queue was polled.
    pub polls: u64,
}

/// Connections that share an event channel and completion queues, driven by one event loop. Nothing here blocks but
/// [`Endpoint::wait`].
///
/// The loop is: wait until its descriptor ([`AsFd`]) is readable or [`Endpoint::next_timeout`] has come, call
/// [`Endpoint::progress`], take events with [`Endpoint::next_event`] until there is none. The descriptor may be watched
/// for its level or for its edges.
///
/// A call that cannot be answered yet returns `None`, and an event follows when it can.
///
/// Connections do not share a protection domain, because an rkey opens a region to every queue pair of its domain: one
/// client could guess its way into another's window (VR-SEC-002). So they share no regions either; instead, an idle one has
/// little ([`Options::keep_memory`](crate::Options::keep_memory)).
pub struct Endpoint<B: Descriptors> {
    // Connections go before their queues, and those before the channel.
    members: SlotMap<ConnectionId, Member<B>>,
    listeners: HashMap<IdentifierKey, Listening<B>>,
    /// A request that a listener hands over.
    requests: Option<B::Identifier>,
    queues: Queues<B>,
    events: B::EventChannel,
    watch: Watch,
    backend: B,
    budget: Arc<Budget>,
    /// Whose connection-manager events are whose.
    identifiers: HashMap<IdentifierKey, ConnectionId>,
    /// When connections want to be looked at. An entry that is not its connection's [`Member::due`] is out of date.
    timers: BinaryHeap<Reverse<(Instant, ConnectionId)>>,
    /// Connections whose times may have changed since they were noted.
    touched: Vec<ConnectionId>,
    /// Connections that have something to tell.
    telling: VecDeque<ConnectionId>,
    /// What there is to tell of listeners.
    notices: VecDeque<Event>,
    /// Connections that failed in a way that an event may explain.
    suspects: Vec<ConnectionId>,
    /// Whether nobody takes events: a face that asks its one connection itself.
    quiet: bool,
    /// Whether the event channel may have something.
    events_wait: bool,
    /// Requests for a connection that this turn may still answer.
    accepts: u32,
    /// Whether the last turn ended before all was done.
    unfinished: bool,
    usage: Usage,
    batch: Box<[Completion; BATCH]>,
}

impl<B: Descriptors> Endpoint<B> {
    /// An endpoint without connections.
    ///
    /// # Errors
    /// There is no RDMA device.
    pub fn new(backend: &B, limits: Limits) -> Result<Self, Error> {
        Self::with(backend, Budget::new(limits), SHARERS)
    }

    /// An endpoint for one connection, which counts in `budget`.
    pub(crate) fn of_one(backend: &B, budget: Arc<Budget>) -> Result<Self, Error> {
        Self::with(backend, budget, 1)
    }

    fn with(backend: &B, budget: Arc<Budget>, sharers: u32) -> Result<Self, Error> {
        let events = backend.event_channel().map_err(Error::backend(OPENING))?;
        Ok(Self {
            members: SlotMap::with_key(),
            listeners: HashMap::new(),
            requests: None,
            queues: Queues::new(sharers),
            watch: Watch::new(&events)?,
            events,
            backend: backend.clone(),
            budget,
            identifiers: HashMap::new(),
            timers: BinaryHeap::new(),
            touched: Vec::new(),
            telling: VecDeque::new(),
            notices: VecDeque::new(),
            suspects: Vec::new(),
            quiet: false,
            events_wait: false,
            accepts: ACCEPTS,
            unfinished: false,
            usage: Usage::default(),
            batch: Box::new([Completion::EMPTY; BATCH]),
        })
    }

    /// Nobody takes events any more.
    pub(crate) fn be_quiet(&mut self) {
        self.quiet = true;
        self.telling.clear();
        self.notices.clear();
    }

    /// A connection, to ask it about itself; `None` if it is gone or not made yet.
    pub fn connection(&self, id: ConnectionId) -> Option<&Connection<B>> {
        self.members.get(id)?.connection.as_deref()
    }

    /// Whether bytes can flow on a connection, or could before it ended.
    pub fn is_open(&self, id: ConnectionId) -> bool {
        self.members.get(id).is_some_and(Member::is_open)
    }

    /// The peer of a connection.
    pub fn peer_addr(&self, id: ConnectionId) -> Option<SocketAddr> {
        self.members.get(id).map(|member| member.peer)
    }

    /// Reads what has arrived; `None` when there is nothing now, `Some(0)` at the end of the stream. [`Event::Readable`] or
    /// [`Event::Ended`] follows.
    ///
    /// # Errors
    /// What ended the connection, once all that arrived before is read; or there is no such connection.
    pub fn read(&mut self, id: ConnectionId, into: &mut [u8]) -> Result<Option<usize>, Error> {
        let member = self.member(id)?;
        let read = member.live()?.try_read(into)?;
        if read.is_some() {
            self.touch(id);
        }
        Ok(read)
    }

    /// Gives bytes back that were used where they lie, see [`Connection::arrived`].
    ///
    /// # Errors
    /// As [`Connection::consume`], or there is no such connection.
    pub fn consume(&mut self, id: ConnectionId, bytes: usize) -> Result<(), Error> {
        self.member(id)?.live()?.consume(bytes)?;
        self.touch(id);
        Ok(())
    }

    /// Takes as many bytes as there is room for, and sends them as one notification. If that is not all, or `None` because
    /// there is no room, [`Event::Writable`] follows.
    ///
    /// # Errors
    /// What ended the connection, or there is no such connection.
    pub fn write(&mut self, id: ConnectionId, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        let member = self.member(id)?;
        let connection = member.live()?;
        let written = connection.try_write(from)?;
        let wanted: usize = from.iter().map(|slice| slice.len()).sum();
        // Also after a write that filled the room exactly: the next one has to wait.
        member.waits.room = written.unwrap_or(0) < wanted || !connection.has_room();
        self.touch(id);
        Ok(written)
    }

    /// Sends from registered memory, see [`Connection::register_buffer`] and [`Connection::try_lend`]. If that is not all, or
    /// `None` because nothing can be lent now, [`Event::Writable`] follows; [`Event::Returned`] when memory has come back.
    ///
    /// # Errors
    /// As [`Connection::try_lend`], or there is no such connection.
    pub fn lend(
        &mut self,
        id: ConnectionId,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        let wanted = range.len();
        let member = self.member(id)?;
        let lent = member.live()?.try_lend(buffer, range)?;
        member.waits.lend = lent.unwrap_or(0) < wanted;
        self.touch(id);
        Ok(lent)
    }

    /// Whether everything written was handed to the device, see [`Connection::flushed`]. After `None` follows
    /// [`Event::Writable`] or [`Event::Ended`].
    ///
    /// # Errors
    /// As [`Connection::flushed`], or there is no such connection.
    pub fn flush(&mut self, id: ConnectionId) -> Result<Option<()>, Error> {
        let member = self.member(id)?;
        let flushed = member.live()?.flushed()?;
        member.waits.flush = flushed.is_none();
        Ok(flushed)
    }

    /// Whether the peer has all that was lent of `buffer`, see [`Connection::returned`]. After `None` follows
    /// [`Event::Returned`] or [`Event::Ended`].
    ///
    /// # Errors
    /// As [`Connection::returned`], or there is no such connection.
    pub fn returned(&mut self, id: ConnectionId, buffer: &RegisteredBuffer<B>) -> Result<Option<()>, Error> {
        self.member(id)?.live()?.returned(buffer)
    }

    /// Begins a graceful end: what was written is delivered first, for at most `linger`; [`Event::Ended`] follows, and
    /// [`Endpoint::closed`] says whether all of it arrived.
    ///
    /// # Errors
    /// There is no such connection.
    pub fn close(&mut self, id: ConnectionId, linger: Duration) -> Result<(), Error> {
        self.member(id)?.close(linger);
        self.settle(id);
        Ok(())
    }

    /// Whether a connection that was closed has ended in order, see [`Connection::closed`]. After `None` follows
    /// [`Event::Ended`].
    ///
    /// # Errors
    /// Not everything arrived, or there is no such connection.
    pub fn closed(&mut self, id: ConnectionId) -> Result<Option<()>, Error> {
        self.member(id)?.live()?.closed()
    }

    /// As [`Endpoint::close`], with nobody listening: nothing more is told of the connection, and it is forgotten when it has
    /// ended.
    ///
    /// # Errors
    /// There is no such connection.
    pub fn abandon(&mut self, id: ConnectionId, linger: Duration) -> Result<(), Error> {
        self.member(id)?.abandoned = true;
        self.close(id, linger)
    }

    /// Ends a connection at once, if it has not ended, and forgets it: what was written may be lost.
    pub fn abort(&mut self, id: ConnectionId) {
        let Some(member) = self.members.remove(id) else { return };
        self.identifiers.remove(&member.key);
        let (queue, options) = (member.queue, member.options);
        let pair = member.connection.as_ref().map(|connection| connection.queue_pair_number());
        drop(member);
        if let Some(queue) = queue {
            self.queues.leave(queue, pair, &options);
        }
    }

    /// What ended a connection, if an error did.
    ///
    /// # Errors
    /// That error, or there is no such connection.
    pub fn check(&self, id: ConnectionId) -> Result<(), Error> {
        self.members.get(id).ok_or(Error::NoSuchConnection)?.check()
    }

    /// What the endpoint holds and has done.
    pub fn usage(&self) -> Usage {
        Usage {
            connections: self.members.len(),
            registered_bytes: self.budget.used(),
            completion_queues: self.queues.len(),
            ..self.usage
        }
    }

    /// When [`Endpoint::progress`] must be called at the latest.
    pub fn next_timeout(&self) -> Option<Instant> {
        let waiting = self.events_wait || !self.suspects.is_empty();
        if self.unfinished || waiting || !self.telling.is_empty() || !self.notices.is_empty() {
            return Some(self.backend.now());
        }
        self.next_timer()
    }

    fn next_timer(&self) -> Option<Instant> {
        let touched = self.touched.iter().filter_map(|id| self.members.get(*id)?.next_timeout());
        let noted = self.timers.peek().map(|Reverse((at, _))| *at);
        touched.chain(noted).min()
    }

    /// The backend's clock, which [`Endpoint::next_timeout`] is about.
    pub fn now(&self) -> Instant {
        self.backend.now()
    }

    /// Its descriptor, which stays open for as long as anybody has it.
    pub(crate) fn descriptor(&self) -> Arc<OwnedFd> {
        self.watch.descriptor()
    }

    /// What has happened, if anything has.
    pub fn next_event(&mut self) -> Option<Event> {
        if let Some(notice) = self.notices.pop_front() {
            return Some(notice);
        }
        while let Some(id) = self.telling.front().copied() {
            let told = self.members.get_mut(id).and_then(|member| member.tell(id));
            if told.is_some() {
                return told;
            }
            self.telling.pop_front();
        }
        None
    }

    /// Takes what has come for any connection, handles time, and posts what can be posted, within bounds (VR-RES-007): what is
    /// left makes [`Endpoint::next_timeout`] say now.
    ///
    /// # Errors
    /// The event channel is lost. What a single connection does wrong ends only that one, and what befalls a completion queue
    /// ends those that share it.
    pub fn progress(&mut self) -> Result<(), Error> {
        self.begin_turn(Some(Duration::ZERO))?;
        for _ in 0..ROUNDS {
            if !self.round()? {
                self.unfinished = false;
                return Ok(());
            }
        }
        self.unfinished = true;
        Ok(())
    }

    /// Sleeps until there is something to do, at most for `limit`, and does it.
    ///
    /// # Errors
    /// As [`Endpoint::progress`].
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        if self.round()? {
            self.usage.turns += 1;
            self.unfinished = true;
            return Ok(());
        }
        self.unfinished = false;
        let due = self.next_timeout().map(|at| at.since(self.now()));
        let limit = match (due, limit) {
            (Some(due), Some(limit)) => Some(due.min(limit)),
            (due, limit) => due.or(limit),
        };
        self.begin_turn(limit)?;
        self.look()?;
        // Armed again when somebody wants to sleep, and not for whoever goes on at once.
        self.unfinished = self.queues.iter().any(|queue| queue.is_deaf());
        Ok(())
    }

    /// Takes what has come, and if that is nothing, arms what is not armed and looks again: what comes from then on makes the
    /// descriptor readable, and what came before is found now. True if anything came. This is the order that never sleeps on
    /// work (VR-FLOW-013).
    fn round(&mut self) -> Result<bool, Error> {
        Ok(self.look()? || self.arm_all() && self.look()?)
    }

    /// Sleeps, for at most `limit`, and takes wake-ups off the channels.
    fn begin_turn(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        self.usage.turns += 1;
        self.accepts = ACCEPTS;
        let mut limit = limit;
        loop {
            let all = self.watch.sleep(limit)?;
            while let Some(woken) = self.watch.woken() {
                match woken {
                    Woken::Events => self.events_wait = true,
                    Woken::Queue(at) => {
                        let taken = self.queues.get_mut(at).map_or(Ok(()), |queue| queue.take_wakeups());
                        self.unless_lost(taken);
                    }
                }
            }
            if all {
                return Ok(());
            }
            limit = Some(Duration::ZERO);
        }
    }

    /// Takes what has come, without asking the kernel and without arming anything; true if anything had.
    ///
    /// # Errors
    /// As [`Endpoint::progress`].
    fn look(&mut self) -> Result<bool, Error> {
        let now = self.backend.now();
        let mut moved = false;
        for at in 0..self.queues.places() {
            let idle = self.queues.get_mut(at).is_none_or(|queue| queue.is_idle());
            moved |= !idle && self.take_batch(at, now);
        }
        self.look_beyond(moved, now)
    }

    /// Takes what has come for one connection and those that share its queue, before anybody was woken by it: what this costs does
    /// not depend on how many queues there are. True if anything had.
    ///
    /// # Errors
    /// As [`Endpoint::progress`].
    pub(crate) fn look_at(&mut self, id: ConnectionId) -> Result<bool, Error> {
        let now = self.backend.now();
        let queue = self.members.get(id).and_then(|member| member.queue);
        let moved = queue.is_some_and(|at| self.take_batch(at, now));
        self.look_beyond(moved, now)
    }

    /// Takes events and handles time, when the queues were looked at.
    fn look_beyond(&mut self, mut moved: bool, now: Instant) -> Result<bool, Error> {
        if self.events_wait || !self.suspects.is_empty() {
            moved |= self.take_events(now)?;
        }
        // An event that was not read yet may tell why they failed.
        if !self.events_wait {
            while let Some(id) = self.suspects.pop() {
                if let Some(connection) =
                    self.members.get_mut(id).and_then(|member| member.connection.as_mut())
                {
                    connection.conclude();
                }
                self.settle(id);
            }
        }
        Ok(moved | self.handle_times(now))
    }

    /// Arms every queue that has had its wake-up; true if there was any.
    fn arm_all(&mut self) -> bool {
        let mut any = false;
        for at in 0..self.queues.places() {
            let armed = self.queues.get_mut(at).map_or(Ok(false), |queue| queue.rearm());
            any |= self.unless_lost(armed).unwrap_or(true);
        }
        any
    }

    /// What a call on a queue came to. A queue that is lost ends the connections whose completions it had, and no others.
    fn unless_lost<T>(&mut self, result: Result<T, Lost>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(Lost { error, owners }) => {
                tracing::warn!(connections = owners.len(), %error, "a completion queue is lost");
                for id in owners {
                    if let Some(member) = self.members.get_mut(id) {
                        member.fail(error.clone());
                    }
                    self.settle(id);
                }
                None
            }
        }
    }

    /// Takes a batch of completions from a queue; true if there were any.
    fn take_batch(&mut self, at: usize, now: Instant) -> bool {
        let Some(queue) = self.queues.get_mut(at) else { return false };
        self.usage.polls += 1;
        let count = match queue.poll(&mut self.batch) {
            Ok(0) => return false,
            Ok(count) => count,
            Err(lost) => {
                self.unless_lost::<()>(Err(lost));
                return true;
            }
        };
        let mut moved = ArrayVec::<ConnectionId, BATCH>::new();
        let batch = self.batch.get(..count).unwrap_or_default();
        for run in batch.chunk_by(|one, next| one.queue_pair == next.queue_pair) {
            // Nobody's: the last ones of a queue pair that is gone.
            let Some(id) = run.first().and_then(|completion| queue.owner(completion.queue_pair)) else {
                continue;
            };
            if let Some(connection) = self.members.get_mut(id).and_then(|member| member.connection.as_mut()) {
                connection.handle_completions(now, run);
                if connection.is_suspect() {
                    self.suspects.push(id);
                }
                // There are at most as many runs as completions in a batch.
                _ = moved.try_push(id);
            }
        }
        for id in moved {
            self.settle(id);
        }
        true
    }

    /// Takes connection-manager events, until as many requests for a connection were answered as may be; true if there were any.
    fn take_events(&mut self, now: Instant) -> Result<bool, Error> {
        let mut any = false;
        while self.accepts > 0 && self.requests.is_none() {
            let event = self.events.next_event().map_err(Error::backend("reading connection events"))?;
            let Some(CmEvent { id: key, kind }) = event else {
                self.events_wait = false;
                return Ok(any);
            };
            any = true;
            match (kind, self.identifiers.get(&key).copied()) {
                (CmEventKind::ConnectRequest { id, .. }, _) => {
                    self.accepts -= 1;
                    self.request(key, id);
                }
                (CmEventKind::DeviceRemoval, None) => self.accept_failed(key, Error::DeviceRemoved),
                (CmEventKind::Async(event), None) if event.is_fatal() => {
                    self.accept_failed(key, Error::Device { event });
                }
                (_, None) => {}
                (event, Some(id)) => {
                    // What the peer sent before counts as such (VR-CLOSE-002).
                    if let Some(queue) = self.members.get(id).and_then(|member| member.queue) {
                        for _ in 0..ROUNDS {
                            if !self.take_batch(queue, now) {
                                break;
                            }
                        }
                    }
                    let route = self.members.get_mut(id).and_then(|member| member.handle_event(event, now));
                    match route {
                        Some(identifier) => self.ask(id, identifier),
                        None => self.settle(id),
                    }
                }
            }
        }
        // The rest in the next turn.
        self.events_wait = true;
        Ok(any)
    }

    /// Handles the time of all whose time has come; true if there were any.
    fn handle_times(&mut self, now: Instant) -> bool {
        while let Some(id) = self.touched.pop() {
            let Some(member) = self.members.get_mut(id) else { continue };
            member.touched = false;
            if let Some(at) = member.next_timeout()
                && member.due.is_none_or(|due| at < due)
            {
                member.due = Some(at);
                self.timers.push(Reverse((at, id)));
            }
        }
        let mut any = false;
        while let Some(Reverse((at, id))) = self.timers.peek().copied().filter(|Reverse((at, _))| *at <= now)
        {
            self.timers.pop();
            if let Some(member) = self.members.get_mut(id).filter(|member| member.due == Some(at)) {
                member.due = None;
                member.handle_time(now);
                self.settle(id);
                any = true;
            }
        }
        any
    }

    /// Notes what a connection has to tell, and that its times may have changed.
    fn settle(&mut self, id: ConnectionId) {
        let Some(member) = self.members.get_mut(id) else { return };
        member.advance();
        if member.abandoned && member.has_ended() {
            self.abort(id);
            return;
        }
        if !self.quiet && member.notice() {
            self.telling.push_back(id);
        }
        self.touch(id);
    }

    fn touch(&mut self, id: ConnectionId) {
        if let Some(member) = self.members.get_mut(id)
            && !std::mem::replace(&mut member.touched, true)
        {
            self.touched.push(id);
        }
    }

    fn member(&mut self, id: ConnectionId) -> Result<&mut Member<B>, Error> {
        self.members.get_mut(id).ok_or(Error::NoSuchConnection)
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
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}
