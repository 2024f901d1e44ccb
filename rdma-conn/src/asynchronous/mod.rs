//! Endpoints, streams and listeners for the tokio runtime.
//!
//! The driver, a task of the runtime, is the event loop of an [`AsyncEndpoint`], and wakes the
//! tasks concerned. Streams and listeners are handles on the endpoint.

mod driver;
mod halves;
mod listener;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, Waker};

use arrayvec::ArrayVec;
use rdma_backend::time::Instant;
use rdma_process::UnsharedFd;
use tokio::net::ToSocketAddrs;

use crate::background::{self, Driven, Schedule};
use crate::budget::Limits;
use crate::domain::ProtectionDomain;
use crate::endpoint::{ConnectionId, ConnectionMap, Descriptors, Endpoint, Event, ListenerId, Usage};
use crate::error::Error;
use crate::fork::locked;
use crate::options::Options;
use crate::stream::Connect;

use driver::drive;

pub use halves::{ReadHalf, WriteHalf};
pub use listener::AsyncListener;
pub use stream::AsyncStream;

/// Connections that share an event channel, completion queues and a task of the runtime.
///
/// Clones are handles on one endpoint. When its runtime ends, a thread of this crate drives it, so
/// that calls of tasks in other runtimes still complete.
#[derive(Clone)]
pub struct AsyncEndpoint<B: Descriptors> {
    shared: Arc<Shared<B>>,
}

impl<B: Descriptors> AsyncEndpoint<B> {
    /// Returns an endpoint without connections.
    ///
    /// # Errors
    /// Returns an error if there is no RDMA device, no runtime, or no descriptor left.
    ///
    /// # Panics
    /// Panics, as does every call that creates an endpoint, if the runtime has no IO or time
    /// driver. Build it with [`enable_all`](tokio::runtime::Builder::enable_all).
    pub fn new(backend: &B, limits: Limits) -> Result<Self, Error> {
        let (endpoint, driven) = Self::of(Endpoint::new(backend, limits)?, None);
        driven.map(|()| endpoint)
    }

    /// Makes an endpoint. If the current runtime cannot drive it, the background thread does.
    fn of(endpoint: Endpoint<B>, listener: Option<ListenerId>) -> (Self, Result<(), Error>) {
        let descriptor = endpoint.descriptor();
        let state = EndpointTasks {
            endpoint,
            tasks: ConnectionMap::new(),
            listeners: listener.into_iter().map(|listener| (listener, Accepting::default())).collect(),
            driver: None,
            sleeps_until: None,
            lost: None,
            itself: None,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), descriptor });
        let driven = drive(&shared);
        // The handle is dropped with the error, and its bytes must still be delivered
        // (VR-CLOSE-001).
        if driven.is_err() {
            let weak: Weak<Shared<B>> = Arc::downgrade(&shared);
            background::drive(weak);
        }
        (Self { shared }, driven)
    }

    /// Listens on `address`. Port 0 picks a free port. Accepted connections use `options`.
    ///
    /// # Errors
    /// The errors are those of [`Endpoint::listen`].
    pub fn listen(&self, address: SocketAddr, options: Options) -> Result<AsyncListener<B>, Error> {
        Error::unless_forked()?;
        // Under one lock: the driver must not see a connection of an unknown listener.
        let listener = self.shared.with(|state| {
            let listener = state.endpoint.listen(address, options)?;
            state.listeners.insert(listener, Accepting::default());
            Ok::<_, Error>(listener)
        })?;
        Ok(AsyncListener { shared: Arc::clone(&self.shared), listener })
    }

    /// Connects to a host and port, `"host:6379"` or `("host", 6379)`. Its addresses are tried in
    /// turn. Dropping the future leaves no connection behind.
    ///
    /// # Errors
    /// The errors are those of [`Stream::connect_with`](crate::Stream::connect_with). Also returns
    /// an error if a limit of the endpoint is reached or the endpoint is lost.
    pub async fn connect(
        &self,
        host: impl ToSocketAddrs + Debug,
        how: &Connect,
    ) -> Result<AsyncStream<B>, Error> {
        self.connect_among(host, how, None).await
    }

    /// Connects in the protection domain of another connection. See [`ProtectionDomain`].
    ///
    /// # Errors
    /// Returns [`Error::ForeignDomain`] if the peer is reached through another device. Otherwise
    /// the errors are those of [`AsyncEndpoint::connect`].
    pub async fn connect_in(
        &self,
        domain: &ProtectionDomain<B>,
        host: impl ToSocketAddrs + Debug,
        how: &Connect,
    ) -> Result<AsyncStream<B>, Error> {
        self.connect_among(host, how, Some(domain)).await
    }

    async fn connect_among(
        &self,
        host: impl ToSocketAddrs + Debug,
        how: &Connect,
        domain: Option<&ProtectionDomain<B>>,
    ) -> Result<AsyncStream<B>, Error> {
        let (addresses, mut last) = addresses(host).await?;
        for peer in addresses {
            match AsyncStream::dial(&self.shared, peer, how, domain).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Returns a weak handle. It upgrades while the endpoint has a connection, listener or handle.
    pub fn downgrade(&self) -> WeakAsyncEndpoint<B> {
        WeakAsyncEndpoint { shared: Arc::downgrade(&self.shared) }
    }

    /// Returns counts of the endpoint's resources and operations.
    pub fn usage(&self) -> Usage {
        self.shared.lock().endpoint.usage()
    }
}

async fn addresses<H: ToSocketAddrs + Debug>(
    host: H,
) -> Result<(impl Iterator<Item = SocketAddr>, Error), Error> {
    let name = format!("{host:?}");
    let addresses =
        tokio::net::lookup_host(host).await.map_err(|source| Error::no_such_host(&name, source))?;
    let addresses: Vec<_> = addresses.collect();
    Ok((addresses.into_iter(), Error::no_address(&name)))
}

/// The descriptor that the driver watches, for programs that list or inherit descriptors. A program
/// that waits for it competes with the driver.
impl<B: Descriptors> AsFd for AsyncEndpoint<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.descriptor.as_fd()
    }
}

