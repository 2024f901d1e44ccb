//! Connection types: one contract over TCP, Unix sockets, TLS and RDMA, for servers that run an event loop.
//!
//! Valkey has this as its `ConnectionType`, a table of functions that every transport fills in. Here it is three traits and two
//! structures, so that what all transports do alike is written once:
//!
//! | | |
//! |---|---|
//! | [`ConnectionType`] | a transport: its settings, how to listen, how to connect |
//! | [`Listening`], [`Transport`] | what it makes: a listener and a connection, both without waiting |
//! | [`Connection`] | a transport with a state, handlers, a last error, and calls that wait |
//! | [`EventLoop`] | owns connections and listeners, waits for all of them, calls handlers |
//!
//! [`Tcp`], [`Unix`], [`Rdma`] on any backend, and with the feature `tls` also `Tls` over any of them, are the types there are.
//!
//! # The contract
//!
//! `tests/types` shows each sentence of it on every type.
//!
//! - **Reads and writes never wait.** They move as many bytes as they can. [`WouldBlock`](std::io::ErrorKind::WouldBlock) means none now and
//!   leaves the connection as it is. A read of 0 bytes is the end of the stream, and the state is [`State::Closed`] from then on. A
//!   write to a peer that has left fails with [`BrokenPipe`](std::io::ErrorKind::BrokenPipe), and what the peer said before can
//!   still be read. Any other error makes the state [`State::Error`], is kept as the last error, and comes back from every
//!   later call.
//! - **Handlers are called by level.** A read handler is called as long as a read would not have to wait, a write handler as
//!   long as a write would not. A call may find nothing to do. Who does not want to read or write removes the handler.
//! - **In one turn the read handler comes first**, the write handler after it; with [`Barrier::WriteFirst`] the other way round, so that
//!   no reply leaves in the turn that made it.
//! - **A connection may be closed anywhere**, also by its own handler, which may go on: its id names nothing any more, and
//!   the resources go when the handler has returned.
//! - **A close delivers** what was written, in the background, for at most [`Timeouts::linger`].
//! - **A handshake is over** after [`Timeouts::handshake`], one way or the other, and its handler is called exactly once.
//! - **A listener may be closed at any time.** Its connections go on.
//! - **A loop with nothing to do sleeps.** RDMA has nothing like `POLLOUT`: who waits to write there is woken by the completion or
//!   registration that makes room ([`EventLoop::has_pending`]).
//!
//! # Where Valkey's RDMA differs
//!
//! As of 9.1.2 its write returns 0 when there is no room, its read never returns 0, its last error is not set, its shutdown does
//! nothing, the barrier is ignored, connecting waits or fails, and a write handler that has to wait keeps the loop from sleeping. Here RDMA
//! does what a socket does. On the wire nothing differs.
//!
//! # An echo server
//!
//! ```
//! use rdma_conn::types::{ConnectionId, EventLoop, Rdma, Tcp};
//! use std::io::{ErrorKind, Read, Write};
//!
//! fn on_connection(server: &mut EventLoop<u32>, id: ConnectionId) {
//!     if server.accept(id, on_established).is_err() {
//!         server.close(id);
//!     }
//! }
//!
//! fn on_established(server: &mut EventLoop<u32>, id: ConnectionId) {
//!     server.state += 1; // the program's own state, here the number of clients
//!     if let Some(client) = server.get_mut(id) {
//!         println!("{} from {:?}", client.kind(), client.peer_address());
//!         client.set_read_handler(Some(on_readable));
//!     }
//! }
//!
//! fn on_readable(server: &mut EventLoop<u32>, id: ConnectionId) {
//!     let Some(client) = server.get_mut(id) else { return };
//!     let mut chunk = [0; 4096];
//!     let done = match client.read(&mut chunk) {
//!         Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
//!         Ok(len) => client.write_all(&chunk[..len]), // a real server keeps what there is no room for
//!         Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
//!         Err(error) => Err(error),
//!     };
//!     if done.is_err() {
//!         server.close(id);
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let fabric = rdma_softsim::Fabric::new(); // or rdma_verbs::Verbs::load()? and real addresses
//! let rdma = Rdma::new(fabric.host(&["192.0.2.1".parse()?]));
//! let mut server = EventLoop::new(0)?;
//! server.listen(&Tcp::new(), &"127.0.0.1:0".parse()?, on_connection)?;
//! server.listen(&rdma, &"192.0.2.1:6379".parse()?, on_connection)?;
//! # let client = Rdma::new(fabric.host(&["192.0.2.2".parse()?]));
//! # let id = server.connect(&client, &"192.0.2.1:6379".parse()?, None, |_, _| {})?;
//! # while server.get(id).is_some_and(|client| client.state() == rdma_conn::types::State::Connecting) {
//! while server.state < 1 {
//!     server.turn(None)?;
//! }
//! #     server.turn(Some(std::time::Duration::from_millis(10)))?;
//! # }
//! # Ok(())
//! # }
//! ```
//!
//! # From Valkey's operations to these
//!
//! | Valkey | here |
//! |---|---|
//! | `get_type` | [`ConnectionType::kind`], [`Connection::kind`] |
//! | `init`, `cleanup` | making and dropping the type |
//! | `configure` | [`ConnectionType::configure`] |
//! | `ae_handler` | [`Transport::drive`] |
//! | `accept_handler` | the handler given to [`EventLoop::listen`] |
//! | `listen`, `closeListener` | [`EventLoop::listen`], [`EventLoop::close_listener`] |
//! | `addr`, `is_local` | [`Connection::peer_address`], [`Connection::local_address`], [`Connection::is_local`] |
//! | `conn_create`, `connect` | [`EventLoop::connect`] |
//! | `conn_create_accepted`, `accept` | [`EventLoop::accept`] |
//! | `blocking_connect` | [`EventLoop::blocking_connect`] |
//! | `shutdown`, `close` | [`Connection::shutdown`], [`EventLoop::close`] |
//! | `read`, `write`, `writev` | [`Read`](std::io::Read) and [`Write`](std::io::Write) of [`Connection`] |
//! | `set_read_handler`, `set_write_handler` | [`Connection::set_read_handler`], [`Connection::set_write_handler`] |
//! | `sync_read`, `sync_write`, `sync_readline` | [`Connection::sync_read`], [`Connection::sync_write`], [`Connection::sync_read_line`] |
//! | `has_pending_data`, `process_pending_data` | [`EventLoop::has_pending`], [`EventLoop::process_pending`] |
//! | `get_last_error` | [`Connection::last_error`] |
//! | `get_peer_cert` | [`Connection::peer_certificate`] |

