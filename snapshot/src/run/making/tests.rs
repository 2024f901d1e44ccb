//! A source on its thread: where its log ends, when its chunks leave, and what its rate is.

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
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        let _over = self.0.send(());
        Ok(Piece::Bytes(into.len()))
    }
}

/// A snapshot of nothing, and a log that never pauses: a byte in a millisecond at most.
struct Steady(bool);

impl Source for Steady {
    fn content(&self) -> Content {
        Content::Bytes
    }
    fn read(&mut self, _: &mut [u8]) -> io::Result<Piece> {
        if !std::mem::replace(&mut self.0, true) {
            return Ok(Piece::Mark);
        }
        std::thread::sleep(Duration::from_millis(1));
        Ok(Piece::Bytes(1))
    }
}

/// VS-TABLE-009: a chunk of later writes leaves although more of them come all the time. A
/// sleep takes at least as long as it says, so the bytes of a chunk tell how old its first one
/// became.
#[test]
fn steady_writes_leave_before_they_are_old() {
    let mut publisher = publisher();
    let (filler, waker) = (publisher.filler(1000), Waker::new().expect("a waker"));
    let how = (Stop::default(), None);
    let making = Making::begin(Box::new(Steady(false)), filler, how, true, &waker).expect("a thread");
    let mut chunks = 0;
    while chunks < 3 {
        match making.made.recv_timeout(Duration::from_secs(600)).expect("its thread lives") {
            Made::Chunk(filled) => {
                let before = publisher.counts().bytes;
                publisher.publish(filled).expect("room");
                let bytes = u128::from(publisher.counts().bytes - before);
                assert!(bytes <= AGE.as_millis() + 1, "{bytes} bytes");
                chunks += 1;
            }
            Made::Mark => {}
            _ => panic!("it goes on"),
        }
    }
}

/// VS-TABLE-009: at any rate of writes, the first byte of a chunk is less than 100 ms old when
/// it leaves, if reads take as long as they may.
#[test]
fn no_byte_of_the_log_waits_for_100_ms() {
    let begun = Instant::now();
    for apart in (1..=QUIET.as_millis() as u64).map(Duration::from_millis) {
        let (mut now, mut since) = (begun, None);
        while !is_old(&mut since, now) {
            now += apart;
        }
        assert!(now - begun < Duration::from_millis(100), "{apart:?} apart");
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
