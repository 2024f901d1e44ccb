//! Answers a client under test in RESP, from a store.

use bytes::{Bytes, BytesMut};
use resp_rs::ParseError;
use resp_rs::resp2::{Frame, frame_to_bytes};

use crate::workload::Entry;
use kv_store as resp;
use kv_store::Store;

/// Keys of this form have values of that many bytes, so that a client can request long replies.
const MADE_UP: &str = "conformance:bytes:";

/// Takes commands and returns replies.
#[derive(Default)]
pub struct Responder {
    store: Store,
    unparsed: Vec<u8>,
    /// The number of answered commands.
    pub answered: u64,
    /// Whether the client has said that it is idle now.
    pub idle: bool,
    /// Whether the client sent QUIT.
    pub quit: bool,
}

impl Responder {
    /// Takes bytes, and returns the replies to all commands that are complete.
    ///
    /// # Errors
    /// The bytes are not RESP.
    pub fn answer(&mut self, bytes: &[u8]) -> Result<Vec<u8>, String> {
        self.unparsed.extend_from_slice(bytes);
        let mut rest = Bytes::from(std::mem::take(&mut self.unparsed));
        let mut replies = BytesMut::new();
        while !rest.is_empty() {
            match resp::parse(rest.clone()) {
                Ok((command, after)) => {
                    self.idle = is_idle(&command);
                    match made_up(&command) {
                        Some(value) => replies.extend_from_slice(&frame_to_bytes(&value)),
                        None => self.quit |= self.store.answer(command, &mut replies),
                    }
                    self.answered += 1;
                    rest = after;
                }
                Err(ParseError::Incomplete) => break,
                Err(error) => {
                    let start = rest[..rest.len().min(40)].escape_ascii();
                    return Err(format!("what the client sent is no RESP ({error}): {start}"));
                }
            }
        }
        self.unparsed = rest.into();
        Ok(replies.into())
    }

    /// Returns how many bytes of a command that is not complete have come.
    pub const fn unparsed(&self) -> usize {
        self.unparsed.len()
    }
}

/// Returns whether the command is the last one before a client is idle: `ECHO idle`.
fn is_idle(command: &Frame) -> bool {
    let Frame::Array(Some(words)) = command else { return false };
    matches!(&words[..], [Frame::BulkString(Some(name)), Frame::BulkString(Some(word))]
        if name.eq_ignore_ascii_case(b"ECHO") && &word[..] == b"idle")
}

fn made_up(command: &Frame) -> Option<Frame> {
    let Frame::Array(Some(words)) = command else { return None };
    let [Frame::BulkString(Some(name)), Frame::BulkString(Some(key))] = &words[..] else { return None };
    let length = std::str::from_utf8(key).ok()?.strip_prefix(MADE_UP)?.parse().ok()?;
    (name.eq_ignore_ascii_case(b"GET") && length <= 64 << 20)
        .then(|| Frame::BulkString(Some(made_up_value(length).into())))
}

/// Returns the name of the key that has a value of `length` bytes.
pub fn made_up_key(length: usize) -> String {
    format!("{MADE_UP}{length}")
}

/// Returns the value of that key.
pub fn made_up_value(length: usize) -> Vec<u8> {
    Entry { number: length as u64, value_len: length }.value()
}
