//! Requests of queue pairs beyond those of [`rdma_backend`].

use std::net::IpAddr;

use rdma_backend::{Access, Immediate, RemoteAddress, RnrTimer, SendOp};

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
    /// An atomic operation on eight bytes, aligned to as many. What they were before is stored in
    /// the request's own memory.
    Atomic(RemoteAddress, Atomic),
    /// SEND to any queue pair for datagrams, with an immediate if there is one.
    Datagram(Destination, Option<Immediate>),
}

impl From<SendOp> for Op {
    fn from(op: SendOp) -> Self {
        Self::Connected(op)
    }
}

/// An atomic operation. Numbers are in the byte order of the machine.
///
/// It is one step ([`ForeignMemory::carry`](crate::ForeignMemory::carry)) in the memory of the
/// program. If one thread at a time takes such steps, it is atomic among the operations of the
/// fabric on that memory: `IBV_ATOMIC_HCA`. The program's own processor may come between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// FETCH and ADD, modulo 2⁶⁴.
    FetchAdd(u64),
    /// COMPARE and SWAP: stores `swap` if the number is `compare`.
    CompareSwap {
        /// The expected number.
        compare: u64,
        /// The new one.
        swap: u64,
    },
}

impl Atomic {
    /// Returns what to store, if anything.
    pub(crate) fn apply(self, found: [u8; 8]) -> Option<[u8; 8]> {
        let number = u64::from_ne_bytes(found);
        let new = match self {
            Self::FetchAdd(add) => number.wrapping_add(add),
            Self::CompareSwap { compare, swap } if number == compare => swap,
            Self::CompareSwap { .. } => return None,
        };
        Some(new.to_ne_bytes())
    }
}

/// What peers may do with a region, or through a queue pair: `enum ibv_access_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// All but atomic operations.
    pub access: Access,
    /// Atomic operations: `IBV_ACCESS_REMOTE_ATOMIC`.
    pub atomics: bool,
}

impl Rights {
    /// Everything.
    pub(crate) const ALL: Self =
        Self { access: Access::REMOTE_WRITE.and(Access::REMOTE_READ), atomics: true };
    /// Atomic operations alone.
    pub(crate) const ATOMICS: Self = Self { access: Access::NONE, atomics: true };

    pub(crate) const fn allow(self, wanted: Self) -> bool {
        self.access.allows(wanted.access) && (self.atomics || !wanted.atomics)
    }
}

impl From<Access> for Rights {
    fn from(access: Access) -> Self {
        Self { access, atomics: false }
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

/// Bytes named by a work request, `struct ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Their address, in the region's address space.
    pub address: u64,
    /// The number of bytes.
    pub len: u32,
    /// The region's key.
    pub lkey: u32,
}

/// The local side of a send request.
#[derive(Clone, Copy, Debug)]
pub enum Local<'a> {
    /// In registered memory, in this order. Empty for no bytes.
    Memory(&'a [Sge]),
    /// In the request.
    Inline(&'a [u8]),
}

/// A send request, `struct ibv_send_wr`.
#[derive(Clone, Copy, Debug)]
pub struct NamedSend<'a> {
    /// Returned in the completion.
    pub id: u64,
    /// The operation.
    pub op: Op,
    /// The source of its bytes, or their target.
    pub local: Local<'a>,
    /// Whether success is reported.
    pub signaled: bool,
    /// Whether its receive raises a solicited event, `IBV_SEND_SOLICITED`.
    pub solicited: bool,
}

/// A receive request, `struct ibv_recv_wr`.
#[derive(Clone, Copy, Debug)]
pub struct NamedReceive<'a> {
    /// Returned in the completion.
    pub id: u64,
    /// Where the bytes go, in this order.
    pub local: &'a [Sge],
}

/// A step of `ibv_modify_qp(3)`.
#[derive(Clone, Copy, Debug)]
pub enum Transition {
    /// To RESET.
    Reset,
    /// To INIT.
    Initialise,
    /// To RTR.
    Receive {
        /// Our address, to which messages are sent.
        local: IpAddr,
        /// The peer's address.
        remote: IpAddr,
        /// The number of the peer's queue pair.
        number: u32,
        /// When a peer that found no receive may retry.
        timer: RnrTimer,
    },
    /// To RTR, of a queue pair for datagrams.
    ReceiveDatagrams,
    /// To RTS.
    Send {
        /// Retries without acknowledgement.
        retry: u8,
        /// Retries of a send without a receive.
        rnr_retry: u8,
        /// READs outstanding at the same time.
        read_depth: u8,
    },
    /// To SQD.
    Drain {
        /// Whether to raise an event when nothing is in flight any more.
        notify: bool,
    },
    /// To ERR.
    Fail,
}
