//! Many connections on one thread: what an event loop needs.

mod making;
mod member;
mod queues;
mod watch;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rdma_proto::backend::{Backend, CmEvent, CmEventKind, EventChannel, Identifier, IdentifierKey};
use rdma_proto::time::Instant;

use crate::connection::Connection;
use crate::error::Error;
use crate::lend::RegisteredBuffer;
use crate::memory::Budget;
use crate::options::Options;
use crate::wait::{self, Descriptors};

use member::{Member, Stage};
use queues::{Lost, QueueId, Queues};
use watch::{MANY, Watch, Woken};

/// Times that [`Endpoint::progress`] looks at its queues before it lets the event loop have a turn.
const ROUNDS: u32 = 64;

/// Requests for a connection that one turn answers: each registers memory, and whoever has a connection waits meanwhile
/// (VR-RES-007).
const ACCEPTS: u32 = 16;

/// Names a connection of an endpoint. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(u64);

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
    /// There is room again, after a write that found too little, or memory can be lent again.
    Writable(ConnectionId),
    /// Some of what was lent has come back.
    Returned(ConnectionId),
    /// The connection has ended, or did not come about. What arrived before can still be read; then
    /// [`Endpoint::remove`] it.
    Ended(ConnectionId),
}

/// What an endpoint may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at the same time, those included that are being made and those on their way to their end. Whoever asks
    /// for one more is rejected.
    pub connections: usize,
    /// Bytes of registered memory of all connections together, before anybody has authenticated (VR-SEC-007). A peer whose
    /// connection does not fit is rejected; a connection that needs more than there is makes do with less, or fails.
    pub registered_bytes: u64,
}

impl Limits {
    /// Half of the memory that a machine with 4 GiB has for programs: about 1800 idle connections with windows of
    /// 1 MiB, as many as 10,000 with windows of 128 KiB, and still so little that strangers who connect and say nothing
    /// cannot make a small machine swap. A server that means to have more says so.
    pub const REGISTERED_BYTES: u64 = 2 << 30;
}

impl Default for Limits {
    /// 10,000 connections, as Valkey's `maxclients`, and [`Limits::REGISTERED_BYTES`].
    fn default() -> Self {
        Self { connections: 10_000, registered_bytes: Self::REGISTERED_BYTES }
    }
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
}

/// Connections that share an event channel and completion queues, driven by one event loop. Nothing here blocks but
/// [`Endpoint::wait`].
///
/// The loop is: wait until its descriptor ([`AsFd`]) is readable or [`Endpoint::next_timeout`] has come, call
/// [`Endpoint::progress`], take events with [`Endpoint::next_event`] until there is none. The descriptor may be watched
/// for its level or for its edges.
///
/// Connections do not share a protection domain, because an rkey opens a region to every queue pair of its domain: one
/// client could guess its way into another's window (VR-SEC-002). So they share no regions either; instead, an idle one has
/// little ([`Options::keep_memory`]).
pub struct Endpoint<B: Backend> {
    // Connections go before their queues, and those before the channel.
    members: HashMap<ConnectionId, Member<B>>,
    listeners: HashMap<IdentifierKey, (B::Identifier, Options)>,
    queues: Queues<B>,
    events: B::EventChannel,
    watch: Watch,
    backend: B,
    budget: Arc<Budget>,
    /// Whose connection-manager events are whose.
    identifiers: HashMap<IdentifierKey, ConnectionId>,
    /// When connections want to be looked at. An entry that is not its connection's [`Member::due`] is out of date.
    timers: BinaryHeap<Reverse<(Instant, ConnectionId)>>,
    /// Connections that have something to tell.
    telling: VecDeque<ConnectionId>,
    /// Connections that failed in a way that an event may explain.
    suspects: Vec<ConnectionId>,
    next: u64,
    /// Whether the last turn ended before all was done.
    unfinished: bool,
    usage: Usage,
}

impl<B: Descriptors> Endpoint<B> {
    /// An endpoint without connections.
    ///
    /// # Errors
    /// There is no RDMA device.
    pub fn new(backend: &B, limits: Limits) -> Result<Self, Error> {
        let events = backend.event_channel().map_err(Error::backend("opening RDMA"))?;
        Ok(Self {
            members: HashMap::new(),
            listeners: HashMap::new(),
            queues: Queues::new(),
            watch: Watch::new(&events)?,
            events,
            backend: backend.clone(),
            budget: Budget::new(limits),
            identifiers: HashMap::new(),
            timers: BinaryHeap::new(),
            telling: VecDeque::new(),
            suspects: Vec::new(),
            next: 0,
            unfinished: false,
            usage: Usage::default(),
        })
    }

