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
        // Before the mark, chunks are full. After it, each chunk is published at once.
        let is_due = match read {
            Piece::Bytes(_) => false,
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
            && !hand_over(Made::Chunk(filled))
        {
            return Ok(());
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
mod tests {
    use std::os::fd::AsFd as _;
    use std::sync::atomic::AtomicBool;

    use rdma_softsim::{Fabric, Limits, SoftSim};

    use super::*;
    use crate::publisher;
    use crate::reader::{Offer, Position};
    use crate::wire::{Content, Layout};

    /// An empty snapshot, and a log of ten bytes at a time, which come once `flows`.
    struct Lagging {
        marked: bool,
        offset: u64,
        cut: Option<u64>,
        flows: Arc<AtomicBool>,
    }

    impl Source for Lagging {
        fn content(&self) -> Content {
            Content::Bytes
        }
        fn total(&self) -> Option<u64> {
            None
        }
        fn position(&self) -> Option<Position> {
            Some(Position { history: [b'h'; 40], offset: 0 })
        }
        fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
            if !std::mem::replace(&mut self.marked, true) {
                return Ok(Piece::Mark);
            }
            let left = self.cut.map_or(u64::MAX, |cut| cut - self.offset);
            if !self.flows.load(Ordering::Relaxed) || left == 0 {
                self.cut = self.cut.filter(|_| left > 0);
                return Ok(Piece::Idle);
            }
            let count = left.min(10).min(into.len() as u64);
            into[..count as usize].fill(b'x');
            self.offset += count;
            Ok(Piece::Bytes(count as usize))
        }
        fn stop(&mut self) -> io::Result<()> {
            Ok(())
        }
        fn offset(&self) -> Option<u64> {
            Some(self.offset)
        }
        fn cut_at(&mut self, offset: u64) {
            self.cut = Some(offset);
        }
    }

    const ADDRESS: std::net::Ipv4Addr = std::net::Ipv4Addr::new(192, 0, 2, 1);

    fn bound(backend: &SoftSim) -> Publisher<SoftSim> {
        Publisher::bind(backend, (ADDRESS, 0).into(), publisher::Config::default()).expect("an address")
    }

    fn publisher() -> Publisher<SoftSim> {
        bound(&Fabric::new().host(&[ADDRESS.into()]))
    }

    /// Returns a publisher whose chunks may take this much of the device's memory.
    fn short_publisher(bytes: u64) -> Publisher<SoftSim> {
        let fabric = Fabric::new();
        let publisher = bound(&fabric.host(&[ADDRESS.into()]));
        let beside = fabric.resources(ADDRESS.into()).registered_bytes;
        drop(publisher);
        let limits = Limits { locked_memory: beside + bytes, ..Limits::default() };
        bound(&Fabric::new().host_with(&[ADDRESS.into()], limits))
    }

    /// Returns the offset at which a log ends that a newer snapshot replaces from `until` on, after
    /// it has continued an `older` one. The log begins to flow after both are known.
    fn end_of_log(older: Option<u64>, until: u64) -> u64 {
        let mut publisher = publisher();
        let flows = Arc::new(AtomicBool::new(false));
        let source = Lagging { marked: false, offset: 0, cut: None, flows: Arc::clone(&flows) };
        let (filler, waker) = (publisher.filler(1000), Waker::new().expect("a waker"));
        let how = (Stop::default(), None);
        let making = Making::begin(Box::new(source), filler, how, older.is_none(), &waker).expect("a thread");
        let by = Instant::now() + Duration::from_secs(600);
        let next = || loop {
            waker.clear();
            if let Some(made) = making.next() {
                break made;
            }
            let left = by.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "nothing comes");
            crate::wait::sleep(&[waker.as_fd()], left).expect("it sleeps");
        };
        assert!(matches!(next(), Made::Mark));
        making.replace(until);
        if let Some(older) = older {
            making.go_on_from(older);
        }
        flows.store(true, Ordering::Relaxed);
        loop {
            match next() {
                Made::Chunk(filled) => publisher.publish(filled).expect("room"),
                Made::Replaced(at) => {
                    assert_eq!(at, publisher.counts().bytes, "all of the log is published");
                    break at;
                }
                Made::Failed(error) | Made::Short(error) => panic!("{error}"),
                Made::Mark | Made::End => panic!("neither comes now"),
            }
        }
    }

    /// VS-TABLE-007: a log that is behind the position of the newer snapshot does not end before it
    /// has come there, nor before it has come to the end of the older log, which may be later.
    #[test]
    fn a_log_ends_where_both_others_meet_it() {
        // It comes ten bytes at a time.
        let soon = 5005..5015;
        assert!(soon.contains(&end_of_log(None, 5005)));
        assert!(soon.contains(&end_of_log(Some(2005), 5005)));
        assert!(soon.contains(&end_of_log(Some(5005), 2005)));
    }

    /// VS-TABLE-007: where no memory can be registered, an older snapshot goes before the newest
    /// one fails.
    #[test]
    fn an_older_snapshot_makes_room_for_the_log() {
        let mut publisher = short_publisher(12_000);
        let (layout, content) = (Layout::Chunks, Content::Bytes);
        let offer = Offer { layout, content, chunk_size: 5000, total: None, position: None };
        publisher.offer(None, offer).expect("an offer");
        publisher.append(&[0; 5000]).expect("room");
        publisher.mark().expect("a mark");
        let mut next = publisher.prepare();
        next.mark().expect("a mark");
        publisher.renew(next, offer, 0).expect("an offer");
        assert!(publisher.kept() > publisher.store.taken());

        let flows = Arc::new(AtomicBool::new(true));
        let source = Lagging { marked: false, offset: 0, cut: None, flows };
        let (filler, waker) = (publisher.filler(1000), Waker::new().expect("a waker"));
        let how = (Stop::default(), None);
        let making = Making::begin(Box::new(source), filler, how, true, &waker).expect("a thread");
        let mut full = Vec::new();
        let by = Instant::now() + Duration::from_secs(600);
        let error = loop {
            match making.next() {
                Some(Made::Chunk(filled)) => publisher.publish(filled).expect("room"),
                Some(Made::Short(error)) => {
                    full.push(publisher.counts().bytes);
                    if let Err(error) = making.retry(&mut publisher, error) {
                        break error;
                    }
                    assert_eq!(publisher.kept(), publisher.store.taken(), "the older one is gone");
                }
                Some(Made::Mark) => {}
                Some(Made::Failed(error)) => panic!("{error}"),
                Some(Made::End | Made::Replaced(_)) => panic!("neither comes"),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            assert!(Instant::now() < by, "nothing comes");
        };
        assert!(matches!(error, Error::Backend { .. }), "{error}");
        // Slabs double.
        assert_eq!(full, [4000, 8000]);
    }

    /// A snapshot without end, which tells of its first bytes, and of its own end.
    struct Slow(std::sync::mpsc::Sender<()>);

    impl Source for Slow {
        fn content(&self) -> Content {
            Content::Bytes
        }
        fn total(&self) -> Option<u64> {
            None
        }
        fn position(&self) -> Option<Position> {
            None
        }
        fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
            let _over = self.0.send(());
            Ok(Piece::Bytes(into.len()))
        }
        fn stop(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A low rate does not keep a source that is not wanted any longer.
    #[test]
    fn a_source_that_is_not_wanted_ends_before_it_is_due() {
        let mut publisher = publisher();
        let (told, tells) = channel();
        let (filler, waker) = (publisher.filler(1000), Waker::new().expect("a waker"));
        // Its next bytes are due after 1000 seconds.
        let how = (Stop::default(), Some(1));
        let making = Making::begin(Box::new(Slow(told)), filler, how, true, &waker).expect("a thread");
        let most = Duration::from_secs(600);
        tells.recv_timeout(most).expect("bytes");
        drop(making);
        let ended = tells.recv_timeout(most);
        assert_eq!(ended, Err(RecvTimeoutError::Disconnected));
    }

    /// While a source gives nothing, no credit for its rate collects.
    #[test]
    fn a_pause_is_no_credit_for_the_rate() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let due = next_due(begun, begun, 1000, 1000);
        assert_eq!(due, after(1));
        // On time, or a little late.
        assert_eq!(next_due(due, due, 1000, 1000), after(2));
        assert_eq!(next_due(due, due + super::super::TICK / 2, 1000, 1000), after(2));
        let late = next_due(due, after(100), 1000, 1000);
        assert_eq!(late, after(101) - super::super::TICK);
    }
}