impl<B: Descriptors> std::fmt::Debug for AsyncEndpoint<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.shared.lock();
        f.debug_struct("AsyncEndpoint")
            .field("listeners", &state.listeners.len())
            .field("connections", &state.endpoint.usage().connections)
            .finish_non_exhaustive()
    }
}

/// A weak handle on an [`AsyncEndpoint`].
pub struct WeakAsyncEndpoint<B: Descriptors> {
    shared: Weak<Shared<B>>,
}

impl<B: Descriptors> WeakAsyncEndpoint<B> {
    /// Returns the endpoint, or `None` if it has no connection, listener or handle left, or has
    /// failed as a whole.
    pub fn upgrade(&self) -> Option<AsyncEndpoint<B>> {
        let shared = self.shared.upgrade()?;
        let works = shared.lock().lost.is_none();
        works.then_some(AsyncEndpoint { shared })
    }
}

impl<B: Descriptors> std::fmt::Debug for WeakAsyncEndpoint<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("WeakAsyncEndpoint").field(&self.upgrade()).finish()
    }
}

/// The driver holds no strong reference, so the endpoint drops with its last handle.
struct Shared<B: Descriptors> {
    state: Mutex<EndpointTasks<B>>,
    descriptor: Arc<UnsharedFd>,
}

struct EndpointTasks<B: Descriptors> {
    endpoint: Endpoint<B>,
    tasks: ConnectionMap<Tasks>,
    listeners: HashMap<ListenerId, Accepting>,
    driver: Option<Waker>,
    /// When the driver will wake by itself.
    sleeps_until: Option<Instant>,
    lost: Option<Error>,
    /// A reference to itself while connections without a handle are closing.
    itself: Option<Arc<Shared<B>>>,
}

/// At most one task that reads a connection, and one that does anything else.
#[derive(Debug, Default)]
struct Tasks {
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// Accepted connections that were not taken yet, and tasks that wait for one.
#[derive(Debug, Default)]
struct Accepting {
    accepted: VecDeque<ConnectionId>,
    waiting: Vec<Waker>,
}

#[derive(Clone, Copy, Debug)]
enum Want {
    Read,
    Write,
}

impl<B: Descriptors> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, EndpointTasks<B>> {
        // A driver that panics with the lock marks the endpoint as lost.
        locked(&self.state)
    }

    fn with<T>(&self, act: impl FnOnce(&mut EndpointTasks<B>) -> T) -> T {
        let mut state = self.lock();
        let done = act(&mut state);
        let mut wake = state.concerned();
        wake.extend(state.sooner());
        drop(state);
        // Not under the lock: a waker may do anything.
        wake.all();
        done
    }