    /// Listens on `address`; port 0 takes a free one. Accepted connections have these `options`.
    ///
    /// # Errors
    /// No RDMA device has that address, or it is taken, or the options are out of bounds.
    pub fn listen(&mut self, address: SocketAddr, options: Options) -> Result<ListenerId, Error> {
        options.protocol.check()?;
        let id = self.events.listen(address, 0).map_err(Error::backend("listening"))?;
        let key = id.key();
        self.listeners.insert(key, (id, options));
        Ok(ListenerId(key))
    }

    /// The address of a listener.
    pub fn local_addr(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.listeners.get(&listener.0)?.0.local_addr()
    }

    /// Listens no more. Connections that were accepted go on.
    pub fn close_listener(&mut self, listener: ListenerId) {
        self.listeners.remove(&listener.0);
    }

    /// Begins to connect to `peer`, from `local` if given. All of it may take `timeout`. Ends in [`Event::Opened`] or
    /// [`Event::Ended`].
    ///
    /// # Errors
    /// The options are out of bounds, or there are as many connections as may be.
    pub fn connect(
        &mut self,
        peer: SocketAddr,
        local: Option<SocketAddr>,
        timeout: Duration,
        options: Options,
    ) -> Result<ConnectionId, Error> {
        options.protocol.check()?;
        let place = self.budget.place()?;
        let identifier =
            self.events.create_id().map_err(Error::backend("creating a connection identifier"))?;
        let doing = "resolving the address";
        identifier.resolve_address(local, peer, timeout).map_err(Error::backend(doing))?;
        let key = identifier.key();
        let stage = Stage::Resolving { id: identifier, options, doing };
        let open_by = Some((self.backend.now().after(timeout), timeout));
        let id = self.enter(Member::new(stage, key, peer, place, None, open_by));
        self.schedule(id);
        Ok(id)
    }

    /// A connection, to ask it about itself; `None` if it is gone or not made yet.
    pub fn connection(&self, id: ConnectionId) -> Option<&Connection<B>> {
        self.members.get(&id)?.connection()
    }

    /// The peer of a connection.
    pub fn peer_addr(&self, id: ConnectionId) -> Option<SocketAddr> {
        self.members.get(&id).map(|member| member.peer)
    }

    /// Reads what has arrived; `None` when there is nothing now, `Some(0)` at the end of the stream.
    ///
    /// # Errors
    /// What ended the connection, once all that arrived before is read; or there is no such connection.
    pub fn read(&mut self, id: ConnectionId, into: &mut [u8]) -> Result<Option<usize>, Error> {
        let read = self.member(id)?.live()?.try_read(into)?;
        self.schedule(id);
        Ok(read)
    }

    /// Gives bytes back that were used where they lie, see [`Connection::arrived`].
    ///
    /// # Errors
    /// As [`Connection::consume`], or there is no such connection.
    pub fn consume(&mut self, id: ConnectionId, bytes: usize) -> Result<(), Error> {
        self.member(id)?.live()?.consume(bytes)?;
        self.schedule(id);
        Ok(())
    }

    /// Takes as many bytes as there is room for, and sends them as one notification. If that is not all, or `None` because
    /// there is no room, [`Event::Writable`] follows.
    ///
    /// # Errors
    /// What ended the connection, or there is no such connection.
    pub fn write(&mut self, id: ConnectionId, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        let wanted: usize = from.iter().map(|slice| slice.len()).sum();
        let member = self.member(id)?;
        let written = member.live()?.try_write(from)?;
        member.wants_room = written.unwrap_or(0) < wanted;
        self.schedule(id);
        Ok(written)
    }

