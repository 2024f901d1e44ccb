#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod client;
#[cfg(feature = "cluster")]
mod cluster;
mod endpoints;
#[cfg(any(feature = "bb8", feature = "deadpool"))]
mod pool;
mod reconnecting;
mod settings;
mod transport;

pub use client::Client;
#[cfg(feature = "cluster")]
pub use cluster::{ClusterNode, Nodes, cluster_connection};
pub use endpoints::Endpoints;
pub use rdma_conn::{Connect, Options};
pub use reconnecting::{Reconnect, Reconnecting};
pub use redis;
pub use settings::{Fallback, Settings};
pub use transport::Transport;
