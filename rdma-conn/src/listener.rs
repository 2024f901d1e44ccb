use std::fmt::Debug;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rdma_backend::Identifier;
use rdma_process::UnsharedFd;

use crate::budget::{Budget, Limits};
use crate::endpoint::{ConnectionId, Descriptors, Endpoint, ListenerId, readable};
use crate::error::Error;
use crate::fork::locked;
use crate::options::Options;
use crate::stream::Stream;
use crate::waker::Waker;

/// Requests examined in one call if none of them can be accepted (VR-RES-007).
const ATTEMPTS: u32 = 16;

/// A peer's request for a connection, returned by [`Listener::try_request`].
///
/// Nothing is allocated for the peer until [`Endpoint::accept_request`] makes the connection.
/// Dropping a request rejects the peer (VR-RES-006).
pub struct Request<B: Descriptors> {
    pub(crate) identifier: B::Identifier,
}

impl<B: Descriptors> Request<B> {
    /// Returns the peer's address, or `None` if the device was removed.
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
/// Each accepted connection has its own [`Endpoint`], so threads that serve different connections
/// share nothing. A listener may be dropped, and another bound elsewhere, while its connections
/// continue (VR-CONN-014). A program with its own endpoints uses [`Listener::try_request`].
pub struct Listener<B: Descriptors> {
    asked: Mutex<Asked<B>>,
    listener: ListenerId,
    backend: B,
    budget: Arc<Budget>,
    descriptor: Arc<UnsharedFd>,
    waker: Waker,
}

struct Asked<B: Descriptors> {
    endpoint: Endpoint<B>,
    over: Option<Error>,
}

impl<B: Descriptors> Listener<B> {
    /// Listens on a host and port, `"host:6379"` or `("host", 6379)`, with default settings.
    ///
    /// The host's addresses are tried in turn. Port 0 picks a free port. RDMA and TCP have separate
    /// port numbers, so one number may serve both (VR-CONN-009).
    ///
    /// # Errors
    /// The errors are those of [`Listener::bind_with`].
    pub fn bind(backend: &B, host: impl ToSocketAddrs + Debug) -> Result<Self, Error> {
        Self::bind_with(backend, host, Options::default(), Limits::default())
    }

    /// Listens with settings for each accepted connection, and limits on all of them together.
    ///
    /// # Errors
    /// Returns an error if there is no RDMA device, the host is unknown, an option is out of
    /// bounds, or the process has no descriptor left. Otherwise returns the error of the last
    /// address tried: no device has the address, or the address is taken.
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
        locked(&self.asked)
    }

    /// Returns the address it listens on.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.lock().endpoint.local_addr(self.listener)
    }

    /// Sets the options of connections accepted from now on.
    ///
    /// # Errors
    /// Returns an error and keeps the old options if one is out of bounds.
    pub fn set_options(&mut self, options: Options) -> Result<(), Error> {
        Error::unless_forked()?;
        let listener = self.listener;
        self.lock().endpoint.set_options(listener, options)
    }

    /// Returns the next request, for [`Endpoint::accept_request`] of the caller's endpoint.
    ///
    /// The options and limits of that endpoint apply, not the listener's. When the listener's
    /// descriptor ([`AsFd`]) is readable, call this until it returns `None`.
    ///
    /// # Errors
    /// Returns an error if the listener failed. If [`Listener::is_over`] is true, its device failed
    /// or was removed, or its events repeatedly could not be read. Every later call then returns
    /// the error, and the descriptor stays readable. Otherwise try again after a moment.
    pub fn try_request(&self) -> Result<Option<Request<B>>, Error> {
        Error::unless_forked()?;
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
            // This call consumed the wake-up of other threads. The waker stays readable.
            self.waker.wake();
        }
        Err(error)
    }

    /// Returns whether the listener has stopped for good. Every call that asks for a request or a
    /// connection then returns the reason.
    pub fn is_over(&self) -> bool {
        self.lock().over.is_some()
    }

    /// Returns the next connection, on an endpoint of its own, if a peer has asked for one.
    ///
    /// The connection may not be established yet. If it is not established within
    /// [`Options::handshake_timeout`], it fails. When the listener's descriptor ([`AsFd`]) is
    /// readable, call this until it returns `None`.
    ///
    /// # Errors
    /// Returns an error if the listener failed; see [`Listener::try_request`]. Also returns an
    /// error if the process has no descriptor or memory left for a connection. The peer is then
    /// rejected, and the listener continues. A request that fails, or is withdrawn, is no error.
    pub fn try_accept(&self) -> Result<Option<(Endpoint<B>, ConnectionId)>, Error> {
        for _ in 0..ATTEMPTS {
            let Some(request) = self.try_request()? else { return Ok(None) };
            let Some(options) = self.lock().endpoint.listener_options(self.listener) else { return Ok(None) };
            let peer = request.peer_addr();
            // Dropping a request rejects its peer, so it learns of every error (VR-RES-006).
            let accepted = self.budget.place().and_then(|place| {
                Endpoint::adopt(&self.backend, request.identifier, options, &self.budget, place)
            });
            match accepted {
                Ok(accepted) => return Ok(Some(accepted)),
                Err(error) if error.concerns_everybody() => return Err(error),
                // It concerns this peer alone, which may have left. The next one can be accepted.
                Err(error) => tracing::warn!(?peer, %error, "a connection was not accepted"),
            }
        }
        Ok(None)
    }

    /// Waits until there may be a request, or until a waker from [`Listener::waker`] wakes it.
    /// Waits for at most `timeout`; `None` is without a limit.
    ///
    /// # Errors
    /// Returns an error if `poll` fails.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), Error> {
        Error::unless_forked()?;
        // Without the lock, for other threads. The channel stays readable while there are requests.
        readable(&self.descriptor, timeout)
    }

    /// Returns a waker of [`Listener::wait`]. A wake-up ends the waits of all threads, and lasts
    /// until a thread looks for a request.
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
    /// The errors are those of [`Listener::try_accept`].
    pub fn accept(&self) -> Result<(Stream<B>, SocketAddr), Error> {
        self.accept_within(None)
    }

    /// Waits for the next connection, for at most `timeout`.
    ///
    /// # Errors
    /// The errors are those of [`Listener::try_accept`], and [`Error::TimedOut`].
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
                return Err(Error::TimedOut { doing: "waiting for a connection", after, peer: None });
            }
            self.wait(deadline.map(|(at, _)| at.since(now)))?;
        }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn into_endpoint(self) -> (Endpoint<B>, ListenerId) {
        let asked = self.asked.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        (asked.endpoint, self.listener)
    }
}

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
