//! Accepting connections.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::Duration;

use rdma_proto::backend::{Backend, CmEventKind, EventChannel, Identifier};

use crate::error::Error;
use crate::link::Link;
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
    /// What ended it: its device is gone.
    end: OnceLock<Error>,
}

impl<B: Backend> Listener<B> {
    /// Listens on `address`; port 0 takes a free one. Ports of RDMA are not those of TCP: one number may serve both
    /// (VR-CONN-009).
    ///
    /// # Errors
    /// There is no RDMA device, or none has that address, or it is taken.
    pub fn bind(backend: &B, address: SocketAddr, options: Options) -> Result<Self, Error> {
        options.protocol.check()?;
        let events = backend.event_channel().map_err(Error::backend("opening RDMA"))?;
        let id = events.listen(address, 0).map_err(Error::backend("listening"))?;
        Ok(Self { id, events, backend: backend.clone(), options, end: OnceLock::new() })
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
    /// The listener failed, or a connection could not be given resources; that peer was told so, and the listener goes on.
    pub fn try_accept(&self) -> Result<Option<Link<B>>, Error> {
        if let Some(end) = self.end.get() {
            return Err(end.clone());
        }
        while let Some(event) =
            self.events.next_event().map_err(Error::backend("reading connection events"))?
        {
            match event.kind {
                CmEventKind::ConnectRequest { id, .. } => return self.take(id).map(Some),
                CmEventKind::DeviceRemoval => return Err(self.end(Error::DeviceRemoved)),
                CmEventKind::Async(event) if event.is_fatal() => {
                    return Err(self.end(Error::Device { event }));
                }
                other => tracing::debug!(event = ?other, "event on a listener"),
            }
        }
        Ok(None)
    }

    /// Nobody can connect any more, which every later call is told too.
    fn end(&self, end: Error) -> Error {
        self.end.get_or_init(|| end).clone()
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
        let events = self.backend.event_channel().map_err(Error::backend("opening an event channel"))?;
        id.migrate(&events).map_err(Error::backend("moving a connection to its own event channel"))?;
        let mut link = Link::new(self.backend.clone(), events, id, peer, self.options)?;
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
