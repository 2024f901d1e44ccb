//! Makes the stream below a connection.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rdma_conn::{AsyncStream, Descriptors};
use redis::RedisResult;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

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

pub(crate) type ByteStream = Pin<Box<dyn redis::aio::AsyncStream + Send>>;

pub(crate) type Loaded<B> = Result<Endpoints<B>, Arc<dyn std::error::Error + Send + Sync>>;

pub(crate) fn loaded<B: Descriptors>(endpoints: &Loaded<B>) -> io::Result<&Endpoints<B>> {
    endpoints.as_ref().map_err(|error| io::Error::new(io::ErrorKind::Unsupported, Arc::clone(error)))
}

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

/// Connects to a host and port. Warns of a fallback unless it was taken `before`.
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
    let endpoints = loaded(endpoints)?;
    let mut within = settings.connect.timeout;
    if settings.fallback.is_some() {
        within /= 2;
    }
    let how = settings.connect.timeout(within);
    let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let endpoint = endpoints.current()?;
    // `within` bounds the look-up of the name and all addresses together.
    let connecting = async {
        let addresses: Vec<_> = tokio::net::lookup_host(&address).await?.collect();
        in_turn(&addresses, how.timeout, |peer, share| {
            let (endpoint, how) = (endpoint.clone(), how.timeout(share));
            async move { Ok(endpoint.connect(peer, &how).await?) }
        })
        .await
    };
    match timeout(within, connecting).await {
        Ok(connected) => connected,
        Err(_late) => {
            let late = format!("{address} could not be reached by RDMA within {within:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, late))
        }
    }
}

/// Connects to the first of these addresses that answers. The remaining ones share the remaining
/// time evenly, so a silent one, such as one whose card has failed, leaves time for the others.
async fn in_turn<T, F: Future<Output = io::Result<T>>>(
    addresses: &[SocketAddr],
    within: Duration,
    connect: impl Fn(SocketAddr, Duration) -> F,
) -> io::Result<T> {
    let until = Instant::now() + within;
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for (left, peer) in (1..=addresses.len() as u32).rev().zip(addresses) {
        let share = until.saturating_duration_since(Instant::now()) / left;
        match connect(*peer, share).await {
            Ok(connected) => return Ok(connected),
            Err(error) => {
                tracing::debug!(%peer, %error, left = left - 1, "an address of the server did not answer");
                last = error;
            }
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        let addresses = [1, 2, 3].map(|last| SocketAddr::from(([192, 0, 2, last], 6379)));
        let within = Duration::from_secs(60);
        let tried = Mutex::new(Vec::new());
        let connect = |peer: SocketAddr, share| {
            tried.lock().expect("is held for a push").push((peer, share));
            async move { if peer == addresses[1] { Ok(peer) } else { Err(io::ErrorKind::TimedOut.into()) } }
        };
        let connected = in_turn(&addresses, within, connect).await.expect("the second answers");
        assert_eq!(connected, addresses[1]);
        let tried = tried.into_inner().expect("no thread panicked");
        assert!(tried.iter().map(|(peer, _)| peer).eq(&addresses[..2]), "{tried:?}");
        assert!(tried[0].1 <= within / 3 && tried[1].1 <= within / 2, "{tried:?}");
        let none = in_turn(&addresses[2..], within, |_, _| async {
            Err::<(), _>(io::ErrorKind::HostUnreachable.into())
        });
        assert_eq!(none.await.expect_err("none answers").kind(), io::ErrorKind::HostUnreachable);
    }
}
