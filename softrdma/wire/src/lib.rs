//! What a program under `softrdma` and its fabric say to each other.
//!
//! A program opens one [`Socket`] to the fabric and sends one [`Request`] at a time; the fabric answers each with one
//! [`Reply`], which may bring a descriptor. A message is one packet of at most [`MAX_MESSAGE`] bytes, encoded by postcard.
//! Nothing here waits for an event: the descriptors say when there is one.
//!
//! Objects have names, numbers that the fabric gives and never gives again in a session. A name means nothing in another
//! session.
#![forbid(unsafe_code)]

mod devices;
mod page;
mod socket;
#[cfg(test)]
mod tests;
mod work;

use std::ffi::CStr;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

pub use devices::{format_devices, gid, guid, parse_addresses, parse_devices};
pub use page::{ARMS, PAGE, POLLS, Page, SHOWN};
pub use socket::{Error, Listener, Socket};
pub use work::{Completion, Local, Op, Receive, Send, Sge};

/// Of this protocol. Both sides come from one build, so any other is a mistake in how they were started.
pub const VERSION: u32 = 7;
/// Bytes of a message. Longer chains of work requests go in several.
pub const MAX_MESSAGE: usize = 64 * 1024;
/// Faults or queue pairs in one message.
pub const MAX_BATCH: usize = 256;
/// Work requests in one message, whatever they are. A longer chain goes in several.
pub const MAX_WORK: usize = 128;
/// Scatter-gather elements of one work request.
pub const MAX_ELEMENTS: usize = 16;
/// Bytes of inline data in one work request.
pub const MAX_INLINE: usize = 256;
/// Bytes of one record of a completion channel: the name of a completion queue, as a little-endian number of 64 bits.
pub const RECORD: usize = 8;
/// The environment variable that says where the fabric's socket is.
pub const SOCKET: &str = "SOFTRDMA_SOCKET";
/// The environment variable with the addresses of the program's devices, see [`format_devices`].
pub const ADDRESSES: &str = "SOFTRDMA_ADDRESSES";
/// The environment variable with the folder in which a program finds its device files and sysfs.
pub const VIEW: &CStr = c"SOFTRDMA_VIEW";

/// What an object is called in its session.
pub type Name = u32;

/// Which of a machine's devices, counted from 0.
pub type Device = u32;

