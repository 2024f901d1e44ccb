//! A key-value store that answers enough of RESP for `valkey-cli` and `valkey-benchmark`: the server of examples and tests.

mod kv;
mod resp;
mod serve;

pub use kv::{REPLY_BATCH, Store};
pub use resp::{FrameReader, Frames, parse};
pub use serve::Server;
