//! Makes an endpoint's connections, by connecting or accepting.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::{EventChannel, Identifier, IdentifierKey};
use rdma_proto::Role;

use super::member::Member;
use super::watch::Descriptors;
use super::{ConnectionId, Endpoint, Event, ListenerId};
use crate::budget::{Budget, Newcomer, Place};
use crate::connecting::{Connecting, set_ack_timeout};
use crate::connection::Connection;
use crate::domain::ProtectionDomain;
use crate::error::Error;
use crate::listener::Request;
use crate::memory::Memory;
use crate::options::Options;

pub(super) struct Listening<B: Descriptors> {
    pub(super) id: B::Identifier,
    pub(super) options: Options,
    pub(super) hands_over: bool,
    pub(super) error: Option<Error>,
}

impl<B: Descriptors> Endpoint<B> {
    /// Listens on `address`. Port 0 picks a free port. Accepted connections use `options`.
    ///
    /// # Errors
    /// Returns an error if no RDMA device has the address, it is taken, or an option is invalid. An
    /// endpoint with [`SharedEvents`](crate::SharedEvents) cannot listen.
    pub fn listen(&mut self, address: SocketAddr, options: Options) -> Result<ListenerId, Error> {
        self.listen_for(address, options, false)
    }

    /// If `hands_over`, requests are left to [`Endpoint::take_request`].
    pub(crate) fn listen_for(
        &mut self,
        address: SocketAddr,
        options: Options,
        hands_over: bool,
    ) -> Result<ListenerId, Error> {
        Error::unless_forked()?;
        options.check()?;
        // Requests that wait in an inbox would hold memory without a limit.
        let Some(channel) = self.events.own() else { return Err(Error::Listening) };
        let id = channel.listen(address, 0).map_err(Error::backend("listening"))?;
        let key = id.key();
        self.listeners.insert(key, Listening { id, options, hands_over, error: None });
        Ok(ListenerId(key))
    }

    /// Returns the address of a listener.
    pub fn local_addr(&self, listener: ListenerId) -> Option<SocketAddr> {
        self.listeners.get(&listener.0)?.id.local_addr()
    }

    /// Sets the options of connections that a listener accepts from now on.
    ///
    /// # Errors
    /// Returns an error and keeps the old options if one is out of bounds.
    pub fn set_options(&mut self, listener: ListenerId, options: Options) -> Result<(), Error> {
        Error::unless_forked()?;
        options.check()?;
        if let Some(listening) = self.listeners.get_mut(&listener.0) {
            listening.options = options;
        }
        Ok(())
    }

    /// Stops listening. Accepted connections continue.
    pub fn close_listener(&mut self, listener: ListenerId) {
        if rdma_process::is_child() {
            return;
        }
        self.listeners.remove(&listener.0);
        self.newcomers.close_listener(listener.0);
    }

    /// Returns the error that kept a listener from accepting, after [`Event::AcceptFailed`]. If its
    /// device is gone, every call returns that error.
    pub fn take_accept_error(&mut self, listener: ListenerId) -> Option<Error> {
        let error = &mut self.listeners.get_mut(&listener.0)?.error;
        match error {
            Some(lasting) if lasting.is_for_good() => error.clone(),
            _ => error.take(),
        }
    }

    /// Makes the endpoint itself accept a listener's requests from now on.
    #[cfg(feature = "tokio")]
    pub(crate) fn accept_for(&mut self, listener: ListenerId) {
        if let Some(listening) = self.listeners.get_mut(&listener.0) {
            listening.hands_over = false;
        }
        // A listener's endpoint was made for itself alone. Now all that it accepts share its
        // queues.
        self.queues.share();
        if let Some(request) = self.requests.take() {
            self.request(listener.0, request, self.backend.now());
        }
    }

    pub(crate) fn take_request(&mut self) -> Option<B::Identifier> {
        self.requests.take()
    }

    pub(crate) fn listener_options(&self, listener: ListenerId) -> Option<Options> {
        Some(self.listeners.get(&listener.0)?.options)
    }

