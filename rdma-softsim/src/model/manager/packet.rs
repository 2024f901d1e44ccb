//! Messages of the connection manager.

use std::net::{IpAddr, SocketAddr};

use rdma_backend::ConnectParams;
use rdma_backend::time::Instant;

use crate::model::base::ids::{IdentifierId, PairId};

pub(crate) struct Packet {
    pub(in crate::model) from: IdentifierId,
    /// The peer; `None` in a request, which finds it by address.
    pub(in crate::model) to: Option<IdentifierId>,
    pub(in crate::model) source: IpAddr,
    pub(in crate::model) target: SocketAddr,
    pub(in crate::model) body: Body,
    pub(in crate::model) data: Box<[u8]>,
    pub(in crate::model) until: Instant,
}

#[derive(Clone, Copy)]
pub(in crate::model) enum Body {
    Request { params: ConnectParams, pair: PairId },
    Reply { params: ConnectParams, pair: PairId },
    Ready,
    Reject(i32),
    Disconnect,
    Goodbye,
}

/// Converts parameters to the receiver's view: what the other side may have outstanding, this one
/// must answer, and the reverse (`rdma_get_cm_event(3)`).
pub(in crate::model) const fn as_received(params: ConnectParams) -> ConnectParams {
    let ConnectParams { responder_resources, initiator_depth, .. } = params;
    ConnectParams { responder_resources: initiator_depth, initiator_depth: responder_resources, ..params }
}
