#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod completion;
mod events;

use core::fmt;
use core::net::SocketAddr;

use memory::{CallerMemory, SharedMemory};
use time::Instant;

pub use completion::{Completed, Completion};
pub use events::{AsyncEvent, CmEvent, CmEventKind, IdentifierKey, reject};
pub use rdma_types::{CompletionError, CompletionStatus, Immediate, RNR_RETRY_INFINITE, RemoteAddress, time};

/// Memory that a peer or a device may change at any time, which regions are made of.
pub use rdma_memory as memory;

/// An RDMA implementation: its family of types, and its entry point.
pub trait Backend: Sized + Clone + Send + Sync + 'static {
    /// The error of every call; see [`Failure`].
    type Error: Failure;
    /// A channel on which connection-manager events arrive.
    type EventChannel: EventChannel<Self>;
    /// A connection-manager identifier.
    type Identifier: Identifier<Self>;
    /// A protection domain.
    type Domain: Domain<Self>;
    /// A registered memory region.
    type Region: Region;
    /// A completion queue with its completion channel.
    type CompletionQueue: CompletionQueue<Self>;
    /// A reliable-connected queue pair.
    type QueuePair: QueuePair<Self>;

    /// Opens a channel for connection-manager events, `rdma_create_event_channel(3)`.
    ///
    /// # Errors
    /// Returns [`ErrorKind::NoDevice`] on a machine without RDMA.
    fn event_channel(&self) -> Result<Self::EventChannel, Self::Error>;

    /// Returns the backend's monotonic clock: real time, or the virtual time of a simulation.
    fn now(&self) -> Instant;
}

/// An error of a backend, with the class that generic code decides on. `Display` has the details.
pub trait Failure: core::error::Error + Send + Sync + 'static {
    /// Returns the class of this error.
    fn kind(&self) -> ErrorKind;
}

/// Classes of backend errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// There is no RDMA device, or no RDMA runtime library.
    NoDevice,
    /// The device cannot use the address (no route, not local, in use).
    Address,
    /// Registered memory or another pinned resource is exhausted (`RLIMIT_MEMLOCK`, device limits).
    Memory,
    /// The process or the system has no descriptor left (`RLIMIT_NOFILE`).
    Descriptors,
    /// A send or receive queue is full. This is back-pressure, not failure.
    QueueFull,
    /// The object's state does not allow the call (for example, it is not connected).
    State,
    /// An argument is outside what the device or the man page allows.
    Argument,
    /// The process is a forked child, which must not use what its parent has.
    Forked,
    /// Anything else; see `Display`.
    Other,
}

/// A channel of connection-manager events, `rdma_create_event_channel(3)`.
pub trait EventChannel<B: Backend>: Send + Sync {
    /// Creates an identifier, whose events arrive here, `rdma_create_id(3)` with `RDMA_PS_TCP`.
    fn create_id(&self) -> Result<B::Identifier, B::Error>;

    /// Creates an identifier that listens on `address`, `rdma_bind_addr(3)` and `rdma_listen(3)`.
    ///
    /// Port 0 picks a free one; see [`Identifier::local_addr`]. A `backlog` of 0 is the system's
    /// maximum.
    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<B::Identifier, B::Error>;

    /// Takes and acknowledges the next event, or returns `None` if there is none now.
    ///
    /// It is one of the connection manager, `rdma_get_cm_event(3)`, or of the device behind an
    /// identifier of this channel, `ibv_get_async_event(3)` ([`CmEventKind::Async`]). What the
    /// device had reported before this call comes before later events of the connection manager.
    fn next_event(&self) -> Result<Option<CmEvent<B>>, B::Error>;
}

/// Connection parameters, `rdma_connect(3)` and `rdma_accept(3)`.
///
/// In an event they are the peer's. Its `initiator_depth` arrives as `responder_resources`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectParams {
    /// RDMA READs the peer may have outstanding towards us.
    pub responder_resources: u8,
    /// RDMA READs we may have outstanding towards the peer.
    pub initiator_depth: u8,
    /// How often an unacknowledged request is retried, 0 to 7. Ignored by `rdma_accept(3)`.
    pub retry_count: u8,
    /// How often **the receiver of these parameters** retries without a receive, 0 to 7 (endless).
    pub rnr_retry_count: u8,
}

