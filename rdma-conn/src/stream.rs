use std::fmt::Debug;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::RefUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rdma_backend::Access;
use rdma_backend::memory::CallerMemory;
use rdma_backend::time::Instant;
use rdma_process::UnsharedFd;
use rdma_proto::Counters;

use crate::background::{self, Driven, Schedule};
use crate::budget::{Budget, Limits};
use crate::connection::{Connection, Work};
use crate::domain::ProtectionDomain;
use crate::endpoint::{ConnectionId, Descriptors, Endpoint};
use crate::error::Error;
use crate::fork::never_unlocked;
use crate::land::{Received, Receiving};
use crate::lend::RegisteredBuffer;
use crate::memory::Registrar;
use crate::options::Options;

/// A blocking byte stream over RDMA. Like a `TcpStream`, it implements [`Read`] and [`Write`].
///
/// The peer's writes have no boundaries (VR-XFER-007). The stream neither encrypts nor
/// authenticates (VR-SEC-006).
///
/// Each `write` is sent at once and costs one notification, however many slices it has. Send
/// several pieces with [`Write::write_vectored`] or a buffer. Dropping the stream delivers written
/// bytes, for at most [`Options::linger`]. [`Stream::close`] also reports the result.
///
/// A stream is a handle on an [`Endpoint`] of its own. While a call waits, it drives this endpoint.
pub struct Stream<B: Descriptors> {
    shared: Arc<Private<B>>,
    read_timeout: Option<Duration>,
    write_timeout: Option<Duration>,
    linger: Duration,
}

/// Settings for [`Stream::connect_with`].
///
/// Start from [`Connect::default`], then assign fields or chain their setters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Connect {
    /// The local address to connect from. Port 0 picks a free port.
    pub local: Option<SocketAddr>,
    /// Time limit for one address of the host. The resolver limits the time to look up a name.
    pub timeout: Duration,
    /// Settings of the connection.
    pub options: Options,
}

impl Connect {
    rdma_proto::setters! {
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
    /// Returns an error, which says what to do, if there is no RDMA device, the host is unknown,
    /// the peer refuses or cannot be reached, the attempt times out, or too little memory can be
    /// locked.
    pub fn connect(backend: &B, host: impl ToSocketAddrs + Debug) -> Result<Self, Error> {
        Self::connect_with(backend, host, &Connect::default())
    }

    /// Connects to a host and port, trying the host's addresses in turn. See [`Stream::connect`].
    ///
    /// # Errors
    /// The errors are those of [`Stream::connect`]: of several addresses, that of the last one.
    /// Also returns an error if an option is out of bounds.
    pub fn connect_with(backend: &B, host: impl ToSocketAddrs + Debug, how: &Connect) -> Result<Self, Error> {
        Self::connect_among(backend, host, how, None)
    }

    /// Connects in the protection domain of another connection. See [`ProtectionDomain`].
    ///
    /// # Errors
    /// Returns [`Error::ForeignDomain`] if the peer is reached through another device. Otherwise
    /// the errors are those of [`Stream::connect_with`].
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

    /// Wraps the result of [`Listener::try_accept`](crate::Listener::try_accept): an endpoint and
    /// its one connection.
    pub fn from_endpoint(mut endpoint: Endpoint<B>, id: ConnectionId) -> Self {
        endpoint.set_quiet(true);
        let linger = endpoint.connection(id).map_or(Duration::ZERO, |connection| connection.options().linger);
        let descriptor = endpoint.descriptor();
        let shared = Arc::new(Private {
            held: Mutex::new(Held { endpoint: Some(endpoint), id, entered: false }),
            descriptor,
        });
        // Weak, so that the thread keeps no stream that its program has dropped.
        let weak: Weak<Private<B>> = Arc::downgrade(&shared);
        background::drive(weak);
        Self { shared, read_timeout: None, write_timeout: None, linger }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn into_endpoint(self) -> Result<(Endpoint<B>, ConnectionId), Error> {
        self.shared.call(|held| {
            let Some(mut endpoint) = held.endpoint.take() else {
                unreachable!("only the end of a stream takes it")
            };
            endpoint.set_quiet(false);
            Ok((endpoint, held.id))
        })
    }

    /// Returns the peer's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.shared.lock().connection().peer_addr()
    }

    /// Returns this side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared.lock().connection().local_addr()
    }

