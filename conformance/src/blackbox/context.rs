//! The context in which a case's body runs: the target, and a way to connect to it.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use raw_peer::Offer;
use rdma_conn::Descriptors;

use super::case::Role;
use super::responder::Responder;
use super::results::Teardown;
use super::session::Session;
use super::target::{Exit, Running, TargetClients, TargetServer, with_last_lines};
use crate::tester::{Breach, Incoming, Listener, Peer, Shape};
use suite::Stop;

/// A target, and the backend through which the suite reaches it.
pub struct Context<'a, B: Descriptors> {
    /// The suite's backend.
    pub backend: &'a B,
    /// How long anything that must happen may take.
    pub patience: Duration,
    /// The id of the case.
    pub case: &'static str,
    /// The target.
    pub side: Side<'a, B>,
    pub(super) teardown: Cell<Option<Teardown>>,
    pub(super) breaches: RefCell<Vec<Breach>>,
    /// The last lines that a client under test had printed when its session ended.
    pub(super) printed: RefCell<String>,
}

/// The target.
pub enum Side<'a, B: Descriptors> {
    /// A server.
    Server(&'a dyn TargetServer),
    /// A client, which is started so that it connects to the suite's listener.
    Client(&'a Listener<B>, &'a dyn TargetClients),
}

impl<B: Descriptors> Clone for Side<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Descriptors> Copy for Side<'_, B> {}

impl<'a, B: Descriptors> Context<'a, B> {
    /// Creates the context of one case.
    pub const fn new(backend: &'a B, patience: Duration, case: &'static str, side: Side<'a, B>) -> Self {
        Self {
            backend,
            patience,
            case,
            side,
            teardown: Cell::new(None),
            breaches: RefCell::new(Vec::new()),
            printed: RefCell::new(String::new()),
        }
    }

    /// Returns the target's role.
    pub const fn role(&self) -> Role {
        match self.side {
            Side::Server(_) => Role::Server,
            Side::Client(..) => Role::Client,
        }
    }

    /// Returns the server under test.
    ///
    /// # Errors
    /// It is a client.
    pub fn server(&self) -> Result<&'a dyn TargetServer, Stop> {
        match self.side {
            Side::Server(server) => Ok(server),
            Side::Client(..) => Err(Stop::not_applicable("about servers only")),
        }
    }

    /// Connects the suite's peer to the target. Neither side has sent anything when this returns.
    ///
    /// # Errors
    /// There is no connection.
    pub fn connect(&self, shape: Shape) -> Result<Session<'_, B>, Stop> {
        let shape = Shape { patience: self.patience, ..shape };
        match self.side {
            Side::Server(server) => {
                let peer = Peer::dial(self.backend, server.address(), shape)?;
                Ok(Session::new(self, peer, None))
            }
            Side::Client(listener, _) => {
                let (id, offered, client) = self.request()?;
                let mut peer = listener.answer(id, shape)?;
                peer.was_offered(offered);
                peer.serves = true;
                peer.await_established()?;
                Ok(Session::new(self, peer, Some(client)))
            }
        }
    }

    /// Connects, and exchanges windows.
    ///
    /// # Errors
    /// There is no connection, or no window.
    pub fn open(&self) -> Result<Session<'_, B>, Stop> {
        self.open_as(Shape::default())
    }

    /// Connects with another shape, and exchanges windows.
    ///
    /// # Errors
    /// There is no connection, or no window.
    pub fn open_as(&self, shape: Shape) -> Result<Session<'_, B>, Stop> {
        let mut session = self.connect(shape)?;
        session.peer.handshake()?;
        Ok(session)
    }

    /// Connects, and exchanges windows, at these places of the suite's memory: `(offset, length)`,
    /// one after the other.
    ///
    /// # Errors
    /// There is no connection, or no window.
    pub fn open_with(&self, plan: Vec<(u32, u32)>) -> Result<Session<'_, B>, Stop> {
        let mut session = self.connect(Shape::default())?;
        session.peer.plan = plan;
        session.peer.handshake()?;
        Ok(session)
    }

    /// Starts a client under test, and returns its connect request.
    ///
    /// # Errors
    /// The client makes no request.
    #[expect(clippy::type_complexity, reason = "used in two places, and taken apart at once")]
    pub fn request(&self) -> Result<(B::Identifier, Offer, Box<dyn Running>), Stop> {
        let Side::Client(listener, clients) = self.side else {
            return Err(Stop::not_applicable("about clients only"));
        };
        // A client of an earlier case may have sent one more.
        while listener.request_within(Duration::ZERO)?.is_some() {}
        let mut client = clients.start(self.case, listener.address()?).map_err(Stop::broken)?;
        for _ in 0..clients.first() {
            self.introduce(listener)?;
        }
        let deadline = Instant::now() + 3 * self.patience;
        loop {
            if let Some((id, offered)) =
                listener.request_within(self.patience.min(Duration::from_millis(200)))?
            {
                return Ok((id, offered, client));
            }
            match client.ended(Duration::ZERO) {
                Some(Exit::Unsupported) => return Err(Stop::unsupported("the client says so (status 89)")),
                Some(Exit::Crashed(how)) => {
                    self.note(Teardown::Crashed);
                    let how = format!("the client crashed before it asked for a connection: {how}");
                    return Err(Stop::died(how));
                }
                Some(exit) => {
                    return Err(Stop::refused(format!("the client asked for no connection: {exit}")));
                }
                None if Instant::now() >= deadline => {
                    let reason = "the client asked for no connection in time";
                    return Err(Stop::refused(with_last_lines(reason, &client.last_lines())));
                }
                None => {}
            }
        }
    }

    /// Returns whether the client under test requests one more connection. It is not accepted.
    pub(super) fn is_asked_again(&self) -> Result<bool, Stop> {
        let Side::Client(listener, _) = self.side else { return Ok(false) };
        Ok(listener.request_within(Duration::ZERO)?.is_some())
    }

    /// Serves a connection that does not count, until the client ends it.
    fn introduce(&self, listener: &Listener<B>) -> Result<(), Stop> {
        let mut peer = match listener.request_within(3 * self.patience)? {
            Some((id, _)) => listener.answer(id, Shape { patience: self.patience, ..Shape::default() })?,
            None => return Err(Stop::refused("the client asked for no connection in time")),
        };
        peer.serves = true;
        peer.await_established()?;
        peer.handshake()?;
        let mut responder = Responder::default();
        loop {
            match peer.receive()? {
                Incoming::Gone(_) => return Ok(()),
                incoming => peer.absorb(incoming)?,
            }
            let heard = peer.take_received();
            let replies = responder.answer(&heard).map_err(Stop::unmet)?;
            peer.send_bytes(&replies)?;
        }
    }

    /// Records how the connection ended. The worst of several counts.
    pub(super) fn note(&self, teardown: Teardown) {
        let worst = self.teardown.get().map_or(teardown, |before| before.max(teardown));
        self.teardown.set(Some(worst));
    }
}
