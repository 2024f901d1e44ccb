//! Makes the stream below a connection.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use rdma_conn::{AsyncStream, Descriptors};
use redis::RedisResult;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::endpoints::Endpoints;
use crate::settings::{Fallback, Settings};

/// The transport of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// An RDMA connection.
    Rdma,
    /// A TCP connection, because RDMA failed: see [`Fallback`].
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rdma => "RDMA",
            Self::Tcp => "TCP",
        })
    }
}

/// A stream over either.
pub(crate) type ByteStream = Pin<Box<dyn redis::aio::AsyncStream + Send>>;

/// The program's RDMA, or why it has none.
pub(crate) type Loaded<B> = Result<Endpoints<B>, Arc<dyn std::error::Error + Send + Sync>>;

/// A client's configuration of TLS; empty without the feature `tls`.
#[derive(Clone, Debug)]
pub(crate) struct Tls {
    #[cfg(feature = "tls")]
    pub(crate) config: Arc<tokio_rustls::rustls::ClientConfig>,
}

impl Tls {
    #[cfg(feature = "tls")]
    pub(crate) async fn over(&self, stream: ByteStream, host: &str) -> io::Result<ByteStream> {
        let unusable = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
        let name =
            tokio_rustls::rustls::pki_types::ServerName::try_from(host.to_string()).map_err(unusable)?;
        let connector = tokio_rustls::TlsConnector::from(Arc::clone(&self.config));
        Ok(Box::pin(connector.connect(name, stream).await?))
    }

    #[cfg(not(feature = "tls"))]
    pub(crate) async fn over(&self, stream: ByteStream, _: &str) -> io::Result<ByteStream> {
        Ok(stream)
    }
}

/// Connects to a host and port according to `settings`. Warns of a fallback unless it was taken
/// `before`.
pub(crate) async fn connect<B: Descriptors>(
    endpoints: &Loaded<B>,
    (host, port): (&str, u16),
    settings: &Settings,
    before: Option<Transport>,
) -> RedisResult<(ByteStream, Transport)> {
    let no_rdma = match over_rdma(endpoints, host, port, settings).await {
        Ok(stream) => return Ok((Box::pin(stream), Transport::Rdma)),
        Err(error) => error,
    };
    let Some(Fallback::Tcp { port: other }) = settings.fallback else { return Err(no_rdma.into()) };
    let port = other.unwrap_or(port);
    match TcpStream::connect((host, port)).await {
        Ok(stream) => {
            stream.set_nodelay(true)?;
            // A pool or a reconnecting connection makes many connections.
            match before {
                Some(Transport::Tcp) => {
                    tracing::debug!(host, port, error = %no_rdma, "no RDMA connection, using TCP");
                }
                _ => tracing::warn!(host, port, error = %no_rdma, "no RDMA connection, using TCP"),
            }
            Ok((Box::pin(stream), Transport::Tcp))
        }
        Err(no_tcp) => {
            let both = format!("by RDMA: {no_rdma}; by TCP to port {port}: {no_tcp}");
            Err(io::Error::new(no_tcp.kind(), both).into())
        }
    }
}

async fn over_rdma<B: Descriptors>(
    endpoints: &Loaded<B>,
    host: &str,
    port: u16,
    settings: &Settings,
) -> io::Result<AsyncStream<B>> {
    let endpoints =
        endpoints.as_ref().map_err(|error| io::Error::new(io::ErrorKind::Unsupported, Arc::clone(error)))?;
    let mut within = settings.connect.timeout;
    if settings.fallback.is_some() {
        within /= 2;
    }
    let how = settings.connect.timeout(within);
    let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let endpoint = endpoints.current()?;
    // `how` bounds the connection to each address; this bounds the look-up of the name and all
    // addresses together.
    match timeout(within, endpoint.connect(&address, &how)).await {
        Ok(connected) => Ok(connected?),
        Err(_late) => {
            let late = format!("{address} could not be reached by RDMA within {within:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, late))
        }
    }
}
