//! Messages between a program under `softrdma` and its fabric.
//!
//! A program opens one [`Socket`] to the fabric and sends one [`Request`] at a time. The fabric
//! answers each with one [`Reply`], which may bring a descriptor. A message is one packet of at
//! most [`MAX_MESSAGE`] bytes, encoded by postcard. No request waits for an event: the descriptors
//! become readable when there is one. Posts that certainly find room are no packets, but lie in
//! memory that both share ([`Posts`]), and have no answer.
//!
//! Objects have names: numbers that the fabric never gives twice in a session. A name is valid only
//! in its session.
#![forbid(unsafe_code)]

mod bounds;
mod devices;
mod page;
mod posts;
mod reply;
mod socket;
#[cfg(test)]
mod tests;
mod work;

use std::ffi::CStr;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

pub use bounds::{Amounts, Exceeded, Resource};
pub use devices::{format_devices, gid, guid, parse_addresses, parse_devices};
pub use page::{ARMS, Notice, PAGE, POLLS, Page, SHOWN};
pub use posts::{POSTS_AT, Post, Posts, Reader, WORDS, Writer};
pub use reply::{About, AsyncEvent, Event, Failure, Limits, Pair, Reply, Session};
pub use socket::{Error, Listener, Socket};
pub use work::{Completion, Destination, Local, Op, Receive, Send, Sge, Source};

/// The version of this protocol. Both sides come from one build, so a different version means that
/// they were started wrongly.
pub const VERSION: u32 = 11;
/// The most bytes of a message. Longer chains of work requests take several messages.
pub const MAX_MESSAGE: usize = 64 * 1024;
/// The most faults or queue pairs in one message.
pub const MAX_BATCH: usize = 256;
/// The most work requests in one message, whatever they are. A longer chain takes several messages.
pub const MAX_WORK: usize = 128;
/// The most scatter-gather elements of one work request.
pub const MAX_ELEMENTS: usize = 16;
/// The most bytes of inline data in one work request.
pub const MAX_INLINE: usize = 256;
/// The bytes of one record of a completion channel: the name of a completion queue, as a
/// little-endian number of 64 bits.
pub const RECORD: usize = 8;
/// The environment variable with the path of the fabric's socket.
pub const SOCKET: &str = "SOFTRDMA_SOCKET";
/// The environment variable with the addresses of the program's devices, see [`format_devices`].
pub const ADDRESSES: &str = "SOFTRDMA_ADDRESSES";
/// The environment variable that has the limit on locked memory apply, if it is set.
pub const MEMLOCK: &str = "SOFTRDMA_MEMLOCK";
/// The environment variable with the folder in which a program finds its device files and sysfs.
pub const VIEW: &CStr = c"SOFTRDMA_VIEW";

/// An object's name in its session.
pub type Name = u32;

/// The number of a device of a machine, counted from 0.
pub type Device = u32;

