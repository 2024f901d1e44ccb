//! Very many objects, and very many messages at once.
//!
//! Beside a program with 60,000 queue pairs and 800,000 regions, the median time of another
//! program's exchange should at most double. The tests print the medians and compare none: on a
//! busy machine a median more than doubles by itself. Nor is there a count of an exchange here. A
//! thread of the fabric looks for posts again before it sleeps, more often on an idle machine. So
//! neither its instructions nor its processor time are the same twice; and many virtual machines
//! count no instructions.
//!
//! What is certain is counted in the tests of `rdma-softsim`'s model (`costs`): how many objects
//! and entries of lists a call looks at while it holds the fabric's lock. An exchange may wait
//! for that. In `no_call_looks_at_the_objects_of_others`, each call has the same count among few
//! objects and among many, those of an exchange included. In `long_work_gives_the_lock_back`,
//! each piece of work on many objects has the same count.
//! `endless_repetitions_leave_time_for_others` bounds the messages that are sent again.
//!
//! `SOFTRDMA_CROWD` is the number of queue pairs; there are 40 regions for three of them, and so
//! many queue pairs send long messages at once.

mod queue;
mod session;

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use queue::Queue;
use rdma_softsim::Parameters;
use session::{address, ask, come, open};
use softrdma::fabric::{Bounds, Fabric};
use softrdma_wire::{
    Access, Local, MAX_BATCH, Name, Op, Receive, Reply, Request, Send, Service, Sge, Socket, Transition,
};

/// How many messages a figure is the median of.
const MESSAGES: usize = 1000;
/// The bytes of one, and of a region.
const BYTES: usize = 64;
/// How long any step may take beside the largest crowd.
const PATIENCE: Duration = Duration::from_secs(600);
/// How many queue pairs send long messages at once, at most, and the bytes of each message.
const MOST_LONG: usize = 1200;
const LONG: usize = 32 << 20;

/// Makes a fabric whose programs, which are all in this process, may have so much.
fn boundless() -> Arc<Fabric> {
    let mut bounds = Bounds::of_this_process();
    for most in [&mut bounds.each, &mut bounds.all] {
        most.memory = 1 << 40;
    }
    Fabric::with_bounds(Parameters::default(), bounds).expect("a fabric")
}

/// Returns how many queue pairs the test makes.
fn crowd() -> usize {
    std::env::var("SOFTRDMA_CROWD").map_or(300, |count| count.parse().expect("a number"))
}

/// A program with a domain and a completion queue.
struct Program {
    socket: Socket,
    last: u8,
    domain: Name,
    queue: Queue,
    at: u64,
}

/// A queue pair: its name, and its number.
type Pair = (Name, u32);

impl Program {
    fn new(fabric: &Arc<Fabric>, last: u8) -> Self {
        let mut socket = open(fabric, last);
        let Reply::Made(domain) = ask(&mut socket, &Request::AllocateDomain(0)) else { panic!("no domain") };
        let queue = Queue::create(&mut socket, 1 << 17, None);
        let at = Vec::leak(vec![0_u8; BYTES]).as_ptr().expose_provenance() as u64;
        Self { socket, last, domain, queue, at }
    }

    fn ask(&mut self, request: &Request<'_>) -> Reply {
        ask(&mut self.socket, request)
    }

    fn done(&mut self, request: &Request<'_>) {
        assert_eq!(self.ask(request), Reply::Done);
    }

    fn pair(&mut self) -> Pair {
        let (domain, queue) = (self.domain, self.queue.name);
        let request = Request::CreatePair {
            domain,
            send_queue: queue,
            receive_queue: queue,
            shared: None,
            service: Service::Connected,
            send_depth: 4,
            receive_depth: 4,
            inline: BYTES as u32,
            elements: [1; 2],
        };
        let Reply::Pair { name, number, .. } = self.ask(&request) else { panic!("no pair") };
        (name, number)
    }

    fn region(&mut self) -> (Name, u32) {
        self.region_at(self.at, BYTES)
    }

    fn region_at(&mut self, at: u64, len: usize) -> (Name, u32) {
        let access = Access { local_write: true, remote_write: true, remote_read: true, remote_atomic: true };
        let region = Request::Register { domain: self.domain, at, address: at, len: len as u64, access };
        let Reply::Region { name, key } = self.ask(&region) else { panic!("no region") };
        (name, key)
    }

