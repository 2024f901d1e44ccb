//! The clients under test: blocking streams, tokio streams, redis-rs, with the same exchanges.

use std::io::{self, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_store::Frames;
use rdma_conn::{AsyncStream, Connect, Descriptors, RegisteredBuffer, Stream};
use rdma_redis::{Client, Reconnect, Reconnecting, Settings};
use redis::aio::ConnectionLike;
use redis::{RedisError, Value};
use resp_rs::resp2::Frame;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Handle;

use super::keys::Command;

/// How long anything may take. A fault of the network ends a connection long before: retries run
/// out after 20 s, and a client that waits asks after 10 s.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// How long an orderly end may take.
const LINGER: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) enum ExchangeError {
    /// The connection was lost or not established: an effect of faults.
    Lost(String),
    /// An effect of a server that ends: it has lost its data, or its device refuses its window,
    /// because a process loses its memory before its queue pairs (seen on kernel 6.1).
    Died(String),
    /// An error that no fault may cause.
    Wrong(String),
}

#[derive(Debug)]
pub(super) enum SessionEnd {
    /// All data is delivered first.
    Orderly,
    Dropped,
    /// The stream is dropped after these commands, without a wait for their replies.
    MidReply(Vec<Command>),
}

pub(super) trait Face {
    fn connect(&mut self) -> Result<(), ExchangeError>;
    fn exchange(&mut self, commands: &[Command]) -> Result<Vec<Frame>, ExchangeError>;
    fn leave(&mut self, how: SessionEnd) -> Result<(), ExchangeError>;
}

fn connect() -> Connect {
    Connect::default().timeout(Duration::from_secs(15))
}

fn hung(doing: &str) -> ExchangeError {
    ExchangeError::Wrong(format!("hung: {doing} took longer than {LIMIT:?}"))
}

/// Classifies the error of an established connection.
fn lost(error: &io::Error) -> ExchangeError {
    use io::ErrorKind as Kind;
    use rdma_conn::Error::Protocol;
    use rdma_proto::{Error::PeerMisbehaved, PeerMisbehaved::WindowRefused};
    let ours = error.get_ref().and_then(|source| source.downcast_ref());
    if matches!(ours, Some(Protocol(PeerMisbehaved(WindowRefused)))) {
        return ExchangeError::Died(error.to_string());
    }
    match error.kind() {
        // `LIMIT` has passed, which is longer than any fault lasts.
        Kind::TimedOut => ExchangeError::Wrong(format!("hung: {error}")),
        Kind::ConnectionReset
        | Kind::ConnectionAborted
        | Kind::BrokenPipe
        | Kind::NotConnected
        | Kind::UnexpectedEof => ExchangeError::Lost(error.to_string()),
        kind => ExchangeError::Wrong(format!("{kind:?}: {error}")),
    }
}

/// Classifies the error of a connection that was not established.
fn refused(error: &io::Error) -> ExchangeError {
    use io::ErrorKind as Kind;
    match error.kind() {
        // Connecting has shorter limits, which faults may reach.
        Kind::TimedOut | Kind::ConnectionRefused | Kind::HostUnreachable => {
            ExchangeError::Lost(error.to_string())
        }
        _ => lost(error),
    }
}

fn ended() -> ExchangeError {
    ExchangeError::Lost("the server ended the connection".into())
}

fn invalid(error: &io::Error) -> ExchangeError {
    ExchangeError::Wrong(format!("invalid reply: {error}"))
}

/// Blocking streams; some values are lent from registered memory.
pub(super) struct Blocking<B: Descriptors> {
    backend: B,
    server: SocketAddr,
    open: Option<Open<B>>,
}

struct Open<B: Descriptors> {
    stream: Stream<B>,
    lent: Arc<RegisteredBuffer<B>>,
    received: Frames,
    chunk: Box<[u8]>,
}

impl<B: Descriptors> Blocking<B> {
    pub(super) const fn new(backend: B, server: SocketAddr) -> Self {
        Self { backend, server, open: None }
    }

