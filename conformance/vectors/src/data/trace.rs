//! Traces.

use serde::{Deserialize, Serialize};

use super::{Bytes, Fields, Hex};
use suite::Role;

/// A file of traces.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceFile {
    /// [`TRACE_FORMAT`](super::TRACE_FORMAT).
    pub format: String,
    /// The subject of the file.
    pub about: String,
    /// The traces.
    pub traces: Vec<Trace>,
}

/// The events of a connection, and the implementation's reaction to each.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// `trace/<file>/<name>`.
    pub id: String,
    /// The point that the trace makes.
    pub comment: String,
    /// The requirements it shows.
    pub requirements: Vec<String>,
    /// Which side the implementation is.
    pub role: Role,
    /// Optional parts of the protocol without which the trace means nothing.
    #[serde(default)]
    pub needs: Vec<Need>,
    /// How the connection is set up.
    #[serde(default)]
    pub settings: Settings,
    /// In order.
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
    /// A limit for silence.
    SilenceLimit,
    /// A limit for waiting bytes.
    StallLimit,
    /// Counting what the peer has handled.
    Credits,
    /// Asking for features to learn what the peer has handled.
    Questions,
    /// Taking completions for it, where the peer gave endless retries.
    AcknowledgedCredits,
    /// A close that waits for the last bytes.
    GracefulClose,
    /// A bound for questions that wait for their answers.
    QuestionLimit,
    /// No Keepalive where a peer that makes notifications wait may have no receive left.
    IdlePeer,
    /// A limit for keepalives that are not acknowledged.
    VanishedLimit,
    /// One notification for all that leaves at once.
    OneNotification,
}

/// How a connection is set up. All lengths in bytes; a time of 0 is none.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Length of our receive windows.
    pub window: u32,
    /// How many there are, 1 or 2.
    pub windows: u8,
    /// Where the first one lies.
    pub address: Hex,
    /// Its key.
    pub rkey: Hex,
    /// Where the second one lies.
    pub address2: Hex,
    /// Its key.
    pub rkey2: Hex,
    /// Receives that the peer keeps posted.
    pub peer_receives: u16,
    /// The longest window a peer may register.
    pub window_limit: u32,
    /// Bytes of output that can wait.
    pub send_buffer: u32,
    /// Send work requests.
    pub send_depth: u16,
    /// A keepalive this often, in milliseconds.
    pub keepalive_ms: u64,
    /// The longest silence, in milliseconds.
    pub silence_ms: u64,
    /// The longest that output may wait for the peer, in milliseconds.
    pub stall_ms: u64,
    /// Whether a client asks for features.
    pub negotiate: bool,
    /// The features we have.
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

/// One thing that happens, and what comes of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// The event.
    #[serde(rename = "in")]
    pub input: Input,
    /// How often.
    #[serde(default = "once")]
    pub times: u32,
    /// The implementation's outputs, in order; none, if absent.
    #[serde(default)]
    pub out: Expected,
    /// Whether the order of `out` is free.
    #[serde(default)]
    pub any_order: bool,
    /// Outputs that it may have besides.
    #[serde(default)]
    pub optional: Vec<Output>,
    /// Kinds of output that must not be among it.
    #[serde(default)]
    pub forbid: Vec<OutputKind>,
    /// False: the input is a breach by the peer. The implementation disconnects, does nothing else, and has failed.
    #[serde(default = "yes")]
    pub valid: bool,
    /// The observable state afterwards.
    #[serde(default)]
    pub check: Check,
    /// Why.
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
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase", deny_unknown_fields)]
pub enum Input {
    /// It is established; the peer gave us this RNR retry count.
    Established {
        /// 0 to 7.
        rnr_retry: u8,
    },
    /// A SEND arrives: a message.
    Receive {
        /// Its fields.
        message: Fields,
    },
    /// A SEND arrives: bytes.
    Bytes {
        /// They.
        hex: Bytes,
    },
    /// A WRITE with immediate arrives.
    Immediate {
        /// The immediate.
        value: u32,
    },
    /// The application writes.
    Write {
        /// How many bytes.
        length: u32,
    },
    /// The application reads.
    Read {
        /// How many bytes, at most.
        length: u32,
    },
    /// The device completes all that was posted.
    Acknowledged {},
    /// A work request fails.
    Failed {
        /// `enum ibv_wc_status` without `IBV_WC_`.
        status: String,
    },
    /// The peer has disconnected.
    Disconnected {},
    /// Time passes.
    Advance {
        /// Milliseconds.
        ms: u64,
    },
    /// The application closes.
    Close {
        /// How long the last bytes may take, in milliseconds.
        within_ms: u64,
    },
}

/// An output of an implementation.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Output {
    /// It sends a message.
    Send(Fields),
    /// It writes and notifies so many bytes, in whatever pieces.
    Payload(u64),
    /// It disconnects.
    Disconnect,
}

/// A kind of [`Output`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[allow(missing_docs)] // the names are those of the messages
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
    /// Its kind.
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

/// An output that a step must lead to.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Expected {
    /// This.
    Exactly(Vec<Output>),
    /// Anything that breaks no rule.
    Anything(Anything),
}

/// The word.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
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
    /// Where it stands.
    pub state: Option<Phase>,
    /// The side to blame for its failure; checked if the implementation reports it.
    pub blame: Option<Blame>,
    /// Bytes that arrived and were not read.
    pub unread: Option<u64>,
    /// Bytes that were written and have not left.
    pub unsent: Option<u64>,
    /// Notifications in this step.
    pub notifications: Option<u64>,
    /// The most notifications allowed in this step.
    pub notifications_at_most: Option<u64>,
    /// The most notifications allowed since the trace began.
    pub notifications_in_all_at_most: Option<u64>,
}

/// Where a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Not established yet.
    Connecting,
    /// Bytes may flow.
    Open,
    /// Closed by the application; last bytes are on their way.
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
    /// The peer sent no message.
    InvalidMessage,
    /// The peer broke a rule.
    PeerMisbehaved,
    /// The peer wants what this side is not set up for.
    PeerIncompatible,
    /// The fabric, the device, the peer's host.
    Transport,
    /// Anything else.
    Other,
}
