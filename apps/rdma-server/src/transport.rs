//! The traits between the loop and its transports.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use crate::address::Address;
use crate::poller::wait_one;

/// A kind of connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// The transport.
    pub carrier: Carrier,
    /// Whether TLS runs on top.
    pub tls: bool,
}

/// The transport of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// A TCP socket.
    Tcp,
    /// A Unix socket.
    Unix,
    /// RDMA.
    Rdma,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.carrier {
            Carrier::Tcp => "tcp",
            Carrier::Unix => "unix",
            Carrier::Rdma => "rdma",
        })?;
        f.write_str(if self.tls { "+tls" } else { "" })
    }
}

/// Identifies an [`EventLoop`](crate::EventLoop) within its process. Transports share resources
/// only within one loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoopId(u64);

impl LoopId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: the number only has to be unique.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A transport, with its settings.
pub trait ConnectionType {
    /// The settings that can be changed.
    type Settings;

    /// Returns the kind of its connections.
    fn kind(&self) -> Kind;

    /// Changes the settings of later connections, including those of existing listeners.
    ///
    /// # Errors
    /// Returns an error and keeps the old settings if one is out of bounds.
    fn configure(&self, settings: Self::Settings) -> io::Result<()>;

    /// Listens on an address, for a loop. Port 0 picks a free port.
    ///
    /// # Errors
    /// Returns an error if the address is taken, not of this machine, or not of this type.
    fn listen(&self, on: LoopId, at: &Address) -> io::Result<Box<dyn Listening>>;

    /// Begins to connect to an address, from another if given, for a loop.
    ///
    /// # Errors
    /// Returns errors that are known at once. [`Transport::establish`] returns the others.
    fn connect(&self, on: LoopId, to: &Address, from: Option<&Address>) -> io::Result<Box<dyn Transport>>;
}

/// A listener's answer to an accept.
pub enum Accepted {
    /// A peer's connection. Nothing costly was allocated yet; [`Transport::establish`] does that.
    Connection(Box<dyn Transport>),
    /// A peer has left already, or could not be served. The next one may succeed.
    Lost(io::Error),
    /// No connection is waiting.
    Nobody,
    /// The listener has stopped for this reason, for example because its device was removed. The
    /// loop closes it and returns [`ListenerLost`](crate::ListenerLost).
    Over(io::Error),
}

/// A listener of some type. Dropping it closes it.
pub trait Listening: Send {
    /// Takes the next connection.
    ///
    /// # Errors
    /// Returns an error if the next connection would fail as well, because descriptors or memory
    /// have run out. The loop retries after a moment. A failure of one connection is
    /// [`Accepted::Lost`], and the end of the listener is [`Accepted::Over`].
    fn accept(&mut self) -> io::Result<Accepted>;

    /// Returns the address it listens on.
    fn local_addr(&self) -> Option<Address>;

    /// Returns a descriptor that is readable when there may be a connection.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

pub(crate) fn out_of_bounds(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// Reading, writing, both or neither: an interest, or what is possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Reading.
    pub read: bool,
    /// Writing.
    pub write: bool,
}

impl Interest {
    /// Neither.
    pub const NONE: Self = Self { read: false, write: false };
    /// Reading only.
    pub const READ: Self = Self { read: true, write: false };
    /// Writing only.
    pub const WRITE: Self = Self { read: false, write: true };
    /// Both.
    pub const BOTH: Self = Self { read: true, write: true };

    /// Returns the intersection of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self { read: self.read && other.read, write: self.write && other.write }
    }

    /// Returns whether it is neither.
    pub const fn is_none(self) -> bool {
        !self.read && !self.write
    }
}

/// Where a transport's readiness comes from.
pub enum Source<'a> {
    /// A descriptor of its own, and the events to wait for. Edges are enough: a transport reports
    /// readiness until it finds out otherwise.
    Own(BorrowedFd<'a>, Interest),
    /// A driver shared by the loop's transports of its type, which wakes the transport's waker.
    Shared(Arc<dyn Driver>),
}

