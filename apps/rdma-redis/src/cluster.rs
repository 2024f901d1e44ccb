//! Clusters: redis-rs routes requests, and this module connects to the nodes.

use std::fmt;
use std::marker::PhantomData;

use rdma_conn::Descriptors;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::{self, ClusterConnection};
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, IntoConnectionInfo, Pipeline, RedisFuture, RedisResult, Value,
};

use crate::client::Client;
use crate::endpoints::Endpoints;
use crate::settings::{Settings, Target, parse};

/// How to reach the nodes of a cluster.
///
/// This is a type, not a value, because redis-rs makes connections to nodes by type alone. The
/// connections share endpoints if all use clones of one [`Endpoints`]:
///
/// ```
/// use std::sync::LazyLock;
///
/// use rdma_redis::{Endpoints, Nodes, Settings};
/// use rdma_verbs::Verbs;
///
/// struct OverVerbs;
///
/// impl Nodes for OverVerbs {
///     type Backend = Verbs;
///
///     fn reach() -> redis::RedisResult<(Endpoints<Verbs>, Settings)> {
///         static VERBS: LazyLock<Result<Endpoints<Verbs>, rdma_verbs::Error>> =
///             LazyLock::new(|| Verbs::load().map(Endpoints::from));
///         let endpoints = VERBS.as_ref().map_err(std::io::Error::other)?;
///         Ok((endpoints.clone(), Settings::default()))
///     }
/// }
/// ```
pub trait Nodes: Send + Sync + Unpin + 'static {
    /// The RDMA backend.
    type Backend: Descriptors;

    /// Returns the endpoints and settings, for each connection to a node.
    ///
    /// # Errors
    /// Returns an error if there is no RDMA.
    fn reach() -> RedisResult<(Endpoints<Self::Backend>, Settings)>;
}

/// Connects to a cluster, some of whose nodes are given as `valkey+rdma://` URLs.
///
/// Each node must listen for RDMA on the port that it announces to clients. That is the number of
/// its TCP port: Valkey announces no other. The settings are those of [`Nodes::reach`], so
/// `protocol` is the only option that URLs may have here. If redis-rs sends a request to several
/// nodes in turn, one response time-out covers all of them.
///
/// # Errors
/// Returns an error if a URL does not have that form, there is no RDMA, or no node answers.
pub async fn cluster_connection<N: Nodes>(
    urls: impl IntoIterator<Item = impl AsRef<str>>,
) -> RedisResult<ClusterConnection<ClusterNode<N>>> {
    let (_endpoints, settings) = N::reach()?;
    let mut nodes = Vec::new();
    for url in urls {
        let mut said = settings;
        let target = parse(url.as_ref(), &mut said)?;
        if target.secure {
            let what = "clusters have no TLS over RDMA: nodes are announced by address, and certificates are for names";
            return Err((ErrorKind::InvalidClientConfig, what).into());
        }
        nodes.push(target.info);
        if said != settings {
            let what = "settings of a cluster's connections belong into Nodes::reach, not into a URL";
            return Err((ErrorKind::InvalidClientConfig, what).into());
        }
    }
    let mut builder = ClusterClientBuilder::new(nodes).connection_timeout(settings.connect.timeout);
    if let Some(timeout) = settings.response_timeout {
        builder = builder.response_timeout(timeout);
    }
    builder.build()?.get_async_generic_connection().await
}

/// A connection to one node of a cluster.
pub struct ClusterNode<N> {
    connection: MultiplexedConnection,
    _reached: PhantomData<fn() -> N>,
}

impl<N> Clone for ClusterNode<N> {
    fn clone(&self) -> Self {
        Self { connection: self.connection.clone(), _reached: PhantomData }
    }
}

impl<N> fmt::Debug for ClusterNode<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterNode").finish_non_exhaustive()
    }
}

impl<N: Nodes> cluster_async::Connect for ClusterNode<N> {
    fn connect_with_config<'a, T>(info: T, config: AsyncConnectionConfig) -> RedisFuture<'a, Self>
    where
        T: IntoConnectionInfo + Send + 'a,
    {
        Box::pin(async move {
            let (endpoints, settings) = N::reach()?;
            let target = Target { info: info.into_connection_info()?, secure: false };
            let client = Client::new(Ok(endpoints), target, settings);
            let connection = client.get_multiplexed_async_connection_with_config(config).await?;
            Ok(Self { connection, _reached: PhantomData })
        })
    }
}

impl<N> ConnectionLike for ClusterNode<N> {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        self.connection.req_packed_command(cmd)
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        self.connection.req_packed_commands(pipeline, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}
