//! Connecting: from an address, or from a peer's request, to an open connection.
//!
//! ```text
//! dial    resolve address ─▶ resolve route ─▶ queue pair, ask ─▶ established ─▶ the server's window ─▶ open
//! accept                                  queue pair, accept ─▶ established ─▶ open
//! ```

use std::net::SocketAddr;
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_backend::{Backend, CmEventKind, Identifier};
use rdma_proto::State;

use crate::connection::Connection;
use crate::error::Error;
use crate::options::Options;

/// How long a server reads events before it gives up a handshake whose time has passed.
const READING: Duration = Duration::from_secs(60);

/// A connection being made by either side, and its time limit (VR-CONN-008).
pub(crate) struct Connecting<B: Backend> {
    step: Step<B>,
    /// Whom this side dials.
    peer: Option<SocketAddr>,
    by: Instant,
    /// Since when the limit has passed with events unread.
    late: Option<Instant>,
    limit: Duration,
}

enum Step<B: Backend> {
    Address(B::Identifier),
    Route(B::Identifier),
    /// The route is known, and the request was sent or is sent now.
    Asked,
    Accepted,
}

/// Call it before creating the queue pair.
pub(crate) fn set_ack_timeout<B: Backend>(id: &B::Identifier, options: &Options) -> Result<(), Error> {
    let Some(code) = options.ack_timeout else { return Ok(()) };
    id.set_ack_timeout(code).map_err(Error::backend("setting the time-out of acknowledgements"))
}

impl<B: Backend> Connecting<B> {
    /// Begins to connect to `peer`, from `local` if given (VR-CONN-011).
    pub(crate) fn dial(
        id: B::Identifier,
        (peer, local): (SocketAddr, Option<SocketAddr>),
        options: &Options,
        now: Instant,
        limit: Duration,
    ) -> Result<Self, Error> {
        // Set them now: the resolved route includes them.
        if let Some(class) = options.traffic_class {
            id.set_traffic_class(class).map_err(Error::backend("setting the traffic class"))?;
        }
        set_ack_timeout::<B>(&id, options)?;
        id.resolve_address(local, peer, limit).map_err(Error::backend("resolving the address"))?;
        Ok(Self { step: Step::Address(id), peer: Some(peer), by: now.after(limit), late: None, limit })
    }

    pub(crate) const fn accepted(now: Instant, limit: Duration) -> Self {
        Self { step: Step::Accepted, peer: None, by: now.after(limit), late: None, limit }
    }

    /// Handles an event before there is a queue pair. Returns the identifier once the route is
    /// known: the caller then makes the queue pair and asks the peer.
    pub(crate) fn handle_event(
        &mut self,
        event: CmEventKind<B>,
        peer: SocketAddr,
        now: Instant,
    ) -> Result<Option<B::Identifier>, Error> {
        match event {
            CmEventKind::AddressError { status } => {
                return Err(Error::unreachable(peer, "no RDMA device has a way to its address", status));
            }
            CmEventKind::RouteError { status } => {
                return Err(Error::unreachable(peer, "there is no route", status));
            }
            CmEventKind::Unreachable { status } => {
                return Err(Error::unreachable(peer, "it does not answer", status));
            }
            CmEventKind::DeviceRemoval => return Err(Error::DeviceRemoved),
            CmEventKind::Async(event) if event.is_fatal() => return Err(Error::Device { event }),
            // Of the port, for example, which may come back within the limit.
            CmEventKind::Async(_) => return Ok(None),
            _ => {}
        }
        match (std::mem::replace(&mut self.step, Step::Asked), event) {
            (Step::Address(id), CmEventKind::AddressResolved) => {
                // One limit for all steps, of which the first has used a part (VR-CONN-008).
                let left = self.by.since(now);
                id.resolve_route(left).map_err(Error::backend("resolving the route"))?;
                self.step = Step::Route(id);
                Ok(None)
            }
            (Step::Route(id), CmEventKind::RouteResolved) => Ok(Some(id)),
            (step, event) => {
                tracing::warn!(%peer, ?event, "unexpected event while resolving");
                self.step = step;
                Ok(None)
            }
        }
    }

    /// Returns whether bytes can flow. A dial waits for the server's window, to detect a server
    /// that registers none. A server may send before it registers one, and then leave: what it sent
    /// can be read (VR-CLOSE-002).
    pub(crate) fn is_done(&self, connection: &Connection<B>) -> bool {
        let established = matches!(connection.state(), State::Open | State::Closing | State::Closed);
        let heard = connection.has_peer_window() || connection.bytes_received() > 0;
        established && (matches!(self.step, Step::Accepted) || heard)
    }

    pub(crate) const fn by(&self) -> Instant {
        self.by
    }

    /// Returns whether the time limit has passed. An `unread` event may say that all is well, and a
    /// busy program has others to read before, which takes long when many clients leave. So those
    /// are read first, for a bounded time. Who dials has named a limit, and gets it once again.
    pub(crate) fn is_late(&mut self, now: Instant, unread: bool) -> bool {
        let more = if matches!(self.step, Step::Accepted) { READING } else { self.limit };
        now >= self.by && (!unread || now >= self.late.get_or_insert(now).after(more))
    }

    pub(crate) fn too_late(&self, connection: Option<&Connection<B>>) -> Error {
        let established = connection.is_some_and(|connection| connection.state() != State::Connecting);
        let doing = match &self.step {
            Step::Address(_) => "resolving the address",
            Step::Route(_) => "resolving the route",
            Step::Asked if established => "waiting for the server to register its window",
            Step::Asked => "connecting",
            Step::Accepted => "waiting for the peer to complete the connection",
        };
        let peer = self.peer.or(connection.map(Connection::peer_addr));
        Error::TimedOut { doing, after: self.limit, peer }
    }
}

#[cfg(test)]
mod tests {
    use rdma_softsim::SoftSim;

    use super::*;

    /// A peer that keeps events coming gains a minute, and no more.
    #[test]
    fn unread_events_give_a_handshake_a_bounded_time() {
        let limit = Duration::from_secs(5);
        let mut connecting = Connecting::<SoftSim>::accepted(Instant::default(), limit);
        let at = |seconds| Instant::default().after(Duration::from_secs(seconds));
        assert!(!connecting.is_late(at(4), false));
        assert!(!connecting.is_late(at(7), true), "the program was away");
        assert!(!connecting.is_late(at(66), true));
        assert!(connecting.is_late(at(67), true));
        assert!(Connecting::<SoftSim>::accepted(Instant::default(), limit).is_late(at(7), false));
    }
}
