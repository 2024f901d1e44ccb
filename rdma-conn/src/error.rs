use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::{AsyncEvent, ErrorKind, Failure, reject};
use rustix::io::Errno;

/// An error of a connection: who is at fault, and what to do. Cheap to clone.
///
/// If it ended the connection, every later call returns it. A read first returns the bytes that had
/// arrived.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A host name has no address.
    #[error("cannot find the host {host}: {source}")]
    NoSuchHost {
        /// The host as given: text, or a pair of a name and a port.
        host: String,
        /// The resolver's error.
        source: Arc<io::Error>,
    },
    /// A call on the RDMA backend failed.
    #[error("{doing}: {source}")]
    Backend {
        /// The action that failed.
        doing: &'static str,
        /// The class of the failure.
        kind: ErrorKind,
        /// The backend's own error.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// No listener is at that address.
    #[error(
        "{peer} refused the connection: nothing listens there for RDMA (a server that listens on the same port by TCP only \
         does not count; for Valkey see --rdma-bind and --rdma-port)"
    )]
    Refused {
        /// The peer that refused.
        peer: SocketAddr,
    },
    /// The peer's application or host rejected the connection.
    #[error("{peer} rejected the connection (reason {reason})")]
    Rejected {
        /// The peer that rejected.
        peer: SocketAddr,
        /// The reason code of the connection manager.
        reason: i32,
    },
    /// There is no RDMA path to the peer.
    #[error("{peer} cannot be reached by RDMA: {what} ({source})")]
    Unreachable {
        /// The peer.
        peer: SocketAddr,
        /// Which step failed.
        what: &'static str,
        /// The errno of the step.
        source: Arc<io::Error>,
    },
    /// A time-out passed.
    #[error("timed out after {after:?} {doing}{}", .peer.map(|peer| format!(" ({peer})")).unwrap_or_default())]
    TimedOut {
        /// The action that failed.
        doing: &'static str,
        /// The time-out.
        after: Duration,
        /// The peer. `None` for a listener that waits for one.
        peer: Option<SocketAddr>,
    },
    /// The protocol machine ended the connection or refused a call. The error says who is at fault.
    #[error(transparent)]
    Protocol(#[from] rdma_proto::Error),
    /// A value of [`Options`](crate::Options) is out of bounds.
    #[error("Options::{field} must be {bounds}")]
    Options {
        /// The field.
        field: &'static str,
        /// Its bounds.
        bounds: &'static str,
    },
    /// A system call for waiting on descriptors, or for creating one, failed.
    #[error("{}", wait(.0))]
    Wait(Arc<io::Error>),
    /// The memory limit of an endpoint or a listener is reached.
    #[error(
        "as much memory is registered as may be, {limit} bytes: raise Limits::registered_bytes or close connections"
    )]
    RegisteredMemory {
        /// The limit, in bytes.
        limit: u64,
    },
    /// The connection limit of an endpoint or a listener is reached.
    #[error("there are as many connections as may be, {limit}: raise Limits::connections or close some")]
    TooManyConnections {
        /// The limit.
        limit: usize,
    },
    /// An endpoint with [`SharedEvents`](crate::SharedEvents) was to listen.
    #[error("an endpoint that shares its events cannot listen: use one of its own")]
    Listening,
    /// The waker of an endpoint with [`SharedEvents`](crate::SharedEvents) was to be a pipe. A
    /// write to a pipe without a reader ends a program by SIGPIPE.
    #[error("a pipe cannot wake an endpoint: use an eventfd or a socket pair")]
    PipeWaker,
    /// The endpoint has no such connection, or has not made it yet.
    #[error("there is no such connection: it was removed, or is still being made")]
    NoSuchConnection,
    /// A buffer was given to a connection that cannot use it.
    #[error(
        "the buffer was registered in the protection domain of another connection: register one for each, or connect in one domain"
    )]
    ForeignBuffer,
    /// The protection domain belongs to another device.
    #[error(
        "the way to this peer leads through another device than that of the protection domain: connect without it"
    )]
    ForeignDomain,
    /// The device reported a failure that has no completion.
    #[error("the RDMA device ended the connection: {}", event.describe())]
    Device {
        /// The event that reported it.
        event: AsyncEvent,
    },
    /// The device was removed.
    #[error("the RDMA device was removed")]
    DeviceRemoved,
    /// This process is a forked child, and its parent has used RDMA. Nothing was done.
    #[error("{}", rdma_process::FORKED)]
    Forked,
}

/// Names the limit that is reached, and whose it is.
fn wait(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => {
            "no descriptor is left: the limit on open files (`ulimit -n`) is reached".into()
        }
        Some(Errno::NFILE) => {
            "no descriptor is left: the system's limit on open files (`fs.file-max`) is reached".into()
        }
        Some(Errno::NOSPC) => {
            "no descriptor can be watched: the limit `fs.epoll.max_user_watches` is reached".into()
        }
        _ => format!("poll: {error}"),
    }
}

impl From<rdma_proto::TransportError> for Error {
    fn from(error: rdma_proto::TransportError) -> Self {
        Self::Protocol(error.into())
    }
}

impl From<rdma_proto::ApiMisuse> for Error {
    fn from(misuse: rdma_proto::ApiMisuse) -> Self {
        Self::Protocol(misuse.into())
    }
}

