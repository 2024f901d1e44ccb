use std::fmt::Debug;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rdma_backend::Access;
use rdma_backend::memory::CallerMemory;
use rdma_proto::Counters;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::ToSocketAddrs;

use super::{AsyncEndpoint, Shared, Tasks, Want};
use crate::budget::Limits;
use crate::connection::{Connection, Work};
use crate::domain::ProtectionDomain;
use crate::endpoint::{ConnectionId, Descriptors, Endpoint};
use crate::error::Error;
use crate::land::{Received, Receiving};
use crate::lend::RegisteredBuffer;
use crate::memory::Registrar;
use crate::stream::{Connect, Stream};

/// A byte stream over RDMA for tokio. It implements [`AsyncRead`] and [`AsyncWrite`].
///
/// Reads and writes are cancel-safe: dropping the future reads or writes nothing. One task may read
/// while another writes ([`AsyncStream::split`], [`AsyncStream::into_split`]). Dropping the stream
/// delivers written bytes in the background, for at most
/// [`Options::linger`](crate::Options::linger); `shutdown` waits for that.
pub struct AsyncStream<B: Descriptors> {
    pub(super) shared: Arc<Shared<B>>,
    id: ConnectionId,
}

impl<B: Descriptors> AsyncStream<B> {
    /// Connects to `"host:6379"` or `("host", 6379)` with default settings, on its own endpoint.
    ///
    /// # Errors
    /// The errors are those of [`AsyncStream::connect_with`].
    pub async fn connect(backend: &B, host: impl ToSocketAddrs + Debug) -> Result<Self, Error> {
        Self::connect_with(backend, host, &Connect::default()).await
    }

    /// Connects to a host and port, trying the host's addresses in turn, on an endpoint of its own.
    ///
    /// Dropping the future leaves nothing behind. For many connections, [`AsyncEndpoint::connect`]
    /// costs less.
    ///
    /// # Errors
    /// The errors are those of [`Stream::connect_with`]. Also returns an error if there is no
    /// runtime.
    pub async fn connect_with(
        backend: &B,
        host: impl ToSocketAddrs + Debug,
        how: &Connect,
    ) -> Result<Self, Error> {
        AsyncEndpoint::new(backend, Limits::NONE)?.connect(host, how).await
    }

    pub(super) async fn dial(
        shared: &Arc<Shared<B>>,
        peer: SocketAddr,
        how: &Connect,
        domain: Option<&ProtectionDomain<B>>,
    ) -> Result<Self, Error> {
        Error::unless_forked()?;
        let id = shared.with(|state| {
            // Under one lock: an event that finds no entry wakes no task.
            let id = state.endpoint.dial(peer, how.local, how.timeout, how.options, domain.cloned())?;
            state.tasks.insert(id, Tasks::default());
            Ok::<_, Error>(id)
        })?;
        let dialing = Dialing { shared, id, done: false };
        poll_fn(|cx| {
            shared.poll(cx, id, Want::Write, |endpoint| {
                endpoint.check(id)?;
                Ok(endpoint.is_open(id).then_some(()))
            })
        })
        .await?;
        Ok(dialing.done())
    }

    pub(super) fn of(shared: &Arc<Shared<B>>, id: ConnectionId) -> Self {
        Self { shared: Arc::clone(shared), id }
    }

    fn ask<T>(&self, ask: impl FnOnce(&Connection<B>) -> T) -> T {
        let state = self.shared.lock();
        let Some(connection) = state.endpoint.connection(self.id) else {
            unreachable!("a stream has a connection, until it is dropped")
        };
        ask(connection)
    }

    fn registrar(&self) -> Result<Registrar<B>, Error> {
        Error::unless_forked()?;
        Ok(self.ask(Connection::registrar))
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.ask(Connection::peer_addr)
    }

