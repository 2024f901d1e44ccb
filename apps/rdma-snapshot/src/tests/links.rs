//! What links of 25 to 400 Gb/s would allow: the unchanged machines of both sides, over a model of
//! links.
//!
//! A link carries one message after another, each way, at 97 % of its rate, and takes 5 µs one way.
//! Making, checking and applying a chunk cost nothing here. So this shows the protocol's limits; a
//! benchmark must show the processor's cost.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::*;
use crate::publisher::session::{Log, Session, Terms};
use crate::reader::Chunk;
use crate::reader::machine::{Machine, Order};
use crate::wire::{Entry, Frame, Mark};

/// One way, in nanoseconds.
const LATENCY: u64 = 5000;
const SIZE: u64 = 1 << 30;
const PIECE: u32 = 1 << 20;

/// An event at a reader.
enum Event {
    Told(Frame),
    Read(Chunk),
}

/// A host: what it has, and what it reads from its parent.
struct Host {
    log: Log,
    machine: Option<Machine>,
    session: Option<Session>,
    parent: usize,
    /// When its link is free again, out and in.
    out: u64,
    into: u64,
    finished: u64,
}

/// A publisher, and readers, each of which reads from `parent(its number)`.
struct Links {
    hosts: Vec<Host>,
    events: BinaryHeap<Reverse<(u64, usize)>>,
    what: BTreeMap<usize, (usize, Event)>,
    gigabits: u64,
    now: u64,
}

pub(super) fn terms() -> Terms {
    Terms {
        secret: crate::Secret::default(),
        snapshot: [1; 16],
        offer: Offer { chunk_size: PIECE, ..offer(Layout::Chunks) },
        data_port: 1,
        lease: Duration::from_secs(20),
        handshake: Duration::from_secs(10),
    }
}

fn moment(nanos: u64) -> Instant {
    Instant::from_start(Duration::from_nanos(nanos))
}

/// Performs the handshake, which takes no time here.
pub(super) fn joined(log: &Log, depth: u8) -> (Machine, Session) {
    let now = Instant::default();
    let mut machine = Machine::new(reader::Config::default(), Have::default(), [0; 32], now);
    let mut session = Session::new(Duration::from_secs(10), now);
    while let Some(order) = machine.poll_order() {
        match order {
            Order::Send(frame) => {
                let answer =
                    session.handle_frame(&frame, &terms(), log, [1; 32], now).expect("a right frame");
                machine.handle_frame(answer.expect("an answer"), now).expect("a right answer");
            }
            Order::Resolve(_) => machine.handle_resolved("10.0.0.1:1".parse().expect("an address"), now),
            Order::Connect => {
                session.handle_established(Duration::from_secs(20), now);
                machine.handle_established(depth, now).expect("READs");
            }
            Order::ReadAddresses(..) => unreachable!("the other layout"),
        }
    }
    (machine, session)
}

impl Links {
    fn new(gigabits: u64, readers: usize, depth: u8, parent: impl Fn(usize) -> usize) -> Self {
        let host = |parent| Host {
            log: Log::default(),
            machine: None,
            session: None,
            parent,
            out: 0,
            into: 0,
            finished: 0,
        };
        let mut links = Self {
            hosts: (0..=readers).map(|reader| host(if reader == 0 { 0 } else { parent(reader) })).collect(),
            events: BinaryHeap::new(),
            what: BTreeMap::new(),
            gigabits,
            now: 0,
        };
        let entries = (0..SIZE / u64::from(PIECE)).map(|index| Entry {
            index: index.into(),
            address: 0.into(),
            rkey: 0.into(),
            length: PIECE.into(),
            reserved: [0; 8],
            digest: [0; 32],
        });
        let log = &mut links.hosts[0].log;
        log.entries = entries.collect();
        log.mark =
            Some(Mark { chunks: (SIZE / u64::from(PIECE)).into(), bytes: SIZE.into(), digest: [0; 32] });
        log.ended = true;
        for reader in 1..=readers {
            links.join(reader, depth);
        }
        for reader in 1..=readers {
            links.tell(reader);
        }
        links
    }

    fn join(&mut self, reader: usize, depth: u8) {
        let (machine, session) = joined(&self.hosts[0].log, depth);
        self.hosts[reader].machine = Some(machine);
        self.hosts[reader].session = Some(session);
    }

