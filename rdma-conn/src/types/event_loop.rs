//! The loop that owns connections and listeners, waits for all of them, and calls their handlers.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use slotmap::{SlotMap, new_key_type};

use super::connection::{Connection, Stage, State};
use super::poller::{Poller, Watched};
use super::{Accepted, Address, ConnectionType, Interest, Listening, SOURCES};

/// Requests that one listener handles in one turn, so that those who come do not keep others from being served (VR-RES-007).
/// The rest are found in the next turn.
const REQUESTS_PER_TURN: usize = 16;

/// For how long a listener rests for which descriptors or memory have run out. Its descriptor stays readable meanwhile.
const PAUSE: Duration = Duration::from_millis(100);

new_key_type! {
    /// Names a connection of a loop; never used again for another.
    pub struct ConnectionId;
    /// Names a listener of a loop; never used again for another.
    pub struct ListenerId;
}

/// What is called when something can be done. What it needs is in the loop's [`state`](EventLoop::state).
pub type Handler<S> = fn(&mut EventLoop<S>, ConnectionId);

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Connecting and handshakes.
    pub handshake: Duration,
    /// Delivering what was written after a close.
    pub linger: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(5), linger: Duration::from_secs(2) }
    }
}

/// Connections and listeners of any types, and a state `S` of the program's own.
pub struct EventLoop<S> {
    /// What the handlers work on.
    pub state: S,
    /// How long things may take, from now on.
    pub timeouts: Timeouts,
    connections: SlotMap<ConnectionId, Connection<S>>,
    listeners: SlotMap<ListenerId, Listener<S>>,
    poller: Poller<Owner>,
    timers: BTreeSet<(Instant, Owner)>,
    /// Connections that somebody has had in hand since they were last looked at.
    touched: Vec<ConnectionId>,
    /// Connections that have something to do whatever their descriptors say.
    pending: Vec<ConnectionId>,
}

struct Listener<S> {
    listening: Box<dyn Listening>,
    handler: Handler<S>,
    watched: Option<Watched>,
}

/// Whose descriptor or timer it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Connection(ConnectionId, usize),
    Listener(ListenerId),
}

