//! One side of one connection: TCP, TLS over TCP, or RDMA.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use rdma_conn::{AsyncEndpoint, AsyncListener, AsyncStream, Connect, Descriptors, Limits, Options};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::error::Error;
use crate::place::{Carrier, Place};
use crate::pump::Taken;
use crate::relay::End;
use crate::tls::TlsConfig;

/// Silence after which a TCP peer is probed, and the interval of probes, as in a Valkey server.
const KEEPALIVE: Duration = Duration::from_secs(300);

enum Carried<B: Descriptors> {
    Tcp(TcpStream),
    Tls(Box<TlsStream<Counted>>),
    Rdma(AsyncStream<B>),
}

impl<B: Descriptors> Carried<B> {
    /// Returns how many bytes have left for the peer.
    fn sent(&self) -> u64 {
        match self {
            // A call takes bytes, or has delivered nothing of what was written before.
            Self::Tcp(_) => 0,
            Self::Tls(stream) => stream.get_ref().0.sent,
            Self::Rdma(stream) => stream.counters().bytes_sent,
        }
    }
}

/// Writes of one slice, for an `AsyncWrite` that has `poll_write_vectored`.
macro_rules! writes_slices {
    () => {
        fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
            self.poll_write_vectored(cx, &[IoSlice::new(from)])
        }

        fn is_write_vectored(&self) -> bool {
            true
        }
    };
}

/// A socket below TLS, which writes more than one call's bytes.
struct Counted {
    socket: TcpStream,
    sent: u64,
}

impl From<TcpStream> for Counted {
    fn from(socket: TcpStream) -> Self {
        Self { socket, sent: 0 }
    }
}

impl AsyncRead for Counted {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_read(cx, into)
    }
}

impl AsyncWrite for Counted {
    writes_slices!();

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.socket).poll_write_vectored(cx, from))?;
        this.sent += written as u64;
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(cx)
    }
}

/// A connection of any transport. Dropping it before it was shut down resets it: its peer must not
/// take half of a reply for a whole one.
pub(crate) struct Channel<B: Descriptors> {
    stream: Carried<B>,
    finished: bool,
    taken: Taken,
}

impl<B: Descriptors> From<Carried<B>> for Channel<B> {
    fn from(stream: Carried<B>) -> Self {
        Self { stream, finished: false, taken: Taken::default() }
    }
}

impl<B: Descriptors> Channel<B> {
    /// Updates the count of taken bytes, if a call waits.
    fn unless_done<T>(&self, outcome: Poll<T>) -> Poll<T> {
        if outcome.is_pending() {
            self.taken.store(self.stream.sent(), Ordering::Relaxed);
        }
        outcome
    }
}

impl<B: Descriptors> End for Channel<B> {
    fn half_closes(&self) -> bool {
        !matches!(self.stream, Carried::Rdma(_))
    }

    fn taken(&self) -> Taken {
        Arc::clone(&self.taken)
    }
}

impl<B: Descriptors> Drop for Channel<B> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let socket: &TcpStream = match &mut self.stream {
            Carried::Tcp(socket) => socket,
            Carried::Tls(stream) => &stream.get_ref().0.socket,
            Carried::Rdma(stream) => {
                // Beginning is enough: nothing waits for undelivered bytes. A peer in the middle of
                // a reply recognises the end.
                let mut abort = pin!(stream.close(Duration::ZERO));
                let _begun = abort.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                return;
            }
        };
        // If it cannot be set, the peer sees an orderly end.
        let _orderly = SockRef::from(socket).set_linger(Some(Duration::ZERO));
    }
}