    /// Returns this side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.ask(Connection::local_addr)
    }

    /// Returns the protocol counters of the connection.
    pub fn counters(&self) -> Counters {
        self.ask(Connection::counters)
    }

    /// Returns counts of the work requested from the device.
    pub fn work(&self) -> Work {
        self.ask(Connection::work)
    }

    /// Returns the bytes of memory registered for this connection, including buffers to lend.
    pub fn registered_bytes(&self) -> usize {
        self.ask(Connection::registered_bytes)
    }

    /// Registers memory for zero-copy sending. See [`Connection::register_buffer`].
    ///
    /// # Errors
    /// Returns an error if `len` is zero or the memory cannot be registered.
    pub fn register_buffer(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.registrar()?.register_buffer(len)
    }

    /// Sends bytes of `buffer` without a copy, from the start of `range`, behind earlier writes.
    ///
    /// Returns how many bytes are on their way. Dropping the future lends nothing. Wait for the
    /// buffer with [`AsyncStream::returned`].
    ///
    /// # Errors
    /// The errors are those of [`Endpoint::lend`].
    pub async fn lend(
        &mut self,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<usize, Error> {
        poll_fn(|cx| self.poll(cx, Want::Write, |endpoint, id| endpoint.lend(id, buffer, range.clone())))
            .await
    }

    /// Waits until the peer has everything lent from `buffer`. The buffer can then be changed.
    ///
    /// # Errors
    /// Returns an error if the connection ends first.
    pub async fn returned(&mut self, buffer: &RegisteredBuffer<B>) -> Result<(), Error> {
        poll_fn(|cx| self.poll(cx, Want::Write, |endpoint, id| endpoint.returned(id, buffer))).await
    }

    /// Registers memory for zero-copy receiving. See [`Connection::register_landing`].
    ///
    /// # Errors
    /// Returns an error if `len` is zero or the memory cannot be registered.
    pub fn register_landing(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.registrar()?.register_landing(len)
    }

    /// Registers memory that the application already has. See [`Connection::register_memory`].
    ///
    /// # Errors
    /// Returns an error, and drops `memory`, if it is empty or cannot be registered.
    pub fn register_memory(
        &self,
        memory: impl CallerMemory,
        access: Access,
    ) -> Result<RegisteredBuffer<B>, Error> {
        self.registrar()?.register_memory(memory, access)
    }

    /// Returns the protection domain, for [`AsyncEndpoint::connect_in`].
    pub fn domain(&self) -> ProtectionDomain<B> {
        self.ask(|connection| connection.domain().clone())
    }

    /// Waits until the next `range.len()` bytes of the stream are in `range` of `buffer`. Returns
    /// how many bytes arrived there without a copy, and how many were copied there.
    ///
    /// If the future is dropped, the bytes that had arrived are in `buffer`, and the caller cannot
    /// learn how many. The next read returns the bytes that arrive after them.
    ///
    /// # Errors
    /// The errors are those of [`Endpoint::receive`].
    pub async fn receive(
        &mut self,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<Received, Error> {
        let mut receiving = Receiving::new(Arc::clone(buffer), range);
        // Also if the future is dropped: no further window may lie in the buffer then (VR-MEM-019).
        let _until_the_end = Landing { shared: &self.shared, id: self.id };
        poll_fn(|cx| self.poll(cx, Want::Read, |endpoint, id| endpoint.receive(id, &mut receiving))).await
    }

    /// Delivers written bytes and ends the connection, waiting for at most `linger`. The close goes
    /// on if the future is dropped.
    ///
    /// # Errors
    /// Returns an error if some bytes did not arrive.
    pub async fn close(&mut self, linger: Duration) -> Result<(), Error> {
        poll_fn(|cx| self.poll_close(cx, linger)).await
    }

    fn poll_close(&self, cx: &mut Context<'_>, linger: Duration) -> Poll<Result<(), Error>> {
        self.poll(cx, Want::Write, |endpoint, id| {
            // Each poll repeats the close, whose first deadline holds.
            endpoint.close(id, linger)?;
            endpoint.closed(id)
        })
    }

    fn poll<T>(
        &self,
        cx: &mut Context<'_>,
        want: Want,
        mut step: impl FnMut(&mut Endpoint<B>, ConnectionId) -> Result<Option<T>, Error>,
    ) -> Poll<Result<T, Error>> {
        self.shared.poll(cx, self.id, want, |endpoint| step(endpoint, self.id))
    }
}

/// Stops placing windows in application memory when dropped.
struct Landing<'a, B: Descriptors> {
    shared: &'a Shared<B>,
    id: ConnectionId,
}

impl<B: Descriptors> Drop for Landing<'_, B> {
    fn drop(&mut self) {
        // The connection exists: its stream is borrowed.
        self.shared.release(|state| _ = state.endpoint.stop_landing(self.id));
    }
}

/// Aborts the connection unless its dial is done.
struct Dialing<'a, B: Descriptors> {
    shared: &'a Arc<Shared<B>>,
    id: ConnectionId,
    done: bool,
}

