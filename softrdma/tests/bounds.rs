//! What programs take of a fabric is bounded, for each of them and for all together, and what is
//! taken is at least what objects hold. The fabric is in the process of this test.
#![allow(unsafe_code, reason = "an allocator that counts")]

mod queue;
mod session;

use std::alloc::{GlobalAlloc, Layout, System};
use std::borrow::Cow;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use queue::Queue;
use rdma_softsim::Parameters;
use session::{address, ask, come, open};
use softrdma::fabric::{Bounds, Fabric};
use softrdma_wire::{
    Access, Amounts, Exceeded, Local, MAX_ELEMENTS, MAX_INLINE, Name, Op, Receive, Reply, Request, Resource,
    Send, Service, Sge, Socket, Transition, VERSION,
};

/// Counts the bytes of the heap.
struct Counted;

static HEAP: AtomicI64 = AtomicI64::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HEAP.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: the caller meets the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HEAP.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: the caller meets the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// The tests count what is the process's: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn bounded(change: impl FnOnce(&mut Bounds)) -> Arc<Fabric> {
    let mut bounds = Bounds::of_this_process();
    change(&mut bounds);
    Fabric::with_bounds(Parameters::default(), bounds).expect("a fabric")
}

fn status(socket: &mut Socket) -> (Amounts, Vec<(Exceeded, u64)>) {
    let Reply::Status { used, refused, .. } = ask(socket, &Request::Status) else { panic!("no status") };
    (used, refused)
}

fn pair(domain: Name, queue: Name, depth: u32, elements: u8, service: Service) -> Request<'static> {
    Request::CreatePair {
        domain,
        send_queue: queue,
        receive_queue: queue,
        shared: None,
        service,
        send_depth: depth,
        receive_depth: depth,
        elements: [elements; 2],
        inline: if elements == 1 { MAX_INLINE as u32 } else { 0 },
    }
}

fn domain(socket: &mut Socket) -> Name {
    let Reply::Made(domain) = ask(socket, &Request::AllocateDomain(0)) else { panic!("no domain") };
    domain
}

/// Returns how many more bytes the heap has after `act`, and how many more were taken.
fn grown(asks: &mut Socket, act: impl FnOnce()) -> (i64, i64) {
    let taken = |asks: &mut Socket| status(asks).0.memory.cast_signed();
    let (heap, before) = (HEAP.load(Relaxed), taken(asks));
    act();
    // What the session's thread may still have of the last request is within the slack.
    (HEAP.load(Relaxed) - heap, taken(asks) - before)
}

/// Bytes that do not belong to an object: tables that all objects share, and a request.
const SLACK: i64 = 64 << 10;

#[test]
fn objects_hold_no_more_than_they_take() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let fabric = Fabric::new().expect("a fabric");
    let (mut asks, mut program) = (come(&fabric), open(&fabric, 1));
    let domain = domain(&mut program);
    let byte = u64::from(u8::MAX);
    let at = (&raw const byte).expose_provenance() as u64;
    let access = Access { local_write: false, remote_write: false, remote_read: true, remote_atomic: false };
    let Reply::Made(channel) = ask(&mut program, &Request::CreateEventChannel) else { panic!("no channel") };
    for request in [
        Request::AllocateDomain(0),
        Request::Register { domain, at, address: at, len: 8, access },
        Request::CreateIdentifier { channel },
        Request::CreateCompletionChannel,
        Request::CreateEventChannel,
        Request::CreateQueue { device: 0, depth: 1, channel: None, vector: 0 },
        Request::CreateShared { domain, depth: 1, limit: 0, elements: 1 },
        pair(domain, 0, 1, 1, Service::Connected),
    ] {
        let queue = Queue::create(&mut program, 1, None);
        let request = match request {
            Request::CreatePair { .. } => pair(domain, queue.name, 1, 1, Service::Connected),
            other => other,
        };
        let (held, taken) = grown(&mut asks, || {
            for _ in 0..200 {
                let made = ask(&mut program, &request);
                assert!(!matches!(made, Reply::Refused(_) | Reply::Exceeded(_)), "{request:?}: {made:?}");
            }
        });
        assert!(held <= taken + SLACK, "{request:?}: {held} bytes are held, {taken} were taken");
    }
}

