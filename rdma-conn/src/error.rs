//! Errors of connections, in the words of somebody who has to do something about them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::{AsyncEvent, ErrorKind, Failure, reject};

/// An error of a connection. Cheap to clone: the first error of a connection is reported by every later call.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A host name has no address.
    #[error("cannot find the host {host}: {source}")]
    NoSuchHost {
        /// As it was given: text, or a pair of a name and a port.
        host: String,
        /// The resolver's error.
        source: Arc<io::Error>,
    },
    /// The RDMA backend could not do something.
    #[error("{doing}: {source}")]
    Backend {
        /// The action that failed.
        doing: &'static str,
        /// The class of the failure.
        kind: ErrorKind,
        /// The backend's own error.
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// Nobody listens there.
    #[error(
        "{peer} refused the connection: nothing listens there for RDMA (a server that listens on the same port by TCP only \
         does not count; for Valkey see --rdma-bind and --rdma-port)"
    )]
    Refused {
        /// The peer that refused.
        peer: SocketAddr,
    },
    /// The application or host there said no.
    #[error("{peer} rejected the connection (reason {reason})")]
    Rejected {
        /// The peer that rejected.
        peer: SocketAddr,
        /// The reason code of the connection manager.
        reason: i32,
    },
    /// There is no way from here to there by RDMA.
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
    #[error("timed out after {after:?} {doing}")]
    TimedOut {
        /// The action that failed.
        doing: &'static str,
        /// The time-out.
        after: Duration,
    },
    /// The protocol machine ended the connection, or refused a call; says who is at fault.
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
    /// Waiting for descriptors failed.
    #[error("poll: {0}")]
    Wait(Arc<io::Error>),
    /// An endpoint, or all connections of a listener, may not register more memory.
    #[error(
        "as much memory is registered as may be, {limit} bytes: raise Limits::registered_bytes or close connections"
    )]
    RegisteredMemory {
        /// The limit, in bytes.
        limit: u64,
    },
    /// An endpoint, or a listener, may not have more connections.
    #[error("there are as many connections as may be, {limit}: raise Limits::connections or close some")]
    TooManyConnections {
        /// The limit.
        limit: usize,
    },
    /// An endpoint was asked about a connection that it does not have, or not yet.
    #[error("there is no such connection: it was removed, or is still being made")]
    NoSuchConnection,
    /// A buffer was given to a connection that cannot use it.
    #[error(
        "the buffer was registered in the protection domain of another connection: register one for each, or connect in one domain"
    )]
    ForeignBuffer,
    /// A connection was to be in a protection domain of another device.
    #[error(
        "the way to this peer leads through another device than that of the protection domain: connect without it"
    )]
    ForeignDomain,
    /// The device told of a failure that no completion tells of.
    #[error("the RDMA device ended the connection: {}", event.describe())]
    Device {
        /// The event that tells of it.
        event: AsyncEvent,
    },
    /// The device went away.
    #[error("the RDMA device was removed")]
    DeviceRemoved,
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
    /// Returns the error of a resolver about a host, given its `Debug` form.
    pub(crate) fn no_such_host(host: &str, source: io::Error) -> Self {
        Self::NoSuchHost { host: host.trim_matches('"').into(), source: Arc::new(source) }
    }

    /// Returns the error about a host that a resolver knows and has no address of, given its `Debug` form.
    pub(crate) fn no_address(host: &str) -> Self {
        Self::no_such_host(host, io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
    }

    /// Returns what makes an error of a backend's, given the activity that failed; for use with `map_err`.
    pub fn backend<E: Failure>(doing: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::Backend { doing, kind: error.kind(), source: Arc::new(error) }
    }

    pub(crate) fn rejected(peer: SocketAddr, reason: i32) -> Self {
        if reason == reject::INVALID_SERVICE_ID {
            Self::Refused { peer }
        } else {
            Self::Rejected { peer, reason }
        }
    }

    pub(crate) fn unreachable(peer: SocketAddr, what: &'static str, status: i32) -> Self {
        let source = Arc::new(io::Error::from_raw_os_error(status.saturating_abs()));
        Self::Unreachable { peer, what, source }
    }

    /// Returns whether it ends a listener: its device has failed, or is gone.
    pub(crate) const fn is_for_good(&self) -> bool {
        matches!(self, Self::DeviceRemoved | Self::Device { .. })
    }

    /// Returns whether it is for want of memory or descriptors, which may be had again at any time.
    pub(crate) const fn is_shortage(&self) -> bool {
        matches!(self, Self::Backend { kind: ErrorKind::Memory | ErrorKind::Descriptors, .. })
    }

    /// Returns whether an accept failed for a reason that the next one meets as well: the process
    /// has no descriptor or no memory left, or there is no device any more. What is polled and
    /// watched here is the process's own, so its failures are of this kind.
    pub(crate) const fn concerns_everybody(&self) -> bool {
        matches!(
            self,
            Self::Wait(_)
                | Self::Backend {
                    kind: ErrorKind::Memory | ErrorKind::Descriptors | ErrorKind::NoDevice,
                    ..
                }
        )
    }

    /// Returns the nearest kind of [`io::Error`].
    pub fn io_kind(&self) -> io::ErrorKind {
        use rdma_proto::Error as Protocol;
        match self {
            Self::NoSuchHost { source, .. } | Self::Wait(source) => source.kind(),
            Self::Backend { kind: ErrorKind::NoDevice, .. } => io::ErrorKind::Unsupported,
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
