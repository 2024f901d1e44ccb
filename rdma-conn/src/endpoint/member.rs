//! A connection as its endpoint sees it.

use std::time::Duration;

use std::net::SocketAddr;

use rdma_proto::backend::{Backend, CmEventKind, Identifier, IdentifierKey};
use rdma_proto::time::Instant;
use rdma_proto::{State, TransportError};

use super::queues::QueueId;
use super::{ConnectionId, Event, ListenerId};
use crate::connection::Connection;
use crate::dial::{Resolved, resolved};
use crate::error::Error;
use crate::memory::Place;
use crate::options::Options;

/// How far a connection has come.
pub(super) enum Stage<B: Backend> {
    /// The address, or after it the route, is being resolved.
    Resolving { id: B::Identifier, options: Options, doing: &'static str },
    /// There is a queue pair.
    Live(Box<Connection<B>>),
    /// It has no queue pair and gets none.
    Failed(Error),
}

/// A connection of an endpoint.
pub(super) struct Member<B: Backend> {
    pub(super) stage: Stage<B>,
    pub(super) key: IdentifierKey,
    pub(super) peer: SocketAddr,
    pub(super) queue: Option<QueueId>,
    /// When it is looked at again: its current entry among the timers.
    pub(super) due: Option<Instant>,
    /// Whether a write found too little room.
    pub(super) wants_room: bool,
    /// Whether memory could not be lent.
    pub(super) wants_to_lend: bool,
    /// Whether nobody wants to hear of it any more.
    pub(super) abandoned: bool,
    /// It counts for as long as it is here, also on its way to its end.
    _place: Place,
    listener: Option<ListenerId>,
    /// When a connection that this side asked for must be there, and how long that may take.
    open_by: Option<(Instant, Duration)>,
    /// Whether this side has begun to end it.
    shut: bool,
    news: News,
    /// Whether it stands among those that have something to tell.
    telling: bool,
}

/// What is to be told, and what was.
#[derive(Clone, Copy, Debug, Default)]
struct News {
    opened: bool,
    readable: bool,
    writable: bool,
    returned: bool,
    ended: bool,
    was_opened: bool,
    has_ended: bool,
    /// Bytes that had arrived when it was last said that there are some.
    received: u64,
    /// Parts of buffers that had come back when it was last said that some have.
    came_back: u64,
}

impl<B: Backend> Member<B> {
    pub(super) fn new(
        stage: Stage<B>,
        key: IdentifierKey,
        peer: SocketAddr,
        place: Place,
        listener: Option<ListenerId>,
        open_by: Option<(Instant, Duration)>,
    ) -> Self {
        Self {
            stage,
            key,
            peer,
            queue: None,
            due: None,
            wants_room: false,
            wants_to_lend: false,
            abandoned: false,
            _place: place,
            listener,
            open_by,
            shut: false,
            news: News::default(),
            telling: false,
        }
    }

    pub(super) fn connection(&self) -> Option<&Connection<B>> {
        match &self.stage {
            Stage::Live(connection) => Some(connection),
            Stage::Resolving { .. } | Stage::Failed(_) => None,
        }
    }

    pub(super) fn connection_mut(&mut self) -> Option<&mut Connection<B>> {
        match &mut self.stage {
            Stage::Live(connection) => Some(connection),
            Stage::Resolving { .. } | Stage::Failed(_) => None,
        }
    }

    /// The connection, for a call that needs one.
    pub(super) fn live(&mut self) -> Result<&mut Connection<B>, Error> {
        match &mut self.stage {
            Stage::Live(connection) => Ok(connection),
            Stage::Resolving { .. } => Err(Error::NoSuchConnection),
            Stage::Failed(error) => Err(error.clone()),
        }
    }

    /// The settings with which it has its place in a queue.
    pub(super) fn options(&self) -> Option<Options> {
        self.connection().map(|connection| *connection.options())
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        match &self.stage {
            Stage::Resolving { .. } => Ok(()),
            Stage::Failed(error) => Err(error.clone()),
            Stage::Live(connection) => {
                connection.check()?;
                let lost = connection.state() == State::Closed
                    && (!self.is_open() || self.shut && connection.unconfirmed() > 0);
                if lost { Err(connection.end()) } else { Ok(()) }
            }
        }
    }

    /// A connection that this side asked for is there when the peer has registered a window: only then can a byte leave.
    fn is_open(&self) -> bool {
        self.connection().is_some_and(|connection| {
            connection.state() != State::Connecting && (self.listener.is_some() || connection.is_registered())
        })
    }

