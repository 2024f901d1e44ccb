//! A program may write anything into the ring of its posts. It ends its own session at most.

mod posts;
mod queue;
mod session;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use posts::{FIRST, HEAD, Poster, TAIL, number};
use proptest::prelude::*;
use queue::Queue;
use session::{address, ask, open, serves};
use softrdma::fabric::Fabric;
use softrdma_wire::{
    Local, MAX_MESSAGE, Name, Op, Post, Receive, Reply, Request, Send, Service, Socket, Transition, WORDS,
};

const PATIENCE: Duration = Duration::from_secs(60);

/// A program with a queue pair that is connected to itself.
struct Program {
    socket: Socket,
    queue: Queue,
    pair: Name,
    posts: Poster,
}

impl Program {
    fn new(fabric: &Arc<Fabric>, last: u8) -> Self {
        let mut socket = open(fabric, last);
        let queue = Queue::create(&mut socket, 64, None);
        let Reply::Made(domain) = ask(&mut socket, &Request::AllocateDomain(0)) else { panic!("no domain") };
        let request = Request::CreatePair {
            domain,
            send_queue: queue.name,
            receive_queue: queue.name,
            shared: None,
            service: Service::Connected,
            send_depth: 8,
            receive_depth: 8,
            elements: [16; 2],
            inline: 0,
        };
        let Reply::Pair { name: pair, number, .. } = ask(&mut socket, &request) else { panic!("no pair") };
        let (local, remote) = (address(last), address(last));
        for to in [
            Transition::Initialise,
            Transition::Receive { local, remote, number, timer: 12 },
            Transition::Send { retry: 7, rnr_retry: 7, read_depth: 1 },
        ] {
            assert_eq!(ask(&mut socket, &Request::Modify { pair, to }), Reply::Done);
        }
        Self { socket, queue, pair, posts: Poster::default() }
    }

    fn write(&self, pair: Name, id: u64) -> Post<'static> {
        let op = Op::Write { address: 0, rkey: 0 };
        let work = vec![Send { id, op, signaled: true, solicited: false, local: Local::Memory(Vec::new()) }];
        Post::Send { pair, work }
    }

    /// Posts a WRITE without bytes, and wakes the fabric if it sleeps.
    fn post(&mut self, id: u64) {
        let post = self.write(self.pair, id);
        if self.posts.put(&self.queue.memory, &post) {
            self.ring();
        }
    }

    /// Rings the doorbell. The fabric may have ended the session.
    fn ring(&mut self) {
        let _sent = self.socket.send(&Request::Doorbell, None);
    }

    /// Waits for the next completion.
    fn finds(&mut self, id: u64) {
        let begun = Instant::now();
        let found = loop {
            if let Some(found) = self.queue.next() {
                break found;
            }
            assert!(begun.elapsed() < PATIENCE, "post {id} does not complete");
            std::thread::yield_now();
        };
        assert_eq!((found.id, found.status), (id, 0));
    }

    /// Whether the fabric still answers, and so the session lasts.
    fn lasts(&mut self) -> bool {
        let asked = self.socket.send(&Request::QueryPair(self.pair), None).is_ok();
        asked && self.socket.receive::<Reply>().is_ok()
    }
}

/// No post is left beside a sleeping fabric, and each is performed once.
#[test]
fn each_post_is_performed() {
    let fabric = Fabric::new().expect("a fabric");
    let mut program = Program::new(&fabric, 1);
    for id in 0..8000 {
        program.post(id);
        program.finds(id);
    }
    assert!(program.posts.tail > WORDS, "the ring did not wrap");
    assert_eq!(number(&program.queue.memory, HEAD), program.posts.tail);
}

/// A request finds done what was posted before it, whether the doorbell rang or not.
#[test]
fn a_request_comes_after_the_posts_before_it() {
    let fabric = Fabric::new().expect("a fabric");
    let mut program = Program::new(&fabric, 1);
    for id in 0..500 {
        let post = program.write(program.pair, id);
        program.posts.put(&program.queue.memory, &post);
        assert!(program.lasts());
        assert_eq!(program.queue.next().map(|found| found.id), Some(id));
    }
}

/// Doorbells without posts are no requests.
#[test]
fn doorbells_without_posts() {
    let fabric = Fabric::new().expect("a fabric");
    let mut program = Program::new(&fabric, 1);
    for id in 0..300 {
        program.ring();
        if id % 100 == 0 {
            program.post(id);
            program.finds(id);
        }
    }
    assert!(program.lasts());
    // Without a session, they are none either.
    let mut stranger = session::come(&fabric);
    stranger.send(&Request::Doorbell, None).expect("the fabric listens");
    assert!(matches!(ask(&mut stranger, &Request::Status), Reply::Status { .. }));
}

