//! One turn of the loop, and the handling of a connection in it.

use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::{Driven, DriverId, EventLoop, Handler, ListenerId, ListenerLost, Owner, SessionId, WakeOne};
use crate::session::{Registered, Session, SessionState, Stage};
use crate::transport::{Accepted, Driver, Interest, Source};

/// Requests that one listener handles in a turn, so that new peers delay no others (VR-RES-007).
const REQUESTS_PER_TURN: usize = 16;

/// How long a listener rests after descriptors or memory ran out.
const REST: Duration = Duration::from_millis(100);

impl<S> EventLoop<S> {
    /// Takes one turn: waits until there is work, for at most `timeout`, and does it.
    ///
    /// # Errors
    /// Returns an error if the system cannot wait, or if a listener is lost ([`ListenerLost`]). In
    /// the latter case the next turn continues with the others.
    pub fn turn(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if self.has_pending() {
            // Polled although there is work: busy connections must not starve the others.
            self.poll(Some(Duration::ZERO))?;
        } else if let Some(driver) = self.only_driver() {
            let timeout = timeout.into_iter().chain(self.timers_due()).min();
            driver.wait(timeout)?;
        } else {
            self.poll(self.wait_at_most(timeout))?;
        }
        // Listeners that ask again meanwhile have their next turn.
        for id in std::mem::take(&mut self.asked) {
            self.accept_some(id);
        }
        // A loop without timers reads no clock.
        let now = self.timers.nearest().map(|_| Instant::now());
        while let Some(owner) = now.and_then(|now| self.timers.take(now)) {
            match owner {
                Owner::Session(id) => self.drive(id, Interest::NONE),
                Owner::Listener(id) => {
                    if let Some(listener) = self.listeners.get_mut(id) {
                        listener.rests_until = None;
                    }
                    // Peers that came while it rested were reported then, and edges come once.
                    self.ask(id);
                }
                // Times of drivers are asked for in `wait_at_most`.
                Owner::Driver(_) => {}
            }
        }
        self.process_pending();
        match self.lost.pop_front() {
            Some(lost) => Err(io::Error::new(lost.source.kind(), lost)),
            None => Ok(()),
        }
    }

    /// Returns the driver if there is nothing else to wait for: its wait saves a system call.
    fn only_driver(&self) -> Option<Arc<dyn Driver>> {
        let mut drivers = self.drivers.values();
        let only = drivers.next().filter(|_| self.poller.has_one())?;
        Some(Arc::clone(&only.driver))
    }

    fn poll(&mut self, wait: Option<Duration>) -> io::Result<()> {
        for (owner, fired) in self.poller.wait(wait)? {
            match owner {
                Owner::Session(id) => self.drive(id, fired),
                Owner::Listener(id) => self.ask(id),
                Owner::Driver(id) => {
                    if let Some(driven) = self.drivers.get(id) {
                        driven.driver.drive();
                    }
                }
            }
        }
        // A driver's turn is bounded, and its descriptor reports the rest by no further edge.
        for Driven { driver, .. } in self.drivers.values() {
            if driver.next_timeout() == Some(Duration::ZERO) {
                driver.drive();
            }
        }
        Ok(())
    }

    fn wait_at_most(&self, timeout: Option<Duration>) -> Option<Duration> {
        let drivers = self.drivers.values().filter_map(|driven| driven.driver.next_timeout());
        timeout.into_iter().chain(self.timers_due()).chain(drivers).min()
    }

    fn timers_due(&self) -> Option<Duration> {
        self.timers.nearest().map(|at| at.saturating_duration_since(Instant::now()))
    }

    fn ask(&mut self, id: ListenerId) {
        if let Some(listener) = self.listeners.get_mut(id)
            && listener.rests_until.is_none()
            && !std::mem::replace(&mut listener.asked, true)
        {
            self.asked.push(id);
        }
    }