    /// Sends from registered memory, see [`Connection::register`] and [`Connection::try_lend`]. If that is not all, or `None`
    /// because nothing can be lent now, [`Event::Writable`] follows; [`Event::Returned`] when memory has come back.
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
        member.wants_to_lend = lent.unwrap_or(0) < wanted;
        self.schedule(id);
        Ok(lent)
    }

    /// Begins a graceful end: what was written is delivered first, for at most `linger`; [`Event::Ended`] follows, and
    /// [`Endpoint::check`] says whether all of it arrived.
    ///
    /// # Errors
    /// There is no such connection.
    pub fn shutdown(&mut self, id: ConnectionId, linger: Duration) -> Result<(), Error> {
        self.member(id)?.shutdown(linger);
        self.settle(id);
        Ok(())
    }

    /// As [`Endpoint::shutdown`], and forgets the connection: nothing more is told of it, and it is removed when it has ended.
    ///
    /// # Errors
    /// There is no such connection.
    pub fn close(&mut self, id: ConnectionId, linger: Duration) -> Result<(), Error> {
        self.member(id)?.abandoned = true;
        self.shutdown(id, linger)
    }

    /// Removes a connection, and ends it at once if it has not ended: what was written may be lost.
    pub fn remove(&mut self, id: ConnectionId) {
        let Some(member) = self.members.remove(&id) else { return };
        self.identifiers.remove(&member.key);
        let (queue, options) = (member.queue, member.options());
        let pair = member.connection().map(Connection::queue_pair_number);
        drop(member);
        if let (Some(queue), Some(options)) = (queue, options) {
            self.queues.leave(queue, pair, &options);
        }
    }

    /// What ended a connection, if an error did.
    ///
    /// # Errors
    /// That error, or there is no such connection.
    pub fn check(&self, id: ConnectionId) -> Result<(), Error> {
        self.members.get(&id).ok_or(Error::NoSuchConnection)?.check()
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
        if self.unfinished || !self.telling.is_empty() || !self.suspects.is_empty() {
            return Some(self.backend.now());
        }
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// The backend's clock, which [`Endpoint::next_timeout`] is about.
    pub fn now(&self) -> Instant {
        self.backend.now()
    }

    /// Sleeps until there is something to do, at most for `limit`, and does it.
    ///
    /// # Errors
    /// As [`Endpoint::progress`].
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), Error> {
        let due = self.next_timeout().map(|at| at.since(self.now()));
        let [_woken] = wait::readable([self.as_fd()], due.into_iter().chain(limit).min())?;
        self.progress()
    }

    /// What has happened, if anything has.
    pub fn next_event(&mut self) -> Option<Event> {
        while let Some(id) = self.telling.front().copied() {
            let told = self.members.get_mut(&id).and_then(|member| member.tell(id));
            if told.is_some() {
                return told;
            }
            self.telling.pop_front();
        }
        None
    }

    /// Takes what has come for any connection, handles time, and posts what can be posted.
    ///
    /// # Errors
    /// The event channel is lost. What a single connection does wrong ends only that one, and what befalls a completion queue
    /// ends those that share it.
    pub fn progress(&mut self) -> Result<(), Error> {
        self.usage.turns += 1;
        let mut events = false;
        loop {
            let woken = self.watch.woken()?;
            for woken in &woken {
                match *woken {
                    Woken::Events => events = true,
                    Woken::Queue(queue) => {
                        let taken = self.queues.take_wakeups(queue);
                        self.unless_lost(taken);
                    }
                }
            }
            if woken.len() < MANY {
                break;
            }
        }
        // Requests that were left wait in the channel, which is readable for as long.
        events |= std::mem::replace(&mut self.unfinished, true);
        let mut accepts = ACCEPTS;
        for _ in 0..ROUNDS {
            let mut moved = self.take_completions();
            if events || !self.suspects.is_empty() {
                moved |= self.take_events(&mut accepts)?;
                events = false;
            }
            for id in std::mem::take(&mut self.suspects) {
                if let Some(connection) = self.members.get_mut(&id).and_then(Member::connection_mut) {
                    connection.conclude();
                }
                self.settle(id);
            }
            // Armed first and polled after: what comes in between is found in the next round.
            if !moved && !self.arm() {
                self.unfinished = accepts == 0;
                break;
            }
        }
        self.handle_times();
        Ok(())
    }

    /// Takes one batch of completions from each queue; true if there were any.
    fn take_completions(&mut self) -> bool {
        let mut any = false;
        for queue in self.queues.ids() {
            any |= self.take_batch(queue);
        }
        any
    }

    /// Arms every queue that has had its wake-up; true if there was any.
    fn arm(&mut self) -> bool {
        let mut any = false;
        for queue in self.queues.ids() {
            let armed = self.queues.arm(queue);
            any |= self.unless_lost(armed).unwrap_or(true);
        }
        any
    }

    /// What a call on a queue came to. A queue that is lost ends the connections whose completions it had, and no others.
    fn unless_lost<T>(&mut self, result: Result<T, Lost>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(Lost { call, owners }) => {
                tracing::warn!(connections = owners.len(), call, "a completion queue is lost");
                for id in owners {
                    if let Some(connection) = self.members.get_mut(&id).and_then(Member::connection_mut) {
                        connection.handle_refusal(call);
                    }
                    self.settle(id);
                }
                None
            }
        }
    }

    fn take_batch(&mut self, queue: QueueId) -> bool {
        let polled = self.queues.poll(queue);
        let Some(batch) = self.unless_lost(polled) else { return true };
        for (pair, run) in batch.runs() {
            // Nobody's: the last ones of a queue pair that is gone.
            let Some(id) = self.queues.owner(queue, pair) else { continue };
            if let Some(connection) = self.members.get_mut(&id).and_then(Member::connection_mut) {
                connection.handle_completions(run);
                if connection.is_suspect() {
                    self.suspects.push(id);
                }
            }
            self.settle(id);
        }
        !batch.is_empty()
    }

    /// Takes connection-manager events, until so many requests for a connection were answered; true if there were any.
    fn take_events(&mut self, accepts: &mut u32) -> Result<bool, Error> {
        let mut any = false;
        while *accepts > 0
            && let Some(CmEvent { id: key, kind }) =
                self.events.next_event().map_err(Error::backend("reading connection events"))?
        {
            any = true;
            if let CmEventKind::ConnectRequest { id, .. } = kind {
                self.request(key, id);
                *accepts -= 1;
                continue;
            }
            let Some(id) = self.identifiers.get(&key).copied() else { continue };
            if let Some(queue) = self.members.get(&id).and_then(|member| member.queue) {
                for _ in 0..ROUNDS {
                    if !self.take_batch(queue) {
                        break;
                    }
                }
            }
            self.handle_event(id, kind);
        }
        Ok(any)
    }

    fn handle_event(&mut self, id: ConnectionId, event: CmEventKind<B>) {
        let Some(member) = self.members.get_mut(&id) else { return };
        match &member.stage {
            Stage::Live(_) => {
                if let Some(connection) = member.connection_mut() {
                    connection.handle_event(event);
                }
            }
            Stage::Resolving { .. } => match member.resolved(event, self.backend.now()) {
                Ok(true) => self.ask(id),
                Ok(false) => {}
                Err(error) => self.fail(id, error),
            },
            Stage::Failed(_) => {}
        }
        self.settle(id);
    }

    fn fail(&mut self, id: ConnectionId, error: Error) {
        if let Some(member) = self.members.get_mut(&id) {
            member.fail(error);
        }
        self.settle(id);
    }

    /// Handles the time of all whose time has come.
    fn handle_times(&mut self) {
        let now = self.backend.now();
        while let Some(Reverse((at, id))) = self.timers.peek().copied().filter(|Reverse((at, _))| *at <= now)
        {
            self.timers.pop();
            let Some(member) = self.members.get_mut(&id).filter(|member| member.due == Some(at)) else {
                continue;
            };
            member.due = None;
            member.handle_time(now);
            self.settle(id);
        }
    }

    /// Notes what a connection has to tell, and when it must be looked at again.
    fn settle(&mut self, id: ConnectionId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        if member.notice() {
            self.telling.push_back(id);
        }
        if member.abandoned && member.has_ended() {
            self.remove(id);
            return;
        }
        self.schedule(id);
    }

    fn schedule(&mut self, id: ConnectionId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let Some(at) = member.next_timeout() else { return };
        if member.due.is_none_or(|due| at < due) {
            member.due = Some(at);
            self.timers.push(Reverse((at, id)));
        }
    }

    fn member(&mut self, id: ConnectionId) -> Result<&mut Member<B>, Error> {
        self.members.get_mut(&id).ok_or(Error::NoSuchConnection)
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
