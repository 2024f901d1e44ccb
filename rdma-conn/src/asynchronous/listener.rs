use std::fmt::Debug;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::net::ToSocketAddrs;

use super::{AsyncEndpoint, AsyncStream, Shared};
use crate::budget::Limits;
use crate::endpoint::{Descriptors, ListenerId};
use crate::error::Error;
use crate::listener::Listener;
use crate::options::Options;

/// Accepts connections for tokio. They share an [`AsyncEndpoint`].
///
/// The [crate page](crate) has an example.
pub struct AsyncListener<B: Descriptors> {
    pub(super) shared: Arc<Shared<B>>,
    pub(super) listener: ListenerId,
}

impl<B: Descriptors> AsyncListener<B> {
    /// Listens on `"host:6379"` or `("host", 6379)` on a new endpoint, like [`Listener::bind`].
    ///
    /// # Errors
    /// The errors are those of [`AsyncListener::bind_with`].
    pub async fn bind(backend: &B, host: impl ToSocketAddrs + Debug) -> Result<Self, Error> {
        Self::bind_with(backend, host, Options::default(), Limits::default()).await
    }

    /// Listens with settings for each accepted connection, and limits on all of them together.
    ///
    /// # Errors
    /// The errors are those of [`Listener::bind_with`]. Also returns an error if there is no
    /// runtime.
    pub async fn bind_with(
        backend: &B,
        host: impl ToSocketAddrs + Debug,
        options: Options,
        limits: Limits,
    ) -> Result<Self, Error> {
        let endpoint = AsyncEndpoint::new(backend, limits)?;
        let (addresses, mut last) = super::addresses(host).await?;
        for address in addresses {
            match endpoint.listen(address, options) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Sets the options of connections accepted from now on.
    ///
    /// # Errors
    /// Returns an error and keeps the old options if one is out of bounds.
    pub fn set_options(&self, options: Options) -> Result<(), Error> {
        Error::unless_forked()?;
        self.shared.with(|state| state.endpoint.set_options(self.listener, options))
    }

    /// Returns the address it listens on.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.lock().endpoint.local_addr(self.listener)
    }

    /// Returns the endpoint of its connections.
    pub fn endpoint(&self) -> AsyncEndpoint<B> {
        AsyncEndpoint { shared: Arc::clone(&self.shared) }
    }

    /// Waits for the next established connection. A future that is dropped early accepts no
    /// connection. Any number of tasks may wait.
    ///
    /// A connection that no task has accepted has no window, and counts towards
    /// [`Limits::backlog`]. A client of this crate that connects waits for that window: its connect
    /// completes only after the accept.
    ///
    /// # Errors
    /// The errors are those of [`Listener::try_accept`], and that of a lost endpoint. A listener
    /// whose device is gone, or whose endpoint is lost, accepts no more.
    pub async fn accept(&self) -> Result<(AsyncStream<B>, SocketAddr), Error> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// Takes the next connection, or has the task woken for one. See [`AsyncListener::accept`].
    ///
    /// # Errors
    /// The errors are those of [`AsyncListener::accept`].
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<Result<(AsyncStream<B>, SocketAddr), Error>> {
        Error::unless_forked()?;
        self.shared.with(|state| {
            let Some(accepting) = state.listeners.get_mut(&self.listener) else {
                return Poll::Ready(Err(Error::NoSuchConnection));
            };
            while let Some(id) = accepting.accepted.pop_front() {
                if let Some(peer) = state.endpoint.peer_addr(id) {
                    state.endpoint.take(id);
                    return Poll::Ready(Ok((AsyncStream::of(&self.shared, id), peer)));
                }
            }
            if let Some(error) = state.endpoint.take_accept_error(self.listener).or(state.lost.clone()) {
                return Poll::Ready(Err(error));
            }
            // A task may poll often before it is woken.
            if !accepting.waiting.iter().any(|noted| noted.will_wake(cx.waker())) {
                accepting.waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
    }
}

impl<B: Descriptors> TryFrom<Listener<B>> for AsyncListener<B> {
    type Error = Error;

    /// Converts a blocking listener, with its options and limits.
    ///
    /// # Errors
    /// Returns an error if there is no runtime.
    fn try_from(listener: Listener<B>) -> Result<Self, Error> {
        Error::unless_forked()?;
        let (mut endpoint, listener) = listener.into_endpoint();
        endpoint.accept_for(listener);
        let (AsyncEndpoint { shared }, driven) = AsyncEndpoint::of(endpoint, Some(listener));
        let listener = Self { shared, listener };
        driven.map(|()| listener)
    }
}

/// The descriptor of its endpoint; see [`AsyncEndpoint`].
impl<B: Descriptors> AsFd for AsyncListener<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.descriptor.as_fd()
    }
}

impl<B: Descriptors> Drop for AsyncListener<B> {
    fn drop(&mut self) {
        self.shared.release(|state| {
            state.endpoint.close_listener(self.listener);
            let accepting = state.listeners.remove(&self.listener).unwrap_or_default();
            // No other handle knows these connections, so that they would stay for ever.
            for id in accepting.accepted {
                state.tasks.remove(id);
                state.endpoint.abort(id);
            }
        });
    }
}

impl<B: Descriptors> std::fmt::Debug for AsyncListener<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AsyncListener").field("address", &self.local_addr()).finish_non_exhaustive()
    }
}
