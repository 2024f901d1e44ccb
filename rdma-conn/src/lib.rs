#![doc = include_str!("../README.md")]
// One exception, in `asynchronous::driver`: the constructor of tokio's `AsyncFd` is unsafe.
#![cfg_attr(not(feature = "tokio"), forbid(unsafe_code))]
#![cfg_attr(feature = "tokio", deny(unsafe_code))]

mod arrived;
#[cfg(feature = "tokio")]
mod asynchronous;
mod background;
mod budget;
mod connecting;
mod connection;
mod deadlines;
mod domain;
mod endpoint;
mod error;
mod fork;
mod land;
mod lend;
mod listener;
mod loans;
mod memory;
mod options;
mod route;
mod settings;
mod stream;
mod waker;

pub use arrived::Arrived;
#[cfg(feature = "tokio")]
pub use asynchronous::{AsyncEndpoint, AsyncListener, AsyncStream, ReadHalf, WeakAsyncEndpoint, WriteHalf};
pub use budget::Limits;
pub use connection::{Connection, Work};
pub use deadlines::Deadlines;
pub use domain::ProtectionDomain;
pub use endpoint::{
    ConnectionId, ConnectionMap, Descriptors, Endpoint, Event, Events, ListenerId, SharedEvents, Usage,
};
pub use error::Error;
pub use land::{Received, Receiving};
pub use lend::RegisteredBuffer;
pub use listener::{Listener, Request};
pub use loans::{Loan, Loans};
pub use memory::Registrar;
pub use options::Options;
pub use rdma_backend::memory::{CallerMemory, DmaBuf, SharedMemory};
pub use rdma_backend::{Access, Pages};
pub use rdma_proto::{Config, Counters, Keepalive, Role};
pub use route::{is_one_machine, leads_back};
pub use settings::{SETTINGS, Setting};
pub use stream::{Connect, Stream};
pub use waker::Waker;
