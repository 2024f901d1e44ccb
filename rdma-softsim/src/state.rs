//! The states of queue pairs and of connections, as programs and tools see them.

use std::net::{IpAddr, SocketAddr};

use rdma_backend::ConnectParams;

/// The state of a queue pair, `enum ibv_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairState {
    /// RESET.
    Reset,
    /// INIT.
    Init,
    /// RTR.
    Receiving,
    /// RTS.
    Ready,
    /// SQD.
    Draining,
    /// ERR.
    Error,
}

/// What is known of a connection for making a queue pair ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// The address of this side.
    pub local: IpAddr,
    /// The address of the peer.
    pub remote: IpAddr,
    /// The number of the peer's queue pair; 0 while it is unknown.
    pub peer: u32,
    /// The peer's parameters.
    pub theirs: ConnectParams,
    /// Retries without acknowledgement.
    pub retry: u8,
}

/// A queue pair and its connection, for inspection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Its number.
    pub pair: u32,
    /// The addresses of its host.
    pub host: Vec<IpAddr>,
    /// Its state.
    pub state: PairState,
    /// Its own address, once it has one. The port is 0 without a connection manager.
    pub local: Option<SocketAddr>,
    /// Its peer's.
    pub remote: Option<SocketAddr>,
    /// The number of its peer's queue pair, once it has a path; 0 if that is gone.
    pub peer: Option<u32>,
}
