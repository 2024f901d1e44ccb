//! A source on its own thread, which fills memory with chunks.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::time::{Duration, Instant};

use rdma_conn::{Descriptors, Waker};

use super::Stop;
use crate::error::Error;
use crate::publisher::{Filled, Filler, Publisher};
use crate::source::{Piece, QUIET, Source};

/// Chunks that a source may be ahead of the table.
pub(super) const AHEAD: usize = 4;

/// Bytes that are taken from a source before they are hashed and written to registered memory. They
/// stay in the processor's cache meanwhile.
const PIECE: usize = 64 << 10;

/// How old a byte of the log becomes before its chunk leaves, in hope of others that share the
/// chunk (VS-TABLE-009). Age is looked at after each read, which may take [`QUIET`] more.
const AGE: Duration = Duration::from_millis(50);
const _: () = assert!(AGE.as_millis() + QUIET.as_millis() < 100);

/// A message of the source's thread.
pub(super) enum Made<B: Descriptors> {
    Chunk(Filled<B>),
    Mark,
    End,
    /// Its log has come to this offset, at which that of a newer snapshot can continue it. It waits
    /// until it is dropped, or until [`Making::go_on_from`].
    Replaced(u64),
    /// No memory could be registered for the next chunk, or the window is full. It waits for
    /// [`Making::retry`], or for readers.
    Short(Error),
    Failed(Error),
}

/// The thread of a source, as seen from the thread that drives RDMA.
pub(super) struct Making<B: Descriptors> {
    made: Receiver<Made<B>>,
    until: Arc<AtomicU64>,
    /// Gives the offset from which its log goes on after a wait.
    from: Sender<u64>,
}

/// What the source's thread is told.
struct Told {
    stop: Stop,
    /// The offset from which on a newer snapshot can continue its log, so that it ends;
    /// [`u64::MAX`] without one.
    until: Arc<AtomicU64>,
    /// Gives the offset from which its log goes on after a wait.
    from: Receiver<u64>,
    is_first: bool,
    /// The most bytes of the snapshot in a second.
    rate: Option<u64>,
}

impl Told {
    /// Returns whether this source is still wanted. The other side is dropped once it is not.
    fn is_wanted(&self) -> bool {
        Arc::strong_count(&self.until) > 1
    }

