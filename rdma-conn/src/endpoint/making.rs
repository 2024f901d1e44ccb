//! How connections of an endpoint come about: asked for, or accepted.

use std::net::SocketAddr;
use std::sync::Arc;

use rdma_proto::backend::{Identifier, IdentifierKey};

use super::member::{Member, Stage};
use super::queues::QueueId;
use super::{ConnectionId, Endpoint, ListenerId};
use crate::connection::Connection;
use crate::error::Error;
use crate::options::Options;
use crate::wait::Descriptors;

impl<B: Descriptors> Endpoint<B> {
    /// Asks the peer for the connection, whose route is known.
    pub(super) fn ask(&mut self, id: ConnectionId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let Some((identifier, options)) = member.take_resolved() else { return };
        let peer = member.peer;
        match self.connect_queue(identifier, peer, options) {
            Ok((queue, connection)) => {
                let asked = connection.connect();
                if let Some(member) = self.members.get_mut(&id) {
                    member.stage = Stage::Live(Box::new(connection));
                }
                self.install(id, queue);
                if let Err(error) = asked {
                    self.fail(id, error);
                }
            }
            Err(error) => self.fail(id, error),
        }
    }

    /// A peer asks for a connection.
    pub(super) fn request(&mut self, listener: IdentifierKey, identifier: B::Identifier) {
        let peer = identifier.peer_addr();
        // Dropping an identifier that was not accepted rejects its peer, so every way out tells it (VR-RES-006).
        let accepted = self.accept(listener, identifier);
        match accepted {
            Ok(()) => self.usage.accepted += 1,
            Err(error) => {
                self.usage.rejected += 1;
                tracing::warn!(?peer, %error, "a connection was rejected");
            }
        }
    }

    fn accept(&mut self, listener: IdentifierKey, identifier: B::Identifier) -> Result<(), Error> {
        // The listener may have been closed meanwhile.
        let (_, options) = self.listeners.get(&listener).ok_or(Error::NoSuchConnection)?;
        let options = *options;
        self.take_in(identifier, Some(ListenerId(listener)), options).map(drop)
    }

    /// Accepts a request that came to a listener of the caller's own, whose identifier `request` is: nothing was allocated for
    /// the peer before. Ends in [`Event::Opened`](super::Event::Opened) or [`Event::Ended`](super::Event::Ended).
    ///
    /// # Errors
    /// The options are out of bounds, a limit is reached, resources are lacking, or the request was withdrawn. The peer is
    /// rejected (VR-RES-006).
    pub fn accept_request(
        &mut self,
        request: B::Identifier,
        options: Options,
    ) -> Result<ConnectionId, Error> {
        options.protocol.check()?;
        request.migrate(&self.events).map_err(Error::backend("moving a request to the endpoint"))?;
        self.take_in(request, None, options)
    }

    fn take_in(
        &mut self,
        identifier: B::Identifier,
        listener: Option<ListenerId>,
        options: Options,
    ) -> Result<ConnectionId, Error> {
        if self.members.len() >= self.limits.connections {
            return Err(Error::TooManyConnections { limit: self.limits.connections });
        }
        let peer = identifier.peer_addr().ok_or(Error::DeviceRemoved)?;
        let key = identifier.key();
        let (queue, mut connection) = self.connect_queue(identifier, peer, options)?;
        let accepted = connection.accept();
        let id = self.enter(Member::new(Stage::Live(Box::new(connection)), key, peer, listener, None));
        self.install(id, queue);
        if let Err(error) = accepted {
            self.remove(id);
            return Err(error);
        }
        Ok(id)
    }

    /// Makes a connection on `identifier` with a place in a queue.
    fn connect_queue(
        &mut self,
        identifier: B::Identifier,
        peer: SocketAddr,
        options: Options,
    ) -> Result<(QueueId, Connection<B>), Error> {
        let limits = identifier.capabilities().map_err(Error::backend("asking for the device's limits"))?;
        let options = options.fitted(&limits);
        let queue = self.queues.book(&identifier, &options, &self.watch)?;
        while self.queues.is_stale(queue) {
            self.take_batch(queue)?;
        }
        let Some(completions) = self.queues.completions(queue) else { return Err(Error::DeviceRemoved) };
        let budget = Arc::clone(&self.budget);
        match Connection::new(self.backend.clone(), identifier, completions, peer, options, budget) {
            Ok(connection) => Ok((queue, connection)),
            Err(error) => {
                // Its queue pair, if there was one, may have left completions behind.
                self.queues.leave(queue, None, &options);
                Err(error)
            }
        }
    }

    pub(super) fn enter(&mut self, member: Member<B>) -> ConnectionId {
        let id = ConnectionId(self.next);
        self.next += 1;
        self.identifiers.insert(member.key, id);
        self.members.insert(id, member);
        id
    }

    /// Gives the completions of a connection's queue pair, which are in `queue`, to that connection.
    fn install(&mut self, id: ConnectionId, queue: QueueId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.queue = Some(queue);
        if let Some(pair) = member.connection().map(Connection::queue_pair_number) {
            self.queues.enter(queue, pair, id);
        }
        self.settle(id);
    }
}
