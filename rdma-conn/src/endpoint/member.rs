//! A connection and its endpoint's bookkeeping.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_backend::{Backend, CmEventKind, IdentifierKey};
use rdma_proto::{Role, State, TransportError};

use super::observed::Observed;
use super::{ConnectionId, Event, ListenerId};
use crate::budget::{Newcomer, Place};
use crate::connecting::Connecting;
use crate::connection::Connection;
use crate::domain::ProtectionDomain;
use crate::error::Error;
use crate::options::Options;

pub(super) struct Member<B: Backend> {
    /// The steps left until it is open; `None` once it is open or has ended.
    pub(super) connecting: Option<Connecting<B>>,
    /// `None` until there is a queue pair.
    pub(super) connection: Option<Box<Connection<B>>>,
    /// Why it never had a queue pair.
    failure: Option<Error>,
    pub(super) options: Options,
    pub(super) domain: Option<ProtectionDomain<B>>,
    pub(super) key: IdentifierKey,
    pub(super) peer: SocketAddr,
    pub(super) queue: Option<usize>,
    /// Its recorded entry in the timers.
    pub(super) due: Option<Instant>,
    pub(super) touched: bool,
    pub(super) waits: Waits,
    /// Whether its events are unwanted and it is forgotten at its end.
    pub(super) abandoned: bool,
    listener: Option<ListenerId>,
    open: bool,
    closed: bool,
    pending: PendingEvents,
    /// Whether it is queued to report events.
    telling: bool,
    observed: Observed,
    /// Its place in the backlog, until the program has it. It has no window before.
    newcomer: Option<Newcomer>,
    /// Since when it is dispensable, as the list of those has it.
    dispensable_since: Option<Instant>,
    /// Its place in the connection limit, also while it closes.
    _place: Place,
}

/// Calls that returned `None` and are owed an [`Event::Writable`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waits {
    pub(super) lend: bool,
    pub(super) flush: bool,
}

impl Waits {
    #[inline]
    const fn any(self) -> bool {
        self.lend | self.flush
    }
}

/// Bits of pending events, in the order in which they are reported.
pub(super) const OPENED: u8 = 1;
pub(super) const READABLE: u8 = 2;
pub(super) const WRITABLE: u8 = 4;
pub(super) const RETURNED: u8 = 8;
pub(super) const ENDED: u8 = 16;

/// Pending events, and what was already reported.
#[derive(Clone, Copy, Debug, Default)]
struct PendingEvents {
    events: u8,
    was_opened: bool,
    has_ended: bool,
    /// Bytes that had arrived at the last [`Event::Readable`].
    received: u64,
    /// Parts of buffers that had come back at the last [`Event::Returned`].
    came_back: u64,
}

impl PendingEvents {
    #[inline]
    const fn any(&self) -> bool {
        self.events != 0
    }

    #[inline]
    const fn add(&mut self, event: u8, happened: bool) {
        if happened {
            self.events |= event;
        }
    }

    /// Removes the first event and returns it; 0 if there is none.
    #[inline]
    const fn take_first(&mut self) -> u8 {
        // The lowest bit: a number and its two's complement have only that in common.
        let first = self.events & self.events.wrapping_neg();
        self.events ^= first;
        first
    }
}

impl<B: Backend> Member<B> {
    pub(super) fn new(
        connecting: Connecting<B>,
        (key, peer): (IdentifierKey, SocketAddr),
        options: Options,
        place: Place,
        role: Role,
    ) -> Self {
        Self {
            connecting: Some(connecting),
            connection: None,
            failure: None,
            options,
            domain: None,
            key,
            peer,
            queue: None,
            due: None,
            touched: false,
            waits: Waits::default(),
            abandoned: false,
            listener: None,
            open: false,
            closed: false,
            pending: PendingEvents::default(),
            telling: false,
            observed: Observed::begun(role, peer),
            newcomer: None,
            dispensable_since: None,
            _place: place,
        }
    }

    /// Makes it a connection that a listener accepted and that the program does not have yet.
    pub(super) fn arrives(mut self, listener: ListenerId, newcomer: Newcomer) -> Self {
        (self.listener, self.newcomer) = (Some(listener), Some(newcomer));
        self
    }

    pub(super) const fn listener(&self) -> Option<ListenerId> {
        self.listener
    }

    pub(super) const fn is_newcomer(&self) -> bool {
        self.newcomer.is_some()
    }