    /// Limits how long a read waits. `None` waits for ever. A read that times out fails with
    /// [`io::ErrorKind::TimedOut`].
    pub fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.read_timeout = timeout;
    }

    /// Limits how long a write or flush waits. `None` waits for ever. A call that times out fails
    /// with [`io::ErrorKind::TimedOut`].
    pub fn set_write_timeout(&mut self, timeout: Option<Duration>) {
        self.write_timeout = timeout;
    }

    /// Returns the protocol counters of the connection.
    pub fn counters(&self) -> Counters {
        self.shared.lock().connection().counters()
    }

    /// Returns counts of the work requested from the device.
    pub fn work(&self) -> Work {
        self.shared.lock().connection().work()
    }

    /// Returns the bytes of memory registered for this connection, including buffers to lend.
    pub fn registered_bytes(&self) -> usize {
        self.shared.lock().connection().registered_bytes()
    }

    fn registrar(&self) -> Result<Registrar<B>, Error> {
        self.shared.call(|held| Ok(held.connection().registrar()))
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
    /// Returns how many bytes are on their way. Wait for the buffer with [`Stream::returned`].
    ///
    /// # Errors
    /// The errors are those of [`Endpoint::lend`], and the write time-out.
    pub fn lend(&mut self, buffer: &Arc<RegisteredBuffer<B>>, range: Range<usize>) -> Result<usize, Error> {
        self.shared.call(|held| {
            held.until(&self.write_timeout, "lending", |endpoint, id| {
                endpoint.lend(id, buffer, range.clone())
            })
        })
    }

    /// Waits until the peer has everything lent from `buffer`. The buffer can then be changed.
    ///
    /// # Errors
    /// Returns an error if the connection ends first or the write time-out passes.
    pub fn returned(&mut self, buffer: &RegisteredBuffer<B>) -> Result<(), Error> {
        let doing = "waiting for a buffer to come back";
        self.shared
            .call(|held| held.until(&self.write_timeout, doing, |endpoint, id| endpoint.returned(id, buffer)))
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

    /// Returns the protection domain, for [`Stream::connect_in`].
    pub fn domain(&self) -> ProtectionDomain<B> {
        self.shared.lock().connection().domain().clone()
    }

    /// Waits until the next `range.len()` bytes of the stream are in `range` of `buffer`. Returns
    /// how many bytes arrived there without a copy, and how many were copied there.
    ///
    /// # Errors
    /// The errors are those of [`Endpoint::receive`], and the read time-out. After a time-out, the
    /// bytes that had arrived are in `buffer`, and the caller cannot learn how many. The next read
    /// returns the bytes that arrive after them.
    pub fn receive(
        &mut self,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<Received, Error> {
        let mut receiving = Receiving::new(Arc::clone(buffer), range);
        self.shared.call(|held| {
            let received = held
                .until(&self.read_timeout, "receiving", |endpoint, id| endpoint.receive(id, &mut receiving));
            // The caller has its buffer back: no further window may lie there (VR-MEM-019).
            if received.is_err() {
                let id = held.id;
                held.stop_landing(id)?;
            }
            received
        })
    }

    /// Delivers written bytes and ends the connection, waiting for at most `linger`.
    ///
    /// # Errors
    /// Returns the error that ended the connection, or an error if some bytes did not arrive.
    pub fn close(&mut self, linger: Duration) -> Result<(), Error> {
        self.shared.call(|held| {
            let id = held.id;
            held.close(id, linger)?;
            // Without a limit of its own: after `linger` the connection has ended.
            held.until(&None, "closing", |endpoint, id| endpoint.closed(id))
        })
    }
}

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
        // Without a limit: the dial has one, and `check` returns its error.
        endpoint.wait(None)?;
    }
}

impl<B: Descriptors> Read for Stream<B> {
    #[inline(never)]
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.shared.call(|held| {
            let id = held.id;
            // What has arrived already is taken without arming and sleeping.
            if !held.connection().is_readable() {
                held.look_at(id)?;
            }
            Ok(held.until(&self.read_timeout, "reading", |endpoint, id| endpoint.read(id, into))?)
        })
    }
}

impl<B: Descriptors> Write for Stream<B> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    #[inline(never)]
    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.shared.call(|held| {
            Ok(held.until(&self.write_timeout, "writing", |endpoint, id| endpoint.write(id, from))?)
        })
    }

    /// Waits until the connection is established and the device has all written bytes.
    fn flush(&mut self) -> io::Result<()> {
        self.shared
            .call(|held| Ok(held.until(&self.write_timeout, "flushing", |endpoint, id| endpoint.flush(id))?))
    }
}

/// The descriptor of the stream's endpoint, for programs that list or inherit descriptors.
///
/// Do not wait until it is readable: a call or the background thread may already have taken what
/// arrived. To wait for a descriptor, use [`Endpoint`].
impl<B: Descriptors> AsFd for Stream<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.descriptor.as_fd()
    }
}

impl<B: Descriptors> Drop for Stream<B> {
    fn drop(&mut self) {
        // A child ends nothing of its parent's. Neither does a stream that has given its endpoint
        // away.
        if rdma_process::is_child() || self.shared.lock().endpoint.is_none() {
            return;
        }
        if let Err(error) = self.close(self.linger) {
            tracing::debug!(%error, "the connection did not end in order");
        }
        // Drop the endpoint now: the background thread may keep the rest alive a moment longer.
        let endpoint = self.shared.lock().endpoint.take();
        drop(endpoint);
    }
}

