//! The bridge: accepts clients, connects each to the server, and drains when it stops.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rdma_conn::{Connect, Descriptors, Limits, Options};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::channel::{Accepted, Dialling, Listening};
use crate::counters::Counters;
use crate::error::Error;
use crate::place::Place;
use crate::pump::{Broken, Side};
use crate::relay::{Patience, SILENCE, discard, relay};
use crate::tls::TlsFiles;

/// How long nothing is accepted after the process ran out of descriptors or memory for a client.
const BREATH: Duration = Duration::from_millis(100);

const FULL: &[u8] = b"-ERR max number of clients reached\r\n";

/// Settings of a bridge.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// Clients at the same time. A further one is closed; over TCP without TLS it gets an error
    /// reply. Each costs what its RDMA connection registers, and at most 64 KiB for bytes that one
    /// side did not take yet.
    pub max_connections: usize,
    /// Time limit for the connection to the server, and for a TLS handshake on either side.
    pub connect_timeout: Duration,
    /// How long either side may take nothing while bytes wait for it, its last ones included. It is
    /// reset after one to two of these.
    pub stall: Duration,
    /// How long no reply may come before a half-closed client's server connection ends.
    ///
    /// A client that ends its own direction (`shutdown(2)` with `SHUT_WR`) still gets its replies.
    /// RDMA has no half-close, so the bridge ends the server's connection when all replies were
    /// delivered and none has come for this long. A full disconnect looks the same, so the server
    /// notices it this much later.
    pub quiet: Duration,
    /// How long clients may continue after the bridge was told to stop. Then they are reset.
    pub drain: Duration,
    /// The options of RDMA connections. `stall` overrides their `linger`.
    pub options: Options,
    /// Certificates for `tls://`.
    pub tls: TlsFiles,
}

impl Default for Settings {
    /// 1000 clients, 5 s to connect, 60 s without progress, 200 ms of quiet, 30 s to drain, no
    /// certificates.
    fn default() -> Self {
        Self {
            max_connections: 1000,
            connect_timeout: Duration::from_secs(5),
            stall: Duration::from_secs(60),
            quiet: Duration::from_millis(200),
            drain: Duration::from_secs(30),
            options: Options::default(),
            tls: TlsFiles::default(),
        }
    }
}

/// Accepts clients on one transport and connects each to a server on another.
pub struct Bridge<B: Descriptors> {
    listening: Listening<B>,
    inner: Arc<Inner<B>>,
    max_connections: usize,
    drain: Duration,
    server_is_here: bool,
}

struct Inner<B: Descriptors> {
    server: Dialling<B>,
    counters: Arc<Counters>,
    patience: Patience,
    connect_timeout: Duration,
}

impl<B: Descriptors> Bridge<B> {
    /// Listens on `listen`, for clients to be connected to `connect`, which need not exist yet.
    ///
    /// # Errors
    /// Returns an error if the place to listen on is taken or no address of this machine, if there
    /// is no RDMA device, or if TLS lacks a certificate, a key or authorities.
    pub async fn bind(
        backend: &B,
        listen: &Place,
        connect: Place,
        settings: &Settings,
    ) -> Result<Self, Error> {
        let tls = settings.tls.load()?;
        let limits = Limits::default().connections(settings.max_connections);
        // A connection's end may take as long as its peer takes bytes. The relay counts that. If it
        // is dropped meanwhile, the connection itself does.
        let mut options = settings.options.linger(Duration::MAX);
        options.protocol.stall_limit = Some(settings.stall.saturating_mul(3));
        let how = Connect::default().timeout(settings.connect_timeout).options(options);
        let server = Dialling::new(connect, backend, limits, &tls, how)?;
        let listening = Listening::bind(listen, backend, limits, &tls, options).await?;
        // Only now: an RDMA address that does not answer takes its time, and clients may connect.
        let server_is_here = server.place().is_here(backend, settings.connect_timeout).await;
        let patience = Patience { stall: settings.stall, quiet: settings.quiet };
        let counters = Arc::default();
        let inner = Inner { server, counters, patience, connect_timeout: settings.connect_timeout };
        let (max_connections, drain) = (settings.max_connections, settings.drain);
        Ok(Self { listening, inner: Arc::new(inner), max_connections, drain, server_is_here })
    }

    /// Returns whether clients of other machines can reach the bridge: it does not listen on a
    /// loopback address.
    ///
    /// # Errors
    /// Returns an error if the socket or the device is gone.
    pub fn is_exposed(&self) -> io::Result<bool> {
        Ok(!self.listening.address()?.ip().to_canonical().is_loopback())
    }