    fn open(&mut self) -> Result<&mut Open<B>, ExchangeError> {
        self.open.as_mut().ok_or_else(|| ExchangeError::Wrong("no connection".into()))
    }
}

impl<B: Descriptors> Open<B> {
    /// Writes all commands in few writes, except lent values.
    fn send(&mut self, commands: &[Command]) -> io::Result<()> {
        let mut head = Vec::new();
        for command in commands {
            command.write_head(&mut head);
            if let Some(value) = command.value() {
                // Some of those that fit, so that both ways are tried.
                if value.len() % 3 == 0 && (1024..=self.lent.len()).contains(&value.len()) {
                    self.stream.write_all(&head)?;
                    self.lend(value)?;
                } else {
                    self.write_both(&head, value)?;
                }
                head.clear();
                head.extend_from_slice(b"\r\n");
            }
        }
        self.stream.write_all(&head)?;
        self.stream.flush()
    }

    fn write_both(&mut self, head: &[u8], value: &[u8]) -> io::Result<()> {
        let mut slices = [IoSlice::new(head), IoSlice::new(value)];
        let mut rest = &mut slices[..];
        // Drops empty slices in front: a write of these returns 0.
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let written = self.stream.write_vectored(rest)?;
            IoSlice::advance_slices(&mut rest, written);
        }
        Ok(())
    }

    fn lend(&mut self, value: &Bytes) -> io::Result<()> {
        // The device may still read the value before (VR-XFER-011).
        self.stream.returned(&self.lent)?;
        let filled = Arc::get_mut(&mut self.lent).is_some_and(|memory| memory.write(0, value));
        if !filled {
            return Err(io::Error::other("a buffer that was returned cannot be written"));
        }
        let mut sent = 0;
        while sent < value.len() {
            sent += self.stream.lend(&self.lent, sent..value.len())?;
        }
        Ok(())
    }

    fn reply(&mut self) -> Result<Frame, ExchangeError> {
        loop {
            if let Some(frame) = self.received.take().map_err(|error| invalid(&error))? {
                return Ok(frame);
            }
            match self.stream.read(&mut self.chunk).map_err(|error| lost(&error))? {
                0 => return Err(ended()),
                read => self.received.push(&self.chunk[..read]),
            }
        }
    }
}

impl<B: Descriptors> Face for Blocking<B> {
    fn connect(&mut self) -> Result<(), ExchangeError> {
        let made = Stream::connect_with(&self.backend, self.server, &connect());
        let mut stream = made.map_err(|error| refused(&error.into()))?;
        stream.set_read_timeout(Some(LIMIT));
        stream.set_write_timeout(Some(LIMIT));
        let lent = Arc::new(stream.register_buffer(128 << 10).map_err(|error| refused(&error.into()))?);
        let (received, chunk) = (Frames::default(), vec![0; 256 << 10].into());
        self.open = Some(Open { stream, lent, received, chunk });
        Ok(())
    }

    fn exchange(&mut self, commands: &[Command]) -> Result<Vec<Frame>, ExchangeError> {
        let open = self.open()?;
        open.send(commands).map_err(|error| lost(&error))?;
        commands.iter().map(|_| open.reply()).collect()
    }

    fn leave(&mut self, how: SessionEnd) -> Result<(), ExchangeError> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        match how {
            SessionEnd::Orderly => open.stream.close(LINGER).or_else(|error| match refused(&error.into()) {
                // During an outage the end is not answered in time.
                ExchangeError::Lost(_) => Ok(()),
                other => Err(other),
            }),
            SessionEnd::Dropped => Ok(()),
            SessionEnd::MidReply(commands) => open.send(&commands).map_err(|error| lost(&error)),
        }
    }
}

/// Tokio streams: one half writes while the other reads.
pub(super) struct Tasks<B: Descriptors> {
    backend: B,
    server: SocketAddr,
    runtime: Handle,
    open: Option<(AsyncStream<B>, Frames)>,
}

