use std::error::Error;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rdma_conn::Descriptors;
use redis::aio::{MultiplexedConnection, PubSub};
use redis::{AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError, RedisResult};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::endpoints::Endpoints;
use crate::reconnecting::{Reconnect, Reconnecting};
use crate::settings::{Settings, Target, parse};
use crate::transport::{self, ByteStream, Loaded, Tls, Transport};

/// A client of one server over RDMA, which makes connections.
#[derive(Clone, Debug)]
pub struct Client<B: Descriptors> {
    endpoints: Loaded<B>,
    pub(crate) info: ConnectionInfo,
    secure: bool,
    tls: Option<Tls>,
    settings: Settings,
    newest: Arc<Mutex<Option<Transport>>>,
}

impl<B: Descriptors> Client<B> {
    /// Returns a client for `valkey+rdma://[USER[:PASSWORD]@]HOST[:PORT][/DB][?OPTIONS]`, or
    /// `valkeys+rdma://…` for TLS over RDMA (feature `tls`, `Client::with_tls`). It does not
    /// connect yet. The options, joined by `&`, are
    ///
    /// - `protocol=resp3`, or `resp2`, which is the default,
    /// - `timeout=SECONDS`, `response_timeout=SECONDS`, `fallback=tcp` or `fallback=tcp:PORT`: see
    ///   [`Settings`],
    /// - what networks and cards need: [`rdma_conn::SETTINGS`], by name.
    ///
    /// `rdma` is a backend, or [`Endpoints`] that several clients share.
    ///
    /// # Errors
    /// Returns an error if the URL does not have that form.
    pub fn open(rdma: impl Into<Endpoints<B>>, url: impl AsRef<str>) -> RedisResult<Self> {
        Self::with_settings(rdma, url, Settings::default())
    }

    /// Returns a client with settings. Options of the URL override them.
    ///
    /// # Errors
    /// Returns an error if the URL does not have the form of [`Client::open`].
    pub fn with_settings(
        rdma: impl Into<Endpoints<B>>,
        url: impl AsRef<str>,
        mut settings: Settings,
    ) -> RedisResult<Self> {
        Ok(Self::new(Ok(rdma.into()), parse(url.as_ref(), &mut settings)?, settings))
    }

