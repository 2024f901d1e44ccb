//! Events of the connection manager and of devices.

use alloc::boxed::Box;
use core::fmt;

use super::{Backend, ConnectParams, Identifier};

/// Identifies an identifier within its process: [`Identifier::key`] of the event's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdentifierKey(pub u64);

/// A connection-manager event and its identifier. For a connect request, that is the listening one.
pub struct CmEvent<B: Backend> {
    /// The identifier this event is for.
    pub id: IdentifierKey,
    /// The kind of event, with its data.
    pub kind: CmEventKind<B>,
    /// The peer's private data of a request, an acceptance or a refusal. Transports may pad it with
    /// zeros: InfiniBand and RoCE to 56, 196 and 148 bytes.
    pub private_data: Box<[u8]>,
}

/// The kind of a connection-manager event, `rdma_get_cm_event(3)`. A `status` is a negative errno.
#[non_exhaustive]
pub enum CmEventKind<B: Backend> {
    /// The address was resolved to a device.
    AddressResolved,
    /// The address could not be resolved.
    AddressError {
        /// Negative errno.
        status: i32,
    },
    /// A route to the peer is known.
    RouteResolved,
    /// There is no route.
    RouteError {
        /// Negative errno.
        status: i32,
    },
    /// A peer asks for a connection. `id` belongs to the receiver of the event.
    ConnectRequest {
        /// The identifier of the new connection.
        id: B::Identifier,
        /// The parameters that the peer offered.
        peer: ConnectParams,
    },
    /// The connection is established, with the peer's parameters (if accepted here, its request's).
    Established {
        /// The parameters that the peer offered.
        peer: ConnectParams,
    },
    /// The connection could not be made.
    ConnectError {
        /// Negative errno.
        status: i32,
    },
    /// The peer does not answer.
    Unreachable {
        /// Negative errno.
        status: i32,
    },
    /// The peer or its host refused; see [`reject`].
    Rejected {
        /// The transport's reason code.
        reason: i32,
    },
    /// The connection has ended.
    Disconnected,
    /// The queue pair has left the timewait state. Its number may be reused.
    TimewaitExit,
    /// The device is being removed.
    DeviceRemoval,
    /// The address behind the identifier changed.
    AddressChange,
    /// The device reports something about the queue pair, its completion queue, port, or itself.
    Async(AsyncEvent),
    /// An unknown or irrelevant event, by its number in `rdma_cma.h`.
    Other(u32),
}

impl<B: Backend> CmEventKind<B> {
    /// Converts this event to another backend's that wraps this one, with `map` for identifiers.
    pub fn map_identifier<C: Backend>(
        self,
        map: impl FnOnce(B::Identifier) -> C::Identifier,
    ) -> CmEventKind<C> {
        match self {
            Self::ConnectRequest { id, peer } => CmEventKind::ConnectRequest { id: map(id), peer },
            Self::AddressResolved => CmEventKind::AddressResolved,
            Self::AddressError { status } => CmEventKind::AddressError { status },
            Self::RouteResolved => CmEventKind::RouteResolved,
            Self::RouteError { status } => CmEventKind::RouteError { status },
            Self::Established { peer } => CmEventKind::Established { peer },
            Self::ConnectError { status } => CmEventKind::ConnectError { status },
            Self::Unreachable { status } => CmEventKind::Unreachable { status },
            Self::Rejected { reason } => CmEventKind::Rejected { reason },
            Self::Disconnected => CmEventKind::Disconnected,
            Self::TimewaitExit => CmEventKind::TimewaitExit,
            Self::DeviceRemoval => CmEventKind::DeviceRemoval,
            Self::AddressChange => CmEventKind::AddressChange,
            Self::Async(event) => CmEventKind::Async(event),
            Self::Other(number) => CmEventKind::Other(number),
        }
    }
}

impl<B: Backend> fmt::Debug for CmEventKind<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddressResolved => f.write_str("AddressResolved"),
            Self::AddressError { status } => write!(f, "AddressError({status})"),
            Self::RouteResolved => f.write_str("RouteResolved"),
            Self::RouteError { status } => write!(f, "RouteError({status})"),
            Self::ConnectRequest { id, peer } => write!(f, "ConnectRequest({:?}, {peer:?})", id.key()),
            Self::Established { peer } => write!(f, "Established({peer:?})"),
            Self::ConnectError { status } => write!(f, "ConnectError({status})"),
            Self::Unreachable { status } => write!(f, "Unreachable({status})"),
            Self::Rejected { reason } => write!(f, "Rejected({reason})"),
            Self::Disconnected => f.write_str("Disconnected"),
            Self::TimewaitExit => f.write_str("TimewaitExit"),
            Self::DeviceRemoval => f.write_str("DeviceRemoval"),
            Self::AddressChange => f.write_str("AddressChange"),
            Self::Async(event) => write!(f, "Async({event:?})"),
            Self::Other(number) => write!(f, "Other({number})"),
        }
    }
}

/// An asynchronous event of a device, `ibv_get_async_event(3)`. If it concerns several identifiers
/// (a completion queue, a port, the device), each is told on its event channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// The completion queue is lost, by overrun or a failure, and so are its queue pairs.
    CqErr,
    /// The queue pair failed and is in the error state. There may be no completion that says so.
    QpFatal,
    /// The peer's request was invalid: the queue pair is in the error state. No receive reports it.
    QpReqErr,
    /// The peer accessed memory without the right to; otherwise as [`QpReqErr`](Self::QpReqErr).
    QpAccessErr,
    /// A message came before the connection was established: [`Identifier::notify_established`].
    CommEst,
    /// The device failed. Nothing on it works any more.
    DeviceFatal,
    /// The port works again.
    PortActive,
    /// The port does not work: its link is down.
    PortErr,
    /// An irrelevant event, by its number in `enum ibv_event_type`.
    Other(u32),
}

impl AsyncEvent {
    /// Returns the event of a number in `enum ibv_event_type`. All are valid: kernels add to them.
    pub const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::CqErr,
            1 => Self::QpFatal,
            2 => Self::QpReqErr,
            3 => Self::QpAccessErr,
            4 => Self::CommEst,
            8 => Self::DeviceFatal,
            9 => Self::PortActive,
            10 => Self::PortErr,
            other => Self::Other(other),
        }
    }

    /// Returns a short description.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::CqErr => "its completion queue was lost",
            Self::QpFatal => "its queue pair failed",
            Self::QpReqErr => "the peer asked its queue pair for something invalid",
            Self::QpAccessErr => "the peer reached for memory that it was not given",
            Self::CommEst => "its first message has come",
            Self::DeviceFatal => "the RDMA device failed",
            Self::PortActive => "the device's port works again",
            Self::PortErr => "the device's port is down",
            Self::Other(_) => "the device told something unknown",
        }
    }

    /// Returns whether the queue pair of the notified identifier is unusable.
    pub const fn is_fatal(self) -> bool {
        matches!(self, Self::CqErr | Self::QpFatal | Self::QpReqErr | Self::QpAccessErr | Self::DeviceFatal)
    }
}

/// Reason codes of [`CmEventKind::Rejected`] (InfiniBand CM, table of REJ reasons).
pub mod reject {
    /// No listener at that address and port.
    pub const INVALID_SERVICE_ID: i32 = 8;
    /// The listening application refused.
    pub const CONSUMER_DEFINED: i32 = 28;
}
