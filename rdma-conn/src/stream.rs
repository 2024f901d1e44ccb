//! The blocking stream.

use std::fmt::Debug;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;

use rdma_backend::Access;
use rdma_backend::memory::CallerMemory;
use rdma_backend::time::Instant;
use rdma_proto::Counters;

use crate::background::{self, Driven, Schedule};
use crate::budget::{Budget, Limits};
use crate::connection::{Connection, Work};
use crate::domain::ProtectionDomain;
use crate::endpoint::{ConnectionId, Descriptors, Endpoint};
use crate::error::Error;
use crate::land::{Received, Receiving};
use crate::lend::RegisteredBuffer;
use crate::memory::Registrar;
use crate::options::{Options, setters};

/// A byte stream over RDMA: like a `TcpStream`, with [`Read`] and [`Write`]. Where the peer cut it means nothing (VR-XFER-007),
/// and nothing in it is encrypted or authenticated (VR-SEC-006).
///
/// Each `write` is sent at once, as one notification to the peer however many slices it has; use
/// [`Write::write_vectored`] or a buffer to send several pieces as one. Dropping the stream delivers what was written, for
/// at most [`Options::linger`]; [`Stream::close`] does it with a report.
///
/// It is a handle on an [`Endpoint`] of its own, which each call drives for as long as it waits.
pub struct Stream<B: Descriptors> {
    shared: Arc<Private<B>>,
    read_timeout: Option<Duration>,
    write_timeout: Option<Duration>,
    linger: Duration,
}

/// Settings of a connect; see [`Stream::connect_with`]. Start from [`Connect::default`]; fields can be assigned, or set in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Connect {
    /// The local address to connect from; port 0 takes any.
    pub local: Option<SocketAddr>,
    /// How long the whole of it may take, for each of the host's addresses. The resolver that looks up a host's name has a limit of
    /// its own, which comes on top.
    pub timeout: Duration,
    /// Settings of the connection.
    pub options: Options,
}

impl Connect {
    setters! {
        local: Option<SocketAddr>,
        timeout: Duration,
        options: Options,
    }
}

impl Default for Connect {
    fn default() -> Self {
        Self { local: None, timeout: Duration::from_secs(5), options: Options::default() }
    }
}

impl<B: Descriptors> Stream<B> {
    /// Connects to a host and port, `"host:6379"` or `("host", 6379)`, with default settings.
    ///
    /// # Errors
    /// Says what to do: no RDMA device, no such host, refused, not reachable, timed out, too little locked memory.
    pub fn connect(backend: &B, host: impl ToSocketAddrs + Debug) -> Result<Self, Error> {
        Self::connect_with(backend, host, &Connect::default())
    }

    /// Connects to a host and port, `"host:6379"` or `("host", 6379)`. Its addresses are tried in turn.
    ///
    /// # Errors
    /// That of the last address tried; as [`Stream::connect`].
    pub fn connect_with(backend: &B, host: impl ToSocketAddrs + Debug, how: &Connect) -> Result<Self, Error> {
        Self::connect_among(backend, host, how, None)
    }

    /// Connects in the protection domain of another connection, so that memory registered for one serves both.
    /// [`ProtectionDomain`] says when that is safe.
    ///
    /// # Errors
    /// As [`Stream::connect_with`], or [`Error::ForeignDomain`].
    pub fn connect_in(
        backend: &B,
        domain: &ProtectionDomain<B>,
        host: impl ToSocketAddrs + Debug,
        how: &Connect,
    ) -> Result<Self, Error> {
        Self::connect_among(backend, host, how, Some(domain))
    }