    pub(super) const fn is_closed(&self) -> bool {
        self.closed
    }

    /// Records since when the program does not use a newcomer: its handshake begins, or the program
    /// closes it. The later time replaces the earlier one.
    pub(super) const fn set_dispensable(&mut self, since: Instant) {
        self.dispensable_since = Some(since);
    }

    /// Returns whether the program does not use a newcomer since this time: it has not heard of it,
    /// or has closed it.
    pub(super) fn is_dispensable(&self, since: Instant) -> bool {
        self.is_newcomer() && (!self.open || self.closed) && self.dispensable_since == Some(since)
    }

    /// Registers its window: the program has it now. Does nothing if the program has closed it.
    pub(super) fn admit(&mut self) -> Result<(), Error> {
        if let Some(connection) = self.connection.as_mut().filter(|_| !self.closed) {
            connection.admit()?;
            self.newcomer = None;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn live(&mut self) -> Result<&mut Connection<B>, Error> {
        match &mut self.connection {
            Some(connection) => Ok(connection),
            None => Err(Self::never_lived(&self.failure)),
        }
    }

    #[cold]
    fn never_lived(failure: &Option<Error>) -> Error {
        failure.clone().unwrap_or(Error::NoSuchConnection)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        match (&self.connection, &self.failure) {
            (_, Some(error)) => Err(error.clone()),
            (None, None) => Ok(()),
            (Some(connection), None) => {
                connection.check()?;
                // An end in order is an error to a connect (VR-CONN-006), and to a close whose
                // bytes did not all arrive (VR-CLOSE-004).
                let lost = connection.state() == State::Closed
                    && (!self.open || self.closed && connection.unconfirmed() > 0);
                if lost { Err(connection.end()) } else { Ok(()) }
            }
        }
    }

    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.abandoned && self.has_ended()
    }

    /// Queues it in `telling` if events are wanted, and in `touched` if its due time may be nearer.
    pub(super) fn note(
        &mut self,
        id: ConnectionId,
        touched: &mut Vec<ConnectionId>,
        telling: Option<&mut VecDeque<ConnectionId>>,
    ) {
        if let Some(telling) = telling
            && self.notice()
        {
            telling.push_back(id);
        }
        self.note_sooner(id, touched);
    }

    #[inline]
    pub(super) fn note_sooner(&mut self, id: ConnectionId, touched: &mut Vec<ConnectionId>) {
        if self.connection.as_mut().is_some_and(|connection| connection.take_sooner()) {
            self.touch(id, touched);
        }
    }

    pub(super) fn touch(&mut self, id: ConnectionId, touched: &mut Vec<ConnectionId>) {
        if !std::mem::replace(&mut self.touched, true) {
            touched.push(id);
        }
    }

    pub(super) const fn is_open(&self) -> bool {
        self.open
    }

    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        match &self.connection {
            None => self.failure.is_some(),
            Some(connection) => connection.has_ended(),
        }
    }

    pub(super) fn handle_event(&mut self, event: CmEventKind<B>, now: Instant) -> Option<B::Identifier> {
        let _inside = self.observed.span().clone().entered();
        if let Some(connection) = &mut self.connection {
            connection.handle_event(event);
            return None;
        }
        match self.connecting.as_mut()?.handle_event(event, self.peer, now) {
            Ok(route) => route,
            Err(error) => {
                self.fail(error);
                None
            }
        }
    }

    pub(super) fn fail(&mut self, error: Error) {
        match &mut self.connection {
            Some(connection) => connection.fail(error),
            // Only the first error counts (VR-CLOSE-006).
            None => _ = self.failure.get_or_insert(error),
        }
    }