impl<B: Descriptors> AsyncRead for Channel<B> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().stream {
            Carried::Tcp(stream) => Pin::new(stream).poll_read(cx, into),
            Carried::Tls(stream) => Pin::new(stream).poll_read(cx, into),
            Carried::Rdma(stream) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl<B: Descriptors> AsyncWrite for Channel<B> {
    writes_slices!();

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = match &mut this.stream {
            Carried::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, from),
            Carried::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, from),
            Carried::Rdma(stream) => Pin::new(stream).poll_write_vectored(cx, from),
        };
        this.unless_done(written)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = match &mut this.stream {
            Carried::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Carried::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Carried::Rdma(stream) => Pin::new(stream).poll_flush(cx),
        };
        this.unless_done(flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let ended = match &mut this.stream {
            Carried::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Carried::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            Carried::Rdma(stream) => Pin::new(stream).poll_shutdown(cx),
        };
        let ended = ready!(this.unless_done(ended));
        this.finished |= ended.is_ok();
        Poll::Ready(ended)
    }
}

pub(crate) enum Listening<B: Descriptors> {
    Tcp(TcpListener, Option<Arc<ServerConfig>>),
    Rdma(AsyncListener<B>),
}

pub(crate) enum Accepted<B: Descriptors> {
    Tcp(TcpStream, Option<Arc<ServerConfig>>),
    Rdma(AsyncStream<B>),
}

impl<B: Descriptors> Listening<B> {
    pub(crate) async fn bind(
        place: &Place,
        backend: &B,
        limits: Limits,
        tls: &TlsConfig,
        options: Options,
    ) -> Result<Self, Error> {
        let failed = |source| Error::Listen { place: place.clone(), source };
        let server = match place.carrier {
            Carrier::Tcp => None,
            Carrier::Tls => {
                let missing = || Error::Tls { place: place.clone(), what: "a certificate with its key" };
                Some(tls.server.clone().ok_or_else(missing)?)
            }
            Carrier::Rdma => {
                let address = tokio::net::lookup_host(place.authority()).await.map_err(failed)?.next();
                let Some(address) = address else {
                    return Err(failed(io::Error::new(io::ErrorKind::NotFound, "the name has no address")));
                };
                let endpoint = AsyncEndpoint::new(backend, limits).map_err(|error| failed(error.into()))?;
                let listener = endpoint.listen(address, options);
                return Ok(Self::Rdma(listener.map_err(|error| failed(error.into()))?));
            }
        };
        Ok(Self::Tcp(TcpListener::bind(place.authority()).await.map_err(failed)?, server))
    }

    pub(crate) fn place(&self) -> io::Result<Place> {
        let carrier = match self {
            Self::Tcp(_, None) => Carrier::Tcp,
            Self::Tcp(_, Some(_)) => Carrier::Tls,
            Self::Rdma(_) => Carrier::Rdma,
        };
        Ok(Place::at(carrier, self.address()?))
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(listener, _) => listener.local_addr(),
            Self::Rdma(listener) => Ok(listener.local_addr().ok_or(io::ErrorKind::AddrNotAvailable)?),
        }
    }

    pub(crate) async fn accept(&self) -> io::Result<Accepted<B>> {
        Ok(match self {
            Self::Tcp(listener, tls) => Accepted::Tcp(listener.accept().await?.0, tls.clone()),
            Self::Rdma(listener) => Accepted::Rdma(listener.accept().await?.0),
        })
    }
}

impl<B: Descriptors> Accepted<B> {
    /// Tells a client that it cannot be served. The call does not wait, so refusing costs nothing.
    pub(crate) fn refuse(self, reply: &[u8]) {
        if let Self::Tcp(stream, None) = self {
            // A fresh socket has room for it. A client that does not get it sees the end anyway.
            let _unheard = stream.try_write(reply);
        }
    }

    pub(crate) async fn channel(self) -> io::Result<Channel<B>> {
        match self {
            Self::Tcp(stream, tls) => {
                prepare(&stream)?;
                match tls {
                    None => Ok(Carried::Tcp(stream).into()),
                    Some(config) => {
                        let stream = TlsAcceptor::from(config).accept(stream.into()).await?;
                        Ok(Carried::Tls(Box::new(stream.into())).into())
                    }
                }
            }
            Self::Rdma(stream) => Ok(Carried::Rdma(stream).into()),
        }
    }
}

