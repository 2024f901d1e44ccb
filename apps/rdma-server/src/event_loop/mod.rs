//! The event loop: owns connections and listeners, waits for all of them, and calls their handlers.

mod turn;

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Wake;
use std::time::{Duration, Instant};

use rdma_conn::{Deadlines, Waker};
use slotmap::{SlotMap, new_key_type};

use crate::address::Address;
use crate::poller::{Poller, SourceId};
use crate::session::{Session, SessionState, Stage};
use crate::transport::{ConnectionType, Driver, Listening, LoopId};

new_key_type! {
    /// Identifies a connection of a loop; never reused.
    pub struct SessionId;
    /// Identifies a listener of a loop; never reused.
    pub struct ListenerId;
    struct DriverId;
}

/// Called when a connection can continue, with the loop and its [`state`](EventLoop::state).
pub type Handler<S> = fn(&mut EventLoop<S>, SessionId);

/// Time limits. Start from [`Timeouts::default`], then assign fields or chain their setters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timeouts {
    /// Limit for connecting and handshakes.
    pub handshake: Duration,
    /// Limit for delivering written bytes after a close.
    pub linger: Duration,
}

impl Timeouts {
    rdma_proto::setters! {
        handshake: Duration,
        linger: Duration,
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(5), linger: Duration::from_secs(2) }
    }
}

/// Connections and listeners of any types, and a state `S` of the program.
pub struct EventLoop<S> {
    /// The state that the handlers work on.
    pub state: S,
    /// Time limits, from now on.
    pub timeouts: Timeouts,
    id: LoopId,
    connections: SlotMap<SessionId, Session<S>>,
    listeners: SlotMap<ListenerId, Listener<S>>,
    drivers: SlotMap<DriverId, Driven>,
    poller: Poller<Owner>,
    timers: Deadlines<Instant, Owner>,
    touched: Vec<SessionId>,
    pending: Vec<SessionId>,
    /// An empty list, kept for its memory: taking a list leaves this one in its place.
    spare: Vec<SessionId>,
    /// Listeners at which peers may be waiting.
    asked: Vec<ListenerId>,
    woken: Arc<Woken>,
    refusing: usize,
    lost: VecDeque<ListenerLost>,
}

/// The error of a listener that stopped accepting, for example because its RDMA device was removed.
/// The listener is closed, and its connections continue as far as they can.
///
/// It is the inner error ([`io::Error::get_ref`]) of the one that [`EventLoop::turn`] and
/// [`Server::turn`](crate::Server::turn) return, once for each listener. The next turn continues
/// with all others. The program may listen again once the device is back.
#[derive(Debug, thiserror::Error)]
#[error("{} accepts no connections any more: {source}; listen there again when that is mended",
    address.as_ref().map_or_else(|| "a listener".to_owned(), ToString::to_string))]
#[non_exhaustive]
pub struct ListenerLost {
    /// The closed listener.
    pub listener: ListenerId,
    /// The address it listened on.
    pub address: Option<Address>,
    /// Why it was lost.
    pub source: io::Error,
}

struct Listener<S> {
    listening: Box<dyn Listening>,
    handler: Handler<S>,
    source: SourceId,
    asked: bool,
    rests_until: Option<Instant>,
}

struct Driven {
    driver: Arc<dyn Driver>,
    source: SourceId,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Session(SessionId),
    Listener(ListenerId),
    Driver(DriverId),
}

#[derive(Default)]
struct Woken(Mutex<Vec<SessionId>>);

impl Woken {
    fn take(&self, empty: Vec<SessionId>) -> Vec<SessionId> {
        // Swapped, so that a turn allocates nothing for what was woken.
        std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), empty)
    }
}

struct WakeOne {
    id: SessionId,
    woken: Arc<Woken>,
}

impl Wake for WakeOne {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Only noted: handlers run in a turn of the loop, and not inside of a driver.
        self.woken.0.lock().unwrap_or_else(PoisonError::into_inner).push(self.id);
    }
}

impl<S> EventLoop<S> {
    /// Returns an empty loop.
    ///
    /// # Errors
    /// Returns an error if the process has no descriptor left.
    pub fn new(state: S) -> io::Result<Self> {
        Ok(Self {
            state,
            timeouts: Timeouts::default(),
            id: LoopId::next(),
            connections: SlotMap::with_key(),
            listeners: SlotMap::with_key(),
            drivers: SlotMap::with_key(),
            poller: Poller::new()?,
            timers: Deadlines::new(),
            touched: Vec::new(),
            pending: Vec::new(),
            spare: Vec::new(),
            asked: Vec::new(),
            woken: Arc::default(),
            refusing: 0,
            lost: VecDeque::new(),
        })
    }

