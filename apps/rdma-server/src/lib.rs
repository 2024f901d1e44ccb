#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod address;
pub mod affinity;
mod buffer;
mod event_loop;
mod poller;
mod rdma;
mod replies;
mod server;
mod session;
mod socket;
#[cfg(feature = "tls")]
mod tls;
mod transport;

pub use address::Address;
pub use event_loop::{EventLoop, Handler, ListenerId, ListenerLost, SessionId, Timeouts};
pub use rdma::{Rdma, RdmaSettings, Vector};
pub use replies::{Replies, SendError};
pub use server::{BindingId, Flow, Server, ServerCounters, ServerSettings, Service};
pub use session::{Barrier, Session, SessionState};
pub use socket::{SocketSettings, Tcp, Unix};
#[cfg(feature = "tls")]
pub use tls::{Tls, TlsSettings};
pub use transport::{
    Accepted, Carrier, ConnectionType, Driver, Interest, Kind, Listening, LoopId, Source, Transport,
};