mod address;
mod connection;
mod event_loop;
mod poller;
mod rdma;
mod socket;
#[cfg(feature = "tls")]
mod tls;

use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;
use std::time::Duration;

pub use address::Address;
pub use connection::{Barrier, Connection, State};
pub use event_loop::{ConnectionId, EventLoop, Handler, ListenerId, Timeouts};
pub use rdma::{Rdma, RdmaSettings, Vector};
pub use socket::{SocketSettings, Tcp, Unix};
#[cfg(feature = "tls")]
pub use tls::{Tls, TlsSettings};

/// A kind of connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// What carries the bytes.
    pub carrier: Carrier,
    /// Whether TLS runs on top.
    pub tls: bool,
}

/// What carries a connection's bytes.
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

/// A transport, with its settings.
pub trait ConnectionType {
    /// What can be set.
    type Settings;

    /// Which kind of connection it makes.
    fn kind(&self) -> Kind;

    /// Changes the settings of the connections made from now on, those of listeners that are there already included.
    ///
    /// # Errors
    /// The settings are out of bounds; the old ones remain.
    fn configure(&self, settings: Self::Settings) -> io::Result<()>;

    /// Listens on an address. Port 0 takes a free one.
    ///
    /// # Errors
    /// The address is taken, not of this machine, or not of this type.
    fn listen(&self, at: &Address) -> io::Result<Box<dyn Listening>>;

    /// Begins to connect to an address, from another if given.
    ///
    /// # Errors
    /// What can be told at once; the rest is told by [`Transport::establish`].
    fn connect(&self, to: &Address, from: Option<&Address>) -> io::Result<Box<dyn Transport>>;
}

/// What a listener has for its loop.
pub enum Accepted {
    /// A peer's connection.
    Connection(Box<dyn Transport>),
    /// A peer came and is gone again, or could not be served. The next one may be.
    Lost(io::Error),
    /// Nobody waits now.
    Nobody,
}

/// A listener of some type. Dropping it closes it.
pub trait Listening: Send {
    /// Takes the next connection, which is not yet established.
    ///
    /// # Errors
    /// The next one would fail as well: descriptors or memory have run out, or the listener has failed. What is wrong with one
    /// connection alone is [`Accepted::Lost`].
    fn accept(&mut self) -> io::Result<Accepted>;

    /// Where it listens.
    fn address(&self) -> Option<Address>;

    /// Readable when there may be a connection.
    fn descriptor(&self) -> BorrowedFd<'_>;
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

    /// What is in both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self { read: self.read && other.read, write: self.write && other.write }
    }

    /// Whether it is neither.
    pub const fn is_none(self) -> bool {
        !self.read && !self.write
    }
}

/// How many descriptors a transport has, at most.
pub const SOURCES: usize = 2;

/// A transport's descriptors, and what to wait for on each of them.
pub type Sources<'a> = [Option<(BorrowedFd<'a>, Interest)>; SOURCES];

/// One connection of some type, without waiting. Dropping it ends it at once.
///
/// Whoever drives it waits until one of [`Transport::sources`] fires or [`Transport::next_timeout`] has passed, calls
/// [`Transport::drive`], and then does whatever [`Transport::ready`] says can be done.
pub trait Transport: Send {
    /// Which kind of connection this is.
    fn kind(&self) -> Kind;

    /// Goes on with connecting or a handshake; true once bytes can flow.
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

    /// This side's address.
    fn local_address(&self) -> Option<Address>;

    /// The peer's address.
    fn peer_address(&self) -> Option<Address>;

    /// Whether the peer is known to be on this machine.
    fn is_local(&self) -> bool;

    /// The certificate that the peer has shown, as DER.
    fn peer_certificate(&self) -> Option<&[u8]> {
        None
    }

    /// What to wait for, given what the owner wants to do.
    fn sources(&self, want: Interest) -> Sources<'_>;

    /// Takes what the descriptors have to say. `fired` tells which have fired, in their order; after a time-out, none.
    fn drive(&mut self, fired: [Interest; SOURCES]);

    /// What can be done without waiting, as far as is known without asking the kernel.
    fn ready(&mut self) -> Interest;

    /// After how long [`Transport::drive`] must be called, whatever happens.
    fn next_timeout(&self) -> Option<Duration> {
        None
    }
}
