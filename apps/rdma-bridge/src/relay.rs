//! One client and its server: bytes from each to the other, until both have ended.

use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rdma_conn::Descriptors;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::channel::Channel;
use crate::counters::Counters;

/// Bytes on their way in each direction of one connection.
const BUFFER: usize = 32 << 10;

/// How long the rest of what a client sent is thrown away after its server has ended: a socket that is closed with bytes unread resets the
/// connection, and the last reply could be lost by that.
const DISCARD: Duration = Duration::from_secs(1);

/// How long connections wait for what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// For a peer to take bytes.
    pub(crate) stall: Duration,
    /// For more replies, after a client has ended its own direction, when the server's connection can only end as a whole.
    pub(crate) quiet: Duration,
}

/// A side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

impl Side {
    fn broke(self) -> impl Fn(io::Error) -> Broken {
        move |error| Broken { side: self, error }
    }
}

/// Which side failed, or took nothing for [`Patience::stall`].
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) side: Side,
    pub(crate) error: io::Error,
}

/// Relays until both sides have ended.
///
/// # Errors
/// One side broke. The other was reset, so that it sees no orderly end.
pub(crate) async fn relay<B: Descriptors>(
    mut client: Channel<B>,
    mut server: Channel<B>,
    counters: &Counters,
    patience: Patience,
) -> Result<(), Broken> {
    let result = until_the_end(&mut client, &mut server, counters, patience).await;
    if result.is_err() {
        client.reset();
        server.reset();
    }
    result
}

async fn until_the_end<B: Descriptors>(
    client: &mut Channel<B>,
    server: &mut Channel<B>,
    counters: &Counters,
    Patience { stall, quiet }: Patience,
) -> Result<(), Broken> {
    let (client_half_closes, server_half_closes) = (client.half_closes(), server.half_closes());
    let forward = Flow::new(&counters.forward);
    let backward = Flow::new(&counters.backward);
    let (mut from_client, mut to_client) = tokio::io::split(&mut *client);
    let (mut from_server, mut to_server) = tokio::io::split(&mut *server);
    let first = {
        let requests =
            pump((&mut from_client, Side::Client), (&mut to_server, Side::Server), &forward, stall);
        let replies =
            pump((&mut from_server, Side::Server), (&mut to_client, Side::Client), &backward, stall);
        let (mut requests, mut replies) = (pin!(requests), pin!(replies));
        tokio::select! {
            result = &mut requests => {
                result?;
                // A client of TCP may still read, and the server's replies to what it has sent are worth waiting for. Ending the
                // server's RDMA connection would end both directions of it.
                if client_half_closes && !server_half_closes {
                    until_quiet(&mut replies, quiet, &backward).await?;
                }
                Side::Client
            }
            result = &mut replies => {
                result?;
                Side::Server
            }
        }
    };
    match first {
        Side::Client => {
            finish(&mut to_server, stall).await.map_err(Side::Server.broke())?;
            if client_half_closes && server_half_closes {
                pump((&mut from_server, Side::Server), (&mut to_client, Side::Client), &backward, stall)
                    .await?;
            }
            if client_half_closes {
                // If it is gone already, so much the better.
                let _gone = finish(&mut to_client, stall).await;
            }
        }
        Side::Server => {
            finish(&mut to_client, stall).await.map_err(Side::Client.broke())?;
            if client_half_closes {
                let _rest = timeout(DISCARD, tokio::io::copy(&mut from_client, &mut tokio::io::sink())).await;
            }
            if server_half_closes {
                let _gone = finish(&mut to_server, stall).await;
            }
        }
    }
    Ok(())
}

/// Relays replies to a client that sends nothing more, until none has come for `quiet`.
async fn until_quiet(
    replies: &mut (impl Future<Output = Result<(), Broken>> + Unpin),
    quiet: Duration,
    backward: &Flow<'_>,
) -> Result<(), Broken> {
    loop {
        let before = backward.bytes();
        match timeout(quiet, &mut *replies).await {
            // The client does not read: it had ended as a whole.
            Ok(Ok(()) | Err(Broken { side: Side::Client, .. })) => return Ok(()),
            Ok(Err(broken)) => return Err(broken),
            Err(_) if backward.bytes() > before => {}
            Err(_) => return Ok(()),
        }
    }
}

/// The bytes of one direction: of this connection, and of all.
struct Flow<'a> {
    here: AtomicU64,
    all: &'a AtomicU64,
}

impl<'a> Flow<'a> {
    const fn new(all: &'a AtomicU64) -> Self {
        Self { here: AtomicU64::new(0), all }
    }

    fn add(&self, bytes: usize) {
        self.here.fetch_add(bytes as u64, Ordering::Relaxed);
        self.all.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn bytes(&self) -> u64 {
        self.here.load(Ordering::Relaxed)
    }
}

/// Moves bytes until `from` ends, each as soon as it is there.
async fn pump(
    (from, source): (&mut (impl AsyncRead + Unpin), Side),
    (to, target): (&mut (impl AsyncWrite + Unpin), Side),
    flow: &Flow<'_>,
    stall: Duration,
) -> Result<(), Broken> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = from.read(&mut buffer).await.map_err(source.broke())?;
        if read == 0 {
            return Ok(());
        }
        let mut rest = buffer.get(..read).unwrap_or_default();
        while !rest.is_empty() {
            let written = in_time(stall, to.write(rest)).await.map_err(target.broke())?;
            if written == 0 {
                return Err(target.broke()(io::ErrorKind::WriteZero.into()));
            }
            flow.add(written);
            rest = rest.get(written..).unwrap_or_default();
        }
        in_time(stall, to.flush()).await.map_err(target.broke())?;
    }
}

/// Delivers what was written and ends this direction; of an RDMA connection, both.
async fn finish(to: &mut (impl AsyncWrite + Unpin), stall: Duration) -> io::Result<()> {
    match in_time(stall, to.shutdown()).await {
        // It had ended already.
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        result => result,
    }
}

async fn in_time<T>(stall: Duration, act: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match timeout(stall, act).await {
        Ok(result) => result,
        Err(_) => {
            Err(io::Error::new(io::ErrorKind::TimedOut, format!("the peer took nothing for {stall:?}")))
        }
    }
}
