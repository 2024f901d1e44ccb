#![doc = include_str!("../README.md")]
// The one exception is `asynchronous::readiness`: tokio asks for a promise about descriptors.
#![cfg_attr(not(feature = "tokio"), forbid(unsafe_code))]
#![cfg_attr(feature = "tokio", deny(unsafe_code))]

mod arrived;
#[cfg(feature = "tokio")]
mod asynchronous;
mod connection;
mod dial;
mod endpoint;
mod error;
mod keeper;
mod lend;
mod link;
mod listener;
mod memory;
mod options;
mod shared;
mod stream;
mod wait;
#[cfg(feature = "tokio")]
mod waiting;
mod work;

pub use arrived::Arrived;
#[cfg(feature = "tokio")]
pub use asynchronous::{AsyncListener, AsyncStream};
pub use connection::Connection;
pub use dial::Dial;
pub use endpoint::{ConnectionId, Endpoint, Event, Limits, ListenerId, Usage};
pub use error::Error;
pub use lend::RegisteredBuffer;
pub use link::Link;
pub use listener::Listener;
pub use options::Options;
pub use rdma_proto::{Config, Counters, Keepalive, Role};
pub use stream::{Connect, Stream};
pub use wait::Descriptors;
pub use work::Work;