    fn at(&mut self, at: u64, reader: usize, event: Event) {
        let number = self.what.last_key_value().map_or(0, |(last, _)| last + 1);
        self.what.insert(number, (reader, event));
        self.events.push(Reverse((at, number)));
    }

    /// Sends a reader its parent's news.
    fn tell(&mut self, reader: usize) {
        let parent = self.hosts[reader].parent;
        let mut session = self.hosts[reader].session.take().expect("a session");
        while let Some(frame) =
            session.announce(&self.hosts[parent].log, Duration::from_secs(20), moment(self.now))
        {
            if !matches!(frame, Frame::Alive) {
                self.at(self.now + LATENCY, reader, Event::Told(frame));
            }
        }
        self.hosts[reader].session = Some(session);
    }

    /// Returns when the answer to a READ posted now arrives.
    fn answered(&mut self, reader: usize, bytes: u64) -> u64 {
        let takes = bytes * 8 * 100 / (self.gigabits * 97);
        let parent = self.hosts[reader].parent;
        let left = (self.now + LATENCY).max(self.hosts[parent].out) + takes;
        self.hosts[parent].out = left;
        let there = left.max(self.hosts[reader].into + takes);
        self.hosts[reader].into = there;
        there + LATENCY
    }

    /// Runs to the end. Returns when the last reader has everything, in nanoseconds.
    fn run(mut self) -> u64 {
        while let Some(Reverse((at, number))) = self.events.pop() {
            self.now = at;
            let (reader, event) = self.what.remove(&number).expect("an event");
            let now = moment(at);
            let mut machine = self.hosts[reader].machine.take().expect("a machine");
            match event {
                Event::Told(frame) => machine.handle_frame(frame, now).expect("a right frame"),
                Event::Read(chunk) => {
                    machine.handle_chunk(&chunk, &[0; 32], now).expect("a right chunk");
                    let entry = self.hosts[0].log.entries[chunk.index as usize];
                    self.hosts[reader].log.entries.push(entry);
                    self.hosts[reader].finished = at;
                }
            }
            while let Some(chunk) = machine.next_read() {
                machine.posted(now);
                let there = self.answered(reader, chunk.length.into());
                self.at(there, reader, Event::Read(chunk));
            }
            if machine.have().mark.is_some() && machine.is_done() {
                self.hosts[reader].log.mark = machine.have().mark;
                self.hosts[reader].log.ended = true;
            }
            self.hosts[reader].machine = Some(machine);
            for child in 1..self.hosts.len() {
                if self.hosts[child].parent == reader {
                    self.tell(child);
                }
            }
        }
        assert!(self.hosts[1..].iter().all(|host| host.log.ended), "somebody has not everything");
        self.hosts.iter().map(|host| host.finished).max().unwrap_or(0)
    }
}

/// One reader at depth 16 uses 98 % of a link of any rate, and nine in a chain take at most 5 %
/// longer than one. The whole table is printed; README.md has it.
#[test]
fn links_are_used_and_a_chain_costs_hardly_more_than_one_reader() {
    println!("| link, Gb/s | 1 reader, depth 1 | 1 reader | use | 3 star | 3 chain | 9 star | 9 chain |");
    println!("|--:|--:|--:|--:|--:|--:|--:|--:|");
    for gigabits in [25, 100, 200, 400] {
        let run = |readers, depth, chain: bool| {
            Links::new(gigabits, readers, depth, |reader| if chain { reader - 1 } else { 0 }).run()
        };
        let millis = |nanos: u64| format!("{:.1} ms", nanos as f64 / 1e6);
        let (serial, one) = (run(1, 1, false), run(1, 16, false));
        let (three, nine) = ([run(3, 16, false), run(3, 16, true)], [run(9, 16, false), run(9, 16, true)]);
        let used = (SIZE * 8 * 100 / (gigabits * 97)) as f64 / one as f64;
        println!(
            "| {gigabits} | {} | {} | {:.1} % | {} | {} | {} | {} |",
            millis(serial),
            millis(one),
            used * 100.0,
            millis(three[0]),
            millis(three[1]),
            millis(nine[0]),
            millis(nine[1])
        );
        assert!(used >= 0.98, "{gigabits} Gb/s: {used}");
        assert!(nine[1] as f64 <= one as f64 * 1.05, "{gigabits} Gb/s: {} and {one}", nine[1]);
    }
}