/// What a program asks for. Every request but the first needs a session, which [`Request::Hello`] opens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the call of its name, with that call's arguments")]
pub enum Request<'a> {
    /// Opens a session for a program on a machine with devices of these addresses. Answer: [`Reply::Welcome`].
    Hello {
        version: u32,
        program: String,
        devices: Vec<Vec<IpAddr>>,
        /// Names of this session are above this one: those of the parent's of a program that forks, whose objects are not the child's.
        above: Name,
    },
    /// Answer: [`Reply::Status`]. Needs no session.
    Status,
    /// Answer: [`Reply::Pairs`], of numbers above this one. Needs no session.
    Pairs {
        above: u32,
    },
    /// Lets these befall machines of the fabric, at most [`MAX_BATCH`] at a time; what comes by chance is drawn from the seed, if there
    /// is one. Needs no session.
    Inject {
        seed: Option<u64>,
        faults: Vec<Fault>,
    },
    /// Changes all devices of the fabric from now on: how long a message travels, in microseconds, and of which kind they are, by the name
    /// that `softrdma run --device-kind` has; or has so many completion vectors from now on, each with a thread. Needs no session.
    Configure {
        latency: Option<u32>,
        device_kind: Option<String>,
        vectors: Option<u32>,
    },
    /// Records what passes from now on in the file that comes as a descriptor with this. Needs no session.
    Record,

    /// Where the kernel forbids the fabric to reach into the program: the program copies its own memory, as it is told by
    /// [`struct@Copy`] over the socket that comes as a descriptor with this. `probe` is an address at which it has memory. Refused with
    /// `EEXIST` where the fabric can reach there.
    OfferMemory {
        probe: u64,
    },
    AllocateDomain(Device),
    FreeDomain(Name),
    /// `len` bytes at `at` in the program, which peers know by `address`. Answer: [`Reply::Region`].
    Register {
        domain: Name,
        at: u64,
        address: u64,
        len: u64,
        access: Access,
    },
    Deregister(Name),

    /// Answer: [`Reply::Made`], with a descriptor from which records can be read.
    CreateCompletionChannel,
    DestroyCompletionChannel(Name),
    /// Answer: [`Reply::Queue`], with a descriptor of the memory in which its [`Page`] is.
    CreateQueue {
        device: Device,
        depth: u32,
        channel: Option<Name>,
        /// The completion vector.
        vector: u32,
    },
    DestroyQueue(Name),
    /// What the [`Page`] of a queue tells its program to ask for: what the program has done there is done, and what there is is shown there.
    Poll(Name),

    /// Answer: [`Reply::Made`].
    CreateShared {
        domain: Name,
        depth: u32,
        limit: u32,
    },
    DestroyShared(Name),
    SetSharedLimit {
        queue: Name,
        limit: u32,
    },
    /// Answer: [`Reply::SharedLimit`].
    QueryShared(Name),
    PostShared {
        queue: Name,
        work: Vec<Receive>,
    },

    /// Answer: [`Reply::Pair`].
    CreatePair {
        domain: Name,
        send_queue: Name,
        receive_queue: Name,
        /// Where its receives are, if not in a queue of its own.
        shared: Option<Name>,
        send_depth: u32,
        receive_depth: u32,
        inline: u32,
    },
    DestroyPair(Name),
    Modify {
        pair: Name,
        to: Transition,
    },
    /// `timeout` of `ibv_modify_qp(3)`: the pair waits 4.096 µs · 2^`timeout` for an acknowledgement, for ever if 0.
    SetTimeout {
        pair: Name,
        timeout: u8,
    },
    /// Answer: [`Reply::State`].
    QueryPair(Name),
    /// At most [`MAX_WORK`] requests, none of them unless `room` requests find room. Answer: [`Reply::Posted`].
    PostSend {
        pair: Name,
        room: u32,
        #[serde(borrow)]
        work: Vec<Send<'a>>,
    },
    PostReceive {
        pair: Name,
        work: Vec<Receive>,
    },

    /// Answer: [`Reply::Done`], with a descriptor that is readable while an asynchronous event of the device waits.
    AsyncEvents(Device),
    /// Answer: [`Reply::AsyncEvent`].
    TakeAsyncEvent(Device),

    /// Answer: [`Reply::Made`], with a descriptor that is readable while an event waits.
    CreateEventChannel,
    DestroyEventChannel(Name),
    /// Answer: [`Reply::Event`].
    TakeEvent(Name),
    CreateIdentifier {
        channel: Name,
    },
    DestroyIdentifier(Name),
    /// Answer: [`Reply::Bound`].
    Bind {
        id: Name,
        address: SocketAddr,
    },
    Listen {
        id: Name,
        backlog: u32,
    },
    /// Of the packets of the identifier's connection.
    SetTrafficClass {
        id: Name,
        class: u8,
    },
    ResolveAddress {
        id: Name,
        source: Option<SocketAddr>,
        destination: SocketAddr,
        milliseconds: u32,
    },
    ResolveRoute(Name),
    Connect {
        id: Name,
        pair: Connected,
        params: Params,
        data: &'a [u8],
    },
    Accept {
        id: Name,
        pair: Connected,
        params: Params,
        data: &'a [u8],
    },
    Reject {
        id: Name,
        data: &'a [u8],
    },
    Notify(Name),
    /// Of a connection whose queue pair is external.
    Establish(Name),
    /// Answer: [`Reply::Offered`].
    Offered(Name),
    Disconnect(Name),
    Migrate {
        id: Name,
        channel: Name,
    },
}

/// The queue pair of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Connected {
    /// The connection manager makes it ready.
    Managed(Name),
    /// The program does; by its number.
    External(u32),
}

/// What the fabric asks of a program that copies its own memory: a packet of [`Copy::LEN`] bytes, and behind one that writes another of
/// the bytes. The answer is a packet of [`Copy::DONE`], and behind it the bytes that were asked for; or one of another byte, if
/// some of the memory is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Into the program's memory.
    pub write: bool,
    /// Where.
    pub at: u64,
    /// How many bytes, at most [`Copy::MOST`].
    pub len: u64,
}

impl Copy {
    /// Bytes of one.
    pub const LEN: usize = 17;
    /// Bytes that are copied at a time.
    pub const MOST: usize = 64 * 1024;
    /// The answer's first byte.
    pub const DONE: u8 = 0;

    /// As a packet.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let [a, b, c, d, e, f, g, h] = self.at.to_le_bytes();
        let [i, j, k, l, m, n, o, p] = self.len.to_le_bytes();
        [u8::from(self.write), a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
    }

    /// Of a packet.
    #[must_use]
    pub fn decode(packet: &[u8; Self::LEN]) -> Self {
        let [write, a, b, c, d, e, f, g, h, len @ ..] = *packet;
        let at = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        Self { write: write != 0, at, len: u64::from_le_bytes(len) }
    }
}

/// A fault, and whom it befalls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The machine with this address, which may come later.
    pub address: IpAddr,
    /// Which of its connections.
    pub connections: Connections,
    /// As `softrdma fault` spells it.
    pub what: String,
    /// When.
    pub when: When,
}