/// A program's request. All need a session, except [`Request::Hello`], which opens it, and those
/// that say so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each is the call of its name, with that call's arguments")]
pub enum Request<'a> {
    /// Opens a session for a program on a machine with devices of these addresses. Answer:
    /// [`Reply::Welcome`].
    Hello {
        version: u32,
        program: String,
        devices: Vec<Vec<IpAddr>>,
        /// The session's names are above this one. A forked child sets it, as its names must differ
        /// from its parent's.
        above: Name,
    },
    /// Asks for the fabric's state. Answer: [`Reply::Status`]. Needs no session.
    Status,
    /// Asks for the queue pairs with numbers above this one. Answer: [`Reply::Pairs`]. Needs no
    /// session.
    Pairs {
        above: u32,
    },
    /// Injects faults into machines of the fabric, at most [`MAX_BATCH`] at a time. Needs no
    /// session.
    ///
    /// Faults by chance are drawn from the seed, if there is one.
    Inject {
        seed: Option<u64>,
        faults: Vec<Fault>,
    },
    /// Changes all devices of the fabric from now on. Needs no session.
    ///
    /// The parameters are how long a message travels, in microseconds; the kind of the devices, by
    /// its name for `softrdma run --device-kind`; and the number of completion vectors, each with a
    /// thread.
    Configure {
        latency: Option<u32>,
        device_kind: Option<String>,
        vectors: Option<u32>,
    },
    /// Makes the fabric look for posts ([`Posts::needs_doorbell`]). No answer.
    Doorbell,
    /// Records all messages from now on to the file whose descriptor comes with this. Needs no
    /// session.
    Record,

    /// Shows the fabric the program's memory: at this address it has eight bytes with this number,
    /// which it has drawn, and does not change them. Refused with `EPERM` if the kernel forbids the
    /// fabric to access that memory.
    ShowMemory {
        at: u64,
        number: u64,
    },
    /// Offers that the program copies its own memory, where the kernel forbids the fabric to access
    /// it.
    ///
    /// The program does what [`struct@Copy`] says over the socket whose descriptor comes with this.
    /// Refused with `EEXIST` if it has shown or offered its memory before.
    OfferMemory,
    AllocateDomain(Device),
    FreeDomain(Name),
    /// Registers `len` bytes at `at` in the program, which peers address from `address` on. Answer:
    /// [`Reply::Region`].
    Register {
        domain: Name,
        at: u64,
        address: u64,
        len: u64,
        access: Access,
    },
    Deregister(Name),

    /// Makes a completion channel. Answer: [`Reply::Made`], with a descriptor from which records
    /// can be read.
    CreateCompletionChannel,
    DestroyCompletionChannel(Name),
    /// Makes a completion queue. Answer: [`Reply::Queue`], with a descriptor of the memory in which
    /// its [`Page`] is.
    CreateQueue {
        device: Device,
        depth: u32,
        channel: Option<Name>,
        /// The completion vector.
        vector: u32,
    },
    DestroyQueue(Name),
    /// Makes the fabric read what the program wrote in a queue's [`Page`], and show further
    /// completions there. The page says when to send this.
    Poll(Name),

    /// Makes a shared receive queue. Answer: [`Reply::Made`].
    CreateShared {
        domain: Name,
        depth: u32,
        limit: u32,
        /// The most elements of a receive.
        elements: u8,
    },
    DestroyShared(Name),
    SetSharedLimit {
        queue: Name,
        limit: u32,
    },
    /// Asks for a shared receive queue's limit. Answer: [`Reply::SharedLimit`].
    QueryShared(Name),
    PostShared {
        queue: Name,
        work: Vec<Receive>,
    },

    /// Makes a queue pair. Answer: [`Reply::Pair`].
    CreatePair {
        domain: Name,
        send_queue: Name,
        receive_queue: Name,
        /// The shared queue of its receives, if it has none of its own.
        shared: Option<Name>,
        service: Service,
        send_depth: u32,
        receive_depth: u32,
        /// The most elements of a send, and of a receive.
        elements: [u8; 2],
        inline: u32,
    },
    DestroyPair(Name),
    Modify {
        pair: Name,
        to: Transition,
    },
    /// Sets `timeout` of `ibv_modify_qp(3)`: the pair waits 4.096 µs · 2^`timeout` for an
    /// acknowledgement, without limit if 0.
    SetTimeout {
        pair: Name,
        timeout: u8,
    },
    /// Sets what the peer of a queue pair may do.
    SetAccess {
        pair: Name,
        access: Access,
    },
    /// Sets the Q_Key of a queue pair for datagrams.
    SetKey {
        pair: Name,
        key: u32,
    },
    /// Asks for a queue pair's state. Answer: [`Reply::State`].
    QueryPair(Name),
    /// Posts at most [`MAX_WORK`] requests, but none of them unless `room` requests find room.
    /// Answer: [`Reply::Posted`].
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

    /// Asks for a descriptor that is readable while an asynchronous event of the device waits. It
    /// comes with [`Reply::Done`].
    AsyncEvents(Device),
    /// Takes an asynchronous event. Answer: [`Reply::AsyncEvent`].
    TakeAsyncEvent(Device),

    /// Makes an event channel. Answer: [`Reply::Made`], with a descriptor that is readable while an
    /// event waits.
    CreateEventChannel,
    DestroyEventChannel(Name),
    /// Takes an event of a channel. Answer: [`Reply::Event`].
    TakeEvent(Name),
    CreateIdentifier {
        channel: Name,
    },
    DestroyIdentifier(Name),
    /// Binds an identifier. Answer: [`Reply::Bound`].
    Bind {
        id: Name,
        address: SocketAddr,
    },
    Listen {
        id: Name,
        backlog: u32,
    },
    /// Sets the traffic class of the packets of the identifier's connection.
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
    /// Establishes a connection whose queue pair is external.
    Establish(Name),
    /// Asks for what is known of a connection. Answer: [`Reply::Offered`].
    Offered(Name),
    Disconnect(Name),
    Migrate {
        id: Name,
        channel: Name,
    },

    /// Makes the fabric stay until the program's process has ended. [`Request::Hello`] does, too.
    /// Needs no session.
    Stay,
}

