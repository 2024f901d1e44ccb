//! Errors by culprit, and the effect of each on the connection.

use core::fmt;
use core::time::Duration;

use crate::wire::{MESSAGE_LEN, Opcode};
use rdma_types::CompletionError;

/// An error, classified by culprit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Error {
    /// The peer sent something that is not a control message.
    InvalidMessage(InvalidMessage),
    /// The peer broke a rule of the protocol.
    PeerMisbehaved(PeerMisbehaved),
    /// The peer obeys the protocol but exceeds what this side is configured for.
    PeerIncompatible(PeerIncompatible),
    /// The fabric, the device or the peer's host failed.
    Transport(TransportError),
    /// The program misused this library. A peer never causes this.
    ApiMisuse(ApiMisuse),
    /// A state that this library or its backend should never reach. Please report it.
    Bug(&'static str),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidMessage(cause) => write!(f, "the peer sent an invalid control message: {cause}"),
            Self::PeerMisbehaved(cause) => write!(f, "the peer broke the protocol: {cause}"),
            Self::PeerIncompatible(cause) => {
                write!(f, "the peer is incompatible with this side's configuration: {cause}")
            }
            Self::Transport(cause) => write!(f, "the RDMA transport failed: {cause}"),
            Self::ApiMisuse(cause) => write!(f, "this library was called wrongly: {cause}"),
            Self::Bug(what) => write!(f, "a bug in this library or its backend: {what}"),
        }
    }
}

impl core::error::Error for Error {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::InvalidMessage(cause) => Some(cause),
            Self::PeerMisbehaved(cause) => Some(cause),
            Self::PeerIncompatible(cause) => Some(cause),
            Self::Transport(cause) => Some(cause),
            Self::ApiMisuse(cause) => Some(cause),
            Self::Bug(_) => None,
        }
    }
}

macro_rules! from_culprits {
    ($($culprit:ident),*) => { $(
        impl From<$culprit> for Error {
            fn from(cause: $culprit) -> Self {
                Self::$culprit(cause)
            }
        }
    )* };
}
from_culprits!(InvalidMessage, PeerMisbehaved, PeerIncompatible, ApiMisuse);

impl From<TransportError> for Error {
    fn from(cause: TransportError) -> Self {
        Self::Transport(cause)
    }
}

/// Why bytes are not a control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InvalidMessage {
    /// VR-CTRL-011.
    Length {
        /// Its length.
        length: usize,
    },
    /// VR-CTRL-011: longer than the receive posted for it. The length is unknown.
    TooLong,
    /// VR-CTRL-012: an opcode that VR-CTRL-004 does not name.
    UnknownOpcode {
        /// The opcode.
        opcode: Opcode,
    },
}

impl fmt::Display for InvalidMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { length } => write!(f, "{length} bytes long, not {MESSAGE_LEN}"),
            Self::TooLong => write!(f, "longer than {MESSAGE_LEN} bytes"),
            Self::UnknownOpcode { opcode } => write!(f, "{opcode} is not defined"),
        }
    }
}

impl core::error::Error for InvalidMessage {}

/// Rules that a peer can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerMisbehaved {
    /// VR-FLOW-002: more bytes notified than the window holds.
    WindowOverrun {
        /// The immediate.
        immediate: u32,
        /// Bytes of the window used before.
        received: u32,
        /// The window's length.
        length: u32,
    },
    /// VR-FLOW-003: bytes notified before a window was announced.
    NoWindow {
        /// The immediate.
        immediate: u32,
    },
    /// VR-MEM-017: a window was replaced before it was full.
    EarlyRegistration {
        /// Bytes of the window used.
        used: u32,
        /// The window's length.
        length: u32,
    },
    /// VR-MEM-006.
    EmptyWindow,
    /// VR-MEM-007.
    WindowWraps {
        /// The address.
        address: u64,
        /// The length.
        length: u32,
    },
    /// VR-FEAT-005, VR-FEAT-014: a server sent features that were not requested.
    UnaskedFeatures,
    /// VR-FEAT-006, VR-FEAT-014: a server sent an opcode reserved for clients.
    ServerSent {
        /// The opcode.
        opcode: Opcode,
    },
    /// VR-FEAT-007: it keeps asking and never takes the answers.
    FeatureFlood,
    /// VR-RES-004: bytes wait for a window, and it never registered one.
    NeverRegistered {
        /// How long this side waited.
        waited: Duration,
    },
    /// VR-RES-004: its window is full and it registers no new one, so it does not read.
    NeverDrained {
        /// How long this side waited.
        waited: Duration,
    },
    /// VR-MEM-009: its device does not let us write to the window it registered.
    WindowRefused,
    /// VR-SEC-011: it read, or wrote outside the connection's windows, and our device refused.
    ReachedOutside,
    /// VR-RES-002: it keeps fewer receives posted than the protocol expects.
    TooFewReceives {
        /// [`Config::peer_receives`](crate::Config::peer_receives).
        limit: u16,
    },
    /// VR-RES-005: it takes no notifications: it posts no receives.
    NeverReceives {
        /// How long this side waited.
        waited: Duration,
    },
    /// VR-KEEP-005: it sent nothing for longer than configured.
    Silent {
        /// How long this side waited.
        waited: Duration,
    },
}

