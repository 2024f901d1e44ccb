//! Throughput of one window, of two, and of windows registered ahead at 100 Gb/s, in virtual time.
//!
//! The sender always has bytes. The link carries one WRITE after another and takes 5 µs one way, so
//! at least 10 µs pass from a window's last byte to the next one's first. The receiver's
//! application copies 18 GB/s. Nothing else takes time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use rdma_proto::time::Instant;
use rdma_proto::wire::FeatureSet;
use rdma_proto::{Action, Config, Machine, Readable, RegionAddress, Role};
use rdma_proto::{Immediate, RNR_RETRY_INFINITE};

/// One way, in nanoseconds.
const LATENCY: u64 = 5000;
/// Bytes per 1000 ns, at 100 Gb/s.
const LINK: u64 = 12_500;
/// Bytes that the application copies in 1000 ns.
const DRAIN: u64 = 18_000;
const WINDOW: u32 = 1 << 20;
const ALL: u64 = 256 << 20;

/// An event of side 0, the sender and client, or 1, the receiver and server.
enum Event {
    Message([u8; 32]),
    Immediate(u32),
    Sent(u64),
    Copied(u32),
}

struct Link {
    machines: [Machine; 2],
    events: BinaryHeap<Reverse<(u64, u64)>>,
    what: VecDeque<(u64, usize, Event)>,
    number: u64,
    now: u64,
    busy: u64,
    copying: bool,
    copied: u64,
}

impl Link {
    fn new(set: impl Fn(Config) -> Config) -> Self {
        let with = |base: Config| set(base.window(WINDOW).send_buffer(32 << 20).negotiate(true));
        let region = |number: u64| RegionAddress { address: number << 32, rkey: number as u32 };
        let machine = |config: Config| Machine::new(config, [region(1), region(2)]).expect("sound settings");
        let mut machines = [machine(with(Config::client())), machine(with(Config::server()))];
        for machine in &mut machines {
            machine.handle_established(Instant::default(), RNR_RETRY_INFINITE);
        }
        let (events, what) = (BinaryHeap::new(), VecDeque::new());
        Self { machines, events, what, number: 0, now: 0, busy: 0, copying: false, copied: 0 }
    }

    fn at(&mut self, at: u64, side: usize, event: Event) {
        self.number += 1;
        self.what.push_back((self.number, side, event));
        self.events.push(Reverse((at, self.number)));
    }

    fn post(&mut self, side: usize) {
        let now = Instant::from_start(Duration::from_nanos(self.now));
        while let Some(action) = self.machines[side].poll_action(|| now) {
            match action {
                Action::Send { id, signaled, message, .. } => {
                    let there = self.now + LATENCY;
                    self.at(there, 1 - side, Event::Message(message));
                    if signaled {
                        self.at(there + LATENCY, side, Event::Sent(id));
                    }
                }
                Action::Write { id, signaled, from, immediate, .. } => {
                    self.busy = self.busy.max(self.now) + u64::from(from.len()) * 1000 / LINK;
                    let there = self.busy + LATENCY;
                    if let Some(Immediate(bytes)) = immediate {
                        self.at(there, 1 - side, Event::Immediate(bytes));
                    }
                    if signaled {
                        self.at(there + LATENCY, side, Event::Sent(id));
                    }
                }
                Action::Disconnect => panic!("{:?}", self.machines[side].state()),
            }
        }
    }

    fn go_on(&mut self) {
        while self.machines[0].has_peer_window() && self.machines[0].space().len > 0 {
            let len = self.machines[0].space().len.min(WINDOW);
            self.machines[0].commit(len as usize).expect("room");
            self.post(0);
        }
        if let Some(Readable { len, .. }) = self.machines[1].readable().filter(|_| !self.copying) {
            self.copying = true;
            self.at(self.now + u64::from(len) * 1000 / DRAIN, 1, Event::Copied(len));
        }
        self.post(0);
        self.post(1);
    }

    fn run(mut self) -> f64 {
        let mut begun = None;
        self.go_on();
        while self.copied < ALL {
            let Reverse((at, number)) = self.events.pop().expect("it goes on");
            self.now = at;
            let place = self.what.iter().position(|(other, ..)| *other == number).expect("an event");
            let (_, side, event) = self.what.remove(place).expect("an event");
            let now = Instant::from_start(Duration::from_nanos(at));
            let machine = &mut self.machines[side];
            match event {
                Event::Message(message) => machine.handle_message(now, &message),
                Event::Immediate(bytes) => machine.handle_immediate(now, Immediate(bytes)),
                Event::Sent(id) => machine.handle_sent(now, id),
                Event::Copied(bytes) => {
                    machine.consume(bytes).expect("readable");
                    self.copying = false;
                    self.copied += u64::from(bytes);
                }
            }
            if self.machines[0].has_peer_window() {
                begun.get_or_insert(at);
            }
            self.go_on();
        }
        let took = self.now - begun.expect("a window");
        (self.copied * 1000 / LINK) as f64 / took as f64
    }
}

fn used(what: &str, set: impl Fn(Config) -> Config) -> f64 {
    let used = Link::new(set).run();
    println!("100 Gb/s, 10 µs, windows of 1 MiB: {what}: {:.1} % of the link", used * 100.0);
    used
}

/// The numbers of docs/upstream/growing-windows.md (VR-MEM-020): a longer window needs fewer round
/// trips, and its receiver still copies all of it while nothing comes.
#[test]
fn a_window_that_grows_waits_less_often() {
    let grows = |longest| {
        move |config: Config| match config.role {
            Role::Server => config.windows(1).grow_to(Some(longest)),
            Role::Client => config,
        }
    };
    let one = used("one window", |config| config.windows(1));
    let grown = [2, 4, 16].map(|mib| used(&format!("one window, grows to {mib} MiB"), grows(mib << 20)));
    let two = used("two windows", |config| config.windows(2));
    assert!(one < grown[0] && grown.is_sorted() && grown[2] < 0.6 && two > 0.88, "{one} {grown:?} {two}");
}

/// The numbers of spec/multi-buffer.md.
#[test]
fn windows_ahead_keep_a_link_busy() {
    let one = used("one window, as the C implementations have", |config| config.windows(1));
    let two = used("two windows, the second at full", |config| config.windows(2));
    let ahead = used("two windows, the second ahead (MULTI_BUFFER)", |config| {
        config.windows(2).features(FeatureSet::MULTI_BUFFER)
    });
    assert!((0.50..0.60).contains(&one), "{one}");
    assert!(two >= 0.88, "{two}");
    assert!(ahead >= 0.97, "{ahead}");
}
