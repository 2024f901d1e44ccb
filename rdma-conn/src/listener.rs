//! Accepting connections.

use std::fmt::Debug;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdma_backend::Identifier;

use crate::budget::{Budget, Limits};
use crate::endpoint::{ConnectionId, Descriptors, Endpoint, ListenerId, readable};
use crate::error::Error;
use crate::options::Options;
use crate::stream::Stream;
use crate::waker::Waker;

/// Requests that are looked at in one call, if nothing comes of any (VR-RES-007).
const ATTEMPTS: u32 = 16;

/// A peer's request for a connection, which [`Listener::try_request`] hands out. Nothing was allocated for it yet:
/// [`Endpoint::accept_request`] makes the connection. Dropping it rejects the peer (VR-RES-006).
pub struct Request<B: Descriptors> {
    pub(crate) identifier: B::Identifier,
}

impl<B: Descriptors> Request<B> {
    /// Returns the peer's address; `None` if the device is gone.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.identifier.peer_addr()
    }

    /// Returns this side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.identifier.local_addr()
    }
}

impl<B: Descriptors> Debug for Request<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Request").field("peer", &self.peer_addr()).finish_non_exhaustive()
    }
}

/// Accepts connections on an address.
///
/// Each accepted connection has an [`Endpoint`] of its own, so that threads that serve one connection each have nothing to share,
/// and a listener may be dropped, and another bound elsewhere, while its connections go on (VR-CONN-014). A program that has endpoints
/// of its own takes the bare requests instead ([`Listener::try_request`]).
pub struct Listener<B: Descriptors> {
    asked: Mutex<Asked<B>>,
    listener: ListenerId,
    backend: B,
    /// Shared by all connections that it accepts.
    budget: Arc<Budget>,
    descriptor: Arc<OwnedFd>,
    waker: Waker,
}

/// The endpoint to which requests come.
struct Asked<B: Descriptors> {
    endpoint: Endpoint<B>,
    /// The reason for which nothing comes any more.
    over: Option<Error>,
}

impl<B: Descriptors> Listener<B> {
    /// Listens on a host and port, `"host:6379"` or `("host", 6379)`, with default settings. Its addresses are tried in turn; port 0 takes a
    /// free one. Ports of RDMA are not those of TCP: one number may serve both (VR-CONN-009).
    ///
    /// # Errors
    /// As [`Listener::bind_with`].
    pub fn bind(backend: &B, host: impl ToSocketAddrs + Debug) -> Result<Self, Error> {
        Self::bind_with(backend, host, Options::default(), Limits::default())
    }

    /// As [`Listener::bind`], with settings for each connection that is accepted, and limits for all of them, taken together.
    ///
    /// # Errors
    /// That of the last address tried. There is no RDMA device, or none has that address, or it is taken, or the options are out of bounds.
    pub fn bind_with(
        backend: &B,
        host: impl ToSocketAddrs + Debug,
        options: Options,
        limits: Limits,
    ) -> Result<Self, Error> {
        let budget = Budget::new(limits);
        let mut endpoint = Endpoint::of_one(backend, Arc::clone(&budget))?;
        let listener = listen(&mut endpoint, host, options)?;
        let (descriptor, waker) = (endpoint.descriptor(), endpoint.waker()?);
        let asked = Mutex::new(Asked { endpoint, over: None });
        Ok(Self { asked, listener, backend: backend.clone(), budget, descriptor, waker })
    }

