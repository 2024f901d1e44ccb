//! The seam between the loop and what carries bytes.

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use crate::address::Address;
use crate::poller::wait_one;

/// Gives a settings type a method for each field that sets it and returns the settings, for chains. `#[non_exhaustive]` lets such
/// a type grow, and so forbids other crates to write it as a literal.
macro_rules! setters {
    ($($field:ident: $type:ty),+ $(,)?) => {
        $(
            #[doc = concat!("Sets `", stringify!($field), "`; see the field.")]
            #[must_use]
            pub fn $field(mut self, $field: $type) -> Self {
                self.$field = $field;
                self
            }
        )+
    };
}
pub(crate) use setters;

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

/// Names an [`EventLoop`](crate::EventLoop) within its process. A transport shares what it can with others on one loop only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoopId(u64);

impl LoopId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A transport, with its settings.
pub trait ConnectionType {
    /// The settings that can be changed.
    type Settings;

    /// Returns which kind of connection it makes.
    fn kind(&self) -> Kind;

    /// Changes the settings of the connections made from now on, those of listeners that are there already included.
    ///
    /// # Errors
    /// The settings are out of bounds; the old ones remain.
    fn configure(&self, settings: Self::Settings) -> io::Result<()>;

    /// Listens on an address, for a loop. Port 0 takes a free one.
    ///
    /// # Errors
    /// The address is taken, not of this machine, or not of this type.
    fn listen(&self, on: LoopId, at: &Address) -> io::Result<Box<dyn Listening>>;

    /// Begins to connect to an address, from another if given, for a loop.
    ///
    /// # Errors
    /// The errors that can be told at once; [`Transport::establish`] tells the rest.
    fn connect(&self, on: LoopId, to: &Address, from: Option<&Address>) -> io::Result<Box<dyn Transport>>;
}

/// An accepted connection or request that a listener has for its loop.
pub enum Accepted {
    /// A peer's connection, not yet established. Nothing that costs much was allocated for it: [`Transport::establish`] does that.
    Connection(Box<dyn Transport>),
    /// A peer came and is gone again, or could not be served. The next one may be.
    Lost(io::Error),
    /// Nobody waits now.
    Nobody,
    /// The listener accepts nobody any more, for this reason: its device is gone, for example. The
    /// loop closes it and says so: [`ListenerLost`](crate::ListenerLost).
    Over(io::Error),
}

/// A listener of some type. Dropping it closes it.
pub trait Listening: Send {
    /// Takes the next connection.
    ///
    /// # Errors
    /// The next one would fail as well, for now: descriptors or memory have run out. The loop tries
    /// again after a moment. What is wrong with one connection alone is [`Accepted::Lost`], and the
    /// end of the listener is [`Accepted::Over`].
    fn accept(&mut self) -> io::Result<Accepted>;

    /// Returns the address where it listens.
    fn local_addr(&self) -> Option<Address>;

    /// Returns a descriptor that is readable when there may be a connection.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

/// Returns the error for settings that a program has chosen wrongly.
pub(crate) fn out_of_bounds(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// Reading, writing, both or neither: what somebody wants, or what can be done.
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

/// The source of the news that a transport may go on.
pub enum Source<'a> {
    /// A descriptor of its own, and what to wait for on it to do what is wanted. Its edges are enough: a transport that is
    /// ready says so until it has found out that it is not.
    Own(BorrowedFd<'a>, Interest),
    /// A driver that it shares with other transports of its type on the loop. It wakes the transport's waker.
    Shared(Arc<dyn Driver>),
}

/// A driver moves many transports of one type on one loop, and has one descriptor for all of them.
pub trait Driver: Send + Sync {
    /// Returns a descriptor that is readable when [`Driver::drive`] has something to do. It may be watched for its edges.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Takes what has come, and wakes the wakers of those who may go on. Bounded; what is left is told by
    /// [`Driver::next_timeout`].
    fn drive(&self);

    /// Returns after how long [`Driver::drive`] must be called, whatever happens.
    fn next_timeout(&self) -> Option<Duration>;

    /// Waits until [`Driver::drive`] has something to do, for at most `timeout` and [`Driver::next_timeout`], and does it. A driver that
    /// can do this in fewer calls of the kernel than one at a time, does.
    ///
    /// # Errors
    /// The system cannot wait.
    fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.into_iter().chain(self.next_timeout()).min();
        wait_one(self.descriptor(), Interest::READ, timeout)?;
        self.drive();
        Ok(())
    }
}

/// One connection of some type, without waiting. Dropping it ends it at once.
///
/// Whoever drives it waits for its [`Transport::source`], calls [`Transport::drive`], and then does whatever
/// [`Transport::ready`] says can be done.
pub trait Transport: Send {
    /// Returns which kind of connection this is.
    fn kind(&self) -> Kind;

    /// Notes whom its driver wakes when it may go on. Transports with a descriptor of their own need nobody.
    fn set_waker(&mut self, _waker: &Waker) {}

    /// Notes that the peer is only told why it is not let in, so that the connection may cost as little memory as the type can do
    /// with. Called before the first [`Transport::establish`].
    fn economize(&mut self) {}

    /// Goes on with connecting, accepting or a handshake, as far as possible; true once bytes can flow.
    ///
    /// # Errors
    /// There will be no connection.
    fn establish(&mut self) -> io::Result<bool>;

    /// As [`Read::read`](std::io::Read::read) of a non-blocking socket.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock), or what ended the connection.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;

    /// As [`Write::write_vectored`](std::io::Write::write_vectored) of a non-blocking socket.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock), or what ended the connection.
    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Ends both directions: the peer reads what was written and then the end, and so does this side.
    fn shutdown(&mut self, linger: Duration);

    /// Begins to close: delivers what was written, for at most `linger`. Nothing is read any more.
    fn begin_close(&mut self, linger: Duration);

    /// Goes on with closing; true when it is over, and the transport can be dropped without loss.
    fn is_over(&mut self) -> bool;

    /// Returns this side's address.
    fn local_addr(&self) -> Option<Address>;

    /// Returns the peer's address.
    fn peer_addr(&self) -> Option<Address>;

    /// Returns whether the peer is on this machine. Before the connection is established that may rest on what the peer says
    /// of itself: true is then a claim, false is not.
    fn is_local(&self) -> bool;

    /// Returns the certificate that the peer has shown, as DER.
    fn peer_certificate(&self) -> Option<&[u8]> {
        None
    }

    /// Returns the source to wait for, given the operations that the owner is interested in.
    fn source(&self, want: Interest) -> Source<'_>;

    /// Takes what its descriptor had to say; nothing after a time-out, or when its waker was woken.
    fn drive(&mut self, fired: Interest);

    /// Returns the operations that need not wait, as far as is known without asking the kernel.
    fn ready(&mut self) -> Interest;
}