    fn connect(&mut self, (pair, _): Pair, peer: u8, (_, number): Pair) {
        let (local, remote) = (address(self.last), address(peer));
        for to in [
            Transition::Initialise,
            // The shortest time after which a message without a receive is sent again.
            Transition::Receive { local, remote, number, timer: 1 },
            Transition::Send { retry: 7, rnr_retry: 7, read_depth: 1 },
        ] {
            self.done(&Request::Modify { pair, to });
        }
    }

    fn post(&mut self, pair: Pair, id: u64, op: Op) {
        self.post_from(pair, id, op, Local::Inline(Cow::Borrowed(&[7; BYTES])));
    }

    fn post_from(&mut self, (pair, _): Pair, id: u64, op: Op, local: Local<'_>) {
        let work = vec![Send { id, op, signaled: true, solicited: false, local }];
        let posted = self.ask(&Request::PostSend { pair, room: 0, work });
        assert!(matches!(posted, Reply::Posted { count: 1, errno: 0, .. }), "{posted:?}");
    }

    /// Writes to the peer, and waits for the completion.
    fn exchange(&mut self, pair: Pair, id: u64, peer: &Self, rkey: u32) -> Duration {
        let begun = Instant::now();
        self.post(pair, id, Op::Write { address: peer.at, rkey });
        loop {
            if let Some(completion) = self.queue.next() {
                assert_eq!((completion.id, completion.status), (id, 0));
                return begun.elapsed();
            }
            waits(begun);
        }
    }
}

/// Lets others run while something is awaited.
fn waits(begun: Instant) {
    assert!(begun.elapsed() < PATIENCE, "it does not come");
    std::thread::yield_now();
}

/// Two programs that write to each other.
struct Others {
    ends: [Program; 2],
    pair: Pair,
    key: u32,
}

impl Others {
    fn new(fabric: &Arc<Fabric>) -> Self {
        let mut ends = [1, 2].map(|last| Program::new(fabric, last));
        let (_, key) = ends[1].region();
        let [pair, theirs] = [0, 1].map(|end: usize| ends[end].pair());
        ends[0].connect(pair, 2, theirs);
        ends[1].connect(theirs, 1, pair);
        Self { ends, pair, key }
    }

    /// Exchanges messages, and returns the median time of one.
    fn median(&mut self) -> Duration {
        let [own, peer] = &mut self.ends;
        let mut times: Vec<_> =
            (0..MESSAGES).map(|id| own.exchange(self.pair, id as u64, peer, self.key)).collect();
        times.sort_unstable();
        times[MESSAGES / 2]
    }
}

/// Exchanges messages while another thread does something over and over.
fn beside(others: &mut Others, what: &str, mut act: impl FnMut() + std::marker::Send) {
    let (over, count) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Relaxed) {
                act();
                count.fetch_add(1, Relaxed);
            }
        });
        let median = others.median();
        over.store(true, Relaxed);
        println!("{what}: {median:?}, {} times", count.load(Relaxed));
    });
}

