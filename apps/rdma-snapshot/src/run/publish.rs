//! Publishing from a source.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

use rdma_conn::{Descriptors, Waker};

use super::{Progress, Stop, TICK};
use crate::error::Error;
use crate::publisher::{self, Filled, Filler, Publisher};
use crate::reader::{AREA, Offer};
use crate::source::{Piece, Source};
use crate::wire::{Layout, Reason};

/// Chunks that a source may be ahead of the table.
const AHEAD: usize = 4;

/// Bytes that are taken from a source before they are hashed and written to registered memory. They
/// stay in the processor's cache meanwhile.
const PIECE: usize = 64 << 10;

/// Settings of a publication.
#[derive(Clone, Debug)]
pub struct Publish {
    /// Settings of the publisher.
    pub config: publisher::Config,
    /// The table's layout.
    pub layout: Layout,
    /// Bytes in a chunk.
    pub chunk_size: u32,
    /// Ends when this many readers have received everything; never if `None`.
    pub readers: Option<usize>,
    /// Ends when the table has been complete for this long, even if readers are still reading.
    pub keep: Option<Duration>,
    /// Ends the log of later writes, and then ends as above.
    pub stop: Stop,
    /// Withdraws the snapshot at once. Readers that do not read are told for a short time only.
    pub withdraw: Stop,
}

impl Default for Publish {
    fn default() -> Self {
        Self {
            config: publisher::Config::default(),
            layout: Layout::Chunks,
            chunk_size: 1 << 20,
            readers: None,
            keep: None,
            stop: Stop::default(),
            withdraw: Stop::default(),
        }
    }
}

/// A message of the source's thread.
enum Made<B: Descriptors> {
    Chunk(Filled<B>),
    Mark,
    End,
    Failed(Error),
}

/// Publishes `source` on `address`, and reports progress to `told` now and then. `bound` gets the
/// address before any reader is served.
///
/// # Errors
/// The source failed, or there is no memory, or no RDMA. Readers are told.
pub fn publish<B: Descriptors>(
    backend: &B,
    address: SocketAddr,
    source: impl Source + 'static,
    how: &Publish,
    bound: impl FnOnce(SocketAddr),
    told: &mut dyn FnMut(&Progress),
) -> Result<Progress, Error> {
    let mut publisher = Publisher::bind(backend, address, how.config.clone())?;
    let rcp = how.layout == Layout::Rcp;
    let chunk_size = if rcp { AREA } else { how.chunk_size };
    let total = source.total();
    if rcp {
        let no_length =
            io::Error::other("the seed's table cannot grow, so the length must be known: a file's is");
        publisher.begin_mapping(total.ok_or_else(|| Error::Source(Arc::new(no_length)))?)?;
    }
    let offer = Offer {
        layout: how.layout,
        content: source.content(),
        chunk_size,
        total,
        position: source.position(),
    };
    publisher.offer(None, offer)?;
    bound(publisher.address());
    let waker = Waker::new()?;
    let (sender, made) = sync_channel(AHEAD);
    let (stop, theirs, filler) = (how.stop.clone(), waker.clone(), publisher.filler(chunk_size));
    let thread = std::thread::Builder::new().name("source".into()).spawn(move || {
        let hand_over = |made| {
            let sent = sender.send(made).is_ok();
            theirs.wake();
            sent
        };
        if let Err(error) = make(source, filler, &stop, &hand_over) {
            hand_over(Made::Failed(error));
        }
    });
    thread.map_err(|error| Error::Source(Arc::new(error)))?;
    let outcome = serve(backend, &mut publisher, &made, how, total, &waker, told);
    if let Err(error) = &outcome {
        let reason = if matches!(error, Error::Source(_)) { Reason::Failed } else { Reason::Resources };
        publisher.withdraw(reason);
    } else {
        publisher.withdraw(Reason::Withdrawn);
    }
    let drained = publisher.drain(&waker, &how.withdraw);
    outcome.and_then(|progress| drained.map(|()| progress))
}