    fn accept_some(&mut self, id: ListenerId) {
        if let Some(listener) = self.listeners.get_mut(id) {
            listener.asked = false;
        }
        for _ in 0..REQUESTS_PER_TURN {
            // A handler may close the listener.
            let Some(listener) = self.listeners.get_mut(id) else { return };
            match listener.listening.accept() {
                Ok(Accepted::Connection(transport)) => {
                    let handler = listener.handler;
                    let connection = self.insert(Session::new(transport, SessionState::Accepting));
                    self.call(connection, handler);
                }
                // Concerns only its sender (VR-SEC-004).
                Ok(Accepted::Lost(error)) => {
                    tracing::debug!(%error, at = ?listener.listening.local_addr(), "a request failed");
                }
                // The queue is empty, so the next peer makes an edge.
                Ok(Accepted::Nobody) => return,
                Ok(Accepted::Over(source)) => {
                    let address = listener.listening.local_addr();
                    self.lost.push_back(ListenerLost { listener: id, address, source });
                    self.close_listener(id);
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, at = ?listener.listening.local_addr(), "cannot accept connections now");
                    let until = Instant::now() + REST;
                    self.timers.set(Owner::Listener(id), &mut listener.rests_until, Some(until));
                    return;
                }
            }
        }
        self.ask(id);
    }

    pub(super) fn insert(&mut self, connection: Session<S>) -> SessionId {
        let id = self.connections.insert(connection);
        let waker = Waker::from(Arc::new(WakeOne { id, woken: Arc::clone(&self.woken) }));
        if let Some(connection) = self.connections.get_mut(id) {
            connection.transport().set_waker(&waker);
        }
        self.touch(id);
        id
    }

    pub(super) fn begin_handshake(&mut self, id: SessionId, handler: Handler<S>) {
        let deadline = Instant::now().checked_add(self.timeouts.handshake);
        if let Some(connection) = self.connections.get_mut(id) {
            connection.loop_state.handshake = Some(handler);
            connection.loop_state.deadline = deadline;
        }
        self.touch(id);
    }

    pub(super) fn take_woken(&mut self) {
        let mut woken = self.woken.take(std::mem::take(&mut self.spare));
        for id in woken.drain(..) {
            self.drive(id, Interest::NONE);
        }
        self.spare = woken;
    }

    fn drive(&mut self, id: SessionId, fired: Interest) {
        if let Some(connection) = self.connections.get_mut(id) {
            connection.transport().drive(fired);
            self.make_pending(id);
        }
    }

    pub(super) fn dispatch(&mut self, id: SessionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        match connection.loop_state.stage {
            Stage::Parting => {
                let late = connection.loop_state.deadline.is_some_and(|at| at <= Instant::now());
                if connection.transport().is_over() || late {
                    self.remove(id);
                }
            }
            // One of its handlers runs; `call` parts with it afterwards.
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

    fn dispatch_handshake(&mut self, id: SessionId) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        // It waits to be accepted.
        if connection.loop_state.handshake.is_none() {
            return;
        }
        if !connection.go_on_establishing() {
            if connection.loop_state.deadline.is_none_or(|at| at > Instant::now()) {
                return;
            }
            connection.fail(io::Error::new(ErrorKind::TimedOut, "the handshake took too long"));
        }
        // Before the handler, which may close the connection and so set another.
        connection.loop_state.deadline = None;
        if let Some(handler) = connection.loop_state.handshake.take() {
            self.call(id, handler);
        }
    }

    fn call(&mut self, id: SessionId, handler: Handler<S>) {
        if let Some(connection) = self.connections.get_mut(id) {
            connection.loop_state.entered += 1;
        }
        handler(self, id);
        let Some(connection) = self.connections.get_mut(id) else { return };
        connection.loop_state.entered -= 1;
        if connection.loop_state.entered == 0 && connection.loop_state.stage == Stage::Leaving {
            self.part(id);
        }
        self.touch(id);
    }

    pub(super) fn part(&mut self, id: SessionId) {
        let linger = self.timeouts.linger;
        let Some(connection) = self.connections.get_mut(id) else { return };
        connection.loop_state.stage = Stage::Parting;
        // `EventLoop::abort` has set it to the time of the call.
        let aborted = connection.loop_state.deadline.is_some_and(|at| at <= Instant::now());
        if aborted || connection.state() == SessionState::Error {
            self.remove(id);
            return;
        }
        connection.loop_state.deadline = Instant::now().checked_add(linger);
        connection.transport().begin_close(linger);
        // It may be over at once, with no event to come.
        self.make_pending(id);
    }

    fn remove(&mut self, id: SessionId) {
        let Some(mut connection) = self.connections.remove(id) else { return };
        self.timers.set(Owner::Session(id), &mut connection.loop_state.timer, None);
        self.refusing -= usize::from(connection.loop_state.refusal.is_some());
        if let (Some(Registered::Own(source)), Source::Own(fd, _)) =
            (connection.loop_state.registered, connection.transport().source(Interest::NONE))
        {
            self.poller.remove(source, fd);
        }
        // Before drivers are counted: it may hold one.
        drop(connection);
        self.retire_drivers();
    }

    pub(super) fn retire_drivers(&mut self) {
        let poller = &mut self.poller;
        self.drivers.retain(|_, Driven { driver, source }| {
            // Listeners and transports hold the others.
            let used = Arc::strong_count(driver) > 1;
            if !used {
                poller.remove(*source, driver.descriptor());
            }
            used
        });
    }

    /// Marks a connection to be checked before the loop sleeps.
    pub(super) fn touch(&mut self, id: SessionId) {
        if let Some(connection) = self.connections.get_mut(id)
            && !std::mem::replace(&mut connection.loop_state.touched, true)
        {
            self.touched.push(id);
        }
    }

    pub(super) fn make_pending(&mut self, id: SessionId) {
        if let Some(connection) = self.connections.get_mut(id)
            && !std::mem::replace(&mut connection.loop_state.pending, true)
        {
            self.pending.push(id);
        }
    }

    /// Updates the poller, the timers and the pending list to the wishes of touched connections.
    pub(super) fn settle_touched(&mut self) {
        while let Some(id) = self.touched.pop() {
            if let Some(connection) = self.connections.get_mut(id) {
                connection.loop_state.touched = false;
                if let Err(error) = self.settle(id) {
                    self.lose(id, error);
                }
            }
        }
    }

    fn settle(&mut self, id: SessionId) -> io::Result<()> {
        self.register(id)?;
        let Some(connection) = self.connections.get_mut(id) else { return Ok(()) };
        let loop_state = &mut connection.loop_state;
        self.timers.set(Owner::Session(id), &mut loop_state.timer, loop_state.deadline);
        if connection.due().iter().any(Option::is_some) {
            self.make_pending(id);
        }
        Ok(())
    }

    fn register(&mut self, id: SessionId) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(id) else { return Ok(()) };
        if connection.loop_state.registered.is_some() {
            return Ok(());
        }
        // For both directions, once: a change of interest then costs no system call.
        let registered = match connection.transport().source(Interest::BOTH) {
            Source::Own(fd, _) => Registered::Own(self.poller.add(fd, Owner::Session(id))?),
            Source::Shared(driver) => {
                self.enlist(driver)?;
                Registered::WithDriver
            }
        };
        if let Some(connection) = self.connections.get_mut(id) {
            connection.loop_state.registered = Some(registered);
        }
        Ok(())
    }

    fn enlist(&mut self, driver: Arc<dyn Driver>) -> io::Result<()> {
        if self.drivers.values().any(|driven| Arc::ptr_eq(&driven.driver, &driver)) {
            return Ok(());
        }
        let poller = &mut self.poller;
        self.drivers.try_insert_with_key(|id: DriverId| {
            let source = poller.add(driver.descriptor(), Owner::Driver(id))?;
            io::Result::Ok(Driven { driver, source })
        })?;
        Ok(())
    }

    /// Fails a connection that cannot be watched. Its next read returns the error.
    fn lose(&mut self, id: SessionId, error: io::Error) {
        tracing::warn!(%error, "a connection cannot be watched");
        if let Some(connection) = self.connections.get_mut(id) {
            if connection.loop_state.stage == Stage::Parting {
                self.remove(id);
            } else {
                connection.fail(error);
                self.make_pending(id);
            }
        }
    }
}

/// Tells a peer why it is refused. The close waits until the text has arrived.
pub(super) fn say_why<S>(events: &mut EventLoop<S>, id: SessionId) {
    if let Some(connection) =
        events.get_mut(id).filter(|connection| connection.state() == SessionState::Connected)
    {
        let why = connection.loop_state.refusal.unwrap_or_default();
        if let Err(error) = connection.write_all(why) {
            tracing::debug!(%error, "a refused peer has left before it was told why");
        }
    }
    events.close(id);
}