    fn lock(&self) -> MutexGuard<'_, Asked<B>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the address it listens on.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.lock().endpoint.local_addr(self.listener)
    }

    /// Settings of the connections accepted from now on.
    ///
    /// # Errors
    /// They are out of bounds; the old ones remain.
    pub fn set_options(&mut self, options: Options) -> Result<(), Error> {
        let listener = self.listener;
        self.lock().endpoint.set_options(listener, options)
    }

    /// Returns the next request for a connection, if a peer has made one, for an endpoint of the caller's
    /// ([`Endpoint::accept_request`]). Its options and limits count there, those of the listener do not. Call it until it returns `None`,
    /// whenever the listener's descriptor ([`AsFd`]) is readable.
    ///
    /// # Errors
    /// The listener failed. Either it is over ([`Listener::is_over`]): its device failed or is gone, or its events cannot be read again
    /// and again. Each call says so from then on, and the descriptor stays readable. Or it goes on, and the next call may do better after
    /// a moment.
    pub fn try_request(&self) -> Result<Option<Request<B>>, Error> {
        let mut asked = self.lock();
        if let Some(error) = &asked.over {
            return Err(error.clone());
        }
        let (error, lost) = match asked.endpoint.progress() {
            Ok(()) => {
                if let Some(identifier) = asked.endpoint.take_request() {
                    return Ok(Some(Request { identifier }));
                }
                let Some(error) = asked.endpoint.take_accept_error(self.listener) else { return Ok(None) };
                (error, false)
            }
            Err(error) => (error, true),
        };
        if error.is_for_good() || lost {
            asked.over = Some(error.clone());
            // What told of it is taken, and others may sleep until something comes. Nothing takes this wake-up.
            self.waker.wake();
        }
        Err(error)
    }

    /// Returns whether it accepts no connection any more: each call on it returns the reason.
    pub fn is_over(&self) -> bool {
        self.lock().over.is_some()
    }

    /// Returns the next connection, if a peer has asked for one, on an endpoint of its own. It may not be established yet, and
    /// fails if that takes longer than [`Options::handshake_timeout`]. Call it until it returns `None`, whenever the listener's
    /// descriptor ([`AsFd`]) is readable.
    ///
    /// # Errors
    /// As [`Listener::try_request`]; or the process has no descriptor or memory left to give to a connection, whose peer was told
    /// so, and the listener goes on. A single request that fails, as when its peer withdraws it, is no error of the listener.
    pub fn try_accept(&self) -> Result<Option<(Endpoint<B>, ConnectionId)>, Error> {
        for _ in 0..ATTEMPTS {
            let Some(request) = self.try_request()? else { return Ok(None) };
            let Some(options) = self.lock().endpoint.listener_options(self.listener) else { return Ok(None) };
            let peer = request.peer_addr();
            // Dropping a request that was not accepted rejects its peer, so every error tells it (VR-RES-006).
            let accepted = self.budget.place().and_then(|place| {
                Endpoint::adopt(&self.backend, request.identifier, options, &self.budget, place)
            });
            match accepted {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(error) if error.concerns_everybody() => return Err(error),
                // The peer may have left; the next one has not.
                Err(error) => tracing::warn!(?peer, %error, "a connection was not accepted"),
            }
        }
        Ok(None)
    }

    /// Waits until there may be a request, or [`Listener::waker`] ends the wait, for at most `timeout`.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), Error> {
        // Not under the lock, so that others may accept too. The channel is readable for as long as there are requests.
        readable(&self.descriptor, timeout)
    }

    /// Returns a waker that ends the waits of all threads, until one of them looks for a request.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
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
            self.wait(deadline.map(|(at, _)| at.since(now)))?;
        }
    }

    /// Returns the endpoint and the listener on it, for a face that drives the endpoint itself.
    #[cfg(feature = "tokio")]
    pub(crate) fn into_endpoint(self) -> (Endpoint<B>, ListenerId) {
        let asked = self.asked.into_inner().unwrap_or_else(PoisonError::into_inner);
        (asked.endpoint, self.listener)
    }
}

/// Listens on the first address of a host that can be had, and hands over what is asked for.
fn listen<B: Descriptors>(
    endpoint: &mut Endpoint<B>,
    host: impl ToSocketAddrs + Debug,
    options: Options,
) -> Result<ListenerId, Error> {
    let name = format!("{host:?}");
    let mut last = Error::no_address(&name);
    for address in host.to_socket_addrs().map_err(|source| Error::no_such_host(&name, source))? {
        match endpoint.listen_for(address, options, true) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
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