/// Reads the source into chunks until its end, or until no more are wanted.
fn make<B: Descriptors>(
    mut source: impl Source,
    mut filler: Filler<B>,
    stop: &Stop,
    hand_over: &dyn Fn(Made<B>) -> bool,
) -> Result<(), Error> {
    let failed = |error| Error::Source(Arc::new(error));
    let mut piece = vec![0; PIECE];
    let mut held = 0;
    let (mut marked, mut stopped) = (false, false);
    loop {
        if stop.is_stopped() && !stopped {
            stopped = true;
            source.stop().map_err(failed)?;
        }
        // A full filler may still be at the end of the snapshot.
        let upto = PIECE.min(filler.room()).max(1);
        let read = source.read(piece.get_mut(held..upto).unwrap_or_default()).map_err(failed)?;
        if let Piece::Bytes(count) = read {
            held = upto.min(held.saturating_add(count));
        }
        // Before the mark, chunks are full. After it, each chunk is published at once.
        let is_due = match read {
            Piece::Bytes(_) => false,
            Piece::Idle => marked,
            Piece::Mark | Piece::End => true,
        };
        if is_due || held == upto {
            filler.write(piece.get(..held).unwrap_or_default())?;
            held = 0;
        }
        if (is_due || filler.is_full())
            && let Some(filled) = filler.take()
            && !hand_over(Made::Chunk(filled))
        {
            return Ok(());
        }
        let also = match read {
            Piece::Mark => {
                marked = true;
                Made::Mark
            }
            Piece::End => Made::End,
            _ => continue,
        };
        let over = matches!(also, Made::End);
        if !hand_over(also) || over {
            return Ok(());
        }
    }
}

fn serve<B: Descriptors>(
    backend: &B,
    publisher: &mut Publisher<B>,
    made: &Receiver<Made<B>>,
    how: &Publish,
    total: Option<u64>,
    waker: &Waker,
    told: &mut dyn FnMut(&Progress),
) -> Result<Progress, Error> {
    let mut progress = Progress { total, ..Progress::default() };
    let begun = backend.now();
    let mut ended = None;
    let mut tell_at = begun;
    loop {
        waker.clear();
        publisher.progress()?;
        // Takes only a few at a time. Between them it checks readers, the operator and the time.
        let mut is_empty = ended.is_some();
        for _ in 0..AHEAD {
            if is_empty {
                break;
            }
            match made.try_recv() {
                Ok(Made::Chunk(filled)) => publisher.publish(filled)?,
                Ok(Made::Mark) => {
                    publisher.mark()?;
                    progress.marked = true;
                }
                Ok(Made::End) => {
                    publisher.end();
                    ended = Some(backend.now());
                    is_empty = true;
                }
                Ok(Made::Failed(error)) => return Err(error),
                Err(TryRecvError::Empty) => is_empty = true,
                Err(TryRecvError::Disconnected) => {
                    return Err(Error::Source(Arc::new(io::Error::other("its thread ended early"))));
                }
            }
            publisher.progress()?;
        }
        let now = backend.now();
        let counts = publisher.counts();
        progress.bytes = counts.bytes;
        (progress.readers, progress.done) = (counts.reading, counts.done);
        if ended.is_none() {
            progress.elapsed = now.since(begun);
        }
        let served = how.readers.is_some_and(|readers| counts.done >= readers);
        let kept = how.keep.zip(ended).is_some_and(|(keep, ended)| now.since(ended) >= keep);
        let over = ended.is_some() && (served || kept) || how.withdraw.is_stopped();
        if now >= tell_at || over {
            tell_at = now.after(TICK);
            told(&progress);
        }
        if over {
            return Ok(progress);
        }
        publisher.wait(waker, Some(if is_empty { tell_at } else { now }))?;
    }
}
