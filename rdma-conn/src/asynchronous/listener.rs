//! Accepting connections in tasks.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;

use super::{Accepting, AsyncEndpoint, AsyncStream, Shared};
use crate::budget::Limits;
use crate::endpoint::{Descriptors, ListenerId};
use crate::error::Error;
use crate::listener::Listener;
use crate::options::Options;

/// Accepts connections for tokio. They share an [`AsyncEndpoint`].
pub struct AsyncListener<B: Descriptors> {
    shared: Arc<Shared<B>>,
    listener: ListenerId,
}

impl<B: Descriptors> AsyncListener<B> {
    /// Listens on `address` with an endpoint of its own, as [`AsyncEndpoint::listen`] does.
    ///
    /// # Errors
    /// Those of the call that it names.
    pub fn bind(backend: &B, address: SocketAddr, options: Options) -> Result<Self, Error> {
        AsyncEndpoint::new(backend, Limits::default())?.listen(address, options)
    }

    /// Accepts what `listener` is asked for, with its options and limits.
    ///
    /// # Errors
    /// The runtime cannot watch the listener.
    pub fn new(listener: Listener<B>) -> Result<Self, Error> {
        let (mut endpoint, listener) = listener.into_endpoint();
        endpoint.accept_for(listener);
        let AsyncEndpoint { shared } = AsyncEndpoint::of(endpoint)?;
        Ok(Self::of(shared, listener))
    }

    pub(super) fn of(shared: Arc<Shared<B>>, listener: ListenerId) -> Self {
        shared.with(|state| state.listeners.insert(listener, Accepting::default()));
        Self { shared, listener }
    }

    /// Returns the address it listens on.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.lock().endpoint.local_addr(self.listener)
    }

    /// Returns the endpoint that its connections are on.
    pub fn endpoint(&self) -> AsyncEndpoint<B> {
        AsyncEndpoint { shared: Arc::clone(&self.shared) }
    }

    /// Waits for the next connection, which is established. A future that is dropped has accepted none, and as many tasks as like
    /// may wait.
    ///
    /// # Errors
    /// The listener failed; or the process has no descriptor or memory left to give to a connection, whose peer was told so, and
    /// the listener goes on. What befalls a single request, as when its peer withdraws it, is no error of the listener.
    pub async fn accept(&self) -> Result<(AsyncStream<B>, SocketAddr), Error> {
        poll_fn(|cx| {
            self.shared.with(|state| {
                let Some(accepting) = state.listeners.get_mut(&self.listener) else {
                    return Poll::Ready(Err(Error::NoSuchConnection));
                };
                while let Some(id) = accepting.accepted.pop_front() {
                    if let Some(peer) = state.endpoint.peer_addr(id) {
                        return Poll::Ready(Ok((AsyncStream::of(&self.shared, id), peer)));
                    }
                }
                if let Some(error) = state.endpoint.take_accept_error(self.listener).or(state.lost.clone()) {
                    return Poll::Ready(Err(error));
                }
                if !accepting.waiting.iter().any(|noted| noted.will_wake(cx.waker())) {
                    accepting.waiting.push(cx.waker().clone());
                }
                Poll::Pending
            })
        })
        .await
    }
}

impl<B: Descriptors> Drop for AsyncListener<B> {
    fn drop(&mut self) {
        self.shared.with(|state| {
            state.endpoint.close_listener(self.listener);
            let accepting = state.listeners.remove(&self.listener).unwrap_or_default();
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
