use serde::{Deserialize, Serialize};

use super::{Bytes, Fields, Hex};
use suite::Role;

/// A file of traces.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceFile {
    pub format: String,
    pub about: String,
    pub traces: Vec<Trace>,
}

/// The events of a connection, and the required reaction to each.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    pub id: String,
    pub comment: String,
    pub requirements: Vec<String>,
    pub role: Role,
    #[serde(default)]
    pub needs: Vec<Need>,
    #[serde(default)]
    pub settings: Settings,
    pub steps: Vec<Step>,
}

/// Optional parts of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Need {
    /// A client that asks for features.
    Negotiation,
    /// Two receive regions.
    SecondWindow,
    /// Regular keepalives.
    Keepalive,
    /// A limit of silence.
    SilenceLimit,
    /// A limit for pending bytes.
    StallLimit,
    /// Counting the notifications that the peer has handled.
    Credits,
    /// Asking for features to learn which notifications the peer has handled.
    Questions,
    /// Completions as a proof of that, if the peer granted endless retries.
    AcknowledgedCredits,
    /// A close that waits for the last bytes.
    GracefulClose,
    /// A bound for unanswered questions.
    QuestionLimit,
    /// No Keepalive if a peer that makes notifications wait may have no receive left.
    IdlePeer,
    /// A limit for unacknowledged keepalives.
    VanishedLimit,
    /// One notification for all bytes that leave at once.
    OneNotification,
}

/// The settings of a connection. All lengths in bytes; a time of 0 is none.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub window: u32,
    pub windows: u8,
    pub address: Hex,
    pub rkey: Hex,
    pub address2: Hex,
    pub rkey2: Hex,
    pub peer_receives: u16,
    pub window_limit: u32,
    pub send_buffer: u32,
    pub send_depth: u16,
    pub keepalive_ms: u64,
    pub silence_ms: u64,
    pub stall_ms: u64,
    pub negotiate: bool,
    pub features: Hex,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            window: 64,
            windows: 1,
            address: Hex(0x7f12_3456_0000),
            rkey: Hex(0xabcd),
            address2: Hex(0x7f12_3457_0000),
            rkey2: Hex(0xabce),
            peer_receives: 1024,
            window_limit: 16 << 20,
            send_buffer: 1 << 16,
            send_depth: 64,
            keepalive_ms: 0,
            silence_ms: 0,
            stall_ms: 0,
            negotiate: false,
            features: Hex(0),
        }
    }
}

/// An event, and the required reaction.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    #[serde(rename = "in")]
    pub input: Input,
    #[serde(default = "once")]
    pub times: u32,
    #[serde(default)]
    pub out: Expected,
    #[serde(default)]
    pub any_order: bool,
    #[serde(default)]
    pub optional: Vec<Output>,
    #[serde(default)]
    pub forbid: Vec<OutputKind>,
    /// False: the peer is wrong. The implementation disconnects, does nothing else, and has failed.
    #[serde(default = "yes")]
    pub valid: bool,
    #[serde(default)]
    pub check: Check,
    #[serde(default)]
    pub note: String,
}

const fn once() -> u32 {
    1
}

const fn yes() -> bool {
    true
}

/// An event of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase", deny_unknown_fields)]
pub enum Input {
    /// The connection is established. The peer granted this RNR retry count.
    Established { rnr_retry: u8 },
    /// A SEND arrives: a message.
    Receive { message: Fields },
    /// A SEND arrives: bytes.
    Bytes { hex: Bytes },
    /// A WRITE with immediate arrives.
    Immediate { value: u32 },
    /// The application writes.
    Write { length: u32 },
    /// The application reads.
    Read { length: u32 },
    /// The device completes all posted requests.
    Acknowledged {},
    /// A work request fails.
    Failed {
        /// `enum ibv_wc_status` without `IBV_WC_`.
        status: String,
    },
    /// The peer has disconnected.
    Disconnected {},
    /// Time passes.
    Advance { ms: u64 },
    /// The application closes.
    Close { within_ms: u64 },
}

/// An output of an implementation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Output {
    /// It sends a message.
    Send(Fields),
    /// It writes and notifies this many bytes, in any pieces.
    Payload(u64),
    /// It disconnects.
    Disconnect,
}

/// A kind of [`Output`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum OutputKind {
    GetServerFeature,
    SetClientFeature,
    Keepalive,
    RegisterXferMemory,
    #[serde(rename = "payload")]
    Payload,
    #[serde(rename = "disconnect")]
    Disconnect,
}

impl Output {
    pub const fn kind(&self) -> OutputKind {
        match self {
            Self::Send(Fields::GetServerFeature { .. }) => OutputKind::GetServerFeature,
            Self::Send(Fields::SetClientFeature { .. }) => OutputKind::SetClientFeature,
            Self::Send(Fields::Keepalive {}) => OutputKind::Keepalive,
            Self::Send(Fields::RegisterXferMemory { .. }) => OutputKind::RegisterXferMemory,
            Self::Payload(_) => OutputKind::Payload,
            Self::Disconnect => OutputKind::Disconnect,
        }
    }
}

/// The required output of a step.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Expected {
    /// Exactly this.
    Exactly(Vec<Output>),
    /// Anything that breaks no rule.
    Anything(Anything),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Anything {
    Anything,
}

impl Default for Expected {
    fn default() -> Self {
        Self::Exactly(Vec::new())
    }
}

/// The observable state of a connection.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    pub state: Option<Phase>,
    pub blame: Option<Blame>,
    pub unread: Option<u64>,
    pub unsent: Option<u64>,
    pub notifications: Option<u64>,
    pub notifications_at_most: Option<u64>,
    pub notifications_in_all_at_most: Option<u64>,
}

/// The phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Not established yet.
    Connecting,
    /// Bytes may flow.
    Open,
    /// Closed by the application. The last bytes are in flight.
    Closing,
    /// Ended in order.
    Closed,
    /// Ended by an error.
    Failed,
}

/// The side at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Blame {
    InvalidMessage,
    PeerMisbehaved,
    PeerIncompatible,
    Transport,
    Other,
}
