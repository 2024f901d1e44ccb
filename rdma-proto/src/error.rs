//! Errors by culprit, and the effect of each on the connection.

use core::time::Duration;

use crate::wire::{MESSAGE_LEN, Opcode};
use rdma_types::CompletionError;

/// An error, classified by culprit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The peer sent something that is not a control message.
    #[error("the peer sent an invalid control message: {0}")]
    InvalidMessage(#[from] InvalidMessage),
    /// The peer broke a rule of the protocol.
    #[error("the peer broke the protocol: {0}")]
    PeerMisbehaved(#[from] PeerMisbehaved),
    /// The peer obeys the protocol but exceeds what this side is configured for.
    #[error("the peer is incompatible with this side's configuration: {0}")]
    PeerIncompatible(#[from] PeerIncompatible),
    /// The fabric, the device or the peer's host failed.
    #[error("the RDMA transport failed: {0}")]
    Transport(#[from] TransportError),
    /// The program misused this library. A peer never causes this.
    #[error("this library was called wrongly: {0}")]
    ApiMisuse(#[from] ApiMisuse),
    /// A state that this library or its backend should never reach. Please report it.
    #[error("a bug in this library or its backend: {0}")]
    Bug(&'static str),
}

/// Why bytes are not a control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidMessage {
    /// VR-CTRL-011.
    #[error("{length} bytes long, not {MESSAGE_LEN}")]
    Length {
        /// Its length.
        length: usize,
    },
    /// VR-CTRL-011: longer than the receive posted for it. The length is unknown.
    #[error("longer than {MESSAGE_LEN} bytes")]
    TooLong,
    /// VR-CTRL-012: an opcode that VR-CTRL-004 does not name.
    #[error("{opcode} is not defined")]
    UnknownOpcode {
        /// The opcode.
        opcode: Opcode,
    },
}

/// Rules that a peer can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum PeerMisbehaved {
    /// VR-FLOW-002: more bytes notified than the window holds.
    #[error("it notified {immediate} bytes when {received} of the window's {length} were already used")]
    WindowOverrun {
        /// The immediate.
        immediate: u32,
        /// Bytes of the window used before.
        received: u32,
        /// The window's length.
        length: u32,
    },
    /// VR-FLOW-003: bytes notified before a window was announced.
    #[error("it notified {immediate} bytes before it was given a window")]
    NoWindow {
        /// The immediate.
        immediate: u32,
    },
    /// VR-MEM-017: a window was replaced before it was full.
    #[error("it registered a new window when only {used} of the old one's {length} bytes were used")]
    EarlyRegistration {
        /// Bytes of the window used.
        used: u32,
        /// The window's length.
        length: u32,
    },
    /// VR-MEM-006.
    #[error("it registered a window of no bytes")]
    EmptyWindow,
    /// VR-MEM-007.
    #[error("it registered a window of {length} bytes at 0x{address:x}, beyond the end of the address space")]
    WindowWraps {
        /// The address.
        address: u64,
        /// The length.
        length: u32,
    },
    /// VR-FEAT-005, VR-FEAT-014: a server sent features that were not requested.
    #[error("it answered a question for features that was not asked")]
    UnaskedFeatures,
    /// VR-FEAT-006, VR-FEAT-014: a server sent an opcode reserved for clients.
    #[error("a server sent {opcode}, which only a client may")]
    ServerSent {
        /// The opcode.
        opcode: Opcode,
    },
    /// VR-FEAT-007: it keeps asking and never takes the answers.
    #[error("it asks for features faster than it takes the answers")]
    FeatureFlood,
    /// VR-RES-004: bytes wait for a window, and it never registered one.
    #[error("it registered no window for {waited:?} while data waits for it")]
    NeverRegistered {
        /// How long this side waited.
        waited: Duration,
    },
    /// VR-RES-004: its window is full and it registers no new one, so it does not read.
    #[error("it did not empty its window for {waited:?} while data waits for it")]
    NeverDrained {
        /// How long this side waited.
        waited: Duration,
    },
    /// VR-MEM-009: its device does not let us write to the window it registered.
    #[error("its device refused the window that it registered")]
    WindowRefused,
    /// VR-SEC-011: it read, or wrote outside the connection's windows, and our device refused.
    #[error("it reached for memory that it was not given")]
    ReachedOutside,
    /// VR-RES-002: it keeps fewer receives posted than the protocol expects.
    #[error("it had no receive posted for a notification, though no more were in flight than {limit}")]
    TooFewReceives {
        /// [`Config::peer_receives`](crate::Config::peer_receives).
        limit: u16,
    },
    /// VR-RES-005: it takes no notifications: it posts no receives.
    #[error("it took no notification for {waited:?}: its receives are used up and not posted again")]
    NeverReceives {
        /// How long this side waited.
        waited: Duration,
    },
    /// VR-KEEP-005: it sent nothing for longer than configured.
    #[error("nothing was heard from it for {waited:?}")]
    Silent {
        /// How long this side waited.
        waited: Duration,
    },
}

/// Valid requests of a peer that exceed this side's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum PeerIncompatible {
    /// VR-MEM-005.
    #[error(
        "it registered a window of {length} bytes; this side accepts at most {limit} (Config::window_limit)"
    )]
    WindowTooLarge {
        /// The length it declared.
        length: u32,
        /// The limit.
        limit: u32,
    },
}