/// Which connections of a machine a fault may strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Connections {
    /// All of them, and what belongs to none.
    All,
    /// That of the queue pair with this number.
    Pair(u32),
    /// Those with a peer at this address.
    Peer(IpAddr),
    /// That with a peer at this address and port of the connection manager.
    PeerAt(SocketAddr),
}

/// When a fault strikes. Times count from now on, or from the coming of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum When {
    /// After so many events of the fabric.
    Event(u64),
    /// At this pass through the site of this name.
    Pass(String, u32),
    /// Again and again, at so many of a million things that it can strike.
    Chance(u32),
}

/// What the fabric answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Done; nothing to say.
    Done,
    /// Refused, with this `errno`.
    Refused(i32),
    /// A session is open.
    Welcome {
        /// The port of each device: one GID for each address.
        devices: Vec<Vec<IpAddr>>,
        /// What each device can do.
        limits: Limits,
        /// The fabric's process, which reaches into this one.
        fabric: u32,
    },
    /// An object was made.
    Made(Name),
    /// A region was registered.
    Region {
        /// Its name.
        name: Name,
        /// Its key, local and remote.
        key: u32,
    },
    /// A completion queue was made.
    Queue {
        /// Its name.
        name: Name,
        /// Which page of the descriptor's memory is its own.
        page: u32,
    },
    /// A queue pair was made.
    Pair {
        /// Its name.
        name: Name,
        /// Its number on the device.
        number: u32,
        /// Bytes of inline data that it takes.
        inline: u32,
    },
    /// What a queue pair is like.
    State {
        /// `enum ibv_qp_state`.
        state: u8,
        /// Its address, that of its peer and the number of the peer's queue pair, once it has a path.
        ends: Option<(IpAddr, IpAddr, u32)>,
    },
    /// As many requests were posted; the next one failed with this `errno`, or none did (0).
    Posted {
        /// How many.
        count: u32,
        /// Why not more.
        errno: i32,
    },
    /// The limit of a shared receive queue; 0 once its event has come.
    SharedLimit(u32),
    /// An asynchronous event, if one waits.
    AsyncEvent(Option<AsyncEvent>),
    /// An event of the connection manager, if one waits.
    Event(Option<Box<Event>>),
    /// What is known of a connection: the fields of `rdma_softsim::Offered`.
    Offered {
        /// The address of this side.
        local: IpAddr,
        /// That of its peer.
        remote: IpAddr,
        /// The number of the peer's queue pair, 0 if it is not known.
        peer: u32,
        /// What the peer gave.
        theirs: Params,
        /// Repetitions of what nobody answers.
        retry: u8,
    },
    /// The address that an identifier is bound to.
    Bound(SocketAddr),
    /// Queue pairs in the order of their numbers, at most [`MAX_BATCH`]; the last ones if there are fewer.
    Pairs(Vec<Pair>),
    /// What the fabric holds, and how often faults struck.
    Status {
        /// Who is there.
        sessions: Vec<Session>,
        /// Faults so far.
        struck: u64,
        /// The classes of failure that came about.
        failures: Vec<Failure>,
        /// Completion events that each completion vector's thread has raised, if they have threads.
        vectors: Vec<u64>,
    },
}

/// What a region may be used for: `enum ibv_access_flags`, the lowest three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the flags' own names")]
pub struct Access {
    pub local_write: bool,
    pub remote_write: bool,
    pub remote_read: bool,
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

/// A step of `ibv_modify_qp(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields of struct ibv_qp_attr")]
pub enum Transition {
    Reset,
    Initialise,
    /// To RTR.
    Receive {
        local: IpAddr,
        remote: IpAddr,
        number: u32,
        timer: u8,
    },
    /// To RTS.
    Send {
        retry: u8,
        rnr_retry: u8,
        read_depth: u8,
    },
    /// To SQD.
    Drain {
        notify: bool,
    },
    Fail,
    /// No other state: `min_rnr_timer` alone.
    Timer(u8),
}

/// An asynchronous event, `enum ibv_event_type`, and what it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsyncEvent {
    /// What happened.
    pub kind: u32,
    /// To whom.
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

/// Connection parameters, `struct rdma_conn_param`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the structure's own fields")]
pub struct Params {
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
}

/// An event of the connection manager, `struct rdma_cm_event`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Whom it is for: of a connect request, the new identifier.
    pub id: Name,
    /// Of a connect request, the listener.
    pub listener: Option<Name>,
    /// `enum rdma_cm_event_type`.
    pub kind: u32,
    /// An `errno`, negative; of a reject its reason.
    pub status: i32,
    /// What the peer offered.
    pub params: Option<Params>,
    /// Private data.
    pub data: Vec<u8>,
    /// The identifier's addresses now.
    pub local: Option<SocketAddr>,
    /// That of its peer.
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
    /// In a few words.
    pub words: String,
    /// How often it was brought about.
    pub injected: u64,
    /// How often a program was confronted with it.
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
