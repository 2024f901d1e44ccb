//! A program may write anything into the pages that it shares with the fabric. It affects only its
//! own queues.

mod posts;
mod queue;
mod session;

use std::sync::Arc;

use posts::Poster;
use proptest::prelude::*;
use queue::{ARMED, Queue, SHOWS, TAKEN};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use session::{address, ask, open};
use softrdma::fabric::Fabric;
use softrdma_wire::{Completion, Name, PAGE, Post, Receive, Reply, Request, SHOWN, Send, Socket, Transition};

/// A program with a queue pair that is connected to itself.
struct Program {
    socket: Socket,
    queue: Queue,
    pair: Name,
}

const SENDS: u32 = 4;

impl Program {
    fn new(fabric: &Arc<Fabric>, last: u8, depth: u32) -> Self {
        let mut socket = open(fabric, last);
        let queue = Queue::create(&mut socket, depth, None);
        let Reply::Made(domain) = ask(&mut socket, &Request::AllocateDomain(0)) else { panic!("no domain") };
        let request = Request::CreatePair {
            domain,
            send_queue: queue.name,
            receive_queue: queue.name,
            shared: None,
            service: softrdma_wire::Service::Connected,
            send_depth: SENDS,
            receive_depth: 4,
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
        Self { socket, queue, pair }
    }

    /// Posts a WRITE without bytes, and returns the answer, but for the room that is left.
    fn write(&mut self, id: u64) -> Reply {
        let op = softrdma_wire::Op::Write { address: 0, rkey: 0 };
        let local = softrdma_wire::Local::Memory(Vec::new());
        let work = vec![Send { id, op, signaled: true, solicited: false, local }];
        match ask(&mut self.socket, &Request::PostSend { pair: self.pair, room: 0, work }) {
            Reply::Posted { count, errno, .. } => Reply::Posted { count, errno, room: 0 },
            other => other,
        }
    }

    /// Moves the queue pair to ERR and posts receives, which complete at once.
    fn flush(&mut self, ids: std::ops::Range<u64>) {
        let modified = ask(&mut self.socket, &Request::Modify { pair: self.pair, to: Transition::Fail });
        assert_eq!(modified, Reply::Done);
        for id in ids {
            let work = vec![Receive { id, local: Vec::new() }];
            let posted = ask(&mut self.socket, &Request::PostReceive { pair: self.pair, work });
            assert!(matches!(posted, Reply::Posted { count: 1, errno: 0, .. }), "{posted:?}");
        }
    }
}

const POSTED: Reply = Reply::Posted { count: 1, errno: 0, room: 0 };

fn ids(completions: &[Completion]) -> Vec<u64> {
    completions.iter().map(|completion| completion.id).collect()
}

/// Checks that another program finds its completions, and no others.
fn finds_its_own(program: &mut Program, id: u64) {
    assert_eq!(program.write(id), POSTED);
    assert_eq!(ids(&program.queue.take_shown()), [id]);
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, Vec<u8>),
    Words(u32, u64),
    Post,
    Poll,
    Forget,
}

