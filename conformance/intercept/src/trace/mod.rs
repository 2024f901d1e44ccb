//! Recorded connections, as pages for people and as packets for Wireshark.
//!
//! [`Recorded`] wraps any backend and records its calls and events of the connection manager, work
//! requests and completions. A [`Recording`] is stored as lines of JSON, shown as a [`timeline`],
//! and converted into the [`packets`] of RoCE v2.

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