/// Drives many transports of one type on one loop, with one descriptor for all of them.
pub trait Driver: Send + Sync {
    /// Returns a descriptor that is readable when [`Driver::drive`] has work. Edge-triggered
    /// polling is enough.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Takes what has arrived, and wakes the transports that can continue. Bounded: if work is
    /// left, [`Driver::next_timeout`] returns zero.
    fn drive(&self);

    /// Returns the time until [`Driver::drive`] must be called in any case.
    fn next_timeout(&self) -> Option<Duration>;

    /// Waits until [`Driver::drive`] has work, for at most `timeout` and [`Driver::next_timeout`],
    /// and does it. A driver may override this to use fewer system calls.
    ///
    /// # Errors
    /// Returns an error if the system cannot wait.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.into_iter().chain(self.next_timeout()).min();
        wait_one(self.descriptor(), Interest::READ, timeout)?;
        self.drive();
        Ok(())
    }
}

/// One non-blocking connection of some type. Dropping it ends it at once.
///
/// Its user waits for the [`Transport::source`], calls [`Transport::drive`], and then does what
/// [`Transport::ready`] allows.
pub trait Transport: Send {
    /// Returns the kind of this connection.
    fn kind(&self) -> Kind;

    /// Sets the waker that its driver calls. Transports with a descriptor of their own need none.
    fn set_waker(&mut self, _waker: &Waker) {}

    /// Announces that the peer is only told why it is refused, so that the connection uses as
    /// little memory as the type allows. Called before the first [`Transport::establish`].
    fn economize(&mut self) {}

    /// Continues connecting, accepting or a handshake, as far as possible. Returns true once bytes
    /// can flow.
    ///
    /// # Errors
    /// Returns an error if there will be no connection.
    fn establish(&mut self) -> io::Result<bool>;

    /// Reads like [`Read::read`](std::io::Read::read) of a non-blocking socket.
    ///
    /// # Errors
    /// Returns [`WouldBlock`](io::ErrorKind::WouldBlock), or the error that ended the connection.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// Writes like [`write_vectored`](std::io::Write::write_vectored) of a non-blocking socket.
    ///
    /// # Errors
    /// Returns [`WouldBlock`](io::ErrorKind::WouldBlock), or the error that ended the connection.
    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Returns whether the peer can end its own direction and still read. False by default: a
    /// connection over RDMA ends as a whole.
    fn half_closes(&self) -> bool {
        false
    }

    /// Has the peer see no orderly end when this is dropped: it must not take what it got for all.
    /// By default this does nothing, for types with one kind of end.
    fn reset(&mut self) {}

    /// Ends both directions: both sides read what was written and then the end.
    fn shutdown(&mut self, linger: Duration);

    /// Begins to close: delivers written bytes, for at most `linger`. Nothing is read any more.
    fn begin_close(&mut self, linger: Duration);

    /// Continues closing. Returns true at the end, when the transport can be dropped without loss.
    fn is_over(&mut self) -> bool;

    /// Returns this side's address.
    fn local_addr(&self) -> Option<Address>;

    /// Returns the peer's address.
    fn peer_addr(&self) -> Option<Address>;

    /// Returns whether the peer is on this machine. Before the connection is established, the
    /// result may rest on the peer's own claim: true is then unproven, false is certain.
    fn is_local(&self) -> bool;

    /// Returns the peer's certificate as DER.
    fn peer_certificate(&self) -> Option<&[u8]> {
        None
    }

    /// Returns the source to wait for, given the owner's interest.
    fn source(&self, want: Interest) -> Source<'_>;

    /// Handles its descriptor's events; none after a time-out or a call of its waker.
    fn drive(&mut self, fired: Interest);

    /// Returns the operations that need not wait, as far as is known without a system call.
    fn ready(&mut self) -> Interest;
}