    /// Begins to connect to `peer`, from `local` if given (VR-CONN-011), within `timeout`, or at
    /// most twice that while this endpoint has events that are not read. [`Event::Opened`] or
    /// [`Event::Ended`] follows.
    ///
    /// # Errors
    /// Returns an error if an option is out of bounds, the connection limit is reached, or the
    /// connection manager refuses a further identifier, the addresses, the traffic class or the
    /// acknowledgement time-out.
    pub fn connect(
        &mut self,
        peer: SocketAddr,
        local: Option<SocketAddr>,
        timeout: Duration,
        options: Options,
    ) -> Result<ConnectionId, Error> {
        self.dial(peer, local, timeout, options, None)
    }

    /// Connects in the protection domain of another connection, even one of another endpoint. See
    /// [`ProtectionDomain`].
    ///
    /// # Errors
    /// The errors are those of [`Endpoint::connect`]. If the peer is reached through another
    /// device, the connection later ends with [`Error::ForeignDomain`].
    pub fn connect_in(
        &mut self,
        domain: &ProtectionDomain<B>,
        peer: SocketAddr,
        local: Option<SocketAddr>,
        timeout: Duration,
        options: Options,
    ) -> Result<ConnectionId, Error> {
        self.dial(peer, local, timeout, options, Some(domain.clone()))
    }

    pub(crate) fn dial(
        &mut self,
        peer: SocketAddr,
        local: Option<SocketAddr>,
        timeout: Duration,
        options: Options,
        domain: Option<ProtectionDomain<B>>,
    ) -> Result<ConnectionId, Error> {
        Error::unless_forked()?;
        options.check()?;
        let place = self.budget.place()?;
        // Shared events have an inbox for it from here on, which an error must remove.
        let id = self.events.create_id().map_err(Error::backend("creating a connection identifier"))?;
        let key = id.key();
        let connecting = Connecting::<B>::dial(id, (peer, local), &options, self.now(), timeout)
            .inspect_err(|_| self.events.forget(key))?;
        let mut member = Member::new(connecting, (key, peer), options, place, Role::Client);
        member.domain = domain;
        Ok(self.enter(member))
    }

    pub(super) fn ask(&mut self, id: ConnectionId, identifier: B::Identifier) {
        let Some(member) = self.members.get(id.0) else { return };
        let (peer, options) = (member.peer, member.options);
        let made = self.connect_queue(id, identifier, peer, Role::Client, options);
        let asked = made.and_then(|()| match self.connection(id) {
            Some(connection) => connection.connect(),
            None => Ok(()),
        });
        if let (Err(error), Some(member)) = (asked, self.members.get_mut(id.0)) {
            member.fail(error);
        }
        self.settle(id);
    }

    pub(super) fn accept_failed(&mut self, listener: IdentifierKey, error: Error) {
        let Some(listening) = self.listeners.get_mut(&listener) else { return };
        if listening.error.as_ref().is_some_and(Error::is_for_good) {
            return;
        }
        // Report it only if none is pending, or if it is final.
        let tells = listening.error.is_none() || error.is_for_good();
        listening.error = Some(error);
        if tells {
            self.notices.push_back(Event::AcceptFailed(ListenerId(listener)));
        }
    }

    /// Accepts a [`Request`]. [`Event::Opened`] or [`Event::Ended`] follows.
    ///
    /// # Errors
    /// Returns an error, and rejects the peer (VR-RES-006), if an option is out of bounds, a limit
    /// is reached, resources are lacking, the device was removed or refuses an option, or the
    /// request was withdrawn. An endpoint with [`SharedEvents`](crate::SharedEvents) accepts none.
    pub fn accept_request(
        &mut self,
        Request { identifier }: Request<B>,
        options: Options,
    ) -> Result<ConnectionId, Error> {
        Error::unless_forked()?;
        options.check()?;
        let place = self.budget.place()?;
        let Some(channel) = self.events.own() else { return Err(Error::Listening) };
        identifier.migrate(channel).map_err(Error::backend("moving a request to the endpoint"))?;
        self.accept(identifier, options, place, None)
    }

