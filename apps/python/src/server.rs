//! Servers that a client connects to, by address.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use any_backend::{AnyBackend, either};
use rdma_conn::{Connect, Descriptors, ProtectionDomain, Stream};
use rdma_kv::Transport;

use crate::address::{Address, FORMS};
use crate::embedded;
use crate::wire::{Arenas, Line, Wire, lock};

/// The port of a server whose address names none.
const PORT: u16 = 6379;

#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) timeout: Option<Duration>,
    pub(crate) connect_timeout: Duration,
    /// The length of a receive window, in bytes.
    pub(crate) window: u32,
    /// Whether a cluster may send SET and DEL again after their connection is lost.
    pub(crate) repeats: bool,
}

pub(crate) type Refusal = Box<dyn std::error::Error + Send + Sync>;

/// A server, and the memory that is registered for connections to it.
pub(crate) trait Server: Send + Sync {
    /// Connects. The connection uses the registered memory.
    fn connect(&self) -> Result<Box<dyn Wire>, Refusal>;

    /// Deregisters the memory that begins at this address. False if there is none.
    fn unregister(&self, address: usize) -> bool;

    fn registrations(&self) -> usize;

    fn way(&self) -> Way;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Rdma,
    /// With the reason why it is not RDMA, for addresses of `valkey://`.
    Tcp(Option<String>),
    Embedded,
}

/// Returns the server at a host of an address. With `valkey://`, `way` decides the transport; if it
/// is `None`, RDMA if that connects, and TCP otherwise.
pub(crate) fn named(
    address: &Address,
    host: &str,
    settings: Settings,
    way: Option<Way>,
) -> Result<Arc<dyn Server>, Refusal> {
    let mut options = address.options;
    options.protocol.window = settings.window;
    // A client has read every reply before it ends, so a long wait has no use.
    options.linger = Duration::from_millis(100);
    let how = Connect::default().timeout(settings.connect_timeout).options(options);
    let tcp = |reason| {
        let dial = Tcp { host: with_port(host), timeout: settings.connect_timeout };
        served(dial, Way::Tcp(reason))
    };
    let rdma = || -> Result<_, Refusal> {
        Ok(either!(AnyBackend::devices()?, AnyBackend(backend) => {
            served(Rdma::new(backend, with_port(host), how), Way::Rdma)
        }))
    };
    match (address.scheme.as_str(), way) {
        ("tcp", _) => Ok(tcp(None)),
        ("rdma", _) | ("valkey", Some(Way::Rdma)) => rdma(),
        ("valkey", Some(Way::Tcp(reason))) => Ok(tcp(reason)),
        ("valkey", _) => match rdma().and_then(|server| server.connect().map(|_it_connects| server)) {
            Ok(server) => Ok(server),
            Err(reason) => Ok(tcp(Some(reason.to_string()))),
        },
        ("embedded", _) if !address.cluster => {
            Ok(served(Rdma::new(embedded::host(host)?, embedded::ADDRESS.to_string(), how), Way::Embedded))
        }
        (scheme, _) => {
            Err(format!("{}: {scheme} is no transport; an address is {FORMS}", address.shown).into())
        }
    }
}

/// Returns `host:port`, with the default port if the host has none outside `[…]`.
pub(crate) fn with_port(host: &str) -> String {
    let behind = host.rsplit(']').next().unwrap_or(host);
    if behind.contains(':') { host.into() } else { format!("{host}:{PORT}") }
}

trait Dial: Send + Sync + 'static {
    type Stream: Transport + Send + 'static;

    fn dial(&self) -> Result<Self::Stream, Refusal>;
}

struct Served<D: Dial> {
    dial: D,
    way: Way,
    arenas: Arenas<D::Stream>,
}

fn served<D: Dial>(dial: D, way: Way) -> Arc<dyn Server> {
    Arc::new(Served { dial, way, arenas: Arc::default() })
}

impl<D: Dial> Server for Served<D> {
    fn connect(&self) -> Result<Box<dyn Wire>, Refusal> {
        Ok(Box::new(Line::new(self.dial.dial()?, Arc::clone(&self.arenas))))
    }

    fn unregister(&self, address: usize) -> bool {
        // Deregistering takes a while. The lock is free meanwhile, for those that look up a buffer.
        let buffer = lock(&self.arenas).remove(address);
        buffer.is_some()
    }

    fn registrations(&self) -> usize {
        lock(&self.arenas).len()
    }

    fn way(&self) -> Way {
        self.way.clone()
    }
}

struct Tcp {
    host: String,
    timeout: Duration,
}

impl Dial for Tcp {
    type Stream = TcpStream;

    fn dial(&self) -> Result<TcpStream, Refusal> {
        let told = |error: io::Error| Refusal::from(format!("{}: {error}", self.host));
        let mut last = told(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
        for address in self.host.to_socket_addrs().map_err(told)? {
            match TcpStream::connect_timeout(&address, self.timeout) {
                Ok(stream) => {
                    stream.set_nodelay(true).map_err(told)?;
                    return Ok(stream);
                }
                Err(error) => last = told(error),
            }
        }
        Err(last)
    }
}

struct Rdma<B: Descriptors> {
    backend: B,
    host: String,
    how: Connect,
    /// The protection domain of all connections: they go from one program to one server, so memory
    /// is registered once for all (VR-SEC-002).
    domain: OnceLock<ProtectionDomain<B>>,
}

impl<B: Descriptors> Rdma<B> {
    const fn new(backend: B, host: String, how: Connect) -> Self {
        Self { backend, host, how, domain: OnceLock::new() }
    }
}

impl<B: Descriptors + Send + Sync + 'static> Dial for Rdma<B> {
    type Stream = Stream<B>;

    fn dial(&self) -> Result<Stream<B>, Refusal> {
        if let Some(domain) = self.domain.get() {
            return Ok(Stream::connect_in(&self.backend, domain, &self.host, &self.how)?);
        }
        let stream = Stream::connect_with(&self.backend, &self.host, &self.how)?;
        // If two connect at once, the second keeps a domain of its own without registered memory.
        let _first = self.domain.set(stream.domain());
        Ok(stream)
    }
}