impl<B: Descriptors> Tasks<B> {
    pub(super) const fn new(backend: B, server: SocketAddr, runtime: Handle) -> Self {
        Self { backend, server, runtime, open: None }
    }
}

async fn talk<B: Descriptors>(
    (stream, received): &mut (AsyncStream<B>, Frames),
    commands: &[Command],
) -> Result<Vec<Frame>, ExchangeError> {
    let mut text = Vec::new();
    for command in commands {
        command.write_head(&mut text);
        if let Some(value) = command.value() {
            text.extend_from_slice(value);
            text.extend_from_slice(b"\r\n");
        }
    }
    let (mut reading, mut writing) = tokio::io::split(stream);
    let write = async {
        writing.write_all(&text).await.map_err(|error| lost(&error))?;
        writing.flush().await.map_err(|error| lost(&error))
    };
    let read = async {
        let mut chunk = vec![0; 256 << 10];
        let mut replies = Vec::with_capacity(commands.len());
        while replies.len() < commands.len() {
            if let Some(frame) = received.take().map_err(|error| invalid(&error))? {
                replies.push(frame);
                continue;
            }
            match reading.read(&mut chunk).await.map_err(|error| lost(&error))? {
                0 => return Err(ended()),
                read => received.push(&chunk[..read]),
            }
        }
        Ok(replies)
    };
    // At once: replies may fill the window before the last command is written (VR-FLOW-016).
    tokio::try_join!(write, read).map(|((), replies)| replies)
}

impl<B: Descriptors> Face for Tasks<B> {
    fn connect(&mut self) -> Result<(), ExchangeError> {
        let (how, server) = (connect(), self.server);
        let made = self.runtime.block_on(async {
            tokio::time::timeout(LIMIT, AsyncStream::connect_with(&self.backend, server, &how)).await
        });
        let stream = made.map_err(|_| hung("connecting"))?.map_err(|error| refused(&error.into()))?;
        self.open = Some((stream, Frames::default()));
        Ok(())
    }

    fn exchange(&mut self, commands: &[Command]) -> Result<Vec<Frame>, ExchangeError> {
        let Some(open) = &mut self.open else { return Err(ExchangeError::Wrong("no connection".into())) };
        self.runtime
            .block_on(async { tokio::time::timeout(LIMIT, talk(open, commands)).await })
            .unwrap_or_else(|_| Err(hung("an exchange")))
    }

    fn leave(&mut self, how: SessionEnd) -> Result<(), ExchangeError> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        self.runtime.block_on(async {
            match how {
                SessionEnd::Orderly => match tokio::time::timeout(LIMIT, open.0.shutdown()).await {
                    Err(_) => Err(hung("an orderly end")),
                    Ok(Ok(())) => Ok(()),
                    Ok(Err(error)) => match refused(&error) {
                        ExchangeError::Lost(_) => Ok(()),
                        other => Err(other),
                    },
                },
                SessionEnd::Dropped => Ok(()),
                // The future is dropped wherever it is.
                SessionEnd::MidReply(commands) => {
                    match tokio::time::timeout(Duration::from_millis(2), talk(&mut open, &commands)).await {
                        Ok(Err(wrong @ ExchangeError::Wrong(_))) => Err(wrong),
                        _ => Ok(()),
                    }
                }
            }
        })
    }
}

/// redis-rs, with the connection that reconnects. The commands of an exchange are concurrent.
pub(super) struct Redis<B: Descriptors> {
    client: Client<B>,
    runtime: Handle,
    connection: Option<Reconnecting<B>>,
}

impl<B: Descriptors> Redis<B> {
    pub(super) fn new(backend: B, server: SocketAddr, runtime: Handle) -> Result<Self, RedisError> {
        let settings = Settings { connect: connect(), response_timeout: Some(LIMIT), ..Settings::default() };
        let client = Client::with_settings(backend, format!("valkey+rdma://{server}/0"), settings)?;
        Ok(Self { client, runtime, connection: None })
    }
}

