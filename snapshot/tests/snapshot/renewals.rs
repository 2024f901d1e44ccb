//! Newer snapshots of one history, in real time, on softsim, of scripted sources.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rdma_snapshot::run::{Progress, Publish, Pull, Stop, publish};
use rdma_snapshot::wire::{Content, Reason};
use rdma_snapshot::{Again, Error, Piece, Source, publisher, reader};
use rdma_softsim::{Fabric, Limits};

use crate::runs::{Paced, Reading, address, ended, publishing, pulling, reporting};

/// How far each snapshot is after the one before. The first log, a hundred bytes at a time, comes
/// further than the second snapshot.
const STEP: u64 = 10_050;
/// How far a log comes before the next snapshot is complete: not as far as that is.
const BEHIND: u64 = 5_000;
/// Bytes of a snapshot, and of the writes after which another one is made.
const SNAPSHOT: u64 = 1_000;
const BACKLOG: u64 = 4_000;
/// Snapshots.
const ALL: u64 = 3;

/// A byte of the history, or of a snapshot.
fn byte(of: u64, at: u64) -> u8 {
    ((at * 31 + at / 977) ^ (of * 97)) as u8
}

/// What a reader of a snapshot gets.
fn expected(number: u64) -> Vec<u8> {
    let snapshot = (0..SNAPSHOT).map(|at| byte(number + 1, at));
    snapshot.chain((number * STEP..(ALL - 1) * STEP + BEHIND).map(|at| byte(0, at))).collect()
}

/// A snapshot of the history, and its log, a hundred bytes at a time. The log is behind the next
/// snapshot when that is complete.
struct Scripted {
    number: u64,
    /// Bytes of the snapshot that were read; `None` after its end.
    read: Option<u64>,
    offset: u64,
    cut: Option<u64>,
    stopped: bool,
    /// How many snapshots were read to their ends.
    complete: Arc<AtomicU64>,
    /// Whether the first snapshot has its reader. Its log waits for that.
    is_read: Arc<AtomicBool>,
}

impl Scripted {
    fn new(number: u64, complete: Arc<AtomicU64>, is_read: Arc<AtomicBool>) -> Self {
        Self { number, read: Some(0), offset: number * STEP, cut: None, stopped: false, complete, is_read }
    }
}

impl Source for Scripted {
    fn content(&self) -> Content {
        Content::Bytes
    }
    fn position(&self) -> Option<reader::Position> {
        Some(reader::Position { history: [b'a'; 40], offset: self.number * STEP })
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        let (of, at, end) = match self.read {
            Some(SNAPSHOT) => {
                self.read = None;
                self.complete.fetch_max(self.number + 1, Ordering::Relaxed);
                return Ok(Piece::Mark);
            }
            Some(read) => (self.number + 1, read, SNAPSHOT),
            None if !self.is_read.load(Ordering::Relaxed) => {
                std::thread::sleep(Duration::from_millis(1));
                return Ok(Piece::Idle);
            }
            None => {
                let is_next_complete = self.complete.load(Ordering::Relaxed) > self.number + 1;
                let reach = if is_next_complete { STEP + STEP / 4 } else { BEHIND };
                let end = self.cut.unwrap_or(self.number * STEP + reach);
                if self.offset == end {
                    let is_end = self.stopped && self.cut.is_none();
                    self.cut = None;
                    return Ok(if is_end { Piece::End } else { Piece::Idle });
                }
                (0, self.offset, end)
            }
        };
        let count = (end - at).min(100).min(into.len() as u64);
        for (into, at) in into.iter_mut().zip(at..at + count) {
            *into = byte(of, at);
        }
        match &mut self.read {
            Some(read) => *read += count,
            None => self.offset += count,
        }
        Ok(Piece::Bytes(count as usize))
    }
    fn stop(&mut self) -> io::Result<()> {
        self.stopped = true;
        Ok(())
    }
    fn again(&self) -> Option<Again> {
        let (complete, is_read) = (Arc::clone(&self.complete), Arc::clone(&self.is_read));
        Some(Arc::new(move |_| {
            let number = complete.load(Ordering::Relaxed);
            if number == ALL {
                return Err(io::Error::other("these are all snapshots"));
            }
            Ok(Box::new(Self::new(number, Arc::clone(&complete), Arc::clone(&is_read))))
        }))
    }
    fn offset(&self) -> Option<u64> {
        Some(self.offset)
    }
    fn cut_at(&mut self, offset: u64) {
        self.cut = Some(offset);
    }
}

