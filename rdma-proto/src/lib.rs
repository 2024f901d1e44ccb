#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]
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

pub mod backend;
mod config;
mod connection;
mod credit;
mod error;
mod send;
pub mod time;
mod window;
pub mod wire;

/// Memory that somebody else may change at any time, which regions are made of.
pub use rdma_memory as memory;

pub use config::{Config, Keepalive, LARGEST_WINDOW, RECEIVES, Role, UNACKNOWLEDGED};
pub use connection::{Action, Counters, Machine, Notification, RegionAddress, State};
pub use error::{ApiMisuse, Effect, Error, InvalidMessage, PeerIncompatible, PeerMisbehaved, TransportError};
pub use send::{Source, Span};
pub use window::Readable;
