//! Settings of streams and listeners.

use std::time::Duration;

use rdma_backend::{Capabilities, RnrTimer};
use rdma_proto::{Config, RECEIVES};

use crate::error::Error;

/// Gives a settings type a method for each field that sets it and returns the settings, for chains. `#[non_exhaustive]` lets such
/// a type grow, and so forbids other crates to write it as a literal.
macro_rules! setters {
    ($($field:ident: $type:ty),+ $(,)?) => {
        $(
            #[doc = concat!("Sets `", stringify!($field), "`; see the field.")]
            #[must_use]
            pub fn $field(mut self, $field: $type) -> Self {
                self.$field = $field;
                self
            }
        )+
    };
}
pub(crate) use setters;

/// Settings of a connection, of either side. Start from [`Options::default`]; fields can be assigned, or set in a chain. Each call that
/// takes them checks them first ([`Options::check`]), and changes none of them except as far as the device goes
/// ([`Connection::options`](crate::Connection::options)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// The protocol's own settings: window sizes, credits, keepalive, limits. Its role does not matter: the side that dials is the
    /// client, and has the keepalives of one unless the settings name others.
    pub protocol: Config,
    /// Receives kept posted, 1 to 16384. Peers count on 1024 (VR-RES-002); fewer is for tests.
    pub receives: u16,
    /// Bytes that a work request may carry within itself, so that the device need not fetch them. What the device grants
    /// may be less.
    pub inline: u32,
    /// How long a peer waits before it repeats what met no posted receive.
    pub rnr_timer: RnrTimer,
    /// How long an accepted connection may take to be established. A dial has a limit for all of it (VR-CONN-008).
    pub handshake_timeout: Duration,
    /// How long dropping a stream waits for the last bytes to arrive. [`Stream::close`](crate::Stream::close) takes
    /// its own limit.
    pub linger: Duration,
    /// How long an idle connection keeps memory that only a busy one needs, its send buffer and its second window: at least this long,
    /// and up to twice as long. At least a millisecond. The send buffer is kept until the peer's device has acknowledged all that lies in
    /// it, which after a few small writes is not before the next keepalive, and without keepalives not before the connection writes again.
    pub keep_memory: Duration,
    /// Whether the send buffer is registered when the connection is made, rather than by its first write, which takes milliseconds longer
    /// then. It costs memory for each connection that never writes.
    pub eager_send_buffer: bool,
    /// How long whoever waits looks again and again before it asks to be woken, which on a NIC takes longer than a round trip. It costs
    /// a processor for as long, in each wait: a face that blocks keeps it, an event loop is told to come back at once
    /// ([`Endpoint::next_timeout`](crate::Endpoint::next_timeout)), and a driver of a runtime lets other tasks have their turns. Waits
    /// that take longer than this make it shorter, down to none, until one is over in time again. An endpoint goes by the
    /// longest of its connections. Zero, the default, never spins; nor does anybody on a machine with one processor.
    pub spin: Duration,
    /// Which completion vector signals completions; taken modulo the device's number of vectors.
    pub completion_vector: u32,
    /// The traffic class of the packets of a connection that this side dials: DSCP in the upper six bits, ECN in the lower two. On RoCE it
    /// chooses the queue of switches and cards; a network whose lossless queue is another than that of class 0 needs it. The server's packets
    /// have the class of the client's, so it changes nothing on the side that accepts. `None`, the default, leaves it to the system
    /// (`default_roce_tos` of the connection manager).
    pub traffic_class: Option<u8>,
    /// How long the device waits for an acknowledgement before it sends again: 4.096 µs · 2^`ack_timeout`, at most 31, and for ever if it
    /// is 0. Each side has its own. Seven of these waits, with the device's own additions, find a peer dead. `None`, the default, leaves it to the
    /// connection manager, which takes what it assumes of the route: on RoCE about a second or two. Linux has it since 5.1; a connection on an
    /// older one fails.
    pub ack_timeout: Option<u8>,
    /// Whether the device may write received bytes in any order ([`Access::RELAXED_ORDERING`](crate::Access::RELAXED_ORDERING)), into
    /// windows, and into memory that is registered to receive into. It changes nothing for the program: bytes are read after the completion that
    /// counts them, and a completion says that all bytes before it are there. On some machines it is faster, on others slower, so
    /// it is off by default. Without a device, a kernel or a library that knows it, bytes are written in order.
    pub relaxed_ordering: bool,
    /// Whether windows, the send buffer, and buffers that the library allocates for the program are on huge pages if they are at least as
    /// long as one, 2 MiB. [`Connection::pages`](crate::Connection::pages) says what came of it: pages that the administrator reserved, or else
    /// the kernel's own choice, which it is advised to make. A device then needs fewer translations. Off by default.
    pub huge_pages: bool,
}

impl Options {
    setters! {
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

    /// Checks the bounds of every field.
    ///
    /// # Errors
    /// [`Error::Options`] names the first field that is out of bounds, or [`rdma_proto::ApiMisuse::Config`] if it is one of
    /// [`Options::protocol`].
    pub fn check(&self) -> Result<(), Error> {
        self.protocol.check()?;
        if !(1..=1 << 14).contains(&self.receives) {
            return Err(Error::Options { field: "receives", bounds: "1 to 16384" });
        }
        // Asking all the time whether memory can go would be spinning.
        if self.keep_memory < Duration::from_millis(1) {
            return Err(Error::Options { field: "keep_memory", bounds: "at least a millisecond" });
        }
        if self.ack_timeout.is_some_and(|code| code > 31) {
            return Err(Error::Options { field: "ack_timeout", bounds: "0 to 31" });
        }
        Ok(())
    }

    /// As far as the device goes (VR-RES-009).
    pub(crate) fn fitted(mut self, limits: &Capabilities) -> Self {
        let deepest = u16::try_from(limits.max_queue_depth).unwrap_or(u16::MAX).max(1);
        self.protocol.send_depth = self.protocol.send_depth.min(deepest);
        self.receives = self.receives.min(deepest);
        self.completion_vector %= limits.completion_vectors.max(1);
        self
    }

    /// Completions that a connection can have waiting in its queue, all of which must find room there (VR-RES-011).
    pub(crate) fn completions(&self) -> u32 {
        u32::from(self.protocol.send_depth) + u32::from(self.receives)
    }
}

impl Default for Options {
    /// The settings that suit most connections.
    fn default() -> Self {
        Self {
            protocol: Config::client(),
            receives: RECEIVES,
            inline: 128,
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