    fn connect_among(
        backend: &B,
        host: impl ToSocketAddrs + Debug,
        how: &Connect,
        domain: Option<&ProtectionDomain<B>>,
    ) -> Result<Self, Error> {
        let name = format!("{host:?}");
        let addresses = host.to_socket_addrs().map_err(|source| Error::no_such_host(&name, source))?;
        let mut last = Error::no_address(&name);
        for peer in addresses {
            match connected(backend, peer, how, domain) {
                Ok((endpoint, id)) => return Ok(Self::from_endpoint(endpoint, id)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Returns the one connection of `endpoint` as a stream, for what [`Listener::try_accept`](crate::Listener::try_accept) gives.
    pub fn from_endpoint(mut endpoint: Endpoint<B>, id: ConnectionId) -> Self {
        endpoint.set_quiet(true);
        let linger = endpoint.connection(id).map_or(Duration::ZERO, |connection| connection.options().linger);
        let descriptor = endpoint.descriptor();
        let shared = Arc::new(Private { endpoint: Mutex::new(Some(endpoint)), id, descriptor });
        let weak: Weak<Private<B>> = Arc::downgrade(&shared);
        background::drive(weak);
        Self { shared, read_timeout: None, write_timeout: None, linger }
    }

    /// Returns the endpoint and the connection on it, for a face that drives the endpoint itself.
    #[cfg(feature = "tokio")]
    pub(crate) fn into_endpoint(self) -> Result<(Endpoint<B>, ConnectionId), Error> {
        let mut slot = self.shared.endpoint.lock().map_err(|_| background::panicked())?;
        let Some(mut endpoint) = slot.take() else { unreachable!("only the end of a stream takes it") };
        endpoint.set_quiet(false);
        Ok((endpoint, self.shared.id))
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.shared.lock().connection().peer_addr()
    }

    /// Returns this side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.lock().connection().local_addr()
    }

    /// Limits how long a read waits; `None` waits for ever. Reads that time out fail with [`io::ErrorKind::TimedOut`].
    pub fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.read_timeout = timeout;
    }

    /// Limits how long a write or flush waits; `None` waits for ever. They time out with [`io::ErrorKind::TimedOut`].
    pub fn set_write_timeout(&mut self, timeout: Option<Duration>) {
        self.write_timeout = timeout;
    }

    /// Returns the protocol's counts of the connection.
    pub fn counters(&self) -> Counters {
        self.shared.lock().connection().counters()
    }

    /// Returns the counts of what the connection has asked of the device.
    pub fn work(&self) -> Work {
        self.shared.lock().connection().work()
    }

    /// Returns the bytes of memory registered for this connection, buffers to lend included.
    pub fn registered_bytes(&self) -> usize {
        self.shared.lock().connection().registered_bytes()
    }

    fn registrar(&self) -> Result<Registrar<B>, Error> {
        Ok(self.shared.enter()?.connection().registrar())
    }

    /// Registers memory to send from without a copy, see
    /// [`Connection::register_buffer`](crate::Connection::register_buffer).
    ///
    /// # Errors
    /// As [`Connection::register_buffer`](crate::Connection::register_buffer).
    pub fn register_buffer(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.registrar()?.buffer(len, Access::NONE)
    }

    /// Sends bytes of `buffer`, from the beginning of `range`, behind all that was written; returns how many as soon as they are
    /// on their way. [`Stream::returned`] waits for the buffer.
    ///
    /// # Errors
    /// As [`Endpoint::lend`], or the write time-out passed.
    pub fn lend(&mut self, buffer: &Arc<RegisteredBuffer<B>>, range: Range<usize>) -> Result<usize, Error> {
        self.shared
            .enter()?
            .until(&self.write_timeout, "lending", |endpoint, id| endpoint.lend(id, buffer, range.clone()))
    }

    /// Waits until the peer has all that was lent of `buffer`, which can then be changed.
    ///
    /// # Errors
    /// The connection ended before that, or the write time-out passed.
    pub fn returned(&mut self, buffer: &RegisteredBuffer<B>) -> Result<(), Error> {
        let doing = "waiting for a buffer to come back";
        self.shared.enter()?.until(&self.write_timeout, doing, |endpoint, id| endpoint.returned(id, buffer))
    }

    /// Registers memory to receive into without a copy, see
    /// [`Connection::register_landing`](crate::Connection::register_landing).
    ///
    /// # Errors
    /// As [`Connection::register_landing`](crate::Connection::register_landing).
    pub fn register_landing(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.registrar()?.buffer(len, Access::REMOTE_WRITE)
    }

    /// Registers memory that exists, see [`Connection::register_memory`](crate::Connection::register_memory).
    ///
    /// # Errors
    /// As [`Connection::register_memory`](crate::Connection::register_memory).
    pub fn register_memory(
        &self,
        memory: impl CallerMemory,
        access: Access,
    ) -> Result<RegisteredBuffer<B>, Error> {
        self.registrar()?.register_memory(memory, access)
    }

    /// Returns the protection domain, for [`Stream::connect_in`].
    pub fn domain(&self) -> ProtectionDomain<B> {
        self.shared.lock().connection().domain().clone()
    }

    /// Waits until the next `range.len()` bytes of the stream are in `range` of `buffer`, and returns how they came there.
    ///
    /// # Errors
    /// As [`Endpoint::receive`], or the read time-out passed: the bytes that have
    /// not come are left to the next read then, and how many have is not known.
    pub fn receive(
        &mut self,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<Received, Error> {
        let mut receiving = Receiving::new(Arc::clone(buffer), range);
        let mut endpoint = self.shared.enter()?;
        let received = endpoint
            .until(&self.read_timeout, "receiving", |endpoint, id| endpoint.receive(id, &mut receiving));
        if received.is_err() {
            let id = endpoint.id;
            endpoint.stop_landing(id)?;
        }
        received
    }

    /// Ends the connection once everything written has arrived at the peer, waiting for at most `linger`.
    ///
    /// # Errors
    /// Not everything arrived.
    pub fn close(&mut self, linger: Duration) -> Result<(), Error> {
        let mut endpoint = self.shared.enter()?;
        let id = endpoint.id;
        endpoint.close(id, linger)?;
        endpoint.until(&None, "closing", |endpoint, id| endpoint.closed(id))
    }
}

/// Waits for a connection to be made, on an endpoint of its own.
fn connected<B: Descriptors>(
    backend: &B,
    peer: SocketAddr,
    how: &Connect,
    domain: Option<&ProtectionDomain<B>>,
) -> Result<(Endpoint<B>, ConnectionId), Error> {
    let mut endpoint = Endpoint::of_one(backend, Budget::new(Limits::NONE))?;
    endpoint.set_quiet(true);
    let id = endpoint.dial(peer, how.local, how.timeout, how.options, domain.cloned())?;
    loop {
        endpoint.check(id)?;
        if endpoint.is_open(id) {
            return Ok((endpoint, id));
        }
        endpoint.wait(None)?;
    }
}

impl<B: Descriptors> Read for Stream<B> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut endpoint = self.shared.enter()?;
        let id = endpoint.id;
        if !endpoint.connection().is_readable() {
            endpoint.look_at(id)?;
        }
        Ok(endpoint.until(&self.read_timeout, "reading", |endpoint, id| endpoint.read(id, into))?)
    }
}

impl<B: Descriptors> Write for Stream<B> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut endpoint = self.shared.enter()?;
        Ok(endpoint.until(&self.write_timeout, "writing", |endpoint, id| endpoint.write(id, from))?)
    }

    /// Waits until the connection is established and everything written has been handed to the device.
    fn flush(&mut self) -> io::Result<()> {
        let mut endpoint = self.shared.enter()?;
        Ok(endpoint.until(&self.write_timeout, "flushing", |endpoint, id| endpoint.flush(id))?)
    }
}

