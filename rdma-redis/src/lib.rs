#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[cfg(feature = "cluster")]
mod cluster;
mod reconnecting;

use rdma_conn::{AsyncStream, Connect, Descriptors};
use redis::aio::{MultiplexedConnection, PubSub};
use redis::{
    AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, RedisError,
    RedisResult,
};

#[cfg(feature = "cluster")]
pub use cluster::{ClusterNode, Nodes, cluster_connection};
pub use reconnecting::{Reconnect, Reconnecting};

/// The scheme of URLs for Valkey over RDMA.
const SCHEME: &str = "valkey+rdma://";

/// What a `valkey+rdma://` URL says.
fn parse(url: &str) -> RedisResult<ConnectionInfo> {
    let invalid =
        || RedisError::from((ErrorKind::InvalidClientConfig, "expected a URL valkey+rdma://HOST:PORT/DB"));
    // What follows the scheme is as in the URLs of redis-rs.
    let rest = url.strip_prefix(SCHEME).ok_or_else(invalid)?;
    let info = format!("redis://{rest}").into_connection_info()?;
    matches!(info.addr(), ConnectionAddr::Tcp(..)).then_some(info).ok_or_else(invalid)
}

/// A server, and how to reach it over RDMA.
#[derive(Clone, Debug)]
pub struct Client<B> {
    backend: B,
    info: ConnectionInfo,
    connect: Connect,
}

impl<B: Descriptors> Client<B> {
    /// A client for `valkey+rdma://[USER[:PASSWORD]@]HOST[:PORT][/DB][?protocol=resp3]`. Nothing is connected yet.
    ///
    /// # Errors
    /// The URL is not of that form.
    pub fn open(backend: B, url: &str) -> RedisResult<Self> {
        Self::with_options(backend, url, Connect::default())
    }

    /// As [`Client::open`], with settings of the RDMA connection.
    ///
    /// # Errors
    /// The URL is not of that form.
    pub fn with_options(backend: B, url: &str, connect: Connect) -> RedisResult<Self> {
        Ok(Self { backend, info: parse(url)?, connect })
    }

    /// Connects; the connection can be cloned, and its clones share one RDMA stream.
    ///
    /// # Errors
    /// Why there is no connection, in the words of [`rdma_conn::Error`], or what the server said to the handshake.
    pub async fn get_multiplexed_async_connection(&self) -> RedisResult<MultiplexedConnection> {
        self.get_multiplexed_async_connection_with_config(AsyncConnectionConfig::new()).await
    }

    /// As [`Client::get_multiplexed_async_connection`], with settings of redis-rs. Its connection time-out and resolver do
    /// not apply: see [`Connect`].
    ///
    /// # Errors
    /// As there.
    pub async fn get_multiplexed_async_connection_with_config(
        &self,
        config: AsyncConnectionConfig,
    ) -> RedisResult<MultiplexedConnection> {
        let stream = self.stream().await?;
        let (connection, driver) =
            MultiplexedConnection::new_with_config(self.info.redis_settings(), stream, config).await?;
        tokio::spawn(driver);
        Ok(connection)
    }

    /// Connects for publish and subscribe, on a stream of its own.
    ///
    /// # Errors
    /// As [`Client::get_multiplexed_async_connection`].
    pub async fn get_async_pubsub(&self) -> RedisResult<PubSub> {
        PubSub::new(self.info.redis_settings(), self.stream().await?).await
    }

    /// Connects, and connects again whenever the connection is lost.
    ///
    /// # Errors
    /// As [`Client::get_multiplexed_async_connection`], for the first connection.
    pub async fn get_reconnecting_connection(&self, how: Reconnect) -> RedisResult<Reconnecting<B>> {
        Reconnecting::new(self.clone(), how).await
    }

    async fn stream(&self) -> RedisResult<AsyncStream<B>> {
        let ConnectionAddr::Tcp(host, port) = self.info.addr() else {
            return Err((ErrorKind::InvalidClientConfig, "not an RDMA address").into());
        };
        let host = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let connected = AsyncStream::connect_with(&self.backend, host, &self.connect).await;
        connected.map_err(|error| std::io::Error::from(error).into())
    }
}