    /// Returns a client with settings for a backend that may be missing: pass `Verbs::load()`.
    /// Without one, all connections use the fallback.
    ///
    /// # Errors
    /// Returns an error if the URL does not have the form of [`Client::open`], or if there is
    /// neither a backend nor a fallback.
    pub fn with_fallback<E: Error + Send + Sync + 'static>(
        rdma: Result<impl Into<Endpoints<B>>, E>,
        url: impl AsRef<str>,
        mut settings: Settings,
    ) -> RedisResult<Self> {
        let target = parse(url.as_ref(), &mut settings)?;
        let endpoints = rdma.map(Into::into).map_err(|error| Arc::new(error) as Arc<_>);
        if settings.fallback.is_none() {
            transport::loaded(&endpoints)?;
        }
        Ok(Self::new(endpoints, target, settings))
    }

    pub(crate) fn new(endpoints: Loaded<B>, Target { info, secure }: Target, settings: Settings) -> Self {
        Self { endpoints, info, secure, tls: None, settings, newest: Arc::default() }
    }

    /// Sets the configuration of TLS, which a `valkeys+rdma://` URL needs. The server's certificate
    /// must match the URL's host.
    ///
    /// TLS runs inside the RDMA stream, and the peer's device still writes into this process: it
    /// protects the bytes, not the memory. Valkey's own programs speak no TLS over RDMA;
    /// `rdma-server` does.
    ///
    /// # Errors
    /// Returns an error if the URL is a `valkey+rdma://` one, without TLS.
    #[cfg(feature = "tls")]
    pub fn with_tls(mut self, config: Arc<tokio_rustls::rustls::ClientConfig>) -> RedisResult<Self> {
        if !self.secure {
            let without = "TLS was configured for a URL without it: use valkeys+rdma://";
            return Err((ErrorKind::InvalidClientConfig, without).into());
        }
        self.tls = Some(Tls { config });
        Ok(self)
    }

    async fn secured(&self, stream: ByteStream, host: &str) -> RedisResult<ByteStream> {
        match &self.tls {
            _ if !self.secure => Ok(stream),
            Some(tls) => Ok(tls.over(stream, host).await?),
            None => {
                let missing = "valkeys+rdma:// needs the feature `tls` and a configuration: Client::with_tls";
                Err((ErrorKind::InvalidClientConfig, missing).into())
            }
        }
    }

    /// Returns the transport of the newest connection of this client or its clones, if any.
    ///
    /// The first fallback after the start or after RDMA is logged as a warning, others as `DEBUG`.
    pub fn transport(&self) -> Option<Transport> {
        *self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects. The connection can be cloned, and its clones share one RDMA stream.
    ///
    /// # Errors
    /// Returns why there is no connection ([`rdma_conn::Error`]), or the server's error reply.
    pub async fn get_multiplexed_async_connection(&self) -> RedisResult<MultiplexedConnection> {
        self.get_multiplexed_async_connection_with_config(AsyncConnectionConfig::new()).await
    }

    /// Connects with settings of redis-rs. Its two time-outs and its resolver do not apply:
    /// [`Settings`] has the time-outs.
    ///
    /// # Errors
    /// The errors are those of [`Client::get_multiplexed_async_connection`].
    pub async fn get_multiplexed_async_connection_with_config(
        &self,
        config: AsyncConnectionConfig,
    ) -> RedisResult<MultiplexedConnection> {
        let (connection, _driver) = self.multiplexed(config).await?;
        Ok(connection)
    }

    /// Makes a connection and its driver, a task that ends when it is lost or unused.
    pub(crate) async fn multiplexed(
        &self,
        config: AsyncConnectionConfig,
    ) -> RedisResult<(MultiplexedConnection, JoinHandle<()>)> {
        let config = config.set_response_timeout(self.settings.response_timeout);
        let redis = self.info.redis_settings();
        self.connected(|stream| async move {
            let (connection, driver) = MultiplexedConnection::new_with_config(redis, stream, config).await?;
            Ok((connection, tokio::spawn(driver)))
        })
        .await
    }

    /// Connects for publish and subscribe, on a stream of its own. Waits in redis-rs's `PubSub`
    /// have no time-out: for its `subscribe` use [`tokio::time::timeout`].
    ///
    /// # Errors
    /// The errors are those of [`Client::get_multiplexed_async_connection`].
    pub async fn get_async_pubsub(&self) -> RedisResult<PubSub> {
        self.connected(|stream| PubSub::new(self.info.redis_settings(), stream)).await
    }

    /// Connects, and reconnects whenever the connection is lost.
    ///
    /// # Errors
    /// Those of [`Client::get_multiplexed_async_connection`], for the first connection.
    pub async fn get_reconnecting_connection(&self, how: Reconnect) -> RedisResult<Reconnecting<B>> {
        Reconnecting::new(self.clone(), how).await
    }

    /// Makes a stream and performs the handshake on it, both within the time for connecting.
    async fn connected<T, H: Future<Output = RedisResult<T>>>(
        &self,
        handshake: impl FnOnce(ByteStream) -> H,
    ) -> RedisResult<T> {
        let ConnectionAddr::Tcp(host, port) = self.info.addr() else {
            return Err((ErrorKind::InvalidClientConfig, "not an RDMA address").into());
        };
        let reached = OnceLock::new();
        let connecting = async {
            let (stream, transport) =
                transport::connect(&self.endpoints, (host, *port), &self.settings, self.transport()).await?;
            let transport = *reached.get_or_init(|| transport);
            let connected = handshake(self.secured(stream, host).await?).await?;
            *self.newest.lock().unwrap_or_else(PoisonError::into_inner) = Some(transport);
            Ok(connected)
        };
        let within = self.settings.connect.timeout;
        let in_time = timeout(within, connecting).await;
        in_time.unwrap_or_else(|_late| Err(too_late(host, *port, within, reached.get())))
    }
}

fn too_late(host: &str, port: u16, within: Duration, reached: Option<&Transport>) -> RedisError {
    let what = match reached {
        Some(transport) => format!(
            "{host}:{port} took a connection over {transport} and did not answer the handshake within {within:?}: is it a \
             Valkey server, and does it run?"
        ),
        None => format!("{host}:{port} could not be reached within {within:?}"),
    };
    io::Error::new(io::ErrorKind::TimedOut, what).into()
}