    pub(super) fn close(&mut self, linger: Duration) {
        self.closed = true;
        match &mut self.connection {
            Some(connection) => connection.close(linger),
            // Without a queue pair it has taken no byte to deliver, so the attempt is given up.
            None => self.fail(TransportError::Disconnected.into()),
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let connection = self.connection.as_ref().and_then(|connection| connection.next_timeout());
        match &self.connecting {
            Some(connecting) => Some(connection.map_or(connecting.by(), |at| at.min(connecting.by()))),
            None => connection,
        }
    }

    /// `unread`: whether there may be events that were not read.
    pub(super) fn handle_time(&mut self, now: Instant, unread: bool) {
        if let Some(connecting) = &mut self.connecting
            && connecting.is_late(now, unread)
        {
            let error = connecting.too_late(self.connection.as_deref());
            self.fail(error);
        }
        if let Some(connection) = &mut self.connection {
            connection.handle_time(now);
        }
    }

    /// Advances the handshake. Forgets an accepted connection that ends before the program saw it.
    #[inline]
    pub(super) fn advance(&mut self) {
        if self.connecting.is_some() {
            self.advance_connecting();
        }
    }

    fn advance_connecting(&mut self) {
        let Some(connecting) = &self.connecting else { return };
        if self.connection.as_ref().is_some_and(|connection| connecting.is_done(connection)) {
            self.open = true;
            self.observed.opened();
            self.connecting = None;
        } else if self.has_ended() {
            self.connecting = None;
            if self.listener.is_some() {
                tracing::debug!(peer = %self.peer, error = ?self.check().err(), "never established");
                self.abandoned = true;
            }
        }
    }

    /// Records new events. Returns true if the connection must be queued to report them.
    fn notice(&mut self) -> bool {
        // Compares with what was reported last. So it does not matter which call or completion
        // changed the connection, or how often.
        if self.open != self.pending.was_opened || self.has_ended() != self.pending.has_ended {
            self.notice_stage();
        }
        let Some(connection) = &self.connection else { return self.enters() };
        let came_back = connection.returned_parts();
        let pending = &mut self.pending;
        pending.add(RETURNED, came_back > pending.came_back);
        pending.came_back = came_back;
        // No descriptor tells of room, so the connection is asked: only for calls that found none.
        if self.waits.any() || connection.lacks_room {
            self.notice_answers();
        }
        self.has_more_bytes();
        self.enters()
    }

    /// Like `notice`, for bytes only.
    #[inline]
    pub(super) fn notice_bytes(&mut self) -> bool {
        self.has_more_bytes() && self.enters()
    }

    #[inline]
    fn has_more_bytes(&mut self) -> bool {
        let Some(connection) = &self.connection else { return false };
        let received = connection.bytes_received();
        // Bytes may come before it is established (VR-CONN-007). They are reported after `Opened`.
        if !self.open || received <= self.pending.received {
            return false;
        }
        self.pending.received = received;
        self.pending.add(READABLE, true);
        true
    }

    #[inline(never)]
    fn notice_answers(&mut self) {
        let (Some(connection), waits) = (&mut self.connection, &mut self.waits) else { return };
        let room = connection.lacks_room && connection.has_room();
        let lend = waits.lend && connection.can_lend();
        // An error is an answer, too.
        let flush = waits.flush && !matches!(connection.flushed(), Ok(None));
        connection.lacks_room &= !room;
        waits.lend &= !lend;
        waits.flush &= !flush;
        self.pending.add(WRITABLE, room || lend || flush);
    }

    #[cold]
    fn notice_stage(&mut self) {
        let has_ended = self.has_ended();
        let pending = &mut self.pending;
        pending.add(OPENED, self.open && !pending.was_opened);
        pending.was_opened |= self.open;
        pending.add(ENDED, has_ended && !pending.has_ended);
        pending.has_ended |= has_ended;
    }

    #[inline]
    const fn enters(&mut self) -> bool {
        if self.telling || self.abandoned || !self.pending.any() {
            return false;
        }
        self.telling = true;
        true
    }

    #[inline]
    pub(super) fn tell(&mut self, id: ConnectionId) -> Option<Event> {
        // Recorded before the connection was abandoned.
        if self.abandoned {
            self.pending.events = 0;
        }
        let told = match self.pending.take_first() {
            OPENED => Some(Event::Opened { id, listener: self.listener }),
            READABLE => Some(Event::Readable(id)),
            WRITABLE => Some(Event::Writable(id)),
            RETURNED => Some(Event::Returned(id)),
            ENDED => Some(Event::Ended(id)),
            _ => None,
        };
        self.telling = self.pending.any();
        told
    }

    /// Takes all events, and the listener that accepted it if it was opened.
    #[inline]
    pub(super) fn tell_all(&mut self) -> (u32, Option<ListenerId>) {
        self.telling = false;
        let events = std::mem::take(&mut self.pending.events);
        let events = if self.abandoned { 0 } else { events };
        (events.into(), if events & OPENED == 0 { None } else { self.listener })
    }

    #[inline]
    pub(super) const fn is_telling(&self) -> bool {
        self.telling
    }
}

impl<B: Backend> Drop for Member<B> {
    fn drop(&mut self) {
        self.observed.ended(self.check().err().as_ref());
    }
}