    /// Returns whether the server takes all clients of the bridge for local ones, so that its
    /// protected mode admits them: the route to it led back to this machine when the bridge was
    /// bound.
    pub const fn is_server_here(&self) -> bool {
        self.server_is_here
    }

    /// Returns the place that clients connect to, with the actual address and port.
    ///
    /// # Errors
    /// Returns an error if the socket or the device is gone.
    pub fn place(&self) -> io::Result<Place> {
        self.listening.place()
    }

    /// Returns the counters of the bridge, which it updates while it runs.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.inner.counters)
    }

    /// Serves until `stop` completes. It then accepts no clients, gives the connected ones
    /// [`Settings::drain`] to end by themselves, and ends the rest.
    ///
    /// # Errors
    /// Returns an error if the listener failed for good, for example because its RDMA device was
    /// removed.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> io::Result<()> {
        let places = Arc::new(Semaphore::new(self.max_connections));
        let mut tasks = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        let result = loop {
            let accepted = tokio::select! {
                () = &mut stop => break Ok(()),
                Some(_) = tasks.join_next() => continue,
                accepted = self.listening.accept() => accepted,
            };
            let client = match accepted {
                Ok(client) => client,
                Err(error) if passes(&error) => {
                    tracing::warn!(%error, "cannot accept a client now");
                    sleep(BREATH).await;
                    continue;
                }
                Err(error) => break Err(error),
            };
            Counters::one_more(&self.inner.counters.accepted);
            match Arc::clone(&places).try_acquire_owned() {
                Ok(place) => {
                    tasks.spawn(Arc::clone(&self.inner).serve_client(client, place));
                }
                Err(_full) => {
                    Counters::one_more(&self.inner.counters.refused);
                    client.refuse(FULL);
                }
            }
        };
        drop(self.listening);
        tracing::info!(open = tasks.len(), "draining");
        let drained = timeout(self.drain, async { while tasks.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!(open = tasks.len(), "ending what did not end by itself");
        }
        tasks.shutdown().await;
        result
    }
}

impl<B: Descriptors> Inner<B> {
    async fn serve_client(self: Arc<Self>, client: Accepted<B>, _place: OwnedSemaphorePermit) {
        let counters = &self.counters;
        let counter = match self.relay(client).await {
            Ok(()) => &counters.ended,
            Err(Failure::Unreachable(error)) => {
                tracing::warn!(server = %self.server.place(), %error, "the server cannot be reached");
                &counters.unreachable
            }
            // Clients come and go. Only a failure of the server deserves a warning.
            Err(Failure::Broken(Broken { side: Side::Client, error })) => {
                tracing::debug!(%error, "a client's connection broke");
                &counters.failed
            }
            Err(Failure::Broken(Broken { side: Side::Server, error })) => {
                tracing::warn!(server = %self.server.place(), %error, "the server's connection broke");
                &counters.failed
            }
        };
        counter.fetch_add(1, Ordering::Release);
    }

    async fn relay(&self, client: Accepted<B>) -> Result<(), Failure> {
        let limit = self.connect_timeout;
        let broke = |error| Failure::Broken(Broken { side: Side::Client, error });
        let mut client = within(limit, client.channel()).await.map_err(broke)?;
        let server = match within(limit, self.server.connect()).await {
            Ok(server) => server,
            Err(error) => {
                // No error reply: a client would take it for the server's answer to its command. It
                // retries when its connection ends without a reply. The reason is in the log.
                let _told = timeout(limit, async {
                    client.shutdown().await?;
                    discard(&mut client, SILENCE, limit).await;
                    Ok::<_, io::Error>(())
                })
                .await;
                return Err(Failure::Unreachable(error));
            }
        };
        relay(client, server, &self.counters, self.patience).await.map_err(Failure::Broken)
    }
}

async fn within<T>(limit: Duration, connect: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, connect).await.unwrap_or_else(|_| {
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {limit:?}")))
    })
}

enum Failure {
    Unreachable(io::Error),
    Broken(Broken),
}

/// Whether an error of `accept(2)` concerns one client, or passes when others have ended.
fn passes(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    const EMFILE: i32 = 24;
    const ENFILE: i32 = 23;
    const ENOBUFS: i32 = 105;
    matches!(
        error.kind(),
        Kind::ConnectionAborted | Kind::ConnectionReset | Kind::OutOfMemory | Kind::Interrupted
    ) || matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOBUFS))
}