    /// Returns a waker that ends a waiting turn, from any thread.
    pub fn waker(&self) -> Waker {
        self.poller.waker()
    }

    /// Listens on an address. `handler` is called with each new connection, which it must
    /// [`accept`](Self::accept) or [`close`](Self::close).
    ///
    /// # Errors
    /// Returns an error if the address is taken, not of this machine, or not of this type.
    pub fn listen(
        &mut self,
        with: &impl ConnectionType,
        at: &Address,
        handler: Handler<S>,
    ) -> io::Result<ListenerId> {
        let listening = with.listen(self.id, at)?;
        let poller = &mut self.poller;
        let id = self.listeners.try_insert_with_key(|id| {
            let source = poller.add(listening.descriptor(), Owner::Listener(id))?;
            // `Poller::add` reports peers that wait already.
            io::Result::Ok(Listener { listening, handler, source, asked: false, rests_until: None })
        })?;
        Ok(id)
    }

    /// Closes a listener. Its connections go on.
    pub fn close_listener(&mut self, id: ListenerId) {
        if let Some(mut listener) = self.listeners.remove(id) {
            self.timers.set(Owner::Listener(id), &mut listener.rests_until, None);
            self.poller.remove(listener.source, listener.listening.descriptor());
        }
        // A listener holds the endpoint of its type, and may have been its last user.
        self.retire_drivers();
    }

    pub(crate) fn has_listener(&self, id: ListenerId) -> bool {
        self.listeners.contains_key(id)
    }

    /// Returns the address of a listener.
    pub fn listener_addr(&self, id: ListenerId) -> Option<Address> {
        self.listeners.get(id)?.listening.local_addr()
    }

    /// Begins to connect. `handler` is called when the connection is established or has failed, in
    /// the next turn at the earliest.
    ///
    /// # Errors
    /// Returns errors that are known at once. Others reach `handler`.
    pub fn connect(
        &mut self,
        with: &impl ConnectionType,
        to: &Address,
        from: Option<&Address>,
        handler: Handler<S>,
    ) -> io::Result<SessionId> {
        let transport = with.connect(self.id, to, from)?;
        let id = self.insert(Session::new(transport, SessionState::Connecting));
        self.begin_handshake(id, handler);
        // It may be established already, with no event to come: a Unix socket is.
        self.make_pending(id);
        Ok(id)
    }

    /// Connects, and waits for at most `timeout`. No handler is called meanwhile.
    ///
    /// # Errors
    /// Returns why there is no connection, [`TimedOut`](ErrorKind::TimedOut) if it takes too long.
    pub fn blocking_connect(
        &mut self,
        with: &impl ConnectionType,
        to: &Address,
        from: Option<&Address>,
        timeout: Duration,
    ) -> io::Result<SessionId> {
        // Not in the loop before it is established, so that no handler of it is called meanwhile.
        let mut connection = Session::new(with.connect(self.id, to, from)?, SessionState::Connecting);
        connection.wait_established(timeout)?;
        Ok(self.insert(connection))
    }

    /// Accepts a connection. `handler` is called when it is established or has failed, at once if
    /// there is nothing to wait for.
    ///
    /// # Errors
    /// Returns an error if there is no such connection, or if it was accepted before.
    pub fn accept(&mut self, id: SessionId, handler: Handler<S>) -> io::Result<()> {
        let acceptable = self.get(id).is_some_and(|connection| {
            connection.state() == SessionState::Accepting && connection.loop_state.handshake.is_none()
        });
        if !acceptable {
            return Err(io::Error::new(ErrorKind::InvalidInput, "no connection that waits to be accepted"));
        }
        self.begin_handshake(id, handler);
        self.dispatch(id);
        Ok(())
    }

    /// Refuses a connection: tells the peer why, and closes it. It costs little memory.
    ///
    /// # Errors
    /// Returns an error if there is no such connection, or if it was accepted before.
    pub fn refuse(&mut self, id: SessionId, why: &'static [u8]) -> io::Result<()> {
        if let Some(connection) = self.get_mut(id).filter(|connection| connection.is_establishing()) {
            connection.economize(why);
            // Counts until `turn::remove` finds the refusal in the session.
            self.refusing += 1;
        }
        self.accept(id, turn::say_why)
    }