impl<B: Descriptors> Dialing<'_, B> {
    fn done(mut self) -> AsyncStream<B> {
        self.done = true;
        AsyncStream::of(self.shared, self.id)
    }
}

impl<B: Descriptors> Drop for Dialing<'_, B> {
    fn drop(&mut self) {
        if !self.done {
            self.shared.release(|state| {
                state.tasks.remove(self.id);
                state.endpoint.abort(self.id);
            });
        }
    }
}

/// Calls of the traits below, shared with the halves.
impl<B: Descriptors> AsyncStream<B> {
    pub(super) fn read_shared(&self, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = ready!(self.poll(cx, Want::Read, |endpoint, id| {
            // A buffer that has grown once has megabytes of spare capacity. Initialise only what
            // the read fills. Without unread bytes, a read into one byte shows whether the stream
            // has ended.
            let unread = endpoint.connection(id).map_or(0, Connection::unread);
            let most = usize::try_from(unread).unwrap_or(usize::MAX).max(1).min(into.remaining());
            endpoint.read(id, into.initialize_unfilled_to(most))
        }))?;
        into.advance(read);
        Poll::Ready(Ok(()))
    }

    pub(super) fn write_shared(&self, cx: &mut Context<'_>, from: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let written = ready!(self.poll(cx, Want::Write, |endpoint, id| endpoint.write(id, from)))?;
        Poll::Ready(Ok(written))
    }

    pub(super) fn flush_shared(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll(cx, Want::Write, Endpoint::flush))?;
        Poll::Ready(Ok(()))
    }

    pub(super) fn shutdown_shared(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Error::unless_forked()?;
        let linger = self.ask(|connection| connection.options().linger);
        ready!(self.poll_close(cx, linger))?;
        Poll::Ready(Ok(()))
    }
}

impl<B: Descriptors> TryFrom<Stream<B>> for AsyncStream<B> {
    type Error = Error;

    /// Converts a blocking stream. Its time-outs are dropped; use `tokio::time::timeout`.
    ///
    /// # Errors
    /// Returns an error if there is no runtime, or if a panic has left the stream unusable.
    fn try_from(stream: Stream<B>) -> Result<Self, Error> {
        let (endpoint, id) = stream.into_endpoint()?;
        Self::from_endpoint(endpoint, id)
    }
}

impl<B: Descriptors> AsyncStream<B> {
    /// Wraps the result of [`Listener::try_accept`](crate::Listener::try_accept): an endpoint and
    /// its one connection.
    ///
    /// # Errors
    /// Returns an error if there is no runtime, or if the endpoint has no such connection.
    pub fn from_endpoint(endpoint: Endpoint<B>, id: ConnectionId) -> Result<Self, Error> {
        Error::unless_forked()?;
        endpoint.connection(id).ok_or(Error::NoSuchConnection)?;
        let (AsyncEndpoint { shared }, driven) = AsyncEndpoint::of(endpoint, None);
        shared.with(|state| state.tasks.insert(id, Tasks::default()));
        // Without a runtime, drop it like any stream: written bytes are delivered.
        let stream = Self::of(&shared, id);
        driven.map(|()| stream)
    }
}

/// The descriptor of its endpoint; see [`AsyncEndpoint`].
impl<B: Descriptors> AsFd for AsyncStream<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.descriptor.as_fd()
    }
}

impl<B: Descriptors> AsyncRead for AsyncStream<B> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.read_shared(cx, into)
    }
}

impl<B: Descriptors> AsyncWrite for AsyncStream<B> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        self.write_shared(cx, &[IoSlice::new(from)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write_shared(cx, from)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Waits until the device has all written bytes.
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.flush_shared(cx)
    }

    /// Waits until all written bytes have arrived, for at most
    /// [`Options::linger`](crate::Options::linger), and ends the connection.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shutdown_shared(cx)
    }
}

impl<B: Descriptors> Drop for AsyncStream<B> {
    fn drop(&mut self) {
        self.shared.abandon(self.id);
    }
}

impl<B: Descriptors> std::fmt::Debug for AsyncStream<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (local, peer) = self.ask(|connection| (connection.local_addr(), connection.peer_addr()));
        f.debug_struct("AsyncStream").field("local", &local).field("peer", &peer).finish_non_exhaustive()
    }
}