    pub(super) fn has_ended(&self) -> bool {
        match &self.stage {
            Stage::Resolving { .. } => false,
            Stage::Failed(_) => true,
            Stage::Live(connection) => {
                matches!(connection.state(), State::Closed | State::Failed(_)) || connection.check().is_err()
            }
        }
    }

    /// Handles an event of the time before there is a queue pair; true once the peer can be asked.
    pub(super) fn resolved(&mut self, event: CmEventKind<B>, now: Instant) -> Result<bool, Error> {
        let Stage::Resolving { id, doing, .. } = &mut self.stage else { return Ok(false) };
        match resolved(event, self.peer)? {
            None => Ok(false),
            Some(Resolved::Address) => {
                *doing = "resolving the route";
                let left = self.open_by.map_or(Duration::ZERO, |(at, _)| at.since(now));
                id.resolve_route(left).map_err(Error::backend(doing))?;
                Ok(false)
            }
            Some(Resolved::Route) => Ok(true),
        }
    }

    /// What a connection is made of, once the peer can be asked for it.
    pub(super) fn take_resolved(&mut self) -> Option<(B::Identifier, Options)> {
        match std::mem::replace(&mut self.stage, Stage::Failed(Error::NoSuchConnection)) {
            Stage::Resolving { id, options, .. } => Some((id, options)),
            other => {
                self.stage = other;
                None
            }
        }
    }

    pub(super) fn fail(&mut self, error: Error) {
        match &mut self.stage {
            Stage::Live(connection) => connection.fail(error),
            stage => *stage = Stage::Failed(error),
        }
    }

    pub(super) fn shutdown(&mut self, linger: Duration) {
        self.shut = true;
        match &mut self.stage {
            Stage::Live(connection) => connection.close(linger),
            stage @ Stage::Resolving { .. } => *stage = Stage::Failed(TransportError::Disconnected.into()),
            Stage::Failed(_) => {}
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let open_by = self.open_by.filter(|_| !self.is_open() && !self.has_ended()).map(|(at, _)| at);
        open_by.into_iter().chain(self.connection().and_then(Connection::next_timeout)).min()
    }

    pub(super) fn handle_time(&mut self, now: Instant) {
        if let Some((at, after)) = self.open_by.filter(|_| !self.is_open())
            && now >= at
        {
            let doing = match &self.stage {
                Stage::Resolving { doing, .. } => doing,
                Stage::Live(connection) if connection.state() == State::Connecting => "connecting",
                Stage::Live(_) | Stage::Failed(_) => "waiting for the server to register its window",
            };
            self.fail(Error::TimedOut { doing, after });
        }
        if let Some(connection) = self.connection_mut() {
            connection.handle_time();
        }
    }

    /// Notes what there is to tell. True if it has to be put among those that have something to tell.
    pub(super) fn notice(&mut self) -> bool {
        let (is_open, has_ended) = (self.is_open(), self.has_ended());
        let news = &mut self.news;
        news.opened |= is_open && !news.was_opened;
        news.was_opened |= is_open;
        news.ended |= has_ended && !news.has_ended;
        news.has_ended |= has_ended;
        if let Stage::Live(connection) = &self.stage {
            let received = connection.counters().bytes_received;
            news.readable |= is_open && received > news.received;
            if is_open {
                news.received = received;
            }
            if self.wants_room && connection.has_room() {
                self.wants_room = false;
                news.writable = true;
            }
            if self.wants_to_lend && connection.can_lend() {
                self.wants_to_lend = false;
                news.writable = true;
            }
            let came_back = connection.work().returned;
            news.returned |= came_back > news.came_back;
            news.came_back = came_back;
        }
        let any = news.opened || news.readable || news.writable || news.returned || news.ended;
        let enters = any && !self.telling && !self.abandoned;
        self.telling |= enters;
        enters
    }

    /// The next thing there is to tell.
    pub(super) fn tell(&mut self, id: ConnectionId) -> Option<Event> {
        let news = &mut self.news;
        let told = if self.abandoned {
            None
        } else if std::mem::take(&mut news.opened) {
            Some(Event::Opened { id, listener: self.listener })
        } else if std::mem::take(&mut news.readable) {
            Some(Event::Readable(id))
        } else if std::mem::take(&mut news.writable) {
            Some(Event::Writable(id))
        } else if std::mem::take(&mut news.returned) {
            Some(Event::Returned(id))
        } else {
            std::mem::take(&mut news.ended).then_some(Event::Ended(id))
        };
        self.telling = told.is_some();
        told
    }
}