/// Failures below the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A work request failed.
    #[error("{} ({:?}, vendor code {})", .0.status.describe(), .0.status, .0.vendor)]
    Completion(CompletionError),
    /// The peer disconnected.
    #[error("the peer has disconnected")]
    Disconnected,
    /// The time for a graceful close ran out.
    #[error("the connection was closed with {unconfirmed} bytes not yet confirmed by the peer")]
    CloseTimedOut {
        /// Bytes accepted for sending that are not known to have arrived.
        unconfirmed: u64,
    },
    /// VR-KEEP-006: a keepalive was not acknowledged.
    #[error(
        "the peer's device acknowledged nothing for {waited:?}: the peer has vanished, or takes no messages"
    )]
    Unacknowledged {
        /// How long this side waited.
        waited: Duration,
    },
    /// The backend refused a call on the connection's own objects.
    #[error("the RDMA backend refused {call}")]
    Backend {
        /// The action that failed.
        call: &'static str,
    },
}

/// Invalid calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ApiMisuse {
    /// Data was written after the end.
    #[error("write after close")]
    WriteAfterClose,
    /// More bytes committed than there was space for.
    #[error("{bytes} bytes committed into {space} bytes of space")]
    CommitBeyondSpace {
        /// Bytes committed.
        bytes: usize,
        /// Bytes that were free.
        space: usize,
    },
    /// More bytes were lent than [`Machine::lendable`](crate::Machine::lendable).
    #[error("{bytes} bytes lent where {lendable} could be")]
    LendBeyondLimit {
        /// Bytes lent.
        bytes: usize,
        /// Bytes that could be lent.
        lendable: usize,
    },
    /// New memory to land in was given while windows or unread bytes lie in the previous memory.
    #[error("memory to land in given before the bytes that landed are consumed")]
    LandingUnderWay,
    /// A range to receive into ends beyond its buffer.
    #[error("bytes up to {end} to be received into a buffer of {len}")]
    ReceiveBeyondBuffer {
        /// The end of the range.
        end: usize,
        /// The length of the buffer.
        len: usize,
    },
    /// Memory to land in wraps around the address space.
    #[error("{length} bytes at {address:#x} to land in wrap around the address space")]
    LandingWraps {
        /// Its address.
        address: u64,
        /// Its length.
        length: u32,
    },
    /// More bytes consumed than were readable.
    #[error("{bytes} bytes consumed of {readable} readable")]
    ConsumeBeyondReadable {
        /// Bytes consumed.
        bytes: usize,
        /// Bytes that were readable.
        readable: usize,
    },
    /// A value of [`Config`](crate::Config) is out of bounds.
    #[error("Config::{field} must be {bounds}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its bounds.
        bounds: &'static str,
    },
}

/// The effect of an error on its connection. Nothing else is affected (VR-SEC-004).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// The call is refused, and the connection continues.
    CallRefused,
    /// The connection ends now. Bytes received before can still be read.
    Disconnect,
}

impl Error {
    /// Returns the effect of this error on its connection: the only table of effects. Every later
    /// call returns an error that ends a connection.
    pub const fn effect(&self) -> Effect {
        match self {
            Self::InvalidMessage(_)
            | Self::PeerMisbehaved(_)
            | Self::PeerIncompatible(_)
            | Self::Transport(_)
            | Self::Bug(_) => Effect::Disconnect,
            Self::ApiMisuse(_) => Effect::CallRefused,
        }
    }
}
