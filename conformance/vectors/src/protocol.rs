//! One flat JSON object a line. An implementation answers each request with a line for each work
//! request, and then exactly one line that ends the answer. See `spec/vectors/README.md`.

use serde::{Deserialize, Serialize};

use super::data::{Blame, Bytes, Fields, Hex, Phase, Reason, Settings};
use suite::Role;

/// The version of this protocol.
pub const VERSION: u32 = 1;

/// A request of the runner.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
#[allow(missing_docs)] // the fields are those of the data
pub enum Request {
    /// Asks for the implementation's name. Answer: [`Reply::Hello`].
    Hello { protocol: u32 },
    /// Decodes bytes. Answer: [`Reply::Message`] or [`Reply::Invalid`].
    Decode { hex: Bytes },
    /// Encodes a message. Answer: [`Reply::Bytes`].
    Encode {
        #[serde(flatten)]
        fields: Fields,
    },
    /// Starts a connection, and drops the last. Answer: [`Reply::Ok`] or [`Reply::Skip`].
    Start {
        trace: String,
        role: Role,
        /// Separated by blanks.
        needs: String,
        #[serde(flatten)]
        settings: Box<Settings>,
    },
    /// The connection is established.
    Established { rnr_retry: u8 },
    /// A SEND arrived.
    Receive { hex: Bytes },
    /// A WRITE with immediate arrived.
    Immediate { value: u32 },
    /// The application writes.
    Write { length: u32 },
    /// The application reads.
    Read { length: u32 },
    /// All posted requests have completed.
    Acknowledged,
    /// A work request failed.
    Failed { status: String },
    /// The peer has disconnected.
    Disconnected,
    /// Time passes.
    Advance { ms: u64 },
    /// The application closes.
    Close { within_ms: u64 },
}

/// An answer of an implementation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "lowercase")]
#[allow(missing_docs)] // the fields are those of the data
pub enum Reply {
    /// It posts a SEND.
    Send { hex: Bytes },
    /// It posts a WRITE, with immediate or without.
    Write {
        address: Hex,
        rkey: Hex,
        length: u32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        immediate: Option<u32>,
    },
    /// It disconnects.
    Disconnect,
    /// Ends the answer to a hello: the implementation's name.
    Hello { name: String, version: String, protocol: u32 },
    /// Ends the answer: the bytes are this message.
    Message {
        #[serde(flatten)]
        fields: Fields,
    },
    /// Ends the answer: the bytes are no message.
    Invalid { reason: Reason },
    /// Ends the answer: the bytes of a message.
    Bytes { hex: Bytes },
    /// Ends the answer to an event: the connection's state now.
    Ok {
        state: Phase,
        unread: u64,
        unsent: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blame: Option<Blame>,
    },
    /// Ends the answer: not implemented, and why.
    Skip { reason: String },
}

impl Reply {
    /// Returns whether it ends an answer.
    pub const fn ends(&self) -> bool {
        !matches!(self, Self::Send { .. } | Self::Write { .. } | Self::Disconnect)
    }
}

/// The implementation that answers.
pub trait Implementation {
    /// Answers one request: the actions, then the line that ends the answer.
    ///
    /// # Errors
    /// It does not answer, or not in this protocol.
    fn ask(&mut self, request: &Request) -> Result<Vec<Reply>, String>;
}

/// Returns a line of the protocol.
///
/// # Errors
/// None in practice: every value of these types is JSON.
pub fn line<T: Serialize>(value: &T) -> Result<String, String> {
    serde_json::to_string(value).map_err(|error| error.to_string())
}

/// Returns a value in the text of the files, for a failure.
pub fn shown<T: Serialize>(value: &T) -> String {
    line(value).unwrap_or_else(|error| error)
}

/// Parses a line.
///
/// # Errors
/// It is not a line of this protocol.
pub fn parse<'a, T: Deserialize<'a>>(line: &'a str) -> Result<T, String> {
    serde_json::from_str(line).map_err(|error| format!("{error} in: {line}"))
}