/// A connection-manager identifier, `rdma_create_id(3)`.
pub trait Identifier<B: Backend>: Send + Sync {
    /// Returns the key of this identifier's events.
    fn key(&self) -> IdentifierKey;
    /// Sets the traffic class, `rdma_set_option(3)`, `RDMA_OPTION_ID_TOS`: six bits of DSCP above
    /// two of ECN.
    ///
    /// Call this before resolving the address. A peer that accepts sends with the same class.
    fn set_traffic_class(&self, class: u8) -> Result<(), B::Error>;
    /// Sets how long the queue pair waits for an acknowledgement before it retransmits,
    /// `rdma_set_option(3)`, `RDMA_OPTION_ID_ACK_TIMEOUT`: 4.096 µs · 2^`code`, for ever if `code`
    /// is 0.
    ///
    /// `code` is at most 31. Call this before creating the queue pair.
    fn set_ack_timeout(&self, code: u8) -> Result<(), B::Error>;
    /// Starts resolving `remote`, from `local` if given, `rdma_resolve_addr(3)`. `AddressResolved`
    /// or `AddressError` follows.
    fn resolve_address(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        timeout: core::time::Duration,
    ) -> Result<(), B::Error>;
    /// Starts resolving the route, `rdma_resolve_route(3)`; `RouteResolved` or `RouteError` comes.
    fn resolve_route(&self, timeout: core::time::Duration) -> Result<(), B::Error>;
    /// Returns the device behind this identifier. Fails before the identifier has one.
    fn device(&self) -> Result<DeviceKey, B::Error>;
    /// Returns the limits of that device.
    fn capabilities(&self) -> Result<Capabilities, B::Error>;
    /// Returns a new protection domain on the identifier's device, `ibv_alloc_pd(3)`.
    fn create_domain(&self) -> Result<B::Domain, B::Error>;
    /// Returns a completion queue for at least `depth` completions, with a completion channel,
    /// `ibv_create_cq(3)`. `vector` is taken modulo the device's number of completion vectors.
    fn create_completion_queue(&self, depth: u32, vector: u32) -> Result<B::CompletionQueue, B::Error>;
    /// Returns the only queue pair, `rdma_create_qp(3)`. Both queues report to `completions`.
    ///
    /// # Errors
    /// Returns [`ErrorKind::Argument`] for limits beyond the device's; [`ErrorKind::State`], also
    /// if the peer has left.
    fn create_queue_pair(
        &self,
        domain: &B::Domain,
        completions: &B::CompletionQueue,
        limits: QueuePairLimits,
    ) -> Result<B::QueuePair, B::Error>;
    /// Requests a connection from the peer, `rdma_connect(3)`. Receives must be posted before.
    fn connect(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), B::Error>;
    /// Accepts a connect request, `rdma_accept(3)`. Receives must be posted before.
    fn accept(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), B::Error>;
    /// Refuses a connect request, `rdma_reject(3)`.
    fn reject(&self, private_data: &[u8]) -> Result<(), B::Error>;
    /// Tells the connection manager that the peer's first message has arrived,
    /// [`AsyncEvent::CommEst`], `rdma_notify(3)`.
    ///
    /// The peer is connected, but its message that says so (RTU) is late or lost. `Established`
    /// follows, or was reported. Then, or if no RTU is expected, an error means nothing.
    fn notify_established(&self) -> Result<(), B::Error>;
    /// Ends the connection, `rdma_disconnect(3)`: the queue pair goes to the error state and the
    /// peer is notified.
    fn disconnect(&self) -> Result<(), B::Error>;
    /// Moves this identifier's events to another channel, `rdma_migrate_id(3)`.
    fn migrate(&self, to: &B::EventChannel) -> Result<(), B::Error>;
    /// Returns the local address, `rdma_get_local_addr(3)`.
    fn local_addr(&self) -> Option<SocketAddr>;
    /// Returns the peer's address, `rdma_get_peer_addr(3)`.
    fn peer_addr(&self) -> Option<SocketAddr>;
}

/// Identifies an open device in its process. Objects of a queue pair must be of the same device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceKey(pub u64);