    /// Returns how many connections are being refused.
    pub const fn refusing(&self) -> usize {
        self.refusing
    }

    /// Returns a connection, unless it was closed.
    pub fn get(&self, id: SessionId) -> Option<&Session<S>> {
        self.connections.get(id).filter(|connection| connection.loop_state.stage == Stage::Owned)
    }

    /// Returns a connection, unless it was closed.
    pub fn get_mut(&mut self, id: SessionId) -> Option<&mut Session<S>> {
        // The caller may set handlers that are due already.
        self.touch(id);
        self.connections.get_mut(id).filter(|connection| connection.loop_state.stage == Stage::Owned)
    }

    /// Returns a connection, unless it was closed, together with the loop's state.
    pub fn get_with_state(&mut self, id: SessionId) -> Option<(&mut S, &mut Session<S>)> {
        self.touch(id);
        let connection = self.connections.get_mut(id)?;
        (connection.loop_state.stage == Stage::Owned).then_some((&mut self.state, connection))
    }

    /// Returns the connections that were not closed.
    pub fn connections(&self) -> impl Iterator<Item = (SessionId, &Session<S>)> {
        self.connections.iter().filter(|(_, connection)| connection.loop_state.stage == Stage::Owned)
    }

    /// Returns the number of connections, including closed ones whose last bytes are on their way.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Returns whether there is no connection at all.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Returns how many closed connections still have bytes on their way.
    pub fn closing(&self) -> usize {
        self.connections.values().filter(|connection| connection.loop_state.stage != Stage::Owned).count()
    }

    /// Closes a connection. Written bytes are delivered in the background, for at most
    /// [`Timeouts::linger`]. In one of its handlers, this takes effect when the handler returns.
    pub fn close(&mut self, id: SessionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        if connection.loop_state.stage != Stage::Owned {
            return;
        }
        connection.loop_state.stage = Stage::Leaving;
        connection.forget_handlers();
        if connection.loop_state.entered == 0 {
            self.part(id);
        }
    }

    /// Ends a connection at once. Bytes that have not arrived may be lost. The peer sees that, by a
    /// reset over TCP and a missing `close_notify` over TLS. RDMA and Unix sockets have one kind of
    /// end.
    pub fn abort(&mut self, id: SessionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        connection.forget_handlers();
        connection.transport().reset();
        // `part` takes a time that has passed for an abort.
        connection.loop_state.deadline = Some(Instant::now());
        if connection.loop_state.stage == Stage::Owned {
            self.close(id);
        }
    }

    /// Returns whether there is work that needs no waiting, so that the loop must not sleep.
    pub fn has_pending(&mut self) -> bool {
        self.take_woken();
        self.settle_touched();
        // A turn returns one lost listener at a time.
        !self.pending.is_empty() || !self.asked.is_empty() || !self.lost.is_empty()
    }

    /// Calls the handlers of connections that can continue, each once. Returns their number.
    pub fn process_pending(&mut self) -> usize {
        self.take_woken();
        self.settle_touched();
        let mut pending = std::mem::take(&mut self.spare);
        // What handlers make pending meanwhile waits for the next turn: each is called once.
        std::mem::swap(&mut pending, &mut self.pending);
        let count = pending.len();
        for id in pending.drain(..) {
            if let Some(connection) = self.connections.get_mut(id) {
                connection.loop_state.pending = false;
                self.dispatch(id);
            }
        }
        self.spare = pending;
        count
    }

    /// Closes everything, and waits for the last bytes for at most [`Timeouts::linger`].
    ///
    /// # Errors
    /// Returns an error if the system cannot wait.
    pub fn finish(mut self) -> io::Result<S> {
        for id in self.listeners.keys().collect::<Vec<_>>() {
            self.close_listener(id);
        }
        // Otherwise a turn below returns that error, and ends this early.
        self.lost.clear();
        for id in self.connections.keys().collect::<Vec<_>>() {
            self.close(id);
        }
        while !self.connections.is_empty() {
            self.turn(None)?;
        }
        Ok(self.state)
    }
}

impl<S> std::fmt::Debug for EventLoop<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventLoop")
            .field("connections", &self.connections.len())
            .field("listeners", &self.listeners.len())
            .finish_non_exhaustive()
    }
}