impl Error {
    /// `host` is the `Debug` form.
    pub(crate) fn no_such_host(host: &str, source: io::Error) -> Self {
        Self::NoSuchHost { host: host.trim_matches('"').into(), source: Arc::new(source) }
    }

    pub(crate) fn no_address(host: &str) -> Self {
        Self::no_such_host(host, io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
    }

    /// Returns a function for `map_err` that wraps an error of a backend. `doing` names the action.
    pub fn backend<E: Failure>(doing: &'static str) -> impl Fn(E) -> Self {
        move |error| match error.kind() {
            // One error for all layers that recognise a forked child.
            ErrorKind::Forked => Self::Forked,
            kind => Self::Backend { doing, kind, source: Arc::new(error) },
        }
    }

    /// Returns an error in a forked child, in which no call may take a lock or touch a descriptor.
    /// The README has the table.
    #[inline(always)]
    pub(crate) fn unless_forked() -> Result<(), Self> {
        if rdma_process::is_child() { Err(Self::Forked) } else { Ok(()) }
    }

    pub(crate) fn rejected(peer: SocketAddr, reason: i32) -> Self {
        // InfiniBand's reason for a REJ where nothing listens. Others come from a listener or the
        // peer's host.
        if reason == reject::INVALID_SERVICE_ID {
            Self::Refused { peer }
        } else {
            Self::Rejected { peer, reason }
        }
    }

    pub(crate) fn unreachable(peer: SocketAddr, what: &'static str, status: i32) -> Self {
        // The connection manager's status is a negative errno, rdma_get_cm_event(3).
        // Saturating, because a status of `i32::MIN` has no absolute value.
        let source = Arc::new(io::Error::from_raw_os_error(status.saturating_abs()));
        Self::Unreachable { peer, what, source }
    }

    /// Returns whether the error ends a listener: its device failed or was removed.
    pub(crate) const fn is_for_good(&self) -> bool {
        matches!(self, Self::DeviceRemoved | Self::Device { .. })
    }

    /// Returns whether memory or descriptors ran out. That can pass at any time.
    pub(crate) const fn is_shortage(&self) -> bool {
        matches!(self, Self::Backend { kind: ErrorKind::Memory | ErrorKind::Descriptors, .. })
    }

    /// Returns whether the end of another connection may mend it.
    pub(crate) const fn is_scarcity(&self) -> bool {
        self.is_shortage() || matches!(self, Self::RegisteredMemory { .. } | Self::TooManyConnections { .. })
    }

    /// Returns whether the next accept would fail too: the process or the machine lacks something.
    pub(crate) const fn concerns_everybody(&self) -> bool {
        // Not our own limits: they reject one peer, and the listener goes on.
        matches!(
            self,
            Self::Wait(_)
                | Self::Forked
                | Self::Backend {
                    kind: ErrorKind::Memory | ErrorKind::Descriptors | ErrorKind::NoDevice,
                    ..
                }
        )
    }

    /// Returns the nearest [`io::ErrorKind`].
    pub fn io_kind(&self) -> io::ErrorKind {
        use rdma_proto::Error as Protocol;
        match self {
            Self::NoSuchHost { source, .. } | Self::Wait(source) => source.kind(),
            Self::Backend { kind: ErrorKind::NoDevice, .. } | Self::Forked => io::ErrorKind::Unsupported,
            Self::Backend { kind: ErrorKind::Address, .. } => io::ErrorKind::AddrNotAvailable,
            Self::Backend { kind: ErrorKind::Memory, .. } | Self::RegisteredMemory { .. } => {
                io::ErrorKind::OutOfMemory
            }
            Self::Backend { kind: ErrorKind::Argument, .. } => io::ErrorKind::InvalidInput,
            Self::Refused { .. } | Self::Rejected { .. } => io::ErrorKind::ConnectionRefused,
            Self::Unreachable { source, .. } if source.kind() == io::ErrorKind::TimedOut => {
                io::ErrorKind::TimedOut
            }
            Self::Unreachable { .. } => io::ErrorKind::HostUnreachable,
            Self::TimedOut { .. } => io::ErrorKind::TimedOut,
            Self::Protocol(Protocol::InvalidMessage(_) | Protocol::PeerMisbehaved(_)) => {
                io::ErrorKind::InvalidData
            }
            Self::Protocol(Protocol::ApiMisuse(_))
            | Self::Options { .. }
            | Self::Listening
            | Self::PipeWaker
            | Self::ForeignBuffer
            | Self::ForeignDomain => io::ErrorKind::InvalidInput,
            Self::Protocol(Protocol::Transport(rdma_proto::TransportError::Disconnected)) => {
                io::ErrorKind::BrokenPipe
            }
            Self::Protocol(Protocol::Transport(_)) => io::ErrorKind::ConnectionReset,
            Self::NoSuchConnection => io::ErrorKind::NotConnected,
            Self::Device { .. } | Self::DeviceRemoved => io::ErrorKind::ConnectionAborted,
            Self::Backend { .. } | Self::Protocol(_) | Self::TooManyConnections { .. } => {
                io::ErrorKind::Other
            }
        }
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::new(error.io_kind(), error)
    }
}
