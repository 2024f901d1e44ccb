//! Cases for the snapshot protocol, an extension of this workspace (`spec/snapshot.md`): publishers and readers of any implementation,
//! judged by what a peer sees.
//!
//! The suite's own side is written from the specification alone: frames and codes (`wire`) over a byte stream of Valkey over RDMA,
//! and READs by [raw verbs](raw_peer). Each case names requirements of `spec/snapshot.toml`. [`wrong`] are peers that each case must
//! notice: our own sides ([`own`]), with one mistake between them and the suite.

mod command;
mod data;
pub mod own;
pub mod publisher;
pub mod reader;
mod wire;
pub mod wrong;

pub use command::{Command, run};
