//! Where the messages of a queue pair go.

use std::net::IpAddr;

use crate::model::base::ids::PairId;

/// The path to the other end.
#[derive(Clone, Copy)]
pub(in crate::model) struct Path {
    pub(in crate::model) peer: PairId,
    pub(in crate::model) local: IpAddr,
    pub(in crate::model) remote: IpAddr,
    /// Whether both ends are on one host, whatever their addresses are.
    pub(in crate::model) loopback: bool,
}

/// The destination of a datagram, looked up.
#[derive(Clone, Copy)]
pub(in crate::model) struct Addressed {
    pub(in crate::model) path: Path,
    pub(in crate::model) key: u32,
}
