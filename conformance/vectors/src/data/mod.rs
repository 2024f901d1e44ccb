//! The files in `spec/vectors`, whose README and schemas document the fields.

#![allow(missing_docs)]

mod trace;

use std::collections::BTreeMap;
use std::fmt;

use rdma_proto::wire::{FeatureSet, Message, Window};
use serde::{Deserialize, Serialize};

pub use suite::hex::Bytes;
pub use trace::{
    Anything, Blame, Check, Expected, Input, Need, Output, OutputKind, Phase, Settings, Step, Trace,
    TraceFile,
};

/// The version of the control vectors' format.
pub const CONTROL_FORMAT: &str = "control-1";
/// The version of the traces' format.
pub const TRACE_FORMAT: &str = "trace-1";

/// A number written as `"0x…"`, because JSON numbers do not hold 64 bits everywhere.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Hex(pub u64);

impl TryFrom<String> for Hex {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = text.strip_prefix("0x").ok_or_else(|| format!("{text} does not begin with 0x"))?;
        u64::from_str_radix(digits, 16).map(Self).map_err(|error| format!("{text}: {error}"))
    }
}

impl From<Hex> for String {
    fn from(Hex(number): Hex) -> Self {
        format!("0x{number:x}")
    }
}

impl fmt::Debug for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:x}", self.0)
    }
}

/// A control message by its fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", deny_unknown_fields)]
pub enum Fields {
    /// Opcode 0.
    GetServerFeature { select: u16, features: Hex },
    /// Opcode 1.
    SetClientFeature { select: u16, features: Hex },
    /// Opcode 2.
    Keepalive {},
    /// Opcode 3.
    RegisterXferMemory { address: Hex, length: u32, rkey: Hex },
}

impl From<Fields> for Message {
    fn from(fields: Fields) -> Self {
        match fields {
            Fields::GetServerFeature { select, features } => {
                Self::GetServerFeature { select, features: FeatureSet(features.0) }
            }
            Fields::SetClientFeature { select, features } => {
                Self::SetClientFeature { select, features: FeatureSet(features.0) }
            }
            Fields::Keepalive {} => Self::Keepalive,
            Fields::RegisterXferMemory { address, length, rkey } => {
                // The lint finds a key beyond 32 bits: the bytes differ.
                Self::RegisterXferMemory(Window { address: address.0, length, rkey: rkey.0 as u32 })
            }
        }
    }
}

impl From<Message> for Fields {
    fn from(message: Message) -> Self {
        match message {
            Message::GetServerFeature { select, features } => {
                Self::GetServerFeature { select, features: Hex(features.0) }
            }
            Message::SetClientFeature { select, features } => {
                Self::SetClientFeature { select, features: Hex(features.0) }
            }
            Message::Keepalive => Self::Keepalive {},
            Message::RegisterXferMemory(Window { address, length, rkey }) => {
                Self::RegisterXferMemory { address: Hex(address), length, rkey: Hex(rkey.into()) }
            }
        }
    }
}

/// A file of control vectors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControlFile {
    pub format: String,
    pub about: String,
    #[serde(default)]
    pub notes: BTreeMap<String, Note>,
    pub vectors: Vec<ControlVector>,
}

/// The reason for some vectors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Note {
    pub about: String,
    pub effect: String,
}

/// A control message as bytes and as fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControlVector {
    pub id: String,
    pub comment: String,
    pub requirements: Vec<String>,
    #[serde(default)]
    pub flags: Vec<String>,
    pub result: Verdict,
    pub hex: Bytes,
    pub fields: Option<Fields>,
    pub reason: Option<Reason>,
}

/// The result of decoding bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Valid,
    Acceptable,
    Invalid,
}

/// The reason for which bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    Length,
    Opcode,
}
