//! The four control messages: 32 bytes each, integers big-endian (VR-CTRL-003), each an RDMA SEND
//! of exactly that length (VR-CTRL-001).
//!
//! | offset | features (0, 1) | keepalive (2) | registration (3) |
//! |-------:|-----------------|---------------|------------------|
//! |      0 | opcode, u16     | opcode, u16   | opcode, u16      |
//! |      2 | select, u16     | reserved, 30  | reserved, 14     |
//! |      4 | reserved, 20    |               |                  |
//! |     16 |                 |               | address, u64     |
//! |     24 | features, u64   |               | length, u32      |
//! |     28 |                 |               | rkey, u32        |
//!
//! Reserved bytes are written as zero and ignored (VR-CTRL-005, VR-CTRL-006). All zeros are a valid
//! question for features: there is no magic number and no version.

use core::fmt;

use zerocopy::network_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::InvalidMessage;

/// The length of every control message in bytes (VR-CTRL-002).
pub const MESSAGE_LEN: usize = 32;

/// The first field of a control message. Unknown values are preserved.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(pub u16);

impl Opcode {
    /// Asks a server for its features, and carries its answer.
    pub const GET_SERVER_FEATURE: Self = Self(0x0000);
    /// Tells a server which features its client uses. Not answered.
    pub const SET_CLIENT_FEATURE: Self = Self(0x0001);
    /// Shows that the sender is alive. Not answered.
    pub const KEEPALIVE: Self = Self(0x0002);
    /// Announces a window that the peer may write to.
    pub const REGISTER_XFER_MEMORY: Self = Self(0x0003);
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::GET_SERVER_FEATURE => f.write_str("GetServerFeature"),
            Self::SET_CLIENT_FEATURE => f.write_str("SetClientFeature"),
            Self::KEEPALIVE => f.write_str("Keepalive"),
            Self::REGISTER_XFER_MEMORY => f.write_str("RegisterXferMemory"),
            Self(other) => write!(f, "opcode 0x{other:04x}"),
        }
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Feature bits. The specification defines none; unknown bits are preserved (VR-FEAT-011).
/// [`FeatureSet::MULTI_BUFFER`] is a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct FeatureSet(pub u64);

impl FeatureSet {
    /// No feature.
    pub const NONE: Self = Self(0);

    /// Several windows, registered before they are needed and filled in registration order.
    ///
    /// A proposal (`spec/multi-buffer.md`), used only if both sides want it. The bit number is
    /// experimental; a definition by Valkey would assign another.
    pub const MULTI_BUFFER: Self = Self(1 << 63);

    /// Returns whether all features of `others` are in this set.
    #[must_use]
    pub const fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Returns the features in both sets.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// Memory that a peer may write to, as announced by RegisterXferMemory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// The address of its first byte in the announcing process.
    pub address: u64,
    /// Its length in bytes.
    pub length: u32,
    /// The key that opens it.
    pub rkey: u32,
}

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Opcode 0. A client's question (`features` has no meaning), or a server's answer.
    GetServerFeature {
        /// The feature set in question. The answer repeats it (VR-FEAT-002). No value is defined.
        select: u16,
        /// The server's features.
        features: FeatureSet,
    },
    /// Opcode 1.
    SetClientFeature {
        /// The feature set in question.
        select: u16,
        /// The client's features.
        features: FeatureSet,
    },
    /// Opcode 2.
    Keepalive,
    /// Opcode 3.
    RegisterXferMemory(Window),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Features {
    opcode: U16,
    select: U16,
    reserved: [u8; 20],
    features: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Registration {
    opcode: U16,
    reserved: [u8; 14],
    address: U64,
    length: U32,
    rkey: U32,
}

const _: () = assert!(size_of::<Features>() == MESSAGE_LEN && size_of::<Registration>() == MESSAGE_LEN);

impl Message {
    /// Decodes a received message.
    ///
    /// # Errors
    /// Returns [`InvalidMessage`] if it is not 32 bytes long or its opcode is unknown.
    pub fn decode(bytes: &[u8]) -> Result<Self, InvalidMessage> {
        let bytes: &[u8; MESSAGE_LEN] =
            bytes.try_into().map_err(|_| InvalidMessage::Length { length: bytes.len() })?;
        // Every layout begins with the opcode, so that any of them shows it.
        let features: &Features = zerocopy::transmute_ref!(bytes);
        let (select, set) = (features.select.get(), FeatureSet(features.features.get()));
        match Opcode(features.opcode.get()) {
            Opcode::GET_SERVER_FEATURE => Ok(Self::GetServerFeature { select, features: set }),
            Opcode::SET_CLIENT_FEATURE => Ok(Self::SetClientFeature { select, features: set }),
            Opcode::KEEPALIVE => Ok(Self::Keepalive),
            Opcode::REGISTER_XFER_MEMORY => {
                let Registration { address, length, rkey, .. } = zerocopy::transmute_ref!(bytes);
                Ok(Self::RegisterXferMemory(Window {
                    address: address.get(),
                    length: length.get(),
                    rkey: rkey.get(),
                }))
            }
            // Not skipped: what it means for the bytes behind it cannot be guessed (VR-CTRL-012).
            opcode => Err(InvalidMessage::UnknownOpcode { opcode }),
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> [u8; MESSAGE_LEN] {
        match *self {
            Self::GetServerFeature { select, features } => encode_features(self.opcode(), select, features),
            Self::SetClientFeature { select, features } => encode_features(self.opcode(), select, features),
            // All that follows the opcode is reserved, and zero (VR-CTRL-005).
            Self::Keepalive => encode_features(self.opcode(), 0, FeatureSet::NONE),
            Self::RegisterXferMemory(window) => zerocopy::transmute!(Registration {
                opcode: self.opcode().0.into(),
                reserved: [0; 14],
                address: window.address.into(),
                length: window.length.into(),
                rkey: window.rkey.into(),
            }),
        }
    }

    /// Returns the opcode.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::GetServerFeature { .. } => Opcode::GET_SERVER_FEATURE,
            Self::SetClientFeature { .. } => Opcode::SET_CLIENT_FEATURE,
            Self::Keepalive => Opcode::KEEPALIVE,
            Self::RegisterXferMemory(_) => Opcode::REGISTER_XFER_MEMORY,
        }
    }
}

fn encode_features(opcode: Opcode, select: u16, features: FeatureSet) -> [u8; MESSAGE_LEN] {
    zerocopy::transmute!(Features {
        opcode: opcode.0.into(),
        select: select.into(),
        reserved: [0; 20],
        features: features.0.into(),
    })
}