async fn request<C: ConnectionLike + Clone>(connection: &C, command: &Command) -> Result<Frame, RedisError> {
    let words = command.words();
    let mut packed = redis::Cmd::new();
    for word in words {
        packed.arg(word);
    }
    // Clones share one connection, on which redis-rs interleaves their requests.
    let value = connection.clone().req_packed_command(&packed).await?;
    Ok(match value {
        Value::Nil => Frame::BulkString(None),
        Value::Int(number) => Frame::Integer(number),
        Value::BulkString(bytes) => Frame::BulkString(Some(bytes.into())),
        Value::Okay => Frame::SimpleString("OK".into()),
        Value::SimpleString(text) => Frame::SimpleString(text.into()),
        // No command here has such a reply, so `Keys::judge` reports it.
        other => Frame::Error(format!("{other:?}").into()),
    })
}

/// Classifies an error of redis-rs. Any request may fail because there is no connection, with a
/// text of rdma-conn or rdma-redis. A time-out without such a text is redis-rs's: a missing reply.
fn failed(error: &RedisError) -> ExchangeError {
    let Some(io) = io_error(error) else {
        // The driver that carried the requests is gone, and redis-rs reports nothing more.
        return match error.to_string() {
            text if error.is_connection_dropped() => ExchangeError::Lost(text),
            // The server's device gave up, and the server disconnected.
            text if text.contains("end of input") => {
                ExchangeError::Lost("the stream ended within a reply".into())
            }
            text => ExchangeError::Wrong(text),
        };
    };
    if io.get_ref().is_some() { refused(io) } else { lost(io) }
}

fn io_error(error: &RedisError) -> Option<&io::Error> {
    let source = std::error::Error::source(error)?;
    source.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>()?.downcast_ref()
}

impl<B: Descriptors> Face for Redis<B> {
    fn connect(&mut self) -> Result<(), ExchangeError> {
        if self.connection.is_some() {
            return Ok(());
        }
        let how =
            Reconnect { deadline: LIMIT, longest_pause: Duration::from_millis(500), ..Reconnect::default() };
        let made = self.runtime.block_on(async {
            tokio::time::timeout(2 * LIMIT, self.client.get_reconnecting_connection(how)).await
        });
        let connection = made.map_err(|_| hung("connecting"))?.map_err(|error| failed(&error))?;
        self.connection = Some(connection);
        Ok(())
    }

    fn exchange(&mut self, commands: &[Command]) -> Result<Vec<Frame>, ExchangeError> {
        let Some(connection) = &self.connection else {
            return Err(ExchangeError::Wrong("no connection".into()));
        };
        let requests = commands.iter().map(|command| request(connection, command));
        let all = futures_util::future::join_all(requests);
        // Reconnecting and the reply have `LIMIT` each.
        let replies = self.runtime.block_on(async { tokio::time::timeout(2 * LIMIT, all).await });
        let replies: Result<Vec<Frame>, RedisError> =
            replies.map_err(|_| hung("an exchange"))?.into_iter().collect();
        replies.map_err(|error| failed(&error))
    }

    fn leave(&mut self, how: SessionEnd) -> Result<(), ExchangeError> {
        match how {
            // A redis-rs connection can only be dropped.
            SessionEnd::Orderly => self.connection = None,
            // The connection stays, and reconnects if it was lost.
            SessionEnd::Dropped => {}
            SessionEnd::MidReply(commands) => {
                let Some(connection) = self.connection.take() else { return Ok(()) };
                let requests = commands.iter().map(|command| request(&connection, command));
                let all = futures_util::future::join_all(requests);
                let _cut = self
                    .runtime
                    .block_on(async { tokio::time::timeout(Duration::from_millis(2), all).await });
            }
        }
        Ok(())
    }
}