    /// Waits for the other side to let this one go on, and returns the offset that it gives; `None`
    /// if the source is not wanted any longer. An older log may take long to come to its end.
    fn answer(&self, source: &mut dyn Source) -> Result<Option<u64>, Error> {
        loop {
            match self.from.recv_timeout(WAIT) {
                Ok(offset) => return Ok(Some(offset)),
                Err(RecvTimeoutError::Timeout) => source.wait().map_err(failed)?,
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }
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
        let until = Arc::new(AtomicU64::new(u64::MAX));
        let told = Told { stop, until: Arc::clone(&until), from: theirs, is_first, rate };
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
        Ok(Self { made, until, from })
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

    /// Ends its log once it has reached this offset, at which the history of a newer snapshot
    /// begins. The log may be behind that, because the newer one has a connection of its own.
    /// [`u64::MAX`] lets it go on, because there is no newer one.
    pub(super) fn replace(&self, from: u64) {
        self.until.store(from, Ordering::Relaxed);
    }

    /// Lets its log begin after that of an older snapshot, or go on after [`Made::Replaced`]. A
    /// chunk begins at this offset.
    pub(super) fn go_on_from(&self, offset: u64) {
        // If it has ended, it says why.
        let _ended = self.from.send(offset);
    }

    /// Ends a source that is not wanted any longer.
    pub(super) fn leave(self) -> Leaving<B> {
        Leaving(self.made)
    }

    /// Answers [`Made::Short`]: an older snapshot goes, and the registration is tried again.
    ///
    /// # Errors
    /// No older snapshot keeps memory.
    pub(super) fn retry(&self, publisher: &mut Publisher<B>, error: Error) -> Result<(), Error> {
        if !publisher.shed() {
            return Err(error);
        }
        // The log does not move meanwhile, so the offset does not matter.
        self.go_on_from(0);
        Ok(())
    }
}

/// A source that is not wanted any longer, until its thread has released its memory.
pub(super) struct Leaving<B: Descriptors>(Receiver<Made<B>>);

impl<B: Descriptors> Leaving<B> {
    /// Returns whether all of its memory is released.
    pub(super) fn is_over(&self) -> bool {
        loop {
            match self.0.try_recv() {
                Ok(_) => {}
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
    }
}

/// How long a source waits before [`Source::wait`] is called again.
const WAIT: Duration = Duration::from_secs(1);

/// Reads the source into chunks until its end, or until no more are wanted.
fn make<B: Descriptors>(
    mut source: Box<dyn Source>,
    mut filler: Filler<B>,
    told: Told,
    hand_over: &dyn Fn(Made<B>) -> bool,
) -> Result<(), Error> {
    let mut piece = vec![0; PIECE];
    let mut held = 0;
    let (mut marked, mut stopped) = (false, false);
    // Where the log of the older snapshot ends. The newer one may begin before that.
    let mut least = 0;
    // Whether its log waits after the mark for the end of an older one.
    let mut waits = !told.is_first;
    let mut due = Instant::now();
    // When the first byte of the log came that has not left.
    let mut waiting_since = None;
    while told.is_wanted() {
        // A newer snapshot ends once it continues the log.
        if told.stop.is_stopped() && !waits && !stopped {
            stopped = true;
            source.stop().map_err(failed)?;
        }
        let until = told.until.load(Ordering::Relaxed).max(least);
        let replaced_at = source.offset().filter(|at| marked && !stopped && *at >= until);
        // A full filler may still be at the end of the snapshot.
        let upto = PIECE.min(filler.room()).max(1);
        let read = match replaced_at {
            Some(_) => Piece::Idle,
            None => source.read(piece.get_mut(held..upto).unwrap_or_default()).map_err(failed)?,
        };
        if let Piece::Bytes(count) = read {
            held = upto.min(held.saturating_add(count));
            if let Some(rate) = told.rate.filter(|_| !marked) {
                due = next_due(due, Instant::now(), count, rate);
                sleep_until(due, &told);
            }
        }
        // Before the mark, chunks are full. After it, a chunk is published when nothing more comes,
        // or when its first byte is old: however fast writes come, none waits for the next ones.
        let is_due = match read {
            Piece::Bytes(_) => marked && is_old(&mut waiting_since, Instant::now()),
            Piece::Idle => marked,
            Piece::Mark | Piece::End => true,
        };
        if is_due || held == upto {
            while let Err(error) = filler.write(piece.get(..held).unwrap_or_default()) {
                let is_full = filler.is_window() && matches!(error, Error::TooMuch { .. });
                if !is_full && !matches!(error, Error::Backend { .. }) {
                    return Err(error);
                }
                if !hand_over(Made::Short(error)) || told.answer(&mut *source)?.is_none() {
                    return Ok(());
                }
            }
            held = 0;
        }
        if (is_due || filler.is_full())
            && let Some(filled) = filler.take()
        {
            waiting_since = None;
            if !hand_over(Made::Chunk(filled)) {
                return Ok(());
            }
        }
        let also = match (read, replaced_at) {
            (Piece::Mark, _) => {
                marked = true;
                Made::Mark
            }
            (Piece::End, _) => Made::End,
            (_, Some(offset)) => Made::Replaced(offset),
            _ => continue,
        };
        let is_last = matches!(also, Made::End);
        waits |= matches!(also, Made::Replaced(_));
        if !hand_over(also) || is_last {
            return Ok(());
        }
        if std::mem::take(&mut waits) {
            let Some(offset) = told.answer(&mut *source)? else { return Ok(()) };
            source.cut_at(offset);
            least = offset;
        }
    }
    Ok(())
}

/// Returns whether bytes that have waited since then must leave; since `now` if there were none.
fn is_old(since: &mut Option<Instant>, now: Instant) -> bool {
    now.saturating_duration_since(*since.get_or_insert(now)) >= AGE
}

fn failed(error: io::Error) -> Error {
    Error::Source(Arc::new(error))
}

/// Returns when more may be taken after these bytes, if bytes could be taken from `due` on. Time in
/// which none came is no credit, but for a [`TICK`](super::TICK): sleeps are not exact.
fn next_due(due: Instant, now: Instant, bytes: usize, rate: u64) -> Instant {
    let least = now.checked_sub(super::TICK).unwrap_or(due);
    due.max(least) + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64)
}

/// Sleeps until `due`, or until the end is requested, or the source is not wanted any longer.
fn sleep_until(due: Instant, told: &Told) {
    while let Some(left) = due.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
        && !told.stop.is_stopped()
        && told.is_wanted()
    {
        std::thread::sleep(left.min(super::TICK));
    }
}

#[cfg(test)]
mod tests;
