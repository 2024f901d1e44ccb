#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]
// No input of a peer may end the process (VR-SEC-003).
#![deny(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic
)]
#![cfg_attr(
    test,
    allow(clippy::arithmetic_side_effects, clippy::indexing_slicing, clippy::unwrap_used, clippy::panic)
)]

#[cfg(test)]
extern crate std;

mod config;
mod connection;
mod credit;
mod error;
mod send;
mod window;
pub mod wire;

pub use config::{Config, Keepalive, LARGEST_WINDOW, RECEIVES, Role, UNACKNOWLEDGED};
pub use connection::{Action, Counters, Machine, RegionAddress, State};
pub use error::{ApiMisuse, Effect, Error, InvalidMessage, PeerIncompatible, PeerMisbehaved, TransportError};
pub use send::{Source, Span};
pub use window::Readable;

pub use rdma_types::{CompletionError, CompletionStatus, Immediate, RNR_RETRY_INFINITE, RemoteAddress, time};