pub(crate) enum Dialling<B: Descriptors> {
    Tcp(Place),
    Tls(Place, Arc<ClientConfig>),
    Rdma(Place, AsyncEndpoint<B>, Box<Connect>),
}

impl<B: Descriptors> Dialling<B> {
    pub(crate) fn new(
        place: Place,
        backend: &B,
        limits: Limits,
        tls: &TlsConfig,
        how: Connect,
    ) -> Result<Self, Error> {
        Ok(match place.carrier {
            Carrier::Tcp => Self::Tcp(place),
            Carrier::Tls => {
                let Some(client) = &tls.client else {
                    let what = "the authorities that its server is certified by";
                    return Err(Error::Tls { place, what });
                };
                Self::Tls(place, Arc::clone(client))
            }
            Carrier::Rdma => match AsyncEndpoint::new(backend, limits) {
                Ok(endpoint) => Self::Rdma(place, endpoint, Box::new(how)),
                Err(error) => return Err(Error::Connect { place, source: error.into() }),
            },
        })
    }

    pub(crate) const fn place(&self) -> &Place {
        match self {
            Self::Tcp(place) | Self::Tls(place, _) | Self::Rdma(place, ..) => place,
        }
    }

    pub(crate) async fn connect(&self) -> io::Result<Channel<B>> {
        match self {
            Self::Tcp(place) => Ok(Carried::Tcp(dial(place).await?).into()),
            Self::Tls(place, config) => {
                let invalid = |error| io::Error::new(io::ErrorKind::InvalidInput, error);
                let name = ServerName::try_from(place.host.clone()).map_err(invalid)?;
                let stream =
                    TlsConnector::from(Arc::clone(config)).connect(name, dial(place).await?.into()).await?;
                Ok(Carried::Tls(Box::new(stream.into())).into())
            }
            Self::Rdma(place, endpoint, how) => {
                Ok(Carried::Rdma(endpoint.connect(place.authority(), how).await?).into())
            }
        }
    }
}

async fn dial(place: &Place) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(place.authority()).await?;
    prepare(&stream)?;
    Ok(stream)
}

fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 3);
    SockRef::from(socket).set_tcp_keepalive(&keepalive)
}

#[cfg(test)]
mod tests {
    use rdma_softsim::Fabric;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::timeout;

    use super::*;

    /// Longer than a machine stands still.
    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn what_a_peer_takes_counts_while_a_flush_waits() {
        let fabric = Fabric::new();
        let [ours, theirs] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(|address| fabric.host(&[address.into()]));
        let mut options = Options::default().handshake_timeout(LONG);
        options.protocol.window = 4096;
        options.protocol.send_buffer = 1 << 20;
        let listener = AsyncListener::bind_with(&theirs, "192.0.2.2:0", options, Limits::default()).await;
        let listener = listener.expect("a listener");
        let how = Connect::default().timeout(LONG).options(options);
        let address = listener.local_addr().expect("bound");
        let (stream, accepted) =
            tokio::join!(AsyncStream::connect_with(&ours, address, &how), listener.accept());
        let mut channel = Channel::from(Carried::Rdma(stream.expect("connected")));
        let (mut peer, _) = accepted.expect("accepted");
        let taken = channel.taken();
        channel.write_all(&[b'x'; 100_000]).await.expect("there is room");
        let mut waits = async || {
            let flushed = timeout(Duration::from_millis(20), channel.flush()).await;
            assert!(flushed.is_err(), "the peer has not read all");
            taken.load(Ordering::Relaxed)
        };
        let mut before = waits().await;
        for _ in 0..3 {
            peer.read_exact(&mut [0; 20_000]).await.expect("read");
            while waits().await == before {}
            before = waits().await;
        }
    }
}