/// The service of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// `IBV_QPT_RC`.
    Connected,
    /// `IBV_QPT_UD`.
    Datagram,
}

/// The queue pair of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Connected {
    /// The connection manager moves it to RTS.
    Managed(Name),
    /// The program moves it to RTS. It is named by its number.
    External(u32),
}

/// The fabric's request to a program that copies its own memory.
///
/// It is a packet of [`Copy::LEN`] bytes; a second packet with the bytes follows one that writes.
/// The answer is a packet of [`Copy::DONE`] and the requested bytes, or a packet of any other byte
/// if some of the memory does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Whether the bytes are written to the program's memory, or read from it.
    pub write: bool,
    /// The address in the program.
    pub at: u64,
    /// How many bytes, at most [`Copy::MOST`].
    pub len: u64,
}

impl Copy {
    /// The bytes of an encoded request.
    pub const LEN: usize = 17;
    /// The most bytes that one request copies.
    pub const MOST: usize = 64 * 1024;
    /// The first byte of an answer that reports success.
    pub const DONE: u8 = 0;

    /// Encodes the request as a packet.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let [a, b, c, d, e, f, g, h] = self.at.to_le_bytes();
        let [i, j, k, l, m, n, o, p] = self.len.to_le_bytes();
        [u8::from(self.write), a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
    }

    /// Decodes a packet.
    #[must_use]
    pub fn decode(packet: &[u8; Self::LEN]) -> Self {
        let [write, a, b, c, d, e, f, g, h, len @ ..] = *packet;
        let at = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        Self { write: write != 0, at, len: u64::from_le_bytes(len) }
    }
}

/// A fault, and where and when it strikes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The address of the machine that it strikes, which may appear later.
    pub address: IpAddr,
    /// Which of the machine's connections it may strike.
    pub connections: Connections,
    /// The fault, as `softrdma fault` spells it.
    pub what: String,
    /// When it strikes.
    pub when: When,
}

/// Which connections of a machine a fault may strike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Connections {
    /// All connections, and what belongs to none.
    All,
    /// The connection of the queue pair with this number.
    Pair(u32),
    /// Connections with a peer at this address.
    Peer(IpAddr),
    /// The connection with a peer at this address and port of the connection manager.
    PeerAt(SocketAddr),
}

/// When a fault strikes. Counts begin now, or when the machine appears.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum When {
    /// After this many events of the fabric.
    Event(u64),
    /// At this pass through the site with this name.
    Pass(String, u32),
    /// Repeatedly, at so many of a million chances to strike.
    Chance(u32),
}

/// The access rights of a region or a queue pair: the lowest four of `enum ibv_access_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the flags' own names")]
pub struct Access {
    pub local_write: bool,
    pub remote_write: bool,
    pub remote_read: bool,
    pub remote_atomic: bool,
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
    /// To RTR, of a queue pair for datagrams.
    ReceiveDatagrams,
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
    /// Not to another state: changes only `min_rnr_timer`.
    Timer(u8),
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