#[test]
fn a_program_with_many_objects_costs_others_nothing() {
    let pairs = crowd();
    let regions = pairs * 40 / 3;
    let fabric = boundless();
    let mut others = Others::new(&fabric);
    println!("alone: {:?}", others.median());
    let mut crowd = Program::new(&fabric, 3);
    let begun = Instant::now();
    let made: Vec<_> = (0..pairs).map(|_| crowd.pair()).collect();
    println!("{pairs} queue pairs made in {:?}", begun.elapsed());
    let begun = Instant::now();
    for _ in 0..regions {
        crowd.region();
    }
    println!("{regions} regions made in {:?}", begun.elapsed());
    println!("beside them: {:?}", others.median());
    // Without a session.
    let mut stranger = come(&fabric);
    let mut above = 0;
    beside(&mut others, "lists of queue pairs", || {
        let Reply::Pairs(listed) = ask(&mut stranger, &Request::Pairs { above }) else { panic!("no list") };
        above = listed.last().filter(|_| listed.len() == MAX_BATCH).map_or(0, |last| last.number);
    });
    beside(&mut others, "states of the fabric", || {
        assert!(matches!(ask(&mut stranger, &Request::Status), Reply::Status { .. }));
    });
    beside(&mut others, "domains made and freed", || {
        let Reply::Made(domain) = crowd.ask(&Request::AllocateDomain(0)) else { panic!("no domain") };
        crowd.done(&Request::FreeDomain(domain));
    });
    beside(&mut others, "completion queues made and destroyed", || {
        let made = Queue::create(&mut crowd.socket, 16, None);
        crowd.done(&Request::DestroyQueue(made.name));
    });
    beside(&mut others, "queue pairs made and destroyed", || {
        let (pair, _) = crowd.pair();
        crowd.done(&Request::DestroyPair(pair));
    });
    beside(&mut others, "regions made and given back", || {
        let (region, _) = crowd.region();
        crowd.done(&Request::Deregister(region));
    });
    let mut turns = made.iter().cycle();
    beside(&mut others, "queue pairs reset", || {
        let (pair, _) = *turns.next().expect("a pair");
        crowd.done(&Request::Modify { pair, to: Transition::Reset });
    });
    // Each sends to the next, which has no receive.
    for two in made.chunks_exact(2) {
        crowd.connect(two[0], 3, two[1]);
        crowd.connect(two[1], 3, two[0]);
        crowd.post(two[0], 1, Op::Send);
    }
    println!("messages without a receive: {:?}", others.median());
    for (pair, _) in &made {
        crowd.done(&Request::Modify { pair: *pair, to: Transition::Reset });
    }
    // A queue that all of them report to is overrun.
    let small = Queue::create(&mut crowd.socket, 1, None);
    let queue = std::mem::replace(&mut crowd.queue, small);
    let made: Vec<_> = made
        .into_iter()
        .map(|(pair, _)| {
            crowd.done(&Request::DestroyPair(pair));
            crowd.pair()
        })
        .collect();
    let begun = Instant::now();
    for (pair, _) in made.iter().take(2) {
        crowd.done(&Request::Modify { pair: *pair, to: Transition::Initialise });
        let work = vec![Receive { id: 1, local: Vec::new() }];
        assert!(matches!(
            crowd.ask(&Request::PostReceive { pair: *pair, work }),
            Reply::Posted { count: 1, .. }
        ));
        crowd.done(&Request::Modify { pair: *pair, to: Transition::Fail });
    }
    println!("while a queue is overrun: {:?}", others.median());
    let (pair, _) = *made.last().expect("a pair");
    while !matches!(crowd.ask(&Request::QueryPair(pair)), Reply::State { state: 6, .. }) {
        waits(begun);
    }
    println!("its queue pairs have failed after {:?}", begun.elapsed());
    drop(queue);
    drop(crowd);
    println!("while the program ends: {:?}", others.median());
}

/// Messages that wait for others in the memory of one program are not late, however long all of
/// them take together.
#[test]
fn long_messages_wait_for_each_other() {
    // A share of the memory and of the queue pairs, unless there are to be many.
    let (count, len) = if crowd() < MOST_LONG { (8, LONG / 16) } else { (MOST_LONG, LONG) };
    let fabric = boundless();
    let [mut own, mut peer] = [1, 2].map(|last| Program::new(&fabric, last));
    let [from, to] = [0; 2].map(|byte| Vec::leak(vec![byte; len]).as_ptr().expose_provenance() as u64);
    let ((_, lkey), (_, rkey)) = (own.region_at(from, len), peer.region_at(to, len));
    let pairs: Vec<_> = (0..count)
        .map(|_| {
            let (pair, theirs) = (own.pair(), peer.pair());
            own.connect(pair, 2, theirs);
            peer.connect(theirs, 1, pair);
            pair
        })
        .collect();
    let begun = Instant::now();
    for (id, pair) in (0..).zip(&pairs) {
        let local = Local::Memory(vec![Sge { address: from, len: len as u32, lkey }]);
        own.post_from(*pair, id, Op::Write { address: to, rkey }, local);
    }
    for _ in &pairs {
        let completion = loop {
            match own.queue.next() {
                Some(completion) => break completion,
                // More than the page shows.
                None if own.queue.must_call() => own.done(&Request::Poll(own.queue.name)),
                None => waits(begun),
            }
        };
        assert_eq!(completion.status, 0, "{completion:?}");
    }
    println!("{count} messages of {len} bytes in {:?}", begun.elapsed());
}
