//! Recorded connections, as pages for people and as packets for Wireshark.
//!
//! [`Recorded`] wraps any backend and writes down what passes it: calls and events of the connection manager, work requests,
//! completions. What it wrote, a [`Recording`], is kept as lines of JSON, shown as a [`timeline`], and turned into
//! the packets ([`packets`]) that RoCE v2 carries for it.

mod ends;
mod inbound;
pub mod packets;
mod recorded;
pub mod recording;
pub mod sequence;
pub mod timeline;
pub mod words;

pub use recorded::Recorded;
pub use recording::{Limits, Recorder, Recording};