/// What cannot be a post ends the session, and no other.
#[test]
fn what_cannot_be_ends_its_session_alone() {
    let fabric = Fabric::new().expect("a fabric");
    let mut other = Program::new(&fabric, 2);
    let encoded = |request: &Request<'_>| postcard::to_stdvec(request).expect("encodes");
    let (domain, long) = (encoded(&Request::AllocateDomain(0)), vec![0; MAX_MESSAGE + 1]);
    for (id, bytes) in (0..).zip([&[][..], &[0xff], &domain, &long]) {
        let mut program = Program::new(&fabric, 1);
        program.post(7);
        program.finds(7);
        assert!(program.lasts());
        program.posts.put_bytes(&program.queue.memory, bytes);
        program.ring();
        assert!(!program.lasts(), "{bytes:?}");
        other.post(id);
        other.finds(id);
    }
    for (tail, len, lasts) in [
        (0, 0, true),
        (WORDS + 1, 1, false),
        (u32::MAX, 1, false),
        (1 << 31, 1, false),
        // A post that is longer than what was posted.
        (2, 9, false),
        (WORDS, u64::MAX, false),
    ] {
        let mut program = Program::new(&fabric, 1);
        posts::write(&program.queue.memory, FIRST, &u64::to_le_bytes(len));
        posts::write(&program.queue.memory, TAIL, &u32::to_le_bytes(tail));
        program.ring();
        assert_eq!(program.lasts(), lasts, "{tail} {len}");
    }
    serves(&fabric);
}

/// A program whose posts never end makes no other one wait.
#[test]
fn posts_without_an_end_hold_up_no_other_program() {
    let fabric = Fabric::new().expect("a fabric");
    let (mut program, mut other) = (Program::new(&fabric, 1), Program::new(&fabric, 2));
    let memory = program.queue.memory.try_clone().expect("a descriptor");
    // Of a queue pair that is not there: two words each.
    let post = postcard::to_stdvec(&Post::Receive { pair: u32::MAX - 9, work: Vec::new() }).expect("encodes");
    let mut words = (post.len() as u64).to_le_bytes().to_vec();
    words.extend(post);
    words.resize(16, 0);
    posts::write(&memory, FIRST, &words.repeat(WORDS as usize / 2));
    let ends = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&ends);
    let begun = std::thread::spawn(move || {
        while !ended.load(Relaxed) {
            posts::write(&memory, TAIL, &(number(&memory, HEAD) / 2 * 2).wrapping_add(WORDS).to_le_bytes());
        }
    });
    let started = Instant::now();
    while number(&program.queue.memory, HEAD) < 2 * WORDS {
        // The fabric may have slept before the first posts.
        program.ring();
        assert!(started.elapsed() < PATIENCE, "no posts are taken");
        std::thread::yield_now();
    }
    for id in 0..20 {
        other.post(id);
        other.finds(id);
    }
    ends.store(true, Relaxed);
    begun.join().expect("posts");
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, Vec<u8>),
    Tail(u32),
    Put(Vec<u8>),
    Receives(u32),
    Post,
    Doorbell,
}

fn step() -> impl Strategy<Value = Step> {
    let place = prop_oneof![0..FIRST + 64, 0..FIRST + u64::from(WORDS) * 8 - 200];
    let bytes = || proptest::collection::vec(any::<u8>(), 0..200);
    prop_oneof![
        (place, bytes()).prop_map(|(at, bytes)| Step::Write(at, bytes)),
        prop_oneof![0..WORDS, any::<u32>()].prop_map(Step::Tail),
        bytes().prop_map(Step::Put),
        any::<u32>().prop_map(Step::Receives),
        Just(Step::Post),
        Just(Step::Doorbell),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever a program writes there while the fabric reads it, another program finds its own
    /// completions.
    #[test]
    fn whatever_is_in_the_ring(steps in proptest::collection::vec(step(), 1..60)) {
        let fabric = Fabric::new().expect("a fabric");
        let (mut hostile, mut other) = (Program::new(&fabric, 1), Program::new(&fabric, 2));
        for (id, step) in (0..).zip(steps) {
            let memory = &hostile.queue.memory;
            match step {
                Step::Write(at, bytes) => posts::write(memory, at, &bytes),
                Step::Tail(tail) => posts::write(memory, TAIL, &tail.to_le_bytes()),
                Step::Put(bytes) => _ = hostile.posts.put_bytes(memory, &bytes),
                Step::Receives(pair) => {
                    let work = vec![Receive { id, local: Vec::new() }; pair as usize % 20];
                    let pair = if pair % 2 == 0 { hostile.pair } else { pair };
                    hostile.posts.put(memory, &Post::Receive { pair, work });
                }
                Step::Post => hostile.post(id),
                Step::Doorbell => hostile.ring(),
            }
            other.post(id);
            other.finds(id);
            if id % 8 == 7 && !hostile.lasts() {
                hostile = Program::new(&fabric, 1);
            }
        }
    }
}
