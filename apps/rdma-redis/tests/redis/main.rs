//! Connections of redis-rs over RDMA, on the embedded fabric.

#[cfg(feature = "cluster")]
mod cluster;
mod connections;
mod fallback;
#[cfg(all(feature = "bb8", feature = "deadpool"))]
mod pools;
mod reconnecting;
mod support;
mod timeouts;
#[cfg(feature = "tls")]
mod tls;
