//! How an adversary gets its connection, from either side, one step at a time.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_proto::backend::{
    Access, CmEventKind, ConnectParams, Domain, EventChannel, Identifier, QueuePairLimits,
};

use super::wait::{Deadline, wrong};
use super::{Adversary, INBOX_SLOT, Incoming, PATIENCE, Seen, Shape};
use crate::client::Failure;

/// Room for the longest burst of any case.
const OUTBOX: usize = 256 << 10;

impl<B: Descriptors> Adversary<B> {
    /// Connects; neither side has sent anything then.
    pub fn dial(backend: &B, to: SocketAddr, shape: Shape) -> Result<Self, Failure> {
        let mut adversary = Self::request(backend, to, shape)?;
        adversary.await_established()?;
        Ok(adversary)
    }

    /// Asks for a connection and does not wait for the answer.
    pub fn request(backend: &B, to: SocketAddr, shape: Shape) -> Result<Self, Failure> {
        let events = backend.event_channel().map_err(wrong("opening an event channel"))?;
        let id = events.create_id().map_err(wrong("creating an identifier"))?;
        id.resolve_address(None, to, PATIENCE).map_err(wrong("resolving the address"))?;
        await_event::<B, _>(&events, |kind| matches!(kind, CmEventKind::AddressResolved).then_some(()))?;
        id.resolve_route(PATIENCE).map_err(wrong("resolving the route"))?;
        await_event::<B, _>(&events, |kind| matches!(kind, CmEventKind::RouteResolved).then_some(()))?;
        let adversary = Self::new(events, id, shape)?;
        adversary.id.connect(&shape.params, shape.private_data).map_err(wrong("connecting"))?;
        Ok(adversary)
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

    fn new(events: B::EventChannel, id: B::Identifier, shape: Shape) -> Result<Self, Failure> {
        let domain = id.create_domain().map_err(wrong("allocating a protection domain"))?;
        let register = |len: usize, access| domain.register(len, access).map_err(wrong("registering memory"));
        let inbox = register(shape.receives as usize * INBOX_SLOT, Access::LOCAL_WRITE)?;
        let outbox = register(OUTBOX, Access::LOCAL_WRITE)?;
        let window = register(shape.window as usize, Access::REMOTE_WRITE)?;
        let limits = QueuePairLimits { send_depth: shape.sends, recv_depth: shape.receives, inline: 0 };
        let queue = id
            .create_completion_queue(shape.sends + shape.receives, 0)
            .map_err(wrong("creating a completion queue"))?;
        let pair = id.create_queue_pair(&domain, &queue, limits).map_err(wrong("creating a queue pair"))?;
        let adversary = Self {
            pair: Some(pair),
            id,
            queue,
            inbox,
            outbox,
            window,
            events,
            shape,
            stowed: 0,
            outstanding: 0,
            established: false,
            incoming: VecDeque::new(),
            reposts: true,
            drains: true,
            plan: vec![(0, shape.window)],
            turn: 0,
            taken: 0,
            heard: Vec::new(),
            theirs: None,
            used: 0,
            keepalives: 0,
            serves: false,
            registered: false,
            offered: None,
            seen: Seen::default(),
        };
        let slots: Vec<u64> = (0..u64::from(shape.receives)).collect();
        slots.chunks(16).try_for_each(|slots| adversary.post_receives(slots))?;
        Ok(adversary)
    }

    pub(super) fn take_event(&mut self, kind: CmEventKind<B>) {
        let gone = match kind {
            CmEventKind::Established { peer } => {
                self.established = true;
                self.offered.get_or_insert(peer);
                return;
            }
            CmEventKind::Disconnected => {
                // As every peer does; it ends what is still under way. Refused if it was the first to disconnect.
                let _ended = self.id.disconnect();
                "disconnected"
            }
            CmEventKind::Rejected { .. } => "rejected",
            CmEventKind::Unreachable { .. } | CmEventKind::ConnectError { .. } => "no answer",
            _ => return,
        };
        self.incoming.push_back(Incoming::Gone(gone));
    }
}

/// An adversary that waits for its victim.
pub struct Lurker<B: Descriptors> {
    backend: B,
    events: B::EventChannel,
    id: B::Identifier,
}

impl<B: Descriptors> Lurker<B> {
    /// Listens.
    pub fn new(backend: &B, address: SocketAddr) -> Result<Self, Failure> {
        let events = backend.event_channel().map_err(wrong("opening an event channel"))?;
        let id = events.listen(address, 0).map_err(wrong("listening"))?;
        Ok(Self { backend: backend.clone(), events, id })
    }

    /// Where.
    pub fn address(&self) -> Result<SocketAddr, Failure> {
        self.id.local_addr().ok_or_else(|| Failure::wrong("the adversary's listener has no address"))
    }

    /// Takes the next request and does nothing with it. Dropping it rejects it.
    pub fn request(&self) -> Result<B::Identifier, Failure> {
        self.request_within(PATIENCE)?
            .map(|(id, _)| id)
            .ok_or_else(|| Failure::Unreached("nobody asked for a connection in time".into()))
    }

    /// The next request within `patience`, if there is one, and what it offers.
    pub fn request_within(
        &self,
        patience: Duration,
    ) -> Result<Option<(B::Identifier, ConnectParams)>, Failure> {
        find_event::<B, _>(&self.events, patience, |kind| match kind {
            CmEventKind::ConnectRequest { id, peer } => Some((id, peer)),
            _ => None,
        })
    }

    /// Rejects the next request.
    pub fn reject(&self) -> Result<(), Failure> {
        self.request()?.reject(&[]).map_err(wrong("rejecting"))
    }

    /// Accepts the next request; the connection is not established yet.
    pub fn accept(&self, shape: Shape) -> Result<Adversary<B>, Failure> {
        self.answer(self.request()?, shape)
    }

    /// Accepts this request.
    pub fn answer(&self, id: B::Identifier, shape: Shape) -> Result<Adversary<B>, Failure> {
        let events = self.backend.event_channel().map_err(wrong("opening an event channel"))?;
        id.migrate(&events).map_err(wrong("moving to an event channel"))?;
        let adversary = Adversary::<B>::new(events, id, shape)?;
        adversary.id.accept(&shape.params, shape.private_data).map_err(wrong("accepting"))?;
        Ok(adversary)
    }
}

/// Waits for the event that `wanted` takes something from.
fn await_event<B: Descriptors, T>(
    events: &B::EventChannel,
    wanted: impl Fn(CmEventKind<B>) -> Option<T>,
) -> Result<T, Failure> {
    find_event::<B, T>(events, PATIENCE, wanted)?
        .ok_or_else(|| Failure::Unreached("the adversary waited for a connection event in vain".into()))
}

/// The same, within `patience`.
fn find_event<B: Descriptors, T>(
    events: &B::EventChannel,
    patience: Duration,
    wanted: impl Fn(CmEventKind<B>) -> Option<T>,
) -> Result<Option<T>, Failure> {
    let deadline = Deadline::after(patience);
    loop {
        while let Some(event) = events.next_event().map_err(wrong("reading connection events"))? {
            let told = format!("{:?}", event.kind);
            if let CmEventKind::AddressError { .. } | CmEventKind::RouteError { .. } = &event.kind {
                return Err(Failure::Unreached(format!("there is no way there: {told}")));
            }
            match wanted(event.kind) {
                Some(found) => return Ok(Some(found)),
                None => tracing::debug!(event = told, "the adversary waits for another event"),
            }
        }
        if !deadline.wait(events, events)? {
            return Ok(None);
        }
    }
}
