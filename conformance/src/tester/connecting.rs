//! Establishes the connection of the suite's peer, from either side, one step at a time.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use raw_peer::{Candidate, Connecting, Offer, Progress, Session, Step, no_way};
use rdma_backend::{Access, CmEvent, CmEventKind, EventChannel, Identifier};
use rdma_conn::Descriptors;

use super::deadline::{Deadline, wrong};
use super::said::{Dialect, Said};
use super::{Incoming, PATIENCE, Peer, Seen, Shape};
use crate::client::Failure;

/// Room for the longest burst of any case.
const OUTBOX: usize = 256 << 10;

/// Resolves the route to `to`, over which a connection can be requested.
pub fn way<B: Descriptors>(backend: &B, to: SocketAddr, patience: Duration) -> Result<Candidate<B>, Failure> {
    let deadline = Deadline::after(patience);
    let mut connecting = Connecting::dial(backend, to, patience).map_err(wrong("resolving the address"))?;
    loop {
        match connecting.poll().map_err(wrong("resolving the route"))? {
            Progress::Ready(candidate) => return Ok(candidate),
            Progress::NoWay(why) => return Err(Failure::Unreached(why)),
            Progress::Waits(waits) => connecting = waits,
        }
        if !deadline.wait(connecting.events(), connecting.events())? {
            return Err(Failure::Unreached("no connection event came in time".into()));
        }
    }
}

impl<B: Descriptors> Peer<B> {
    /// Connects. Neither side has sent anything then.
    pub fn dial(backend: &B, to: SocketAddr, shape: Shape) -> Result<Self, Failure> {
        let mut peer = Self::request(backend, to, shape)?;
        peer.await_established()?;
        Ok(peer)
    }

    /// Requests a connection without waiting for the answer.
    pub fn request(backend: &B, to: SocketAddr, shape: Shape) -> Result<Self, Failure> {
        let candidate = way(backend, to, PATIENCE)?;
        let peer = Self::new(candidate.session(shape.session()), shape, Dialect::Commands)?;
        peer.session.connect(&shape.params, shape.private_data).map_err(wrong("connecting"))?;
        Ok(peer)
    }

    /// Waits until the connection is established.
    pub fn await_established(&mut self) -> Result<(), Failure> {
        let deadline = Deadline::after(self.shape.patience);
        while !self.established {
            if let Some(Incoming::Gone(why)) = self.incoming.front() {
                return Err(Failure::Unreached(format!("no connection: {why}")));
            }
            if !self.step(deadline)? {
                return Err(Failure::Unreached("no connection in time".into()));
            }
        }
        Ok(())
    }

    fn new(session: Result<Session<B>, B::Error>, shape: Shape, dialect: Dialect) -> Result<Self, Failure> {
        let is_server = matches!(dialect, Dialect::Commands);
        let mut session = session.map_err(wrong("making what a queue pair needs"))?;
        session.create_queue_pair().map_err(wrong("creating a queue pair"))?;
        session.reposts = true;
        session
            .take(Step::Receive(shape.receives.min(shape.posted) as usize))
            .map_err(wrong("posting receives"))?;
        Ok(Self {
            session,
            shape,
            established: false,
            incoming: VecDeque::new(),
            waits_since: None,
            drains: true,
            plan: vec![(0, shape.window)],
            plan_ends: false,
            turn: 0,
            taken: 0,
            received: Vec::new(),
            landing: None,
            theirs: None,
            used: 0,
            keepalives: 0,
            serves: false,
            answers_late: false,
            owed: Vec::new(),
            asked: 0,
            painted: false,
            mirror: None,
            registered: false,
            offered: None,
            said: Some(Said::new(dialect)),
            left: false,
            failed: false,
            seen: Seen { is_server, ..Seen::default() },
        })
    }
}

impl Shape {
    const fn session(&self) -> raw_peer::Shape {
        let (sends, receives) = (self.sends, self.receives);
        let (window, access) = (self.window as usize, Access::REMOTE_WRITE);
        raw_peer::Shape { sends, receives, window, access, outbox: OUTBOX }
    }
}

/// Listens for clients under test.
pub struct Listener<B: Descriptors> {
    backend: B,
    events: B::EventChannel,
    id: B::Identifier,
}

impl<B: Descriptors> Listener<B> {
    /// Listens on `address`; port 0 takes a free one.
    pub fn new(backend: &B, address: SocketAddr) -> Result<Self, Failure> {
        let events = backend.event_channel().map_err(wrong("opening an event channel"))?;
        let id = events.listen(address, 0).map_err(wrong("listening"))?;
        Ok(Self { backend: backend.clone(), events, id })
    }

    /// Returns the address at which it listens.
    pub fn address(&self) -> Result<SocketAddr, Failure> {
        self.id.local_addr().ok_or_else(|| Failure::wrong("the suite's listener has no address"))
    }

    /// Takes the next request without handling it. Dropping it rejects it.
    pub fn request(&self) -> Result<B::Identifier, Failure> {
        self.request_within(PATIENCE)?
            .map(|(id, _)| id)
            .ok_or_else(|| Failure::Unreached("no connection was requested in time".into()))
    }

    /// Returns the next request within `patience`, if there is one, and its offer.
    pub fn request_within(&self, patience: Duration) -> Result<Option<(B::Identifier, Offer)>, Failure> {
        find_event::<B, _>(&self.events, patience, |event| match event.kind {
            CmEventKind::ConnectRequest { id, peer: params } => {
                Some((id, Offer { params, private_data: event.private_data }))
            }
            _ => None,
        })
    }

    /// Rejects the next request.
    pub fn reject(&self) -> Result<(), Failure> {
        self.request()?.reject(&[]).map_err(wrong("rejecting"))
    }

    /// Accepts the next request. The connection is not established yet.
    pub fn accept(&self, shape: Shape) -> Result<Peer<B>, Failure> {
        self.answer(self.request()?, shape)
    }

    /// Accepts this request.
    pub fn answer(&self, id: B::Identifier, shape: Shape) -> Result<Peer<B>, Failure> {
        let events = self.backend.event_channel().map_err(wrong("opening an event channel"))?;
        id.migrate(&events).map_err(wrong("moving to an event channel"))?;
        let peer = Peer::new(Session::new(id, events, shape.session()), shape, Dialect::Replies)?;
        peer.session.accept(&shape.params, shape.private_data).map_err(wrong("accepting"))?;
        Ok(peer)
    }
}

fn find_event<B: Descriptors, T>(
    events: &B::EventChannel,
    patience: Duration,
    wanted: impl Fn(CmEvent<B>) -> Option<T>,
) -> Result<Option<T>, Failure> {
    let deadline = Deadline::after(patience);
    loop {
        while let Some(event) = events.next_event().map_err(wrong("reading connection events"))? {
            let told = format!("{:?}", event.kind);
            if let Some(why) = no_way(&event.kind) {
                return Err(Failure::Unreached(why));
            }
            match wanted(event) {
                Some(found) => return Ok(Some(found)),
                None => tracing::debug!(event = told, "another event is awaited"),
            }
        }
        if !deadline.wait(events, events)? {
            return Ok(None);
        }
    }
}