/// The limits of a device, `ibv_query_device(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Maximum work requests in one queue.
    pub max_queue_depth: u32,
    /// Maximum completions in one completion queue.
    pub max_completions: u32,
    /// Maximum bytes in one region.
    pub max_region: u64,
    /// Maximum outstanding RDMA READs of a queue pair as the initiator.
    pub max_read_depth: u8,
    /// Completion vectors.
    pub completion_vectors: u32,
}

impl Capabilities {
    /// Returns capabilities with these values, for implementers of [`Backend`].
    pub const fn new(
        max_queue_depth: u32,
        max_completions: u32,
        max_region: u64,
        max_read_depth: u8,
        completion_vectors: u32,
    ) -> Self {
        Self { max_queue_depth, max_completions, max_region, max_read_depth, completion_vectors }
    }
}

/// Requested queue pair sizes, `ibv_create_qp(3)`. Each work request has one scatter/gather
/// element, and is signalled only on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairLimits {
    /// Send work requests outstanding.
    pub send_depth: u32,
    /// Receive work requests outstanding.
    pub recv_depth: u32,
    /// Requested bytes of inline data. [`QueuePair::max_inline`] may return less.
    pub inline: u32,
}

/// A protection domain, `ibv_alloc_pd(3)`.
pub trait Domain<B: Backend>: Send + Sync {
    /// Allocates and registers `len` bytes of zeroed memory, `ibv_reg_mr(3)`.
    ///
    /// # Errors
    /// Returns [`ErrorKind::Memory`] if the locked-memory limit or the device has no room. Its
    /// message says which limit, and how to raise it.
    fn register(&self, len: usize, access: Access) -> Result<B::Region, B::Error>;

    /// Allocates and registers `len` bytes of zeroed memory, on huge pages if the system has them.
    ///
    /// [`Region::pages`] returns the kind of pages. They are those of [`Domain::register`] if the
    /// backend allocates none of its own, or if `len` is less than a huge page.
    ///
    /// # Errors
    /// Returns [`ErrorKind::Memory`] as [`Domain::register`], but not for a lack of huge pages.
    fn register_huge(&self, len: usize, access: Access) -> Result<B::Region, B::Error> {
        self.register(len, access)
    }

    /// Registers existing memory, `ibv_reg_mr(3)`, without copying or clearing it.
    ///
    /// The region keeps `memory` until it has deregistered it. [`CallerMemory`] says who may write
    /// meanwhile. A mapping of a dma-buf ([`CallerMemory::dma_buf`]) is registered with
    /// `ibv_reg_dmabuf_mr(3)`, which was tried on no device.
    ///
    /// # Errors
    /// Drops `memory` and returns an error: [`ErrorKind::Memory`] if the locked-memory limit or the
    /// device has no room, [`ErrorKind::Argument`] if the device cannot register a dma-buf.
    fn register_memory<M: CallerMemory>(&self, memory: M, access: Access) -> Result<B::Region, B::Error>;
}

/// Rights of the device and the peer in a region, `ibv_reg_mr(3)`. Our sends may always read it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Access(u8);

impl Access {
    /// The device only reads the region, for our sends and writes.
    pub const NONE: Self = Self(0);
    /// The device may write into it: receives, and answers to our reads.
    pub const LOCAL_WRITE: Self = Self(1);
    /// The peer may write into it (which includes [`Access::LOCAL_WRITE`]).
    pub const REMOTE_WRITE: Self = Self(1 | 2);
    /// The peer may read it.
    pub const REMOTE_READ: Self = Self(4);
    /// The device may write the bytes of messages in any order, `IBV_ACCESS_RELAXED_ORDERING`.
    ///
    /// A completion still covers all bytes before it. If the device, the kernel or the library
    /// lacks the option, bytes are written in order.
    pub const RELAXED_ORDERING: Self = Self(8);

    /// Returns the rights of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether these rights include all of `other`.
    pub const fn allows(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Self::LOCAL_WRITE, "LOCAL_WRITE"),
            (Self(2), "REMOTE_WRITE"),
            (Self::REMOTE_READ, "REMOTE_READ"),
            (Self::RELAXED_ORDERING, "RELAXED_ORDERING"),
        ];
        f.debug_list()
            .entries(names.iter().filter(|(bit, _)| self.allows(*bit)).map(|(_, name)| name))
            .finish()
    }
}

