//! Clusters: redis-rs routes requests, and this module connects to the nodes.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_conn::Descriptors;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::{self, ClusterConnection};
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, IntoConnectionInfo, Pipeline, RedisError, RedisFuture,
    RedisResult, Value,
};
use tokio::task::JoinHandle;

use crate::client::Client;
use crate::endpoints::Endpoints;
use crate::reconnecting::is_loss;
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

    /// Returns whether a command may be carried out more than once, and late. By default none may.
    ///
    /// redis-rs sends a command again, many times, if its connection is lost or its reply is late.
    /// The node may have carried out the first one, or may do so later: a second `INCR` counts
    /// twice, a second `SET` can replace a newer value. So a command for which this is false fails
    /// instead. Commands that a node refused or never got are sent again in any case.
    fn may_repeat(_command: &Cmd) -> bool {
        false
    }
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
    /// The task that ends when the connection is lost.
    driver: Arc<JoinHandle<()>>,
    /// Whether a request has failed because the connection was lost.
    lost: Arc<AtomicBool>,
    _reached: PhantomData<fn() -> N>,
}

impl<N> Clone for ClusterNode<N> {
    fn clone(&self) -> Self {
        let Self { connection, driver, lost, _reached } = self;
        Self {
            connection: connection.clone(),
            driver: Arc::clone(driver),
            lost: Arc::clone(lost),
            _reached: PhantomData,
        }
    }
}

impl<N: Nodes> ClusterNode<N> {
    /// Returns an error that redis-rs answers by a new connection for the same request, which this
    /// one is not given.
    fn check(&self) -> RedisResult<()> {
        if self.lost.load(Ordering::Relaxed) || self.driver.is_finished() {
            return Err(io::Error::from(io::ErrorKind::NotConnected).into());
        }
        Ok(())
    }

    /// Replaces an error after which redis-rs would send the same commands again.
    fn told<T>(&self, outcome: RedisResult<T>, may_repeat: bool) -> RedisResult<T> {
        outcome.map_err(|error| {
            if is_loss(&error) {
                self.lost.store(true, Ordering::Relaxed);
            } else if !error.is_io_error() {
                // An answer of the node.
                return error;
            }
            if may_repeat { error } else { unknown(&error) }
        })
    }
}

fn unknown(error: &RedisError) -> RedisError {
    let what = "the node may have carried out the command, so it is not sent again";
    (ErrorKind::Client, what, error.to_string()).into()
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
            let (connection, driver) = client.multiplexed(config).await?;
            Ok(Self { connection, driver: Arc::new(driver), lost: Arc::default(), _reached: PhantomData })
        })
    }
}

impl<N: Nodes> ConnectionLike for ClusterNode<N> {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            self.check()?;
            let outcome = self.connection.req_packed_command(cmd).await;
            self.told(outcome, N::may_repeat(cmd))
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            self.check()?;
            let outcome = self.connection.req_packed_commands(pipeline, offset, count).await;
            self.told(outcome, pipeline.cmd_iter().all(N::may_repeat))
        })
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}
