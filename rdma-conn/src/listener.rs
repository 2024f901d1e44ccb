//! Accepting connections.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_backend::Identifier;

use crate::budget::{Budget, Limits};
use crate::endpoint::{ConnectionId, Descriptors, Endpoint, EndpointWaker, ListenerId, readable};
use crate::error::Error;
use crate::options::Options;
use crate::stream::Stream;

/// Requests that are looked at in one call, if nothing comes of any (VR-RES-007).
const ATTEMPTS: u32 = 16;

/// Accepts connections on an address.
///
/// Each accepted connection has an [`Endpoint`] of its own, so that threads that serve one connection each have nothing to share,
/// and a listener may be dropped, and another bound elsewhere, while its connections go on (VR-CONN-014).
pub struct Listener<B: Descriptors> {
    endpoint: Mutex<Endpoint<B>>,
    listener: ListenerId,
    backend: B,
    /// Shared by all connections that it accepts.
    budget: Arc<Budget>,
    descriptor: Arc<OwnedFd>,
    /// Tells everybody who waits that it has failed for good.
    waker: EndpointWaker,
}

impl<B: Descriptors> Listener<B> {
    /// Listens on `address`; port 0 takes a free one. Ports of RDMA are not those of TCP: one number may serve both
    /// (VR-CONN-009). Its connections together may have as much as [`Limits::default`] says.
    ///
    /// # Errors
    /// There is no RDMA device, or none has that address, or it is taken, or the options are out of bounds.
    pub fn bind(backend: &B, address: SocketAddr, options: Options) -> Result<Self, Error> {
        Self::bind_with(backend, address, options, Limits::default())
    }

    /// As [`Listener::bind`], with limits for all connections that are accepted, taken together.
    ///
    /// # Errors
    /// Those of the call that it names.
    pub fn bind_with(
        backend: &B,
        address: SocketAddr,
        options: Options,
        limits: Limits,
    ) -> Result<Self, Error> {
        let budget = Budget::new(limits);
        let mut endpoint = Endpoint::of_one(backend, Arc::clone(&budget))?;
        let listener = endpoint.listen_for(address, options, true)?;
        let (descriptor, waker) = (endpoint.descriptor(), endpoint.waker()?);
        let endpoint = Mutex::new(endpoint);
        Ok(Self { endpoint, listener, backend: backend.clone(), budget, descriptor, waker })
    }

    fn lock(&self) -> MutexGuard<'_, Endpoint<B>> {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the address it listens on.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.lock().local_addr(self.listener)
    }

    /// Settings of the connections accepted from now on.
    ///
    /// # Errors
    /// They are out of bounds; the old ones remain.
    pub fn set_options(&mut self, options: Options) -> Result<(), Error> {
        let listener = self.listener;
        self.lock().set_options(listener, options)
    }

    /// Returns the next connection, if a peer has asked for one, on an endpoint of its own. It may not be established yet, and
    /// fails if that takes longer than [`Options::handshake_timeout`]. Call it until it returns `None`, whenever the listener's
    /// descriptor ([`AsFd`]) is readable.
    ///
    /// # Errors
    /// The listener failed, as every call says from then on, and its descriptor stays readable; or
    /// the process has no descriptor or memory left to give to a connection, whose peer was told
    /// so, and the listener goes on. A single request that fails, as when its peer withdraws it, is
    /// no error of the listener.
    pub fn try_accept(&self) -> Result<Option<(Endpoint<B>, ConnectionId)>, Error> {
        let mut endpoint = self.lock();
        for _ in 0..ATTEMPTS {
            endpoint.progress()?;
            let Some(request) = endpoint.take_request() else {
                let error = endpoint.take_accept_error(self.listener);
                if error.as_ref().is_some_and(Error::is_for_good) {
                    // What told of it was taken just now, and others may sleep until something
                    // comes: so it says so for ever.
                    self.waker.wake()?;
                }
                return error.map_or(Ok(None), Err);
            };
            let Some(options) = endpoint.listener_options(self.listener) else { return Ok(None) };
            let peer = request.peer_addr();
            // Dropping an identifier that was not accepted rejects its peer, so every error tells it (VR-RES-006).
            let accepted = self
                .budget
                .place()
                .and_then(|place| Endpoint::adopt(&self.backend, request, options, &self.budget, place));
            match accepted {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(error) if error.concerns_everybody() => return Err(error),
                // The peer may have left; the next one has not.
                Err(error) => tracing::warn!(?peer, %error, "a connection was not accepted"),
            }
        }
        Ok(None)
    }

    /// Returns the backend it listens on.
    pub const fn backend(&self) -> &B {
        &self.backend
    }

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
            if let Some((endpoint, id)) = self.try_accept()? {
                let stream = Stream::from_endpoint(endpoint, id);
                let peer = stream.peer_addr();
                return Ok((stream, peer));
            }
            let now = self.backend.now();
            if let Some((_, after)) = deadline.filter(|(at, _)| now >= *at) {
                return Err(Error::TimedOut { doing: "waiting for a connection", after });
            }
            // Not under the lock, so that others may accept too. The channel is readable for as long as there are requests.
            readable(&self.descriptor, deadline.map(|(at, _)| at.since(now)))?;
        }
    }

    /// Returns the endpoint and the listener on it, for a face that drives the endpoint itself.
    #[cfg(feature = "tokio")]
    pub(crate) fn into_endpoint(self) -> (Endpoint<B>, ListenerId) {
        let endpoint = self.endpoint.into_inner().unwrap_or_else(PoisonError::into_inner);
        (endpoint, self.listener)
    }
}

impl<B: Descriptors> AsFd for Listener<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl<B: Descriptors> std::fmt::Debug for Listener<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").field("address", &self.local_addr()).finish_non_exhaustive()
    }
}