/// The pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Pages {
    /// The system's usual pages, or unknown ones.
    #[default]
    Usual,
    /// The kernel was advised to use huge pages, `madvise(2)`. It does so where it has them.
    Advised,
    /// Huge pages that the administrator reserved, `MAP_HUGETLB`.
    Huge,
}

/// A registered memory region, `ibv_reg_mr(3)`. A drop deregisters the memory, then releases it.
pub trait Region: Send + Sync {
    /// Returns the requested length in bytes.
    fn len(&self) -> usize;
    /// Returns whether the length is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Returns the address of the first byte, for the peer.
    fn address(&self) -> u64;
    /// Returns the key, for the peer.
    fn rkey(&self) -> u32;
    /// Returns the bytes.
    fn memory(&self) -> SharedMemory<'_>;
    /// Returns the kind of its pages.
    fn pages(&self) -> Pages {
        Pages::Usual
    }
    /// Copies `into.len()` bytes at `offset` out. Returns false, unchanged, if the region is
    /// shorter.
    #[must_use]
    #[inline]
    fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        self.memory().read(offset, into)
    }
    /// Copies `from` to `offset`. Returns false, and copies nothing, if it does not fit.
    #[must_use]
    #[inline]
    fn write(&self, offset: usize, from: &[u8]) -> bool {
        self.memory().write(offset, from)
    }
}

/// A part of a region.
#[derive(Debug)]
pub struct Slice<'a, R> {
    /// The region.
    pub region: &'a R,
    /// The offset of the first byte.
    pub offset: usize,
    /// Its length in bytes.
    pub len: usize,
}

impl<R> Clone for Slice<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Slice<'_, R> {}

/// A send work request, `ibv_post_send(3)`.
#[derive(Debug)]
pub struct SendRequest<'a, R> {
    /// Returned in the completion.
    pub id: u64,
    /// The operation.
    pub op: SendOp,
    /// The source; for a READ, the target.
    pub local: Slice<'a, R>,
    /// Whether success is reported. Errors always are.
    pub signaled: bool,
    /// Whether the bytes are copied during the call: the slice may then be overwritten at once.
    ///
    /// C copies without atomics: no other thread may write these bytes meanwhile, not even through
    /// [`SharedMemory`]. At most [`QueuePair::max_inline`] bytes, and not for a READ.
    pub inline: bool,
}

impl<R> Clone for SendRequest<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for SendRequest<'_, R> {}

/// Operations of a send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SendOp {
    /// SEND: consumes one of the peer's receives.
    Send,
    /// SEND with immediate: consumes one of the peer's receives and delivers a number.
    SendImmediate(Immediate),
    /// RDMA WRITE: the peer's processor is not involved.
    Write(RemoteAddress),
    /// RDMA WRITE with immediate: consumes one of the peer's receives.
    WriteImmediate(RemoteAddress, Immediate),
    /// RDMA READ, limited by [`ConnectParams::initiator_depth`].
    Read(RemoteAddress),
}

/// A receive work request, `ibv_post_recv(3)`.
#[derive(Debug)]
pub struct RecvRequest<'a, R> {
    /// Returned in the completion.
    pub id: u64,
    /// Where a SEND's bytes go.
    pub local: Slice<'a, R>,
}

impl<R> Clone for RecvRequest<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for RecvRequest<'_, R> {}

