//! Send requests beyond those of [`rdma_backend`].

use std::net::IpAddr;

use rdma_backend::{Immediate, SendOp};

/// The service of a queue pair, `enum ibv_qp_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection: RC.
    Connected,
    /// Unreliable datagrams: UD.
    Datagram,
}

/// The operation of a send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Of a connected queue pair.
    Connected(SendOp),
    /// SEND to any queue pair for datagrams, with an immediate if there is one.
    Datagram(Destination, Option<Immediate>),
}

impl From<SendOp> for Op {
    fn from(op: SendOp) -> Self {
        Self::Connected(op)
    }
}

/// Where a datagram goes: an address handle (`ibv_create_ah(3)`), and `wr.ud` of
/// `ibv_post_send(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The sender's address: one of its device's.
    pub local: IpAddr,
    /// The receiver's address.
    pub remote: IpAddr,
    /// The number of its queue pair.
    pub number: u32,
    /// The Q_Key that the queue pair must have. If its highest bit is set, the sender's own counts
    /// instead.
    pub key: u32,
}
