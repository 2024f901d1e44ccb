//! How connections of an endpoint come about: asked for, or accepted.

use std::net::SocketAddr;
use std::sync::Arc;

use rdma_proto::backend::{Identifier, IdentifierKey};

use super::member::{Member, Stage};
use super::queues::QueueId;
use super::{ConnectionId, Endpoint, ListenerId};
use crate::connection::Connection;
use crate::error::Error;
use crate::memory::Memory;
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
        let place = self.budget.place()?;
        // The listener may have been closed meanwhile.
        let (_, options) = self.listeners.get(&listener).ok_or(Error::NoSuchConnection)?;
        let options = *options;
        let peer = identifier.peer_addr().ok_or(Error::DeviceRemoved)?;
        let key = identifier.key();
        let (queue, mut connection) = self.connect_queue(identifier, peer, options)?;
        let accepted = connection.accept();
        let listener = Some(ListenerId(listener));
        let id = self.enter(Member::new(Stage::Live(Box::new(connection)), key, peer, place, listener, None));
        self.install(id, queue);
        if accepted.is_err() {
            self.remove(id);
        }
        accepted
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
        // Before anything is made for it.
        self.budget.has(Memory::<B>::idle(&options))?;
        let queue = self.queues.book(&identifier, &options, &self.watch)?;
        while self.queues.is_stale(queue) {
            self.take_batch(queue);
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