fn step() -> impl Strategy<Value = Step> {
    // An offset in the pages of the first queues, or beyond.
    let place = prop_oneof![0..8 * PAGE as u64, 0..(PAGE as u64) << 14];
    prop_oneof![
        (place, proptest::collection::vec(any::<u8>(), 1..200))
            .prop_map(|(at, bytes)| Step::Write(at, bytes)),
        (any::<u32>(), any::<u64>()).prop_map(|(taken, armed)| Step::Words(taken, armed)),
        Just(Step::Post),
        Just(Step::Poll),
        Just(Step::Forget),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever a program writes there, the fabric answers, and another program finds only its own
    /// completions.
    #[test]
    fn whatever_is_in_a_page(steps in proptest::collection::vec(step(), 1..100)) {
        let fabric = Fabric::new().expect("a fabric");
        let (mut hostile, mut other) = (Program::new(&fabric, 1, 16), Program::new(&fabric, 2, 16));
        for (id, step) in (0..).zip(steps) {
            match step {
                Step::Write(at, bytes) => {
                    // The write fails beyond the memory's end.
                    let _written = rustix::io::pwrite(&hostile.queue.memory, &bytes, at);
                }
                Step::Words(taken, armed) => {
                    hostile.queue.write(TAKEN, &taken.to_le_bytes());
                    hostile.queue.write(ARMED, &armed.to_le_bytes());
                }
                Step::Post => {
                    let answer = hostile.write(id);
                    assert!(matches!(answer, Reply::Posted { .. }), "{answer:?}");
                }
                Step::Poll => {
                    let answer = ask(&mut hostile.socket, &Request::Poll(hostile.queue.name));
                    assert!(matches!(answer, Reply::Done | Reply::Refused(_)), "{answer:?}");
                }
                Step::Forget => hostile.queue.write(0, &[0; PAGE]),
            }
            finds_its_own(&mut other, id);
        }
    }
}

/// The memory keeps its size. A hole that the program punches reads as zeros, and the fabric
/// continues.
#[test]
fn the_memory_keeps_its_size() {
    let fabric = Fabric::new().expect("a fabric");
    let mut program = Program::new(&fabric, 1, 16);
    let memory = &program.queue.memory;
    let len = rustix::fs::fstat(memory).expect("a file").st_size as u64;
    for size in [0, len - 1, len + 1, 2 * len] {
        assert_eq!(rustix::fs::ftruncate(memory, size), Err(Errno::PERM));
    }
    for seal in [rustix::fs::SealFlags::WRITE, rustix::fs::SealFlags::FUTURE_WRITE] {
        assert_eq!(rustix::fs::fcntl_add_seals(memory, seal), Err(Errno::PERM));
    }
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for id in 0..3 {
        assert_eq!(program.write(id), POSTED);
        assert_eq!(program.queue.number(SHOWS), id as u32 + 1);
        rustix::fs::fallocate(&program.queue.memory, hole, 0, len).expect("a hole");
        assert_eq!(program.queue.number(SHOWS), 0);
    }
    assert!(matches!(ask(&mut program.socket, &Request::AllocateDomain(0)), Reply::Made(_)));
}

/// A post without an answer that the fabric refuses fails its queue pair, and no other.
#[test]
fn a_refused_submission_fails_its_queue_pair() {
    const STATE_RESET: u8 = 0;
    const STATE_RTS: u8 = 3;
    const STATE_ERR: u8 = 6;
    let fabric = Fabric::new().expect("a fabric");
    let state = |program: &mut Program, pair| match ask(&mut program.socket, &Request::QueryPair(pair)) {
        Reply::State { state, .. } => Some(state),
        _ => None,
    };
    let write = |id| {
        let op = softrdma_wire::Op::Write { address: 0, rkey: 0 };
        Send { id, op, signaled: true, solicited: false, local: softrdma_wire::Local::Memory(Vec::new()) }
    };
    let receive = |id| Receive { id, local: Vec::new() };
    let mut other = Program::new(&fabric, 2, 16);
    for (count, fails) in [(SENDS, false), (SENDS + 1, true)] {
        let mut program = Program::new(&fabric, 1, 16);
        let (own, foreign, mut posts) = (program.pair, u32::MAX, Poster::default());
        for pair in [foreign, own] {
            let work = (0..count.into()).map(write).collect();
            posts.put(&program.queue.memory, &Post::Send { pair, work });
        }
        let expected = if fails { STATE_ERR } else { STATE_RTS };
        assert_eq!(state(&mut program, own), Some(expected));
        // Those that found room were posted.
        assert_eq!(ids(&program.queue.take_shown()), (0..SENDS.into()).collect::<Vec<_>>());
    }
    let mut program = Program::new(&fabric, 1, 16);
    let (pair, work, mut posts) = (program.pair, (0..5).map(receive).collect(), Poster::default());
    posts.put(&program.queue.memory, &Post::Receive { pair, work });
    assert_eq!(state(&mut program, pair), Some(STATE_ERR));
    let reset = Request::Modify { pair, to: Transition::Reset };
    assert_eq!(ask(&mut program.socket, &reset), Reply::Done);
    let work = vec![receive(9)];
    posts.put(&program.queue.memory, &Post::Receive { pair, work });
    assert_eq!(state(&mut program, pair), Some(STATE_RESET));
    finds_its_own(&mut other, 1);
}

/// A program that claims to have taken more than it was shown, or less than before, has taken
/// nothing.
#[test]
fn positions_that_cannot_be_are_not_believed() {
    let fabric = Fabric::new().expect("a fabric");
    let mut program = Program::new(&fabric, 1, 16);
    let full = Reply::Posted { count: 0, errno: Errno::NOMEM.raw_os_error(), room: 0 };
    for id in 0..u64::from(SENDS) {
        assert_eq!(program.write(id), POSTED);
    }
    for taken in [SENDS + 1, 1000, u32::MAX, 1 << 31] {
        program.queue.write(TAKEN, &taken.to_le_bytes());
        program.queue.write(ARMED, &(u64::from(taken) << 32 | 2).to_le_bytes());
        assert_eq!(program.write(9), full, "{taken}");
    }
    // Completions that were taken make room for as many.
    program.queue.write(TAKEN, &2_u32.to_le_bytes());
    assert_eq!((program.write(4), program.write(5), program.write(9)), (POSTED, POSTED, full.clone()));
    program.queue.write(TAKEN, &1_u32.to_le_bytes());
    assert_eq!(program.write(9), full);
    assert_eq!(ids(&program.queue.take_shown()), [0, 1, 2, 3, 4, 5]);
    assert_eq!(program.write(6), POSTED);
}

/// Completions without room in the page are shown when the program asks.
#[test]
fn completions_beyond_the_page_come_when_asked_for() {
    let fabric = Fabric::new().expect("a fabric");
    let all = 2 * u64::from(SHOWN) + 5;
    let mut program = Program::new(&fabric, 1, 1 << 10);
    program.flush(0..all);
    let mut found = Vec::new();
    for more in [true, true, false] {
        assert_eq!(program.queue.must_call(), more);
        found.extend(ids(&program.queue.take_shown()));
        assert_eq!(ask(&mut program.socket, &Request::Poll(program.queue.name)), Reply::Done);
    }
    assert_eq!(found, (0..all).collect::<Vec<_>>());
}

/// A program that takes no completions loses its queue, and is told so.
#[test]
fn a_queue_whose_completions_are_not_taken_is_lost() {
    let fabric = Fabric::new().expect("a fabric");
    let (mut program, mut other) = (Program::new(&fabric, 1, 16), Program::new(&fabric, 2, 16));
    program.flush(0..16);
    assert!(!program.queue.must_call());
    program.flush(16..17);
    assert!(program.queue.must_call());
    assert!(matches!(ask(&mut program.socket, &Request::Poll(program.queue.name)), Reply::Refused(_)));
    finds_its_own(&mut other, 1);
}

/// The number of a program's queues is bounded. A destroyed one makes room for another, and other
/// programs have their own.
#[test]
fn pages_are_bounded() {
    let fabric = Fabric::new().expect("a fabric");
    let mut socket = open(&fabric, 1);
    let request = Request::CreateQueue { device: 0, depth: 1, channel: None, vector: 0 };
    let (mut count, mut last) = (0, 0);
    let refused = loop {
        match ask(&mut socket, &request) {
            Reply::Queue { name, page } => {
                (count, last) = (count + 1, name);
                // The first page has the notices.
                assert_eq!(page, count);
            }
            other => break other,
        }
    };
    assert_eq!((refused, count), (Reply::Refused(Errno::NOMEM.raw_os_error()), (1 << 14) - 1));
    assert_eq!(ask(&mut socket, &Request::DestroyQueue(last)), Reply::Done);
    let again = ask(&mut socket, &request);
    assert!(matches!(again, Reply::Queue { page, .. } if page == count), "{again:?}");
    finds_its_own(&mut Program::new(&fabric, 2, 16), 1);
}
