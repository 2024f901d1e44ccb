//! Accepting connections.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rdma_proto::backend::{Backend, CmEventKind, EventChannel, Identifier};

use crate::endpoint::Limits;
use crate::error::{Error, OPENING};
use crate::link::Link;
use crate::memory::Budget;
use crate::options::Options;
use crate::stream::Stream;
use crate::wait::{self, Descriptors};

/// Accepts connections on an address.
///
/// Each accepted connection has an event channel of its own, so a listener may be dropped, and another bound elsewhere, while
/// its connections go on (VR-CONN-014).
#[derive(Debug)]
pub struct Listener<B: Backend> {
    id: B::Identifier,
    events: B::EventChannel,
    backend: B,
    options: Options,
    /// Shared by all connections that it accepts.
    budget: Arc<Budget>,
}

impl<B: Backend> Listener<B> {
    /// Listens on `address`; port 0 takes a free one. Ports of RDMA are not those of TCP: one number may serve both
    /// (VR-CONN-009). Its connections together may have as much as [`Limits::default`] says.
    ///
    /// # Errors
    /// There is no RDMA device, or none has that address, or it is taken.
    pub fn bind(backend: &B, address: SocketAddr, options: Options) -> Result<Self, Error> {
        Self::bind_with(backend, address, options, Limits::default())
    }

    /// As [`Listener::bind`], with limits for all connections that are accepted, taken together.
    ///
    /// # Errors
    /// As there.
    pub fn bind_with(
        backend: &B,
        address: SocketAddr,
        options: Options,
        limits: Limits,
    ) -> Result<Self, Error> {
        options.protocol.check()?;
        let events = backend.event_channel().map_err(Error::backend("opening RDMA"))?;
        let id = events.listen(address, 0).map_err(Error::backend("listening"))?;
        let budget = Budget::new(limits);
        Ok(Self { id, events, backend: backend.clone(), options, budget })
    }

    /// The address it listens on.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local_addr()
    }

    /// Settings of the connections accepted from now on.
    ///
    /// # Errors
    /// They are out of bounds; the old ones remain.
    pub fn set_options(&mut self, options: Options) -> Result<(), Error> {
        options.protocol.check()?;
        self.options = options;
        Ok(())
    }

    /// The next connection, if a peer has asked for one. It may not be established yet, and fails if that takes longer than
    /// [`Options::handshake_timeout`].
    ///
    /// # Errors
    /// The listener failed; or the process has no descriptor or memory left to give to a connection, whose peer was told so, and
    /// the listener goes on. What befalls a single request, as when its peer withdraws it, is no error of the listener.
    pub fn try_accept(&self) -> Result<Option<Link<B>>, Error> {
        while let Some(event) =
            self.events.next_event().map_err(Error::backend("reading connection events"))?
        {
            match event.kind {
                CmEventKind::ConnectRequest { id, .. } => match self.take(id) {
                    Ok(link) => return Ok(Some(link)),
                    Err(error) if error.concerns_everybody() => return Err(error),
                    // The peer may have left; the next one has not.
                    Err(error) => tracing::warn!(%error, "a connection was not accepted"),
                },
                CmEventKind::DeviceRemoval => return Err(Error::DeviceRemoved),
                other => tracing::debug!(event = ?other, "event on a listener"),
            }
        }
        Ok(None)
    }

    /// The channel whose events announce connections.
    pub const fn event_channel(&self) -> &B::EventChannel {
        &self.events
    }

    /// The backend it listens on.
    pub const fn backend(&self) -> &B {
        &self.backend
    }

    fn take(&self, id: B::Identifier) -> Result<Link<B>, Error> {
        // Dropping an identifier that was not accepted rejects its peer, so every error below tells it (VR-RES-006).
        let peer = id.peer_addr().ok_or(Error::DeviceRemoved)?;
        let place = self.budget.place()?;
        let events = self.backend.event_channel().map_err(Error::backend(OPENING))?;
        id.migrate(&events).map_err(Error::backend("moving a connection to its own event channel"))?;
        let mut link =
            Link::new(self.backend.clone(), events, id, peer, self.options, (&self.budget, place))?;
        link.accept()?;
        Ok(link)
    }
}

impl<B: Descriptors> Listener<B> {
    /// Waits for the next connection.
    ///
    /// # Errors
    /// As [`Listener::try_accept`].
    pub fn accept(&self) -> Result<(Stream<B>, SocketAddr), Error> {
        self.accept_within(None)
    }

    /// Waits for the next connection, but no longer than `timeout`.
    ///
    /// # Errors
    /// As [`Listener::try_accept`], and [`Error::TimedOut`].
    pub fn accept_timeout(&self, timeout: Duration) -> Result<(Stream<B>, SocketAddr), Error> {
        self.accept_within(Some(timeout))
    }

    fn accept_within(&self, timeout: Option<Duration>) -> Result<(Stream<B>, SocketAddr), Error> {
        let deadline = timeout.map(|after| (self.backend.now().after(after), after));
        loop {
            if let Some(link) = self.try_accept()? {
                let peer = link.peer_addr();
                return Ok((link.into(), peer));
            }
            let now = self.backend.now();
            if let Some((_, after)) = deadline.filter(|(at, _)| now >= *at) {
                return Err(Error::TimedOut { doing: "waiting for a connection", after });
            }
            let [_woken] = wait::readable([self.events.as_fd()], deadline.map(|(at, _)| at.since(now)))?;
        }
    }
}