/// A reliable-connected queue pair, `rdma_create_qp(3)`.
pub trait QueuePair<B: Backend>: Send + Sync {
    /// Returns the number, as in [`Completion::queue_pair`].
    fn number(&self) -> u32;
    /// Returns how many bytes fit inline.
    fn max_inline(&self) -> usize;
    /// Posts a chain of requests with one doorbell, `ibv_post_send(3)`. Requests execute in order.
    ///
    /// # Errors
    /// [`PostError::posted`] requests were posted before the one that failed; the others were not.
    /// The error is [`ErrorKind::Argument`] for a slice outside its region or of another domain.
    fn post_send(&self, requests: &[SendRequest<'_, B::Region>]) -> Result<(), PostError<B::Error>>;
    /// Posts a chain of receives, `ibv_post_recv(3)`.
    ///
    /// # Errors
    /// The errors are those of [`QueuePair::post_send`].
    fn post_recv(&self, requests: &[RecvRequest<'_, B::Region>]) -> Result<(), PostError<B::Error>>;
    /// Sets a peer's wait before it retries a send without a receive, `ibv_modify_qp(3)`,
    /// `min_rnr_timer`, by default the slowest, 655 ms. For a connected queue pair only.
    fn set_min_rnr_timer(&self, timer: RnrTimer) -> Result<(), B::Error>;
    /// Returns whether the path leads back to the port and address it leaves from,
    /// `ibv_query_qp(3)`, `IBV_QP_AV`.
    ///
    /// The peer is then on this device. [`Identifier::peer_addr`] only repeats a request's claim;
    /// this is where the device sends to (VR-SEC-008).
    ///
    /// # Errors
    /// Returns [`ErrorKind::State`] for a queue pair that was not connected.
    fn is_loopback(&self) -> Result<bool, B::Error>;
    /// Returns whether it is in the error state, `ibv_query_qp(3)`, `IBV_QP_STATE`.
    ///
    /// Posted requests are then flushed, and nothing arrives. For completions without queue pair.
    fn has_failed(&self) -> Result<bool, B::Error>;
}

/// The `min_rnr_timer` codes of InfiniBand, 0 to 31.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RnrTimer(u8);

impl RnrTimer {
    /// 655.36 ms, the default of a queue pair.
    pub const SLOWEST: Self = Self(0);
    /// 0.64 ms.
    pub const MICROS_640: Self = Self(12);

    /// Returns the timer of a code, or `None` above 31.
    pub const fn from_code(code: u8) -> Option<Self> {
        if code < 32 { Some(Self(code)) } else { None }
    }

    /// Returns the code.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Returns the delay of the code (InfiniBand, RNR NAK timer values), in steps of 10 µs.
    pub fn delay(self) -> core::time::Duration {
        const TENS_OF_MICROS: [u64; 32] = [
            65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
            2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
        ];
        match TENS_OF_MICROS.get(self.0 as usize) {
            Some(tens) => core::time::Duration::from_micros(tens.saturating_mul(10)),
            None => core::time::Duration::ZERO,
        }
    }
}

/// The error of a chain that was posted only in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PostError<E> {
    /// How many requests of the chain were posted.
    pub posted: usize,
    /// Why the next one was not posted.
    pub error: E,
}

/// A completion queue and its completion channel, `ibv_create_cq(3)`.
pub trait CompletionQueue<B: Backend>: Send + Sync {
    /// Room for the completions of a poll, used again by the next one.
    type Batch: Send + Sync;

    /// Returns room for `most` completions.
    fn batch(most: usize) -> Self::Batch;

    /// Takes as many completions as there are and `batch` has room for, `ibv_poll_cq(3)`.
    ///
    /// Fewer than there is room for mean that the queue was empty. The call takes them all: those
    /// that the caller does not read from the iterator are lost.
    ///
    /// # Errors
    /// Returns an error if the queue is lost, for example by overrun. Its queue pairs are then lost
    /// too.
    fn poll_batch<'a>(
        &self,
        batch: &'a mut Self::Batch,
    ) -> Result<impl ExactSizeIterator<Item = Completion> + Clone + use<'a, Self, B>, B::Error>;

    /// Takes at most `into.len()` completions and returns how many: [`CompletionQueue::poll_batch`]
    /// with room of its own.
    ///
    /// # Errors
    /// The errors are those of [`CompletionQueue::poll_batch`].
    fn poll(&self, into: &mut [Completion]) -> Result<usize, B::Error> {
        let mut batch = Self::batch(into.len());
        let taken = self.poll_batch(&mut batch)?;
        let count = taken.len();
        into.iter_mut().zip(taken).for_each(|(place, completion)| *place = completion);
        Ok(count)
    }
    /// Requests one event when the next completion arrives, `ibv_req_notify_cq(3)`. Poll again
    /// afterwards: see the module's rules.
    fn arm(&self) -> Result<(), B::Error>;
    /// Takes and acknowledges pending events, `ibv_get_cq_event(3)`, `ibv_ack_cq_events(3)`.
    /// Returns how many, possibly none.
    ///
    /// Some may remain, and the descriptor stays readable, if more were raised than
    /// [`CompletionQueue::arm`] requested.
    fn take_events(&self) -> Result<u32, B::Error>;
}