impl fmt::Display for PeerMisbehaved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WindowOverrun { immediate, received, length } => write!(
                f,
                "it notified {immediate} bytes when {received} of the window's {length} were already used"
            ),
            Self::NoWindow { immediate } => {
                write!(f, "it notified {immediate} bytes before it was given a window")
            }
            Self::EarlyRegistration { used, length } => write!(
                f,
                "it registered a new window when only {used} of the old one's {length} bytes were used"
            ),
            Self::EmptyWindow => f.write_str("it registered a window of no bytes"),
            Self::WindowWraps { address, length } => write!(
                f,
                "it registered a window of {length} bytes at 0x{address:x}, beyond the end of the address space"
            ),
            Self::UnaskedFeatures => f.write_str("it answered a question for features that was not asked"),
            Self::ServerSent { opcode } => write!(f, "a server sent {opcode}, which only a client may"),
            Self::FeatureFlood => f.write_str("it asks for features faster than it takes the answers"),
            Self::NeverRegistered { waited } => {
                write!(f, "it registered no window for {waited:?} while data waits for it")
            }
            Self::NeverDrained { waited } => {
                write!(f, "it did not empty its window for {waited:?} while data waits for it")
            }
            Self::WindowRefused => f.write_str("its device refused the window that it registered"),
            Self::ReachedOutside => f.write_str("it reached for memory that it was not given"),
            Self::TooFewReceives { limit } => write!(
                f,
                "it had no receive posted for a notification, though no more were in flight than {limit}"
            ),
            Self::NeverReceives { waited } => write!(
                f,
                "it took no notification for {waited:?}: its receives are used up and not posted again"
            ),
            Self::Silent { waited } => write!(f, "nothing was heard from it for {waited:?}"),
        }
    }
}

impl core::error::Error for PeerMisbehaved {}

/// Valid requests of a peer that exceed this side's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerIncompatible {
    /// VR-MEM-005.
    WindowTooLarge {
        /// The length it declared.
        length: u32,
        /// The limit.
        limit: u32,
    },
}

impl fmt::Display for PeerIncompatible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::WindowTooLarge { length, limit } = self;
        write!(
            f,
            "it registered a window of {length} bytes; this side accepts at most {limit} (Config::window_limit)"
        )
    }
}

impl core::error::Error for PeerIncompatible {}

/// Failures below the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportError {
    /// A work request failed.
    Completion(CompletionError),
    /// The peer disconnected.
    Disconnected,
    /// The time for a graceful close ran out.
    CloseTimedOut {
        /// Bytes accepted for sending that are not known to have arrived.
        unconfirmed: u64,
    },
    /// VR-KEEP-006: a keepalive was not acknowledged.
    Unacknowledged {
        /// How long this side waited.
        waited: Duration,
    },
    /// The backend refused a call on the connection's own objects.
    Backend {
        /// The action that failed.
        call: &'static str,
    },
}

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Completion(error) => {
                write!(f, "{} ({:?}, vendor code {})", error.status.describe(), error.status, error.vendor)
            }
            Self::Disconnected => f.write_str("the peer has disconnected"),
            Self::CloseTimedOut { unconfirmed } => {
                write!(f, "the connection was closed with {unconfirmed} bytes not yet confirmed by the peer")
            }
            Self::Unacknowledged { waited } => write!(
                f,
                "the peer's device acknowledged nothing for {waited:?}: the peer has vanished, or takes no messages"
            ),
            Self::Backend { call } => write!(f, "the RDMA backend refused {call}"),
        }
    }
}

impl core::error::Error for TransportError {}

/// Invalid calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ApiMisuse {
    /// Data was written after the end.
    WriteAfterClose,
    /// More bytes committed than there was space for.
    CommitBeyondSpace {
        /// Bytes committed.
        bytes: usize,
        /// Bytes that were free.
        space: usize,
    },
    /// More bytes were lent than [`Machine::lendable`](crate::Machine::lendable).
    LendBeyondLimit {
        /// Bytes lent.
        bytes: usize,
        /// Bytes that could be lent.
        lendable: usize,
    },
    /// New memory to land in was given while windows or unread bytes lie in the previous memory.
    LandingUnderWay,
    /// A range to receive into ends beyond its buffer.
    ReceiveBeyondBuffer {
        /// The end of the range.
        end: usize,
        /// The length of the buffer.
        len: usize,
    },
    /// Memory to land in wraps around the address space.
    LandingWraps {
        /// Its address.
        address: u64,
        /// Its length.
        length: u32,
    },
    /// More bytes consumed than were readable.
    ConsumeBeyondReadable {
        /// Bytes consumed.
        bytes: usize,
        /// Bytes that were readable.
        readable: usize,
    },
    /// A value of [`Config`](crate::Config) is out of bounds.
    Config {
        /// The field.
        field: &'static str,
        /// Its bounds.
        bounds: &'static str,
    },
}

impl fmt::Display for ApiMisuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WriteAfterClose => f.write_str("write after close"),
            Self::CommitBeyondSpace { bytes, space } => {
                write!(f, "{bytes} bytes committed into {space} bytes of space")
            }
            Self::LendBeyondLimit { bytes, lendable } => {
                write!(f, "{bytes} bytes lent where {lendable} could be")
            }
            Self::LandingUnderWay => {
                f.write_str("memory to land in given before the bytes that landed are consumed")
            }
            Self::ReceiveBeyondBuffer { end, len } => {
                write!(f, "bytes up to {end} to be received into a buffer of {len}")
            }
            Self::LandingWraps { address, length } => {
                write!(f, "{length} bytes at {address:#x} to land in wrap around the address space")
            }
            Self::ConsumeBeyondReadable { bytes, readable } => {
                write!(f, "{bytes} bytes consumed of {readable} readable")
            }
            Self::Config { field, bounds } => write!(f, "Config::{field} must be {bounds}"),
        }
    }
}

impl core::error::Error for ApiMisuse {}

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