/// A sink that sends what it gets.
fn sent() -> (Paced, mpsc::Receiver<Vec<u8>>) {
    let (taken, got) = mpsc::channel();
    (Paced { allowed: mpsc::channel().1, taken }, got)
}

/// VS-TABLE-002, VS-TABLE-007: each of two newer snapshots is complete before the log so far has
/// come to its position. A reader of the first gets all of the history, and one that comes last
/// that from the third snapshot on.
#[test]
fn no_byte_of_the_history_is_missing_or_repeated() {
    let fabric = Fabric::new();
    let stop = Stop::default();
    let how = Publish {
        readers: Some(2),
        backlog: BACKLOG,
        chunk_size: 4096,
        stop: stop.clone(),
        ..Publish::default()
    };
    let (tell, told) = mpsc::channel();
    let is_read = Arc::new(AtomicBool::new(false));
    let source = Scripted::new(0, Arc::default(), Arc::clone(&is_read));
    let tell = move |progress: &Progress| tell.send(*progress).unwrap_or(());
    let (at, publisher) = reporting(&fabric, 1, source, how, tell);
    let pull = |host| {
        let (sink, got) = sent();
        (pulling(&fabric, host, [at], sink, Pull::default()), got)
    };
    let until = |is_so: &dyn Fn(&Progress) -> bool| {
        // It reports five times a second.
        told.iter().take(3000).find(is_so).expect("the publisher runs, and comes there");
    };
    let first = pull(2);
    until(&|progress| progress.readers == 1);
    is_read.store(true, Ordering::Relaxed);
    until(&|progress| progress.snapshots == ALL as usize);
    let last = pull(3);
    until(&|progress| progress.readers + progress.done == 2);
    stop.stop();
    for ((pulled, got), number) in [(first, 0), (last, ALL - 1)] {
        ended(pulled);
        let got = got.iter().collect::<Vec<_>>().concat();
        assert!(got == expected(number), "{} bytes of snapshot {number}", got.len());
    }
    assert_eq!(ended(publisher).done, 2);
}

/// The bound of a wait for another thread.
const MOST: Duration = Duration::from_secs(600);

/// An empty snapshot, with a log that is full at once. It ends when the next snapshot is requested
/// and `ends`.
fn full(requested: Arc<AtomicU64>, ends: bool, again: Again) -> impl Source {
    let mut marked = false;
    let read = move |into: &mut [u8]| {
        if !std::mem::replace(&mut marked, true) {
            return Ok(Piece::Mark);
        }
        if requested.load(Ordering::Relaxed) == 0 {
            into[0] = b'x';
            return Ok(Piece::Bytes(1));
        }
        std::thread::sleep(Duration::from_millis(1));
        Ok(if ends { Piece::End } else { Piece::Idle })
    };
    Reading { read, offset: Some(0), again: Some(again) }
}

/// A snapshot that is never complete. It tells of its first byte, and of its end.
fn endless(begun: Arc<AtomicU64>, ended: mpsc::Sender<()>) -> impl Source {
    let read = move |into: &mut [u8]| {
        let _until_dropped = &ended;
        begun.store(1, Ordering::Relaxed);
        into.fill(b'x');
        Ok(Piece::Bytes(into.len()))
    };
    Reading { read, offset: Some(0), again: None }
}

