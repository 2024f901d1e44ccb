//! A key-value store that answers enough of RESP for `valkey-cli`, `valkey-benchmark` and client
//! libraries: the server of examples and tests.

mod buffer;
mod cut;
mod keys;
mod kv;
mod resp;
mod serve;
mod session;
mod threads;

pub use cut::{Cut, parse};
pub use kv::{REPLY_BATCH, Store};
pub use resp::{FrameReader, Frames, command};
pub use serve::Server;
pub use session::Session;
pub use threads::Threads;
