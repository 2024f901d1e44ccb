//! An event channel, and the events of the connection manager on it.

use std::collections::BTreeMap;

use rdma_backend::{AsyncEvent, ConnectParams, IdentifierKey};

use crate::failure_class::FailureClass;
use crate::model::base::arena::OnHost;
use crate::model::base::ids::{HostId, IdentifierId};

pub(crate) struct EventChannel {
    pub(in crate::model) host: HostId,
    /// The unread events, by number, so that those of one identifier can be found.
    pub(in crate::model) notices: BTreeMap<u64, Notice>,
    /// The number of the next event.
    pub(in crate::model) next: u64,
    /// Whether a wake was raised and not cleared.
    pub(in crate::model) raised: bool,
}

impl OnHost for EventChannel {
    const NAME: &'static str = "event channel";

    fn host(&self) -> HostId {
        self.host
    }
}

pub(crate) struct Taken {
    pub(crate) notice: Option<Notice>,
    /// Whether the channel became empty, so that the wake must be cleared.
    pub(crate) emptied: bool,
}

/// An event and its identifier.
pub(crate) struct Notice {
    pub(in crate::model) identifier: IdentifierId,
    pub(crate) key: IdentifierKey,
    pub(crate) kind: NoticeKind,
    /// The private data of a request, a reply or a reject.
    pub(crate) data: Box<[u8]>,
}

/// The part of [`CmEventKind`](rdma_backend::CmEventKind) that this fabric raises, with ids for
/// handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoticeKind {
    AddressResolved,
    AddressError(i32),
    RouteResolved,
    RouteError(i32),
    ConnectRequest {
        id: IdentifierId,
        key: IdentifierKey,
        peer: ConnectParams,
    },
    Established(ConnectParams),
    /// The peer has accepted, and the queue pair's owner must make it ready.
    ConnectResponse,
    Unreachable(i32),
    ConnectError(i32),
    Rejected(i32),
    Disconnected,
    TimewaitExit,
    DeviceRemoval,
    AddressChange,
    Async(AsyncEvent),
}

impl NoticeKind {
    pub(in crate::model) const fn name(&self) -> &'static str {
        match self {
            Self::AddressResolved => "address resolved",
            Self::AddressError(_) => "address error",
            Self::RouteResolved => "route resolved",
            Self::RouteError(_) => "route error",
            Self::ConnectRequest { .. } => "connect request",
            Self::Established(_) => "established",
            Self::ConnectResponse => "connect response",
            Self::Unreachable(_) => "unreachable",
            Self::ConnectError(_) => "connect error",
            Self::Rejected(_) => "rejected",
            Self::Disconnected => "disconnected",
            Self::TimewaitExit => "timewait exit",
            Self::DeviceRemoval => "device removal",
            Self::AddressChange => "address change",
            Self::Async(event) => event.describe(),
        }
    }

    /// The failure class that reading it shows.
    pub(in crate::model) const fn class(&self) -> Option<FailureClass> {
        match self {
            Self::AddressError(_)
            | Self::RouteError(_)
            | Self::Unreachable(_)
            | Self::ConnectError(_)
            | Self::Rejected(_) => Some(FailureClass::ConnectionSetup),
            Self::TimewaitExit | Self::DeviceRemoval | Self::AddressChange | Self::Async(_) => {
                Some(FailureClass::AbruptEvent)
            }
            _ => None,
        }
    }

    pub(in crate::model) const fn child(&self) -> Option<IdentifierId> {
        match self {
            Self::ConnectRequest { id, .. } => Some(*id),
            _ => None,
        }
    }
}
