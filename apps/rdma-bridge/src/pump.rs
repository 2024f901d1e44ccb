//! One direction of a connection: copies bytes from one side to the other as they arrive.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::timeout;

/// Most bytes per read, and the most that a direction keeps while its target takes nothing.
pub(crate) const BUFFER: usize = 32 << 10;

thread_local! {
    /// This thread's read buffer. Most bytes are written directly from it. A connection has a
    /// buffer of its own only for bytes that its target did not take.
    static SCRATCH: Cell<Option<Box<[u8]>>> = const { Cell::new(None) };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

impl Side {
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }

    pub(crate) fn broke(self) -> impl Fn(io::Error) -> Broken {
        move |error| Broken { side: self, error }
    }
}

#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) side: Side,
    pub(crate) error: io::Error,
}

impl Broken {
    /// Returns whether `side` takes nothing any more, as opposed to nothing in time.
    pub(crate) fn is_gone(&self, side: Side) -> bool {
        self.side == side && self.error.kind() != io::ErrorKind::TimedOut
    }
}

/// Why a pump stopped. It has delivered everything that it read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Ended,
    Quiet,
}

pub(crate) struct Pump<'a> {
    source: Side,
    /// Bytes that were read. Those from `at` on were not written yet. Without memory while empty.
    held: Vec<u8>,
    at: usize,
    /// Whether written bytes may wait for a flush.
    unflushed: bool,
    stall: Stall,
    delivered: &'a AtomicU64,
}

impl<'a> Pump<'a> {
    /// Moves bytes from `source`. `stall` is that of the other side.
    pub(crate) const fn new(source: Side, stall: Stall, delivered: &'a AtomicU64) -> Self {
        Self { source, held: Vec::new(), at: 0, unflushed: false, stall, delivered }
    }

    /// Moves bytes until `from` has ended. With `quiet`, also stops when no byte is pending and
    /// none has come for that long. A next call delivers the pending bytes of a dropped future.
    ///
    /// # Errors
    /// Returns an error if one of the two sides broke.
    pub(crate) async fn run(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        quiet: Option<Duration>,
    ) -> Result<Stop, Broken> {
        loop {
            self.deliver(to).await.map_err(self.source.other().broke())?;
            let moving = poll_fn(|cx| self.poll_move(cx, from, to));
            let moved = match quiet {
                None => moving.await,
                Some(quiet) => match timeout(quiet, moving).await {
                    Ok(moved) => moved,
                    Err(_) => return Ok(Stop::Quiet),
                },
            };
            if !moved? {
                return Ok(Stop::Ended);
            }
        }
    }

    async fn deliver(&mut self, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        while let Some(rest) = self.held.get(self.at..).filter(|rest| !rest.is_empty()) {
            let written = self.stall.bounds(to.write(rest)).await?;
            self.at += self.count(written)?;
        }
        (self.held, self.at) = (Vec::new(), 0);
        if self.unflushed {
            self.stall.bounds(to.flush()).await?;
            self.unflushed = false;
        }
        Ok(())
    }

    /// Reads if nothing is pending, and writes what `to` takes at once. False: `from` has ended.
    fn poll_move(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Poll<Result<bool, Broken>> {
        let mut scratch = SCRATCH.take().unwrap_or_else(|| vec![0; BUFFER].into());
        let moved = self.poll_move_by(cx, &mut scratch, from, to);
        SCRATCH.set(Some(scratch));
        moved
    }

    fn poll_move_by(
        &mut self,
        cx: &mut Context<'_>,
        scratch: &mut [u8],
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Poll<Result<bool, Broken>> {
        let mut read = ReadBuf::new(scratch);
        ready!(Pin::new(from).poll_read(cx, &mut read)).map_err(self.source.broke())?;
        let read = read.filled();
        if read.is_empty() {
            return Poll::Ready(Ok(false));
        }
        let written = match Pin::new(to).poll_write(cx, read) {
            Poll::Pending => 0,
            Poll::Ready(written) => {
                let counted = written.and_then(|written| self.count(written));
                counted.map_err(self.source.other().broke())?
            }
        };
        self.unflushed = true;
        self.held = read.get(written..).unwrap_or_default().to_vec();
        Poll::Ready(Ok(true))
    }

    fn count(&self, written: usize) -> io::Result<usize> {
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.delivered.fetch_add(written as u64, Ordering::Relaxed);
        Ok(written)
    }
}

/// How long a side may take nothing while bytes wait for it.
#[derive(Clone, Debug)]
pub(crate) struct Stall {
    limit: Duration,
    taken: Taken,
}

/// A count that grows whenever a side takes bytes, also while one call delivers what was written
/// before.
pub(crate) type Taken = Arc<AtomicU64>;

impl Stall {
    pub(crate) const fn new(limit: Duration, taken: Taken) -> Self {
        Self { limit, taken }
    }

    pub(crate) const fn limit(&self) -> Duration {
        self.limit
    }

    /// Waits for a call as long as its side takes bytes. It ends between one and two limits after
    /// the last of them.
    ///
    /// # Errors
    /// The call's, or that its side took nothing for too long.
    pub(crate) async fn bounds<T>(&self, act: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let mut act = pin!(act);
        let mut before = self.taken.load(Ordering::Relaxed);
        loop {
            // The call is polled once more before the limit counts, which updates the count.
            if let Ok(result) = timeout(self.limit, act.as_mut()).await {
                return result;
            }
            let now = self.taken.load(Ordering::Relaxed);
            if now == before {
                let text = format!("the peer took nothing for {:?}", self.limit);
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            before = now;
        }
    }
}