    /// Accepts another endpoint's request as the one connection of a new endpoint.
    pub(crate) fn adopt(
        backend: &B,
        identifier: B::Identifier,
        options: Options,
        budget: &Arc<Budget>,
        place: Place,
    ) -> Result<(Self, ConnectionId), Error> {
        // Check the budget before anything is made for it.
        budget.has(Memory::<B>::idle(&options.of(Role::Server)))?;
        // With a channel of its own: the end of the listener's would end it, too (VR-CONN-014).
        let mut endpoint = Self::of_one(backend, Arc::clone(budget))?;
        let Some(channel) = endpoint.events.own() else { return Err(Error::Listening) };
        identifier
            .migrate(channel)
            .map_err(Error::backend("moving a connection to its own event channel"))?;
        let id = endpoint.accept(identifier, options, place, None)?;
        Ok((endpoint, id))
    }

    /// Accepts a request, of a listener unless the program has examined it.
    pub(super) fn accept(
        &mut self,
        identifier: B::Identifier,
        options: Options,
        place: Place,
        arrives: Option<(ListenerId, Newcomer)>,
    ) -> Result<ConnectionId, Error> {
        let peer = identifier.peer_addr().ok_or(Error::DeviceRemoved)?;
        set_ack_timeout::<B>(&identifier, &options)?;
        let connecting = Connecting::accepted(self.now(), options.handshake_timeout);
        let mut member = Member::new(connecting, (identifier.key(), peer), options, place, Role::Server);
        if let Some((listener, newcomer)) = arrives {
            member = member.arrives(listener, newcomer);
        }
        let id = self.enter(member);
        let made = self.connect_queue(id, identifier, peer, Role::Server, options);
        let accepted = made.and_then(|()| match self.connection(id) {
            Some(connection) => connection.accept(),
            None => Ok(()),
        });
        match accepted {
            Ok(()) => {
                self.settle(id);
                Ok(id)
            }
            Err(error) => {
                // This drops the identifier, which rejects the peer (VR-RES-006).
                self.abort(id);
                Err(error)
            }
        }
    }

    fn connect_queue(
        &mut self,
        id: ConnectionId,
        identifier: B::Identifier,
        peer: SocketAddr,
        role: Role,
        options: Options,
    ) -> Result<(), Error> {
        let limits = identifier.capabilities().map_err(Error::backend("asking for the device's limits"))?;
        let options = options.of(role).fitted(&limits);
        // Before anything is made for it.
        self.budget.has(Memory::<B>::idle(&options))?;
        // The completion channel gets the descriptor that `with_events` took for it.
        drop(self.place.take());
        let at = self.queues.book(&identifier, &options, &self.watch)?;
        // A new queue is not armed yet.
        self.awake.has_more();
        while self.queues.get_mut(at).is_some_and(|queue| queue.is_stale()) {
            self.take_batch(at, self.backend.now(), false);
        }
        let Some(queue) = self.queues.get_mut(at) else { return Err(Error::DeviceRemoved) };
        if queue.is_lost() {
            // A stale completion lost the queue, so this connection would never get one.
            self.queues.leave(at, None, &options);
            return Err(Error::DeviceRemoved);
        }
        let budget = Arc::clone(&self.budget);
        let backend = self.backend.clone();
        let member = self.members.get(id.0);
        let domain = member.and_then(|member| member.domain.clone());
        let has_window = !member.is_some_and(Member::is_newcomer);
        let made =
            Connection::new(backend, identifier, queue.completions(), (peer, role), options, domain, budget);
        let made = made.and_then(|mut connection| {
            if has_window {
                connection.admit()?;
            }
            Ok(connection)
        });
        match made {
            Ok(connection) => {
                queue.enter(connection.queue_pair_number(), id);
                if let Some(member) = self.members.get_mut(id.0) {
                    member.queue = Some(at);
                    // As booked: `Queues::leave` gives back what these options need.
                    member.options = options;
                    member.connection = Some(Box::new(connection));
                }
                Ok(())
            }
            Err(error) => {
                // The queue pair, if it existed, may have left completions behind.
                self.queues.leave(at, None, &options);
                Err(error)
            }
        }
    }

    fn enter(&mut self, member: Member<B>) -> ConnectionId {
        let key = member.key;
        self.awake.raise_spin(member.options.spin);
        let id = ConnectionId(self.members.insert(member));
        self.identifiers.insert(key, id);
        self.touch(id);
        id
    }
}