/// Fills the queues of a queue pair, and its completion queue.
#[test]
fn queues_hold_no_more_than_they_take() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    const DEPTH: u32 = 1 << 13;
    let fabric = Fabric::new().expect("a fabric");
    let (mut asks, mut program) = (come(&fabric), open(&fabric, 1));
    let domain = domain(&mut program);
    for elements in [1, MAX_ELEMENTS as u8] {
        let (held, taken) = grown(&mut asks, || {
            let queue = Queue::create(&mut program, 2 * DEPTH, None).name;
            let [one, other] = [(); 2].map(|()| {
                let request = pair(domain, queue, DEPTH, elements, Service::Connected);
                let Reply::Pair { name, number, .. } = ask(&mut program, &request) else { panic!("no pair") };
                (name, number)
            });
            for ((pair, _), (_, number)) in [(one, other), (other, one)] {
                let (local, remote) = (address(1), address(1));
                for to in [
                    Transition::Initialise,
                    Transition::Receive { local, remote, number, timer: 1 },
                    Transition::Send { retry: 7, rnr_retry: 7, read_depth: 1 },
                ] {
                    assert_eq!(ask(&mut program, &Request::Modify { pair, to }), Reply::Done);
                }
            }
            let list = vec![Sge { address: 8, len: 0, lkey: 0 }; elements.into()];
            let local = || match elements {
                1 => Local::Inline(Cow::Borrowed(&[7; MAX_INLINE])),
                _ => Local::Memory(list.clone()),
            };
            // The peer has no receive, so all of them wait.
            for _ in 0..DEPTH / 32 {
                let send = |id| Send { id, op: Op::Send, signaled: true, solicited: false, local: local() };
                let work = (0..32).map(send).collect();
                let posted = ask(&mut program, &Request::PostSend { pair: one.0, room: 0, work });
                assert!(matches!(posted, Reply::Posted { count: 32, errno: 0, .. }), "{posted:?}");
                let work = (0..32).map(|id| Receive { id, local: list.clone() }).collect();
                let posted = ask(&mut program, &Request::PostReceive { pair: one.0, work });
                assert!(matches!(posted, Reply::Posted { count: 32, errno: 0, .. }), "{posted:?}");
            }
        });
        assert!(held <= taken + SLACK, "{elements}: {held} bytes are held, {taken} were taken");
        // Much more would be no bound.
        assert!(held > taken / 16, "{elements}: {held} bytes are held, {taken} were taken");
    }
}

/// Fills completion queues with the receives of a queue pair that fails.
#[test]
fn completion_queues_hold_no_more_than_they_take() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    const DEPTH: u32 = 1 << 13;
    let fabric = Fabric::new().expect("a fabric");
    let (mut asks, mut program) = (come(&fabric), open(&fabric, 1));
    let domain = domain(&mut program);
    let (held, taken) = grown(&mut asks, || {
        for _ in 0..4 {
            let queue = Queue::create(&mut program, DEPTH, None).name;
            let request = pair(domain, queue, DEPTH, 1, Service::Connected);
            let Reply::Pair { name: pair, .. } = ask(&mut program, &request) else { panic!("no pair") };
            assert_eq!(ask(&mut program, &Request::Modify { pair, to: Transition::Initialise }), Reply::Done);
            for _ in 0..DEPTH / 64 {
                let work = (0..64).map(|id| Receive { id, local: Vec::new() }).collect();
                let posted = ask(&mut program, &Request::PostReceive { pair, work });
                assert!(matches!(posted, Reply::Posted { count: 64, errno: 0, .. }), "{posted:?}");
            }
            assert_eq!(ask(&mut program, &Request::Modify { pair, to: Transition::Fail }), Reply::Done);
            // Only the completions are left.
            assert_eq!(ask(&mut program, &Request::DestroyPair(pair)), Reply::Done);
        }
    });
    assert!(held <= taken + SLACK, "{held} bytes are held, {taken} were taken");
}

/// Begins resolutions that fail at once, until an identifier may begin no more.
#[test]
fn unread_events_of_identifiers_are_within_what_they_take() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let fabric = Fabric::new().expect("a fabric");
    let (mut asks, mut program) = (come(&fabric), open(&fabric, 1));
    let Reply::Made(channel) = ask(&mut program, &Request::CreateEventChannel) else { panic!("no channel") };
    // No device has an address of that family.
    let destination = "[2001:db8::1]:1".parse().expect("an address");
    let (held, taken) = grown(&mut asks, || {
        for _ in 0..200 {
            let made = ask(&mut program, &Request::CreateIdentifier { channel });
            let Reply::Made(id) = made else { panic!("{made:?}") };
            let resolve = Request::ResolveAddress { id, source: None, destination, milliseconds: 1 };
            let begun = (0..1000).take_while(|_| ask(&mut program, &resolve) == Reply::Done).count();
            assert!((1..1000).contains(&begun), "{begun} resolutions");
        }
    });
    assert!(held <= taken + SLACK, "{held} bytes are held, {taken} were taken");
}

/// A device takes what the events hold that its program does not read.
#[test]
fn an_opened_device_takes_what_its_unread_events_hold() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let fabric = Fabric::new().expect("a fabric");
    let (mut asks, mut programs) = (come(&fabric), Vec::new());
    let mut taken_with = |devices: Vec<_>| {
        let hello = Request::Hello { version: VERSION, program: "test".into(), devices, above: 0 };
        let (_, taken) = grown(&mut asks, || {
            let mut program = come(&fabric);
            assert!(matches!(ask(&mut program, &hello), Reply::Welcome { .. }));
            programs.push(program);
        });
        taken
    };
    let one = taken_with(vec![vec![address(1)]]);
    let three = taken_with([2, 3, 4].map(|last| vec![address(last)]).into());
    let context = rdma_softsim::footprint::CONTEXT.cast_signed();
    assert!(three - one >= 2 * context, "two more devices have taken {}", three - one);
}