/// The end of the log ends a snapshot that is being made, although the publication goes on. One
/// that `opens_late` is opened after that end.
fn ends_with_the_log(opens_late: bool) {
    let (tells, is_over) = mpsc::channel();
    let begun = Arc::new(AtomicU64::new(0));
    // Only the second snapshot has what tells of its end.
    let next = std::sync::Mutex::new(Some(endless(Arc::clone(&begun), tells)));
    let requested = Arc::clone(&begun);
    let again: Again = Arc::new(move |stop| {
        let by = Instant::now() + MOST;
        while opens_late && !stop.is_stopped() && Instant::now() < by {
            requested.store(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
        let next = next.lock().expect("no panic").take();
        next.map(|next| Box::new(next) as _).ok_or_else(|| io::Error::other("there is one"))
    });
    let withdraw = Stop::default();
    let how = Publish { backlog: 1, withdraw: withdraw.clone(), ..Publish::default() };
    let source = full(begun, true, again);
    let (_, publisher) = publishing(&Fabric::new(), 1, source, how);
    let over = is_over.recv_timeout(MOST);
    assert!(matches!(over, Err(mpsc::RecvTimeoutError::Disconnected)), "it is kept");
    assert!(!publisher.is_finished());
    withdraw.stop();
    ended(publisher);
}

#[test]
fn an_unfinished_snapshot_ends_with_the_log() {
    ends_with_the_log(false);
}

#[test]
fn a_snapshot_that_is_opened_after_the_log_is_not_kept() {
    ends_with_the_log(true);
}

/// A log whose next snapshot begins far ahead of it. It comes there once that snapshot is gone, and
/// ends once it is stopped.
struct Behind {
    marked: bool,
    offset: u64,
    stopped: bool,
    is_next_gone: Arc<AtomicBool>,
    again: Again,
}

/// Where that next snapshot begins.
const AHEAD: u64 = 20_000;

impl Source for Behind {
    fn content(&self) -> Content {
        Content::Bytes
    }
    fn position(&self) -> Option<reader::Position> {
        Some(reader::Position { history: [b'a'; 40], offset: 0 })
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        if !std::mem::replace(&mut self.marked, true) {
            return Ok(Piece::Mark);
        }
        let end = if self.is_next_gone.load(Ordering::Relaxed) { AHEAD + BEHIND } else { BEHIND };
        if self.offset == end {
            std::thread::sleep(Duration::from_millis(1));
            return Ok(if self.stopped { Piece::End } else { Piece::Idle });
        }
        let count = (end - self.offset).min(100).min(into.len() as u64);
        self.offset += count;
        Ok(Piece::Bytes(count as usize))
    }
    fn stop(&mut self) -> io::Result<()> {
        self.stopped = true;
        Ok(())
    }
    fn again(&self) -> Option<Again> {
        Some(Arc::clone(&self.again))
    }
    fn offset(&self) -> Option<u64> {
        Some(self.offset)
    }
}

/// A complete snapshot, whose source ends while its log waits.
struct Fails(Option<Piece>, Arc<AtomicBool>);

impl Source for Fails {
    fn content(&self) -> Content {
        Content::Bytes
    }
    fn position(&self) -> Option<reader::Position> {
        Some(reader::Position { history: [b'a'; 40], offset: AHEAD })
    }
    fn read(&mut self, _: &mut [u8]) -> io::Result<Piece> {
        self.0.take().ok_or_else(|| io::Error::other("the source has ended"))
    }
    fn wait(&mut self) -> io::Result<()> {
        Err(io::Error::other("the source has ended"))
    }
    fn offset(&self) -> Option<u64> {
        Some(AHEAD)
    }
}

impl Drop for Fails {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

/// A new snapshot whose source ends before its log is needed ends nothing else. The log so far goes
/// on beyond the place where that of the new one would have begun.
#[test]
fn a_snapshot_that_fails_while_it_waits_ends_nothing_else() {
    let is_gone = Arc::new(AtomicBool::new(false));
    let next = std::sync::Mutex::new(Some(Fails(Some(Piece::Mark), Arc::clone(&is_gone))));
    let again: Again = Arc::new(move |_| {
        let next = next.lock().expect("no panic").take();
        next.map(|next| Box::new(next) as _).ok_or_else(|| io::Error::other("there is one"))
    });
    let source = Behind { marked: false, offset: 0, stopped: false, is_next_gone: is_gone, again };
    let (stop, withdraw) = (Stop::default(), Stop::default());
    let how = Publish {
        backlog: BACKLOG,
        keep: Some(Duration::ZERO),
        stop: stop.clone(),
        withdraw: withdraw.clone(),
        ..Publish::default()
    };
    let backend = Fabric::new().host(&[address(1)]);
    let by = Instant::now() + MOST;
    let told = &mut |progress: &Progress| {
        if progress.bytes == AHEAD + BEHIND {
            stop.stop();
        }
        if Instant::now() >= by {
            withdraw.stop();
        }
    };
    let published = publish(&backend, (address(1), 0).into(), source, &how, |_| {}, told);
    let progress = published.expect("the log so far goes on");
    assert_eq!((progress.snapshots, progress.bytes), (1, AHEAD + BEHIND));
}

/// An unfinished snapshot that takes the memory of the log is given up, and the log goes on in it.
#[test]
fn an_unfinished_snapshot_gives_its_memory_to_the_log() {
    // Both grow in slabs of 4, 4, 8 and 16 KiB. All of the log fits beside the first of the new
    // snapshot, but not beside its first three.
    const PAGE: usize = 4096;
    const LOCKED: u64 = 9 * PAGE as u64;
    const WRITTEN: u64 = 5 * PAGE as u64;
    let fabric = Fabric::new();
    let bound = publisher::Publisher::bind(
        &fabric.host(&[address(1)]),
        (address(1), 0).into(),
        publisher::Config::default(),
    );
    let of_streams = fabric.resources(address(1)).registered_bytes;
    drop(bound.expect("an address"));

    let is_taken = Arc::new(AtomicBool::new(false));
    let takes = Arc::clone(&is_taken);
    let again: Again = Arc::new(move |_| {
        let (takes, mut slabs) = (Arc::clone(&takes), 4);
        let read = move |into: &mut [u8]| {
            // A slab is registered once a chunk of it is full.
            if slabs == 0 {
                takes.store(true, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
                return Ok(Piece::Idle);
            }
            slabs -= 1;
            Ok(Piece::Bytes(into.len().min(PAGE)))
        };
        Ok(Box::new(Reading { read, offset: Some(0), again: None }))
    });
    let (mut marked, mut written) = (false, 0);
    let stop = Stop::default();
    let is_stopped = stop.clone();
    let read = move |into: &mut [u8]| {
        if !std::mem::replace(&mut marked, true) {
            return Ok(Piece::Mark);
        }
        let least = if is_taken.load(Ordering::Relaxed) { WRITTEN } else { 1 };
        if written == least {
            std::thread::sleep(Duration::from_millis(1));
            return Ok(if is_stopped.is_stopped() { Piece::End } else { Piece::Idle });
        }
        let count = (least - written).min(into.len() as u64);
        written += count;
        Ok(Piece::Bytes(count as usize))
    };
    let source = Reading { read, offset: Some(0), again: Some(again) };
    let withdraw = Stop::default();
    let how = Publish {
        backlog: 1,
        chunk_size: PAGE as u32,
        keep: Some(Duration::ZERO),
        stop: stop.clone(),
        withdraw: withdraw.clone(),
        ..Publish::default()
    };
    let by = Instant::now() + MOST;
    let told = &mut |progress: &Progress| {
        if progress.bytes == WRITTEN {
            stop.stop();
        }
        if Instant::now() >= by {
            withdraw.stop();
        }
    };
    let limits = Limits { locked_memory: of_streams + LOCKED, ..Limits::default() };
    let backend = Fabric::new().host_with(&[address(1)], limits);
    let published = publish(&backend, (address(1), 0).into(), source, &how, |_| {}, told);
    let progress = published.expect("the log goes on");
    assert_eq!((progress.snapshots, progress.bytes), (1, WRITTEN));
}

/// Readers are told of a withdrawal before changes at the source are undone, which may take long.
/// After it, the source is dropped, although nothing more comes from it.
#[test]
fn readers_are_told_before_the_source_is_restored() {
    let fabric = Fabric::new();
    let (told, is_told) = mpsc::channel();
    let is_told = std::sync::Mutex::new(is_told);
    let requested = Arc::new(AtomicU64::new(0));
    let request = Arc::clone(&requested);
    let again: Again = Arc::new(move |_| {
        request.store(1, Ordering::Relaxed);
        // This is the undoing.
        let _told = is_told.lock().expect("no panic").recv_timeout(MOST);
        Err(io::Error::other("nothing was opened"))
    });
    let withdraw = Stop::default();
    // The machine may stand still for a while.
    let config = publisher::Config { handshake: MOST, lease: MOST, ..publisher::Config::default() };
    let how = Publish { config, backlog: 1, withdraw: withdraw.clone(), ..Publish::default() };
    let users = Arc::downgrade(&requested);
    let source = full(requested, false, again);
    let (at, publisher) = publishing(&fabric, 1, source, how);
    let (sink, got) = sent();
    // Without a word it ends before the undoing does.
    let config = reader::Config { handshake: MOST, silence: MOST / 2, ..reader::Config::default() };
    let pulled = pulling(&fabric, 2, [at], sink, Pull { config, ..Pull::default() });
    got.recv().expect("the log");
    withdraw.stop();
    let pulled = pulled.join().expect("no panic");
    assert!(matches!(pulled, Err(Error::Refused(Reason::Withdrawn))), "{pulled:?}");
    told.send(()).expect("it waits");
    ended(publisher);
    let by = Instant::now() + MOST;
    while users.strong_count() > 0 {
        assert!(Instant::now() < by, "the source is kept");
        std::thread::sleep(Duration::from_millis(1));
    }
}