impl<B: Descriptors> std::fmt::Debug for Stream<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (local, peer) = (self.local_addr(), self.peer_addr());
        f.debug_struct("Stream").field("local", &local).field("peer", &peer).finish_non_exhaustive()
    }
}

/// An endpoint of one connection, shared by a stream and the background thread. A call holds the
/// lock also while it waits, so the thread drives only idle streams.
struct Private<B: Descriptors> {
    held: Mutex<Held<B>>,
    descriptor: Arc<UnsharedFd>,
}

// `entered` keeps calls away from what a panic left, as the poison of std's lock would.
impl<B: Descriptors> RefUnwindSafe for Private<B> {}

impl<B: Descriptors> Private<B> {
    #[inline(always)]
    fn call<T, E: From<Error>>(&self, does: impl FnOnce(&mut Held<B>) -> Result<T, E>) -> Result<T, E> {
        Error::unless_forked()?;
        self.held.lock().run(does)
    }

    /// Locks for a call that has no error to return.
    fn lock(&self) -> MutexGuard<'_, Held<B>> {
        // A thread that held the lock at the fork is not in the child, and never unlocks there.
        if rdma_process::is_child() {
            return self.held.try_lock().unwrap_or_else(|| never_unlocked());
        }
        self.held.lock()
    }
}

/// What the lock protects.
struct Held<B: Descriptors> {
    /// `None` once the stream is dropped or has given the endpoint away.
    endpoint: Option<Endpoint<B>>,
    id: ConnectionId,
    /// Whether a call is running, or ended in a panic.
    entered: bool,
}

impl<B: Descriptors> Deref for Held<B> {
    type Target = Endpoint<B>;

    #[inline]
    fn deref(&self) -> &Endpoint<B> {
        let Some(endpoint) = &self.endpoint else { unreachable!("only the end of a stream takes it") };
        endpoint
    }
}

impl<B: Descriptors> DerefMut for Held<B> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Endpoint<B> {
        let Some(endpoint) = &mut self.endpoint else { unreachable!("only the end of a stream takes it") };
        endpoint
    }
}

impl<B: Descriptors> Held<B> {
    /// Runs a call. Fails if a panic interrupted an earlier one, which may have lost what a wait
    /// needs.
    #[inline(always)]
    fn run<T, E: From<Error>>(&mut self, does: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        if self.entered {
            return Err(background::panicked().into());
        }
        self.entered = true;
        let result = does(self);
        self.entered = false;
        result
    }

    #[inline]
    fn connection(&self) -> &Connection<B> {
        let Some(connection) = Endpoint::connection(self, self.id) else {
            unreachable!("a stream has a connection, until it is dropped")
        };
        connection
    }

    /// Repeats `step` until it has a result. Sleeps in between, so waiting takes no processor time
    /// (VR-FLOW-013). Reads the clock only before sleeping, to apply `timeout`.
    ///
    /// # Errors
    /// Returns the error of `step`, or a time-out that names `doing`.
    #[inline(always)]
    fn until<T>(
        &mut self,
        timeout: &Option<Duration>,
        doing: &'static str,
        mut step: impl FnMut(&mut Endpoint<B>, ConnectionId) -> Result<Option<T>, Error>,
    ) -> Result<T, Error> {
        let mut deadline = None;
        loop {
            let id = self.id;
            if let Some(done) = step(self, id)? {
                return Ok(done);
            }
            self.sleep(timeout, doing, &mut deadline)?;
        }
    }

    /// Sleeps until there is progress. A call's first sleep sets `deadline` to `timeout` from then.
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
            return Err(Error::TimedOut { doing, after, peer: self.peer_addr(self.id) });
        }
        self.wait(Some(by.since(now)))
    }
}

impl<B: Descriptors> Held<B> {
    /// Drives the endpoint for the background thread, which fails once there is no more to drive.
    fn drive(&mut self) -> Result<Schedule, Error> {
        let id = self.id;
        let Some(endpoint) = &mut self.endpoint else { return Ok(Schedule::Never) };
        endpoint.progress()?;
        if endpoint.connection(id).is_none() {
            return Ok(Schedule::Never);
        }
        if endpoint.is_open(id) || endpoint.check(id).is_err() {
            return Ok(Schedule::Periodic);
        }
        // An accepted peer waits for our first window even if the program does not call.
        Ok(Schedule::WhenReadable(endpoint.next_timeout().map(|at| at.since(endpoint.now()))))
    }
}

impl<B: Descriptors> Driven for Private<B> {
    fn drive(&self) -> Schedule {
        // The call that has the lock drives the endpoint.
        let Some(mut held) = self.held.try_lock() else { return Schedule::Periodic };
        held.run(Held::drive).unwrap_or(Schedule::Never)
    }

    fn descriptor(&self) -> Arc<UnsharedFd> {
        Arc::clone(&self.descriptor)
    }

    /// A waiting call holds the lock; later calls find it entered.
    fn panicked(&self) {}
}

#[cfg(test)]
mod tests;
