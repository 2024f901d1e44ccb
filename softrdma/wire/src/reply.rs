//! What the fabric answers.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::{Amounts, Exceeded, Name, Params};

/// The fabric's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Success, with nothing to report.
    Done,
    /// Refused, with this `errno`.
    Refused(i32),
    /// Refused, as a bound would be exceeded.
    Exceeded(Exceeded),
    /// The session is open.
    Welcome {
        /// The addresses of each device: its port has one GID for each.
        devices: Vec<Vec<IpAddr>>,
        /// What each device can do.
        limits: Limits,
        /// The fabric's process, which accesses the memory of this one.
        fabric: u32,
    },
    /// An object was made.
    Made(Name),
    /// A region was registered.
    Region {
        /// Its name.
        name: Name,
        /// The region's local and remote key.
        key: u32,
    },
    /// A completion queue was made.
    Queue {
        /// Its name.
        name: Name,
        /// The number of its page in the descriptor's memory.
        page: u32,
    },
    /// A queue pair was made.
    Pair {
        /// Its name.
        name: Name,
        /// Its number on the device.
        number: u32,
        /// The most bytes of inline data that it takes.
        inline: u32,
    },
    /// The state of a queue pair.
    State {
        /// `enum ibv_qp_state`.
        state: u8,
        /// Its address, that of its peer and the number of the peer's queue pair, once it has a
        /// path.
        ends: Option<(IpAddr, IpAddr, u32)>,
    },
    /// How many requests were posted, and the `errno` of the next one.
    Posted {
        /// How many were posted.
        count: u32,
        /// Why no more were posted; 0 if all were.
        errno: i32,
        /// How many more sends certainly find room. 0 for receives, and after a refusal.
        room: u32,
    },
    /// The limit of a shared receive queue; 0 once its event was raised.
    SharedLimit(u32),
    /// An asynchronous event, if one waits.
    AsyncEvent(Option<AsyncEvent>),
    /// An event of the connection manager, if one waits.
    Event(Option<Box<Event>>),
    /// What is known of a connection: the fields of `rdma_softsim::Offered`.
    Offered {
        /// The address of this side.
        local: IpAddr,
        /// The address of its peer.
        remote: IpAddr,
        /// The number of the peer's queue pair, 0 if it is not known.
        peer: u32,
        /// The parameters that the peer gave.
        theirs: Params,
        /// How often an unanswered request is repeated.
        retry: u8,
    },
    /// The address that an identifier is bound to.
    Bound(SocketAddr),
    /// Queue pairs in the order of their numbers, at most [`MAX_BATCH`](crate::MAX_BATCH). Fewer
    /// mean that these are the last ones.
    Pairs(Vec<Pair>),
    /// What the fabric holds, and how often faults struck.
    Status {
        /// The sessions of programs.
        sessions: Vec<Session>,
        /// How many faults have struck.
        struck: u64,
        /// The classes of failure that occurred.
        failures: Vec<Failure>,
        /// How many completion events the thread of each completion vector has raised, if they have
        /// threads.
        vectors: Vec<u64>,
        /// What programs have taken of the fabric, and may take.
        used: Amounts,
        /// That of all programs.
        most: Amounts,
        /// The bounds that were in the way, and how often.
        refused: Vec<(Exceeded, u64)>,
    },
}

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields of struct ibv_device_attr")]
pub struct Limits {
    pub max_mr_size: u64,
    pub max_mr: u32,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_qp_rd_atom: u8,
    pub vectors: u32,
}

/// An asynchronous event, and the object that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsyncEvent {
    /// `enum ibv_event_type`.
    pub kind: u32,
    /// The object that it is about.
    pub about: About,
}

/// The object of an asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the objects' own names")]
pub enum About {
    Pair(Name),
    Queue(Name),
    Shared(Name),
    Device,
}

/// An event of the connection manager, `struct rdma_cm_event`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The identifier that it is for; of a connect request, the new one.
    pub id: Name,
    /// The listener, of a connect request.
    pub listener: Option<Name>,
    /// `enum rdma_cm_event_type`.
    pub kind: u32,
    /// A negative `errno`; the peer's reason if it rejected the request.
    pub status: i32,
    /// What the peer offered.
    pub params: Option<Params>,
    /// Private data.
    pub data: Vec<u8>,
    /// The identifier's current local address.
    pub local: Option<SocketAddr>,
    /// The current address of its peer.
    pub remote: Option<SocketAddr>,
}

/// A queue pair as `softrdma status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields of rdma_softsim::Connection")]
pub struct Pair {
    pub number: u32,
    pub machine: Option<IpAddr>,
    /// `enum ibv_qp_state`.
    pub state: u8,
    pub local: Option<SocketAddr>,
    pub remote: Option<SocketAddr>,
    pub peer: Option<u32>,
}

/// A class of failure as `softrdma status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The class, in a few words.
    pub words: String,
    /// How often the fabric caused it.
    pub injected: u64,
    /// How often a program met it.
    pub observed: u64,
}

/// A session as `softrdma status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "counts of what their names say")]
pub struct Session {
    pub program: String,
    pub pid: u32,
    pub devices: Vec<Vec<IpAddr>>,
    pub domains: u32,
    pub regions: u32,
    pub registered_bytes: u64,
    pub completion_queues: u32,
    pub queue_pairs: u32,
    pub identifiers: u32,
    pub requests: u64,
}
