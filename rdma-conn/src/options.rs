use std::time::Duration;

use rdma_backend::{Capabilities, RnrTimer};
use rdma_proto::{Config, RECEIVES, Role};

use crate::error::Error;

/// Settings of a connection, on either side.
///
/// Start from [`Options::default`], then assign fields or chain their setters. Each call that takes
/// options first checks them with [`Options::check`]. A value that the device cannot provide is
/// lowered ([`Connection::options`](crate::Connection::options) returns the result).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Protocol settings: window sizes, credits, keepalive, limits.
    ///
    /// [`Config::role`] is ignored: the side that dials is the client. If [`Config::keepalive`] is
    /// `None`, each side uses the default of its role. [`Config::grow_to`] applies to the side that
    /// accepts.
    pub protocol: Config,
    /// Receives kept posted, 1 to 16384. Peers expect 1024 (VR-RES-002); use fewer only in tests.
    pub receives: u16,
    /// Bytes that a work request may carry inline, which saves a fetch. The device may grant fewer.
    pub inline: u32,
    /// How long a peer waits before it retries a send that found no posted receive.
    pub rnr_timer: RnrTimer,
    /// Time limit for establishing an accepted connection. While events are not read, it lasts up
    /// to a minute more. A dial has its own limit (VR-CONN-008).
    pub handshake_timeout: Duration,
    /// How long dropping a stream waits for the last bytes to arrive. `close` takes its own limit.
    pub linger: Duration,
    /// How long an idle connection keeps its send buffer and its second window. They are released
    /// after at least this time and at most twice this time. The value must be at least a
    /// millisecond.
    ///
    /// The send buffer also stays until this side knows that the peer's device has acknowledged all
    /// of it. After a few small writes, the next keepalive tells that. Without keepalives, the next
    /// write does.
    pub keep_memory: Duration,
    /// Whether to register the send buffer with the first window, not at the first long write.
    /// The first write is then milliseconds faster. Each connection that never writes costs more
    /// memory.
    pub eager_send_buffer: bool,
    /// How long a wait busy-polls before it sleeps. A NIC's wake-up takes more than a round trip.
    ///
    /// It costs a processor during each wait. A blocking stream polls in its call, an event loop is
    /// told to come back at once ([`Endpoint::next_timeout`](crate::Endpoint::next_timeout)), and a
    /// tokio driver lets other tasks run in between. Each wait longer than this limit shortens the
    /// polling time, down to none. The next wait that ends within the limit restores it. An
    /// endpoint uses the largest value of its connections. Zero, the default, turns busy-polling
    /// off. A machine with one processor never busy-polls.
    pub spin: Duration,
    /// The completion vector that signals completions, modulo the device's number of vectors.
    pub completion_vector: u32,
    /// The traffic class of packets of a connection that this side dials: DSCP in the upper six
    /// bits, ECN in the lower two.
    ///
    /// On RoCE it selects the queue of switches and cards. Set it if the network's lossless queue
    /// is not that of class 0. The server's packets have the client's class, so the option changes
    /// nothing on the side that accepts. With `None`, the default, the system decides
    /// (`default_roce_tos` of the connection manager).
    pub traffic_class: Option<u8>,
    /// How long the device waits for an acknowledgement before it retransmits: 4.096 µs ·
    /// 2^`ack_timeout`, or for ever if it is 0. It is at most 31.
    ///
    /// Each side has its own. The device reports a dead peer after seven of these waits, and may
    /// make each of them longer. With `None`, the default, the connection manager chooses the wait
    /// from what it assumes about the route. On RoCE one wait then takes about a second or two.
    /// Linux supports this option since 5.1. On an older kernel, a connection with it fails.
    pub ack_timeout: Option<u8>,
    /// Whether the device may write received bytes in any order
    /// ([`Access::RELAXED_ORDERING`](crate::Access::RELAXED_ORDERING)), in windows and memory
    /// registered to receive into.
    ///
    /// Programs see no difference: bytes are read only after a completion that says that they have
    /// arrived. It is faster on some machines and slower on others, so it is off by default. Bytes
    /// are written in order if the device, the kernel or the library does not support it.
    pub relaxed_ordering: bool,
    /// Whether the library allocates windows and buffers of at least 2 MiB on huge pages. Off by
    /// default. With huge pages, a device needs fewer address translations.
    ///
    /// Reserved pages are used if there are any. Otherwise the kernel is advised to use huge pages,
    /// and decides. [`Connection::pages`](crate::Connection::pages) returns the result.
    pub huge_pages: bool,
}

impl Options {
    rdma_proto::setters! {
        protocol: Config,
        receives: u16,
        inline: u32,
        rnr_timer: RnrTimer,
        handshake_timeout: Duration,
        linger: Duration,
        keep_memory: Duration,
        eager_send_buffer: bool,
        spin: Duration,
        completion_vector: u32,
        traffic_class: Option<u8>,
        ack_timeout: Option<u8>,
        relaxed_ordering: bool,
        huge_pages: bool,
    }

    /// Checks that every field is within its bounds.
    ///
    /// # Errors
    /// Returns [`Error::Options`], which names the first field out of bounds, or
    /// [`rdma_proto::ApiMisuse::Config`] for a field of [`Options::protocol`].
    pub fn check(&self) -> Result<(), Error> {
        self.protocol.check()?;
        if !(1..=1 << 14).contains(&self.receives) {
            return Err(Error::Options { field: "receives", bounds: "1 to 16384" });
        }
        // Checking constantly would be busy-polling.
        if self.keep_memory < Duration::from_millis(1) {
            return Err(Error::Options { field: "keep_memory", bounds: "at least a millisecond" });
        }
        // The queue pair's field has five bits, ibv_modify_qp(3).
        if self.ack_timeout.is_some_and(|code| code > 31) {
            return Err(Error::Options { field: "ack_timeout", bounds: "0 to 31" });
        }
        Ok(())
    }

    /// Returns them for a connection of this role: the program may have named the other one.
    pub(crate) fn of(mut self, role: Role) -> Self {
        self.protocol.role = role;
        self
    }

    /// Lowers what the device cannot provide (VR-RES-009).
    pub(crate) fn fitted(mut self, limits: &Capabilities) -> Self {
        let deepest = u16::try_from(limits.max_queue_depth).unwrap_or(u16::MAX).max(1);
        self.protocol.send_depth = self.protocol.send_depth.min(deepest);
        self.receives = self.receives.min(deepest);
        // A device may report no vectors, and a remainder by zero panics.
        self.completion_vector %= limits.completion_vectors.max(1);
        self
    }

    /// Completions that can wait at once; the queue must hold them all (VR-RES-011).
    pub(crate) fn completions(&self) -> u32 {
        u32::from(self.protocol.send_depth) + u32::from(self.receives)
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            protocol: Config::client(),
            receives: RECEIVES,
            inline: 128,
            // The connection manager would leave it at 655 ms (VR-CONN-012).
            rnr_timer: RnrTimer::MICROS_640,
            handshake_timeout: Duration::from_secs(5),
            linger: Duration::from_secs(2),
            keep_memory: Duration::from_secs(5),
            eager_send_buffer: false,
            spin: Duration::ZERO,
            completion_vector: 0,
            traffic_class: None,
            ack_timeout: None,
            relaxed_ordering: false,
            huge_pages: false,
        }
    }
}
