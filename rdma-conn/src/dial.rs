//! Connecting: from an address to an established connection whose peer has registered a window.

use std::net::SocketAddr;
use std::time::Duration;

use rdma_proto::State;
use rdma_proto::backend::{Backend, CmEventKind, EventChannel, Identifier};
use rdma_proto::time::Instant;

use crate::endpoint::Limits;
use crate::error::Error;
use crate::link::Link;
use crate::memory::Budget;
use crate::options::Options;

/// A connection being made, without waiting; see [`Stream::connect`](crate::Stream::connect) for that.
pub struct Dial<B: Backend> {
    step: Step<B>,
    backend: B,
    peer: SocketAddr,
    options: Options,
    deadline: Instant,
    timeout: Duration,
}

enum Step<B: Backend> {
    /// The address, or after it the route, is being resolved.
    Resolving { events: B::EventChannel, id: B::Identifier, what: &'static str },
    /// The peer was asked, or has accepted and its window is awaited.
    Connecting(Box<Link<B>>),
    /// Connected and handed out, or failed.
    Over,
}

impl<B: Backend> Dial<B> {
    /// Begins to connect to `peer`, from `local` if given (VR-CONN-011). All of it may take `timeout`.
    ///
    /// # Errors
    /// There is no RDMA device, or `options` are out of bounds.
    pub fn new(
        backend: &B,
        peer: SocketAddr,
        local: Option<SocketAddr>,
        timeout: Duration,
        options: Options,
    ) -> Result<Self, Error> {
        options.protocol.check()?;
        let events = backend.event_channel().map_err(Error::backend("opening RDMA"))?;
        let id = events.create_id().map_err(Error::backend("creating a connection identifier"))?;
        let what = "resolving the address";
        id.resolve_address(local, peer, timeout).map_err(Error::backend(what))?;
        let step = Step::Resolving { events, id, what };
        let deadline = backend.now().after(timeout);
        Ok(Self { step, backend: backend.clone(), peer, options, deadline, timeout })
    }

    /// Goes on as far as possible; after `None`, wait for [`Dial::sources`]. The connection, once it is established and its peer has registered a window: only then
    /// can a byte leave, and a server that never registers is found out here and not by the first write.
    ///
    /// # Errors
    /// Why there will be no connection.
    pub fn progress(&mut self) -> Result<Option<Link<B>>, Error> {
        loop {
            match std::mem::replace(&mut self.step, Step::Over) {
                Step::Resolving { events, id, what } => match next_resolved::<B>(&events, self.peer)? {
                    None => {
                        self.step = Step::Resolving { events, id, what };
                        return self.unless_late(what);
                    }
                    Some(Resolved::Address) => {
                        let what = "resolving the route";
                        let left = self.deadline.since(self.backend.now());
                        id.resolve_route(left).map_err(Error::backend(what))?;
                        self.step = Step::Resolving { events, id, what };
                    }
                    Some(Resolved::Route) => {
                        let budget = Budget::new(Limits { connections: 1, registered_bytes: u64::MAX });
                        let place = (&budget, budget.place()?);
                        let link =
                            Link::new(self.backend.clone(), events, id, self.peer, self.options, place)?;
                        link.connect()?;
                        self.step = Step::Connecting(Box::new(link));
                    }
                },
                Step::Connecting(mut link) => {
                    link.take_completion_events();
                    link.take_events();
                    // What comes from here on wakes the caller, what came before is found now. Armed before the events
                    // were taken, the wake-up could be among them, and there would be no other.
                    link.arm();
                    link.progress();
                    link.check()?;
                    let doing = match link.state() {
                        State::Connecting => "connecting",
                        // Also if the server has left again: what it said before is there to be read (VR-CLOSE-002).
                        _ if link.is_registered() => return Ok(Some(*link)),
                        State::Closed => return Err(link.end()),
                        _ => "waiting for the server to register its window",
                    };
                    self.step = Step::Connecting(link);
                    return self.unless_late(doing);
                }
                Step::Over => {
                    return Err(Error::Protocol(rdma_proto::Error::Unreachable("a dial that is over")));
                }
            }
        }
    }

    /// When it fails if nothing happens.
    pub const fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The channel whose events move this on, and the completion queue, once there is one.
    pub const fn sources(&self) -> Option<(&B::EventChannel, Option<&B::CompletionQueue>)> {
        match &self.step {
            Step::Resolving { events, .. } => Some((events, None)),
            Step::Connecting(link) => Some((link.event_channel(), Some(link.completion_queue()))),
            Step::Over => None,
        }
    }

    fn unless_late(&self, doing: &'static str) -> Result<Option<Link<B>>, Error> {
        if self.backend.now() < self.deadline {
            return Ok(None);
        }
        Err(Error::TimedOut { doing, after: self.timeout })
    }
}

pub(crate) enum Resolved {
    Address,
    Route,
}

/// How a resolving step ended, if `event` is about that.
pub(crate) fn resolved<B: Backend>(
    event: CmEventKind<B>,
    peer: SocketAddr,
) -> Result<Option<Resolved>, Error> {
    match event {
        CmEventKind::AddressResolved => Ok(Some(Resolved::Address)),
        CmEventKind::RouteResolved => Ok(Some(Resolved::Route)),
        CmEventKind::AddressError { status } => {
            Err(Error::unreachable(peer, "no RDMA device has a way to its address", status))
        }
        CmEventKind::RouteError { status } => Err(Error::unreachable(peer, "there is no route", status)),
        CmEventKind::Unreachable { status } => Err(Error::unreachable(peer, "it does not answer", status)),
        CmEventKind::DeviceRemoval => Err(Error::DeviceRemoved),
        other => {
            tracing::warn!(%peer, event = ?other, "unexpected event while resolving");
            Ok(None)
        }
    }
}

/// How a resolving step ended, if it did.
fn next_resolved<B: Backend>(events: &B::EventChannel, peer: SocketAddr) -> Result<Option<Resolved>, Error> {
    while let Some(event) = events.next_event().map_err(Error::backend("reading connection events"))? {
        if let Some(resolved) = resolved(event.kind, peer)? {
            return Ok(Some(resolved));
        }
    }
    Ok(None)
}

impl<B: Backend> std::fmt::Debug for Dial<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dial")
            .field("peer", &self.peer)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}
