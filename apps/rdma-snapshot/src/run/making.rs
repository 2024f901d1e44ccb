//! A source on its own thread, which fills memory with chunks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel, sync_channel};
use std::time::{Duration, Instant};

use rdma_conn::{Descriptors, Waker};

use super::Stop;
use crate::error::Error;
use crate::publisher::{Filled, Filler};
use crate::source::{Piece, Source};

/// Chunks that a source may be ahead of the table.
pub(super) const AHEAD: usize = 4;

/// Bytes that are taken from a source before they are hashed and written to registered memory. They
/// stay in the processor's cache meanwhile.
const PIECE: usize = 64 << 10;

/// A message of the source's thread.
pub(super) enum Made<B: Descriptors> {
    Chunk(Filled<B>),
    Mark,
    End,
    /// Its log ends at this offset, because that of a newer snapshot continues it.
    Replaced(u64),
    Failed(Error),
}

/// The thread of a source, as seen from the thread that drives RDMA.
pub(super) struct Making<B: Descriptors> {
    made: Receiver<Made<B>>,
    replaced: Arc<AtomicBool>,
    /// Gives the offset at which its log continues that of an older snapshot.
    from: Sender<u64>,
}

/// What the source's thread is told.
struct Told {
    stop: Stop,
    replaced: Arc<AtomicBool>,
    /// Gives the offset at which its log continues that of an older snapshot, unless it is the
    /// first.
    from: Option<Receiver<u64>>,
    /// The most bytes of the snapshot in a second.
    rate: Option<u64>,
}

impl<B: Descriptors> Making<B> {
    /// Starts the thread. A source that is not the first waits at its mark for
    /// [`Making::go_on_from`].
    pub(super) fn begin(
        source: Box<dyn Source>,
        filler: Filler<B>,
        (stop, rate): (Stop, Option<u64>),
        is_first: bool,
        waker: &Waker,
    ) -> Result<Self, Error> {
        let (sender, made) = sync_channel(AHEAD);
        let (from, theirs) = channel();
        let replaced = Arc::new(AtomicBool::new(false));
        let told = Told { stop, replaced: Arc::clone(&replaced), from: (!is_first).then_some(theirs), rate };
        let waker = waker.clone();
        let thread = std::thread::Builder::new().name("source".into()).spawn(move || {
            let hand_over = |made| {
                let sent = sender.send(made).is_ok();
                waker.wake();
                sent
            };
            if let Err(error) = make(source, filler, told, &hand_over) {
                hand_over(Made::Failed(error));
            }
        });
        thread.map_err(|error| Error::Source(Arc::new(error)))?;
        Ok(Self { made, replaced, from })
    }

    /// Returns the next message, if there is one.
    pub(super) fn next(&self) -> Option<Made<B>> {
        match self.made.try_recv() {
            Ok(made) => Some(made),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                let early = io::Error::other("its thread ended early");
                Some(Made::Failed(Error::Source(Arc::new(early))))
            }
        }
    }

    /// Ends its log, after the mark, wherever it is.
    pub(super) fn replace(&self) {
        self.replaced.store(true, Ordering::Relaxed);
    }

    /// Lets its log begin. A chunk begins at this offset.
    pub(super) fn go_on_from(&self, offset: u64) {
        // If it has ended, it says why.
        let _ended = self.from.send(offset);
    }
}

/// Reads the source into chunks until its end, or until no more are wanted.
fn make<B: Descriptors>(
    mut source: Box<dyn Source>,
    mut filler: Filler<B>,
    mut told: Told,
    hand_over: &dyn Fn(Made<B>) -> bool,
) -> Result<(), Error> {
    let failed = |error| Error::Source(Arc::new(error));
    let mut piece = vec![0; PIECE];
    let mut held = 0;
    let (mut marked, mut stopped) = (false, false);
    let (begun, mut taken) = (Instant::now(), 0_u64);
    loop {
        // A newer snapshot ends once it continues the log.
        if told.stop.is_stopped() && told.from.is_none() && !stopped {
            stopped = true;
            source.stop().map_err(failed)?;
        }
        let is_replaced = marked && !stopped && told.replaced.load(Ordering::Relaxed);
        // A full filler may still be at the end of the snapshot.
        let upto = PIECE.min(filler.room()).max(1);
        let read = match is_replaced {
            true => Piece::Idle,
            false => source.read(piece.get_mut(held..upto).unwrap_or_default()).map_err(failed)?,
        };
        if let Piece::Bytes(count) = read {
            held = upto.min(held.saturating_add(count));
            taken = taken.saturating_add(count as u64);
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
        if let Some(rate) = told.rate.filter(|_| !marked) {
            slow_down(begun, taken, rate, &told.stop);
        }
        let also = match read {
            Piece::Mark => {
                marked = true;
                Made::Mark
            }
            Piece::End => Made::End,
            _ if is_replaced => {
                let no_history = || failed(io::Error::other("its history has no offsets"));
                Made::Replaced(source.offset().ok_or_else(no_history)?)
            }
            _ => continue,
        };
        let is_last = !matches!(also, Made::Mark);
        if !hand_over(also) || is_last {
            return Ok(());
        }
        if let Some(from) = told.from.take() {
            // It is dropped if this snapshot is not wanted any longer.
            let Ok(offset) = from.recv() else { return Ok(()) };
            source.cut_at(offset);
        }
    }
}

/// Sleeps until this many bytes may have been taken, or until the end is requested.
fn slow_down(begun: Instant, taken: u64, rate: u64, stop: &Stop) {
    let due = Duration::from_secs_f64(taken as f64 / rate.max(1) as f64);
    while let Some(left) = due.checked_sub(begun.elapsed()).filter(|left| !left.is_zero())
        && !stop.is_stopped()
    {
        std::thread::sleep(left.min(super::TICK));
    }
}