/// A bound refuses new objects, says which one it is, and leaves those that exist alone.
#[test]
fn memory_is_bounded_for_each_program_and_for_all() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    const MOST: u64 = 32 << 20;
    for each in [true, false] {
        let fabric = bounded(|bounds| {
            if each { &mut bounds.each } else { &mut bounds.all }.memory = MOST;
        });
        let (mut asks, mut program, mut other) = (come(&fabric), open(&fabric, 1), open(&fabric, 2));
        let first = domain(&mut program);
        let queue = Queue::create(&mut program, 8, None).name;
        let request = pair(first, queue, 1 << 10, 1, Service::Connected);
        let mut pairs = Vec::new();
        let refused = loop {
            match ask(&mut program, &request) {
                Reply::Pair { name, .. } => pairs.push(name),
                other => break other,
            }
        };
        let exceeded = Exceeded { resource: Resource::Memory, each, most: MOST };
        assert_eq!(refused, Reply::Exceeded(exceeded));
        assert_eq!(exceeded.errno(), rustix::io::Errno::NOMEM.raw_os_error());
        let (used, refused) = status(&mut asks);
        assert!(used.memory <= MOST && refused == [(exceeded, 1)], "{used:?} {refused:?}");
        // It is the bound of the program, not of its session.
        let (domain, queue) = (domain(&mut other), Queue::create(&mut other, 8, None).name);
        assert_eq!(
            ask(&mut other, &pair(domain, queue, 1 << 10, 1, Service::Connected)),
            Reply::Exceeded(exceeded)
        );
        // A queue pair that exists has what its queues may hold.
        let pair = pairs[0];
        assert_eq!(ask(&mut program, &Request::Modify { pair, to: Transition::Initialise }), Reply::Done);
        for _ in 0..1 << 4 {
            let work = (0..64).map(|id| Receive { id, local: Vec::new() }).collect();
            let posted = ask(&mut program, &Request::PostReceive { pair, work });
            assert!(matches!(posted, Reply::Posted { count: 64, errno: 0, .. }), "{posted:?}");
        }
        // What is given back can be taken.
        assert_eq!(ask(&mut program, &Request::DestroyPair(pairs[1])), Reply::Done);
        assert!(matches!(ask(&mut program, &request), Reply::Pair { .. }));
    }
}

/// Each session takes threads. One that is refused is told why.
#[test]
fn sessions_are_bounded_for_each_program() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let fabric = bounded(|bounds| bounds.each.sessions = 4);
    let mut sessions: Vec<_> = (1..=4).map(|last| open(&fabric, last)).collect();
    let hello = Request::Hello {
        version: VERSION,
        program: "test".into(),
        devices: vec![vec![address(5)]],
        above: 0,
    };
    let exceeded = Exceeded { resource: Resource::Sessions, each: true, most: 4 };
    // However many come, each has its answer.
    for _ in 0..200 {
        assert_eq!(ask(&mut come(&fabric), &hello), Reply::Exceeded(exceeded));
    }
    sessions.pop();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while matches!(ask(&mut come(&fabric), &hello), Reply::Exceeded(_)) {
        assert!(std::time::Instant::now() < deadline, "the session does not end");
        std::thread::yield_now();
    }
}

#[test]
fn descriptors_are_bounded_for_each_program() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let fabric = bounded(|bounds| bounds.each.descriptors = 40);
    let mut program = open(&fabric, 1);
    let exceeded = Exceeded { resource: Resource::Descriptors, each: true, most: 40 };
    for request in [Request::CreateCompletionChannel, Request::CreateEventChannel] {
        let refused = loop {
            match ask(&mut program, &request) {
                Reply::Made(_) => {}
                other => break other,
            }
        };
        assert_eq!(refused, Reply::Exceeded(exceeded));
    }
    assert_eq!(exceeded.errno(), rustix::io::Errno::MFILE.raw_os_error());
}

/// The threads of completion vectors are the fabric's, however often the number changes and
/// whatever sessions still have the vectors of before.
#[test]
fn vectors_share_their_threads() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let vectors = || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("threads").flatten();
        let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
        tasks.filter_map(name).filter(|name| name.starts_with("vector-")).count()
    };
    let fabric = Fabric::new().expect("a fabric");
    let mut asks = come(&fabric);
    let mut sessions = Vec::new();
    for (last, count) in (1..=8).zip([64, 2, 64, 63, 64, 1, 64, 64]) {
        let change = Request::Configure { latency: None, device_kind: None, vectors: Some(count) };
        assert_eq!(ask(&mut asks, &change), Reply::Done);
        sessions.push(open(&fabric, last));
    }
    // A thread takes its name when it runs.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while vectors() < 64 {
        assert!(std::time::Instant::now() < deadline, "{} threads", vectors());
        std::thread::yield_now();
    }
    assert_eq!(vectors(), 64);
}
