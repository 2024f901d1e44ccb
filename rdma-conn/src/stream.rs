//! The blocking stream.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rdma_proto::Counters;

use crate::dial::Dial;
use crate::error::Error;
use crate::keeper;
use crate::lend::RegisteredBuffer;
use crate::link::Link;
use crate::options::Options;
use crate::shared::{Locked, Shared};
use crate::wait::{self, Descriptors};
use crate::work::Work;

/// A byte stream over RDMA: like a `TcpStream`, with [`Read`] and [`Write`]. Where the peer cut it means nothing (VR-XFER-007),
/// and nothing in it is encrypted or authenticated (VR-SEC-006).
///
/// Each `write` is sent at once, as one notification to the peer however many slices it has; use
/// [`Write::write_vectored`] or a buffer to send several pieces as one. Dropping the stream delivers what was written, for
/// at most [`Options::linger`]; [`Stream::shutdown`] does it with a report.
pub struct Stream<B: Descriptors> {
    shared: Arc<Shared<B>>,
    read_timeout: Option<Duration>,
    write_timeout: Option<Duration>,
    linger: Duration,
}

/// How to connect; see [`Stream::connect_with`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// The local address to connect from; port 0 takes any.
    pub local: Option<SocketAddr>,
    /// How long the whole of it may take, for each of the host's addresses.
    pub timeout: Duration,
    /// Settings of the connection.
    pub options: Options,
}

impl Default for Connect {
    fn default() -> Self {
        Self { local: None, timeout: Duration::from_secs(5), options: Options::client() }
    }
}

impl<B: Descriptors> Stream<B> {
    /// Connects to a host and port, with default settings.
    ///
    /// # Errors
    /// Says what to do: no RDMA device, no such host, refused, not reachable, timed out, too little locked memory.
    pub fn connect(backend: &B, host: impl ToSocketAddrs + ToString) -> Result<Self, Error> {
        Self::connect_with(backend, host, &Connect::default())
    }

    /// Connects to a host and port. Its addresses are tried in turn.
    ///
    /// # Errors
    /// That of the last address tried; as [`Stream::connect`].
    pub fn connect_with(
        backend: &B,
        host: impl ToSocketAddrs + ToString,
        how: &Connect,
    ) -> Result<Self, Error> {
        let no_such_host = |source| Error::NoSuchHost { host: host.to_string(), source: Arc::new(source) };
        let addresses = host.to_socket_addrs().map_err(no_such_host)?;
        let mut last = no_such_host(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        for peer in addresses {
            let dialed = Dial::new(backend, peer, how.local, how.timeout, how.options)
                .and_then(|dial| wait::dialed(backend, dial));
            match dialed {
                Ok(link) => return Ok(link.into()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn link(&self) -> Locked<'_, B> {
        self.shared.lock()
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.link().peer_addr()
    }

    /// This side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.link().local_addr()
    }

    /// Limits how long a read waits; `None` waits for ever. Reads that time out fail with [`io::ErrorKind::TimedOut`].
    pub const fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.read_timeout = timeout;
    }

    /// Limits how long a write or flush waits; `None` waits for ever. They time out with [`io::ErrorKind::TimedOut`].
    pub const fn set_write_timeout(&mut self, timeout: Option<Duration>) {
        self.write_timeout = timeout;
    }

    /// What the connection has done so far.
    pub fn counters(&self) -> Counters {
        self.link().counters()
    }

    /// What it has asked of the device so far.
    pub fn work(&self) -> Work {
        self.link().work()
    }

    /// Bytes of memory registered for this connection.
    pub fn registered_bytes(&self) -> usize {
        self.link().registered_bytes()
    }

    /// Registers memory to send from without a copy, see [`Connection::register`](crate::Connection::register).
    ///
    /// # Errors
    /// As there.
    pub fn register(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.link().register(len)
    }

    /// Sends bytes of `buffer`, from the beginning of `range`, behind all that was written; returns how many as soon as they are
    /// on their way. [`Stream::returned`] waits for the buffer.
    ///
    /// # Errors
    /// As [`Connection::try_lend`](crate::Connection::try_lend), or the write time-out passed.
    pub fn lend(&mut self, buffer: &Arc<RegisteredBuffer<B>>, range: Range<usize>) -> Result<usize, Error> {
        let mut link = self.link();
        wait::until(&mut link, self.write_timeout, "lending", |link| link.try_lend(buffer, range.clone()))
    }

    /// Waits until the peer has all that was lent of `buffer`, which can then be changed.
    ///
    /// # Errors
    /// The connection ended before that, or the write time-out passed.
    pub fn returned(&mut self, buffer: &RegisteredBuffer<B>) -> Result<(), Error> {
        let doing = "waiting for a buffer to come back";
        wait::until(&mut self.link(), self.write_timeout, doing, |link| link.returned(buffer))
    }

    /// Ends the connection once everything written has arrived at the peer, waiting for at most `linger`.
    ///
    /// # Errors
    /// Not everything arrived.
    pub fn shutdown(&mut self, linger: Duration) -> Result<(), Error> {
        let mut link = self.link();
        link.close(linger);
        wait::until(&mut link, None, "closing", |link| link.closed())
    }
}

impl<B: Descriptors> From<Link<B>> for Stream<B> {
    fn from(link: Link<B>) -> Self {
        let linger = link.options().linger;
        let shared = Arc::new(Shared::new(link));
        let weak: Weak<Shared<B>> = Arc::downgrade(&shared);
        keeper::keep(weak);
        Self { shared, read_timeout: None, write_timeout: None, linger }
    }
}

impl<B: Descriptors> Read for Stream<B> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut link = self.link();
        Ok(wait::until(&mut link, self.read_timeout, "reading", |link| link.try_read(into))?)
    }
}

impl<B: Descriptors> Write for Stream<B> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut link = self.link();
        Ok(wait::until(&mut link, self.write_timeout, "writing", |link| link.try_write(from))?)
    }

    /// Waits until the connection is established and everything written has been handed to the device.
    fn flush(&mut self) -> io::Result<()> {
        let mut link = self.link();
        Ok(wait::until(&mut link, self.write_timeout, "flushing", |link| link.flushed())?)
    }
}

impl<B: Descriptors> Drop for Stream<B> {
    fn drop(&mut self) {
        if let Err(error) = self.shutdown(self.linger) {
            tracing::debug!(%error, "the connection did not end in order");
        }
        self.shared.release();
    }
}

impl<B: Descriptors> std::fmt::Debug for Stream<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("link", &*self.link()).finish_non_exhaustive()
    }
}
