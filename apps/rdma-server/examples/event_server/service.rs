//! The store as a service of `rdma_server`, and the changes that operators request.

use bytes::{Bytes, BytesMut};
use rdma_server::{Address, SessionId};
use rdma_server::{Flow, Replies, Service};
use resp_rs::resp2::Frame;

use kv_store::{Cut, Store};

/// Answers commands, and collects changes, which only the owner of the server can make.
#[derive(Default)]
pub struct StoreService {
    store: Store,
    /// Changes that clients requested. Each client awaits a reply.
    pub requests: Vec<ChangeRequest>,
}

pub struct ChangeRequest {
    pub from: SessionId,
    pub change: Change,
}

pub enum Change {
    Tcp(Vec<Address>),
    Rdma(Vec<Address>),
    MaxClients(usize),
    Protected(bool),
}

impl Service for StoreService {
    type Client = Cut;

    fn serve(&mut self, from: SessionId, cut: &mut Cut, input: &mut BytesMut, replies: &mut Replies) -> Flow {
        while !replies.is_full() {
            let command = match cut.take(input) {
                Ok(Some(command)) => command,
                Ok(None) => return Flow::Stay,
                Err(error) => {
                    replies.extend_from_slice(format!("-ERR {error}\r\n").as_bytes());
                    return Flow::Leave;
                }
            };
            match change_request(&command) {
                Some(Ok(change)) => {
                    self.requests.push(ChangeRequest { from, change });
                    return Flow::Wait;
                }
                Some(Err(why)) => replies.extend_from_slice(format!("-ERR {why}\r\n").as_bytes()),
                None if self.store.answer(command, replies.buffer()) => return Flow::Leave,
                None => {}
            }
        }
        Flow::Again
    }

    /// A value may be longer than the default limit of a request.
    fn request_limit(&self, _: &Cut) -> usize {
        64 << 20
    }
}

/// Parses the change of a `CONFIG SET`, or says what is wrong with it. `None` for other commands.
fn change_request(command: &Frame) -> Option<Result<Change, String>> {
    let Frame::Array(Some(words)) = command else { return None };
    let words: Vec<&str> = words
        .iter()
        .map(|word| match word {
            Frame::BulkString(Some(bytes)) => text(bytes),
            _ => None,
        })
        .collect::<Option<_>>()?;
    let (config, rest) = words.split_first()?;
    let (set, rest) = rest.split_first()?;
    if !config.eq_ignore_ascii_case("CONFIG") || !set.eq_ignore_ascii_case("SET") {
        return None;
    }
    let Some((name, values)) = rest.split_first() else { return Some(Err("CONFIG SET what?".into())) };
    let addresses =
        || values.iter().flat_map(|value| value.split_whitespace()).map(str::parse).collect::<Result<_, _>>();
    let value = values.first().copied().unwrap_or_default();
    Some(match name.to_ascii_lowercase().as_str() {
        "tcp" => addresses().map(Change::Tcp).map_err(|error| error.to_string()),
        "rdma" => addresses().map(Change::Rdma).map_err(|error| error.to_string()),
        "maxclients" => value.parse().map(Change::MaxClients).map_err(|error| error.to_string()),
        "protected-mode" if ["yes", "no"].contains(&value) => Ok(Change::Protected(value == "yes")),
        "protected-mode" => Err("protected-mode is yes or no".into()),
        other => Err(format!("there is no setting {other} here")),
    })
}

fn text(bytes: &Bytes) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}
