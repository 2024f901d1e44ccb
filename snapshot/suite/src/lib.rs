//! Cases for the snapshot protocol, an extension of this workspace (`spec/snapshot.md`): publishers
//! and readers of any implementation, judged by what a peer sees.
//!
//! The suite's own side is written from the specification alone: frames and codes (`wire`) over a
//! byte stream of Valkey over RDMA, and READs by [raw verbs](raw_peer). Each case names
//! requirements of `spec/snapshot.toml`. [`bent`] has peers that each case must notice: our own
//! sides ([`builtin`]), with one mistake between them and the suite.

pub mod bent;
pub mod builtin;
mod command;
mod data;
pub mod publisher;
pub mod reader;
mod wire;

pub use command::{Command, run};