/// The descriptor of its endpoint, for programs that list or inherit descriptors. What has come may have been taken already, by a call or
/// the background thread, so do not wait for it: [`Endpoint`] is for that.
impl<B: Descriptors> AsFd for Stream<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.descriptor.as_fd()
    }
}

impl<B: Descriptors> Drop for Stream<B> {
    fn drop(&mut self) {
        if self.shared.slot().is_none() {
            return;
        }
        if let Err(error) = self.close(self.linger) {
            tracing::debug!(%error, "the connection did not end in order");
        }
        // Now, though the background thread may hold on to the rest for a moment longer.
        let endpoint = self.shared.slot().take();
        drop(endpoint);
    }
}

impl<B: Descriptors> std::fmt::Debug for Stream<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (local, peer) = (self.local_addr(), self.peer_addr());
        f.debug_struct("Stream").field("local", &local).field("peer", &peer).finish_non_exhaustive()
    }
}

/// An endpoint of one connection, which a stream and the background thread share. A call on the stream holds the lock while it runs, and
/// while it waits, so the thread only finds idle ones.
struct Private<B: Descriptors> {
    /// None once the stream is gone, or has given it away.
    endpoint: Mutex<Option<Endpoint<B>>>,
    id: ConnectionId,
    descriptor: Arc<OwnedFd>,
}