    /// Tries `step`. Without a result, polls the device, tries again, and then has the task woken.
    fn poll<T>(
        &self,
        cx: &mut Context<'_>,
        id: ConnectionId,
        want: Want,
        mut step: impl FnMut(&mut Endpoint<B>) -> Result<Option<T>, Error>,
    ) -> Poll<Result<T, Error>> {
        Error::unless_forked()?;
        self.with(|state| {
            let mut result = step(&mut state.endpoint).transpose();
            if result.is_none() {
                // After `step`: what arrived before the loss can still be read.
                if let Some(error) = &state.lost {
                    return Poll::Ready(Err(error.clone()));
                }
                // An error concerns all connections; the driver finds it too.
                result = match state.endpoint.look_at(id) {
                    Ok(_) => step(&mut state.endpoint).transpose(),
                    Err(error) => Some(Err(error)),
                };
            }
            if let Some(result) = result {
                return Poll::Ready(result);
            }
            if let Some(tasks) = state.tasks.get_mut(id) {
                let place = match want {
                    Want::Read => &mut tasks.reader,
                    Want::Write => &mut tasks.writer,
                };
                match place {
                    Some(noted) if noted.will_wake(cx.waker()) => {}
                    other => *other = Some(cx.waker().clone()),
                }
            }
            Poll::Pending
        })
    }

    /// Runs `release` for a handle that is dropped. A forked child leaves all to its parent.
    fn release(&self, release: impl FnOnce(&mut EndpointTasks<B>)) {
        if !rdma_process::is_child() {
            self.with(release);
        }
    }

    fn abandon(self: &Arc<Self>, id: ConnectionId) {
        self.release(|state| {
            state.tasks.remove(id);
            let linger = state.endpoint.connection(id).map(|connection| connection.options().linger);
            // Bytes are delivered without a handle, so the endpoint holds a reference to itself
            // (VR-CLOSE-001). A lost one delivers nothing, and would hold it for ever.
            if state.endpoint.abandon(id, linger.unwrap_or_default()).is_ok() && state.lost.is_none() {
                state.keep_itself(self);
            }
        });
    }
}

/// Tasks to wake. A few need no allocation.
#[derive(Default)]
struct Wake {
    few: ArrayVec<Waker, 4>,
    more: Vec<Waker>,
}

impl Wake {
    fn extend(&mut self, wakers: impl IntoIterator<Item = Waker>) {
        for waker in wakers {
            if let Err(full) = self.few.try_push(waker) {
                self.more.push(full.element());
            }
        }
    }

    fn all(self) {
        self.few.into_iter().chain(self.more).for_each(Waker::wake);
    }
}

impl<B: Descriptors> EndpointTasks<B> {
    fn concerned(&mut self) -> Wake {
        let mut wake = Wake::default();
        // A connection counts as taken when a task has accepted it, which bounds those that no task
        // has (VR-SEC-007).
        while let Some(event) = self.endpoint.next_untaken() {
            let (id, reads, writes) = match event {
                Event::Opened { id, listener: Some(listener) } => {
                    match self.listeners.get_mut(&listener) {
                        Some(accepting) => {
                            self.tasks.insert(id, Tasks::default());
                            accepting.accepted.push_back(id);
                            wake.extend(accepting.waiting.drain(..));
                        }
                        // The listener is gone, so no task can take the connection.
                        None => self.endpoint.abort(id),
                    }
                    continue;
                }
                Event::AcceptFailed(listener) => {
                    if let Some(accepting) = self.listeners.get_mut(&listener) {
                        wake.extend(accepting.waiting.drain(..));
                    }
                    continue;
                }
                Event::Readable(id) => (id, true, false),
                Event::Writable(id) | Event::Returned(id) => (id, false, true),
                Event::Opened { id, listener: None } | Event::Ended(id) => (id, true, true),
            };
            // Connections without a handle have no task.
            let Some(tasks) = self.tasks.get_mut(id) else { continue };
            wake.extend(tasks.reader.take_if(|_| reads));
            wake.extend(tasks.writer.take_if(|_| writes));
        }
        if self.itself.is_some() && self.tasks.len() == self.endpoint.usage().connections {
            // Every connection has a handle again. The caller has another reference.
            self.itself = None;
        }
        wake
    }

    fn sooner(&mut self) -> Option<Waker> {
        let next = self.endpoint.next_timeout()?;
        // The driver wakes in time without a call.
        if self.sleeps_until.is_some_and(|at| at <= next) { None } else { self.driver.take() }
    }

    fn keep_itself(&mut self, shared: &Arc<Shared<B>>) {
        self.itself.get_or_insert_with(|| Arc::clone(shared));
    }

    fn lose(&mut self, error: Error) -> Vec<Waker> {
        tracing::warn!(%error, "an endpoint is lost");
        self.lost = Some(error);
        // Nothing drives it any more, so that no close can complete.
        self.itself = None;
        let tasks = self.tasks.values_mut().flat_map(|tasks| [tasks.reader.take(), tasks.writer.take()]);
        let waiting = self.listeners.values_mut().flat_map(|accepting| accepting.waiting.drain(..));
        tasks.flatten().chain(waiting).collect()
    }
}
