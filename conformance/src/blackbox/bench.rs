//! What a case's body works on: a way to meet the target.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use rdma_conn::Descriptors;

use super::case::Role;
use super::desk::Desk;
use super::meeting::Meeting;
use super::target::{Clients, Exit, Running, Server};
use super::verdict::{Stop, Teardown};
use crate::adversary::{Adversary, Breach, Incoming, Lurker, Shape};

/// A target, and RDMA as the suite has it.
pub struct Bench<'a, B: Descriptors> {
    /// RDMA as the suite has it.
    pub backend: &'a B,
    /// How long the target may take for anything that must happen.
    pub patience: Duration,
    /// The id of the case.
    pub case: &'static str,
    pub(super) side: Side<'a, B>,
    pub(super) teardown: Cell<Option<Teardown>>,
    pub(super) breaches: RefCell<Vec<Breach>>,
}

/// Who is tested.
pub enum Side<'a, B: Descriptors> {
    /// A server.
    Server(&'a dyn Server),
    /// A client, which is sent to the adversary that waits.
    Client(&'a Lurker<B>, &'a dyn Clients),
}

impl<B: Descriptors> Clone for Side<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Descriptors> Copy for Side<'_, B> {}

impl<'a, B: Descriptors> Bench<'a, B> {
    /// For one case.
    pub const fn new(backend: &'a B, patience: Duration, case: &'static str, side: Side<'a, B>) -> Self {
        Self { backend, patience, case, side, teardown: Cell::new(None), breaches: RefCell::new(Vec::new()) }
    }

    /// Who is tested.
    pub const fn role(&self) -> Role {
        match self.side {
            Side::Server(_) => Role::Server,
            Side::Client(..) => Role::Client,
        }
    }

    /// The server under test.
    ///
    /// # Errors
    /// It is a client.
    pub fn server(&self) -> Result<&'a dyn Server, Stop> {
        match self.side {
            Side::Server(server) => Ok(server),
            Side::Client(..) => Err(Stop::not_applicable("about servers only")),
        }
    }

    /// The adversary connected to the target; neither side has sent anything then.
    ///
    /// # Errors
    /// There is no connection.
    pub fn meet(&self, shape: Shape) -> Result<Meeting<'_, B>, Stop> {
        let shape = Shape { patience: self.patience, ..shape };
        match self.side {
            Side::Server(server) => {
                let peer = Adversary::dial(self.backend, server.address(), shape)?;
                Ok(Meeting::new(self, peer, None))
            }
            Side::Client(lurker, _) => {
                let (id, offered, client) = self.request()?;
                let mut peer = lurker.answer(id, shape)?;
                peer.was_offered(offered);
                peer.serves = true;
                peer.await_established()?;
                Ok(Meeting::new(self, peer, Some(client)))
            }
        }
    }

    /// The same, and the windows exchanged.
    ///
    /// # Errors
    /// There is no connection, or no window.
    pub fn greet(&self) -> Result<Meeting<'_, B>, Stop> {
        self.greet_as(Shape::default())
    }

    /// The same with another shape.
    ///
    /// # Errors
    /// There is no connection, or no window.
    pub fn greet_as(&self, shape: Shape) -> Result<Meeting<'_, B>, Stop> {
        let mut meeting = self.meet(shape)?;
        meeting.peer.handshake()?;
        Ok(meeting)
    }

    /// The same with the adversary's windows at these places of its memory, each `(offset, length)`, one after the other.
    ///
    /// # Errors
    /// There is no connection, or no window.
    pub fn greet_with(&self, plan: Vec<(u32, u32)>) -> Result<Meeting<'_, B>, Stop> {
        let mut meeting = self.meet(Shape::default())?;
        meeting.peer.plan = plan;
        meeting.peer.handshake()?;
        Ok(meeting)
    }

    /// The request of a client under test that was just started.
    ///
    /// # Errors
    /// It makes none.
    #[expect(clippy::type_complexity, reason = "used in two places, and taken apart at once")]
    pub fn request(
        &self,
    ) -> Result<(B::Identifier, rdma_proto::backend::ConnectParams, Box<dyn Running>), Stop> {
        let Side::Client(lurker, clients) = self.side else {
            return Err(Stop::not_applicable("about clients only"));
        };
        // A client of an earlier case may have asked once more.
        while lurker.request_within(Duration::ZERO)?.is_some() {}
        let mut client = clients.start(self.case, lurker.address()?).map_err(Stop::broken)?;
        for _ in 0..clients.first() {
            self.introduce(lurker)?;
        }
        let deadline = Instant::now() + 3 * self.patience;
        loop {
            if let Some((id, offered)) =
                lurker.request_within(self.patience.min(Duration::from_millis(200)))?
            {
                return Ok((id, offered, client));
            }
            match client.ended(Duration::ZERO) {
                Some(Exit::Unsupported) => return Err(Stop::unsupported("the client says so (status 89)")),
                Some(Exit::Crashed(how)) => {
                    self.note(Teardown::Crashed);
                    return Err(Stop::died(format!(
                        "the client crashed before it asked for a connection: {how}"
                    )));
                }
                Some(exit) => {
                    return Err(Stop::refused(format!("the client asked for no connection: {exit}")));
                }
                None if Instant::now() >= deadline => {
                    return Err(Stop::refused("the client asked for no connection in time"));
                }
                None => {}
            }
        }
    }

    /// Whether the client under test asks for one more connection, which it does not get.
    pub(super) fn is_asked_again(&self) -> Result<bool, Stop> {
        let Side::Client(lurker, _) = self.side else { return Ok(false) };
        Ok(lurker.request_within(Duration::ZERO)?.is_some())
    }

    /// Serves a connection that does not count, until the client leaves it.
    fn introduce(&self, lurker: &Lurker<B>) -> Result<(), Stop> {
        let mut peer = match lurker.request_within(3 * self.patience)? {
            Some((id, _)) => lurker.answer(id, Shape { patience: self.patience, ..Shape::default() })?,
            None => return Err(Stop::refused("the client asked for no connection in time")),
        };
        peer.serves = true;
        peer.await_established()?;
        peer.handshake()?;
        let mut desk = Desk::default();
        loop {
            match peer.receive()? {
                Incoming::Gone(_) => return Ok(()),
                incoming => peer.absorb(incoming)?,
            }
            let heard = peer.take_heard();
            let replies = desk.answer(&heard).map_err(Stop::unmet)?;
            peer.say(&replies)?;
        }
    }

    /// Books how the connection ended. The worst counts.
    pub(super) fn note(&self, teardown: Teardown) {
        let worst = self.teardown.get().map_or(teardown, |before| before.max(teardown));
        self.teardown.set(Some(worst));
    }
}