impl<S> EventLoop<S> {
    /// A loop with nothing in it.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn new(state: S) -> io::Result<Self> {
        Ok(Self {
            state,
            timeouts: Timeouts::default(),
            connections: SlotMap::with_key(),
            listeners: SlotMap::with_key(),
            poller: Poller::new()?,
            timers: BTreeSet::new(),
            touched: Vec::new(),
            pending: Vec::new(),
        })
    }

    /// Listens on an address. `handler` is called with each connection that comes, which it must [`accept`](Self::accept) or
    /// [`close`](Self::close).
    ///
    /// # Errors
    /// As [`ConnectionType::listen`].
    pub fn listen(
        &mut self,
        with: &impl ConnectionType,
        at: &Address,
        handler: Handler<S>,
    ) -> io::Result<ListenerId> {
        let listening = with.listen(at)?;
        let id = self.listeners.insert(Listener { listening, handler, watched: None });
        self.watch_listener(id, Interest::READ).inspect_err(|_| {
            self.listeners.remove(id);
        })?;
        Ok(id)
    }

    /// Closes a listener. Its connections go on.
    pub fn close_listener(&mut self, id: ListenerId) {
        // Its descriptor goes with it, so it does not matter if it cannot be taken out of the poller.
        let _ = self.watch_listener(id, Interest::NONE);
        self.timers.retain(|(_, owner)| *owner != Owner::Listener(id));
        self.listeners.remove(id);
    }

    /// Where a listener listens.
    pub fn listener_address(&self, id: ListenerId) -> Option<Address> {
        self.listeners.get(id)?.listening.address()
    }

    /// Begins to connect. `handler` is called when the connection is there, or has failed; not before the next turn.
    ///
    /// # Errors
    /// What can be told at once.
    pub fn connect(
        &mut self,
        with: &impl ConnectionType,
        to: &Address,
        from: Option<&Address>,
        handler: Handler<S>,
    ) -> io::Result<ConnectionId> {
        let transport = with.connect(to, from)?;
        let id = self.connections.insert(Connection::new(transport, State::Connecting));
        self.begin_handshake(id, handler);
        self.make_pending(id);
        Ok(id)
    }

    /// Connects and waits for it, for at most `timeout`. No handler is called meanwhile.
    ///
    /// # Errors
    /// Why there is no connection; [`TimedOut`](ErrorKind::TimedOut) when it takes too long.
    pub fn blocking_connect(
        &mut self,
        with: &impl ConnectionType,
        to: &Address,
        from: Option<&Address>,
        timeout: Duration,
    ) -> io::Result<ConnectionId> {
        let mut connection = Connection::new(with.connect(to, from)?, State::Connecting);
        connection.wait_established(timeout)?;
        let id = self.connections.insert(connection);
        self.touch(id);
        Ok(id)
    }

    /// Accepts a connection. `handler` is called when it is established, or has failed: at once where there is nothing to wait for.
    ///
    /// # Errors
    /// There is no such connection, or it was accepted before.
    pub fn accept(&mut self, id: ConnectionId, handler: Handler<S>) -> io::Result<()> {
        let acceptable = self.get(id).is_some_and(|connection| {
            connection.state() == State::Accepting && connection.life.handshake.is_none()
        });
        if !acceptable {
            return Err(io::Error::new(ErrorKind::InvalidInput, "no connection that waits to be accepted"));
        }
        self.begin_handshake(id, handler);
        self.dispatch(id);
        Ok(())
    }

    /// A connection, unless it was closed.
    pub fn get(&self, id: ConnectionId) -> Option<&Connection<S>> {
        self.connections.get(id).filter(|connection| connection.life.stage == Stage::Owned)
    }

    /// A connection, unless it was closed.
    pub fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Connection<S>> {
        self.touch(id);
        self.connections.get_mut(id).filter(|connection| connection.life.stage == Stage::Owned)
    }

    /// A connection, unless it was closed, and the loop's state beside it.
    pub fn get_with_state(&mut self, id: ConnectionId) -> Option<(&mut S, &mut Connection<S>)> {
        self.touch(id);
        let connection = self.connections.get_mut(id)?;
        (connection.life.stage == Stage::Owned).then_some((&mut self.state, connection))
    }

    /// The connections that were not closed.
    pub fn connections(&self) -> impl Iterator<Item = (ConnectionId, &Connection<S>)> {
        self.connections.iter().filter(|(_, connection)| connection.life.stage == Stage::Owned)
    }

    /// How many connections there are, closed ones whose last bytes are on their way included.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there is no connection at all.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// How many closed connections still have bytes on their way.
    pub fn parting(&self) -> usize {
        self.connections.values().filter(|connection| connection.life.stage != Stage::Owned).count()
    }

    /// Closes a connection: what was written is delivered in the background, for at most [`Timeouts::linger`]. In one of its
    /// handlers this takes effect when the handler returns.
    pub fn close(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        if connection.life.stage != Stage::Owned {
            return;
        }
        connection.life.stage = Stage::Leaving;
        connection.forget_handlers();
        if connection.life.entered == 0 {
            self.part(id);
        }
    }

    /// Ends a connection at once. What was written and has not arrived may be lost.
    pub fn abort(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        connection.forget_handlers();
        connection.life.deadline = Some(Instant::now());
        if connection.life.stage == Stage::Owned {
            self.close(id);
        }
    }

    /// Whether something can be done without waiting, so that the loop must not sleep.
    pub fn has_pending(&mut self) -> bool {
        self.settle_touched();
        !self.pending.is_empty()
    }

    /// Calls the handlers of connections that can go on, each once; how many connections.
    pub fn process_pending(&mut self) -> usize {
        self.settle_touched();
        let pending = std::mem::take(&mut self.pending);
        for id in &pending {
            if let Some(connection) = self.connections.get_mut(*id) {
                connection.life.pending = false;
                self.dispatch(*id);
            }
        }
        pending.len()
    }

    /// One turn: waits until something can be done, for at most `timeout`, and does it.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn turn(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let wait = if self.has_pending() {
            Some(Duration::ZERO)
        } else {
            let timer = self.timers.first().map(|(at, _)| at.saturating_duration_since(Instant::now()));
            [timeout, timer].into_iter().flatten().min()
        };
        for (owner, fired) in self.poller.wait(wait)? {
            match owner {
                Owner::Connection(id, source) => {
                    let mut all = [Interest::NONE; SOURCES];
                    if let Some(place) = all.get_mut(source) {
                        *place = fired;
                    }
                    self.drive(id, all);
                }
                Owner::Listener(id) => self.accept_all(id),
            }
        }
        let now = Instant::now();
        while let Some((_, owner)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.pop_first();
            match owner {
                Owner::Connection(id, _) => self.drive(id, [Interest::NONE; SOURCES]),
                Owner::Listener(id) => {
                    if let Err(error) = self.watch_listener(id, Interest::READ) {
                        tracing::error!(%error, "a listener is lost");
                    }
                }
            }
        }
        self.process_pending();
        Ok(())
    }

    /// Closes everything and waits until the last bytes have arrived or [`Timeouts::linger`] has passed.
    ///
    /// # Errors
    /// As [`EventLoop::turn`].
    pub fn finish(mut self) -> io::Result<S> {
        for id in self.listeners.keys().collect::<Vec<_>>() {
            self.close_listener(id);
        }
        for id in self.connections.keys().collect::<Vec<_>>() {
            self.close(id);
        }
        while !self.connections.is_empty() {
            self.turn(None)?;
        }
        Ok(self.state)
    }

    fn accept_all(&mut self, id: ListenerId) {
        for _ in 0..REQUESTS_PER_TURN {
            // A handler may close the listener.
            let Some(listener) = self.listeners.get_mut(id) else { return };
            match listener.listening.accept() {
                Ok(Accepted::Connection(transport)) => {
                    let handler = listener.handler;
                    let connection = Connection::new(transport, State::Accepting);
                    let connection = self.connections.insert(connection);
                    self.call(connection, handler);
                }
                // Its sender's concern alone (VR-SEC-004).
                Ok(Accepted::Lost(error)) => {
                    tracing::debug!(%error, at = ?listener.listening.address(), "a request came to nothing");
                }
                Ok(Accepted::Nobody) => return,
                Err(error) => {
                    tracing::warn!(%error, at = ?listener.listening.address(), "cannot accept connections now");
                    // Watched again when the timer has passed.
                    let _ = self.watch_listener(id, Interest::NONE);
                    self.timers.insert((Instant::now() + PAUSE, Owner::Listener(id)));
                    return;
                }
            }
        }
    }

    fn watch_listener(&mut self, id: ListenerId, interest: Interest) -> io::Result<()> {
        let Some(listener) = self.listeners.get_mut(id) else { return Ok(()) };
        let fd = listener.listening.descriptor();
        self.poller.watch(&mut listener.watched, fd, interest, Owner::Listener(id))
    }

    fn begin_handshake(&mut self, id: ConnectionId, handler: Handler<S>) {
        let deadline = Instant::now().checked_add(self.timeouts.handshake);
        if let Some(connection) = self.connections.get_mut(id) {
            connection.life.handshake = Some(handler);
            connection.life.deadline = deadline;
        }
        self.touch(id);
    }

    fn drive(&mut self, id: ConnectionId, fired: [Interest; SOURCES]) {
        if let Some(connection) = self.connections.get_mut(id) {
            connection.transport().drive(fired);
            self.make_pending(id);
        }
    }

    /// Does what can be done for a connection, once.
    fn dispatch(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        match connection.life.stage {
            Stage::Parting => {
                let late = connection.life.deadline.is_some_and(|at| at <= Instant::now());
                if connection.transport().is_over() || late {
                    self.remove(id);
                }
            }
            Stage::Leaving => {}
            Stage::Owned if connection.is_establishing() => self.dispatch_handshake(id),
            Stage::Owned => {
                for due in connection.due().into_iter().flatten() {
                    // The first handler may have closed the connection or changed the second.
                    if let Some(handler) = self.get(id).and_then(|connection| connection.handler(due)) {
                        self.call(id, handler);
                    }
                }
            }
        }
        self.touch(id);
    }

    fn dispatch_handshake(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        if connection.life.handshake.is_none() {
            return;
        }
        if !connection.go_on_establishing() {
            if connection.life.deadline.is_none_or(|at| at > Instant::now()) {
                return;
            }
            connection.fail(io::Error::new(ErrorKind::TimedOut, "the handshake took too long"));
        }
        connection.life.deadline = None;
        if let Some(handler) = connection.life.handshake.take() {
            self.call(id, handler);
        }
    }

    /// Calls a handler of a connection, which may close it.
    fn call(&mut self, id: ConnectionId, handler: Handler<S>) {
        if let Some(connection) = self.connections.get_mut(id) {
            connection.life.entered += 1;
        }
        handler(self, id);
        let Some(connection) = self.connections.get_mut(id) else { return };
        connection.life.entered -= 1;
        if connection.life.entered == 0 && connection.life.stage == Stage::Leaving {
            self.part(id);
        }
        self.touch(id);
    }

    /// Begins the end of a connection that its owner has closed.
    fn part(&mut self, id: ConnectionId) {
        let linger = self.timeouts.linger;
        let Some(connection) = self.connections.get_mut(id) else { return };
        connection.life.stage = Stage::Parting;
        let aborted = connection.life.deadline.is_some_and(|at| at <= Instant::now());
        if aborted || matches!(connection.state(), State::Closed | State::Error) {
            self.remove(id);
            return;
        }
        connection.life.deadline = Instant::now().checked_add(linger);
        connection.transport().begin_close(linger);
        self.make_pending(id);
    }

    fn remove(&mut self, id: ConnectionId) {
        let Some(mut connection) = self.connections.remove(id) else { return };
        if let Some(timer) = connection.life.timer {
            self.timers.remove(&(timer, Owner::Connection(id, 0)));
        }
        let mut watched = connection.life.watched;
        let sources = connection.transport().sources(Interest::NONE);
        for (index, (watched, source)) in watched.iter_mut().zip(sources).enumerate() {
            if let Some((fd, _)) = source {
                // It may be shared with what outlives the connection. If it is not, dropping it does the same.
                let _ = self.poller.watch(watched, fd, Interest::NONE, Owner::Connection(id, index));
            }
        }
    }

    /// Has a connection looked at before the loop sleeps.
    fn touch(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(id)
            && !std::mem::replace(&mut connection.life.touched, true)
        {
            self.touched.push(id);
        }
    }

    fn make_pending(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(id)
            && !std::mem::replace(&mut connection.life.pending, true)
        {
            self.pending.push(id);
        }
    }

    /// Brings the poller, the timers and the pending list into agreement with what connections want.
    fn settle_touched(&mut self) {
        while let Some(id) = self.touched.pop() {
            if let Some(connection) = self.connections.get_mut(id) {
                connection.life.touched = false;
                if let Err(error) = self.settle(id) {
                    self.lose(id, error);
                }
            }
        }
    }

    fn settle(&mut self, id: ConnectionId) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(id) else { return Ok(()) };
        let wanted = connection.wanted();
        let mut watched = connection.life.watched;
        for (index, (watched, source)) in
            watched.iter_mut().zip(connection.transport().sources(wanted)).enumerate()
        {
            if let Some((fd, interest)) = source {
                self.poller.watch(watched, fd, interest, Owner::Connection(id, index))?;
            }
        }
        connection.life.watched = watched;

        let soon = connection.transport().next_timeout().and_then(|left| Instant::now().checked_add(left));
        let timer = [soon, connection.life.deadline].into_iter().flatten().min();
        if let Some(old) = std::mem::replace(&mut connection.life.timer, timer) {
            self.timers.remove(&(old, Owner::Connection(id, 0)));
        }
        if let Some(timer) = timer {
            self.timers.insert((timer, Owner::Connection(id, 0)));
        }

        if connection.due().iter().any(Option::is_some) {
            self.make_pending(id);
        }
        Ok(())
    }

    /// A connection that cannot be watched is lost, which whoever reads it next is told.
    fn lose(&mut self, id: ConnectionId, error: io::Error) {
        tracing::warn!(%error, "a connection cannot be watched");
        if let Some(connection) = self.connections.get_mut(id) {
            if connection.life.stage == Stage::Parting {
                self.remove(id);
            } else {
                connection.fail(error);
                self.make_pending(id);
            }
        }
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