impl<B: Descriptors> Private<B> {
    fn slot(&self) -> MutexGuard<'_, Option<Endpoint<B>>> {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> Locked<'_, B> {
        Locked { endpoint: self.slot(), id: self.id }
    }

    /// Returns the endpoint for a call that may fail: it does where a panic has left the endpoint in the middle of something, of which a
    /// wait might never hear the rest.
    #[inline]
    fn enter(&self) -> Result<Locked<'_, B>, Error> {
        match self.endpoint.lock() {
            Ok(endpoint) => Ok(Locked { endpoint, id: self.id }),
            Err(_) => Err(background::panicked()),
        }
    }
}

/// An endpoint that the caller has for itself.
struct Locked<'a, B: Descriptors> {
    endpoint: MutexGuard<'a, Option<Endpoint<B>>>,
    id: ConnectionId,
}

impl<B: Descriptors> Deref for Locked<'_, B> {
    type Target = Endpoint<B>;

    #[inline]
    fn deref(&self) -> &Endpoint<B> {
        let Some(endpoint) = &*self.endpoint else { unreachable!("only the end of a stream takes it") };
        endpoint
    }
}

impl<B: Descriptors> DerefMut for Locked<'_, B> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Endpoint<B> {
        let Some(endpoint) = &mut *self.endpoint else { unreachable!("only the end of a stream takes it") };
        endpoint
    }
}

impl<B: Descriptors> Locked<'_, B> {
    #[inline]
    fn connection(&self) -> &Connection<B> {
        let Some(connection) = Endpoint::connection(self, self.id) else {
            unreachable!("a stream has a connection, until it is dropped")
        };
        connection
    }

    /// Repeats `step` until it has a result, sleeping in between until the connection has moved: waiting for a peer takes no
    /// processor time (VR-FLOW-013). `timeout` is looked at only by whoever sleeps.
    ///
    /// # Errors
    /// `step`'s own, or a time-out while `doing`.
    #[inline]
    fn until<T>(
        &mut self,
        timeout: &Option<Duration>,
        doing: &'static str,
        mut step: impl FnMut(&mut Endpoint<B>, ConnectionId) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let id = self.id;
        let mut deadline = None;
        loop {
            if let Some(done) = step(self, id)? {
                return Ok(done);
            }
            self.sleep(timeout, doing, &mut deadline)?;
        }
    }

    /// Sleeps until the connection has moved, at most until `deadline`, which is `timeout` from the first call on.
    #[inline(never)]
    fn sleep(
        &mut self,
        timeout: &Option<Duration>,
        doing: &'static str,
        deadline: &mut Option<Instant>,
    ) -> Result<(), Error> {
        let Some(after) = *timeout else { return self.wait(None) };
        let now = self.now();
        let by = *deadline.get_or_insert_with(|| now.after(after));
        if now >= by {
            return Err(Error::TimedOut { doing, after });
        }
        self.wait(Some(by.since(now)))
    }
}

impl<B: Descriptors> Driven for Private<B> {
    fn drive(&self) -> Schedule {
        let mut slot = match self.endpoint.try_lock() {
            Ok(slot) => slot,
            Err(TryLockError::Poisoned(_)) => return Schedule::Never,
            Err(TryLockError::WouldBlock) => return Schedule::Periodic,
        };
        let Some(endpoint) = &mut *slot else { return Schedule::Never };
        if endpoint.progress().is_err() || endpoint.connection(self.id).is_none() {
            return Schedule::Never;
        }
        if endpoint.is_open(self.id) || endpoint.check(self.id).is_err() {
            return Schedule::Periodic;
        }
        // The peer of an accepted connection waits for this side's window, whether its program calls or not.
        Schedule::WhenReadable(endpoint.next_timeout().map(|at| at.since(endpoint.now())))
    }

    fn descriptor(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.descriptor)
    }

    /// Whoever waits has the lock, and whoever comes later finds it poisoned.
    fn panicked(&self) {}
}

#[cfg(test)]
mod tests;
