//! A program that is killed at any of its system calls leaves nothing in the fabric: no descriptor,
//! mapping, thread or memory. The fabric is in the process of this test, which is alone in it.
//!
//! The test kills 20 programs, or as many as `SOFTRDMA_KILLS` says. The number of a kill is the
//! seed from which its program and its system call are drawn.
#![allow(unsafe_code, reason = "an allocator that counts")]

mod common;
mod echo;
mod session;
mod traced;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use common::{CLIENT, Home, SERVER, await_some, program};
use session::{ask, come, listening, open};
use softrdma_wire::{Reply, Request};
use traced::Traced;

/// How many messages are echoed.
const MESSAGES: usize = 16;

/// Bytes that the heap may have more than before the first kill, however many kills there were.
const SLACK: i64 = 4096;

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

/// What the fabric holds of programs: descriptors of this process, threads that serve programs, and
/// mappings of memory that is shared with programs.
fn held() -> [usize; 3] {
    let entries = |of: &str| std::fs::read_dir(format!("/proc/self/{of}")).expect("a folder").flatten();
    // A thread may have ended meanwhile.
    let name = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("comm")).ok();
    let sessions = entries("task").filter_map(name).filter(|name| name == "session\n").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("mappings");
    let mappings = maps.lines().filter(|line| line.contains("/memfd:softrdma")).count();
    [entries("fd").count(), sessions, mappings]
}

/// A number drawn from a seed (splitmix64).
fn drawn(seed: u64) -> u64 {
    let mixed = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Kills the server at its `at`th stop, and returns how often it stopped. Its client ends.
fn kills_server(home: &Home, at: u64) -> u64 {
    let mut server = Traced::start(program(home, SERVER, "echo::echoes", ""), at);
    if let Some(address) = server.line("listens on ") {
        assert!(echo::client(home, &address, MESSAGES).finish().0);
    }
    server.ended()
}

/// Kills the client at its `at`th stop, and returns how often it stopped. Its server serves the
/// next one.
fn kills_client(home: &Home, at: u64) -> u64 {
    let (server, address, _pid) = echo::server(home);
    let argument = format!("{address} {MESSAGES}");
    let stops = Traced::start(program(home, CLIENT, "echo::sends", &argument), at).ended();
    // A server ends by itself once it has served a client to the end, this one at the latest.
    // It is refused if the first was served to the end.
    assert!(echo::client(home, &address, MESSAGES).finish().0);
    let (ended, said) = server.finish();
    assert!(ended && said.contains("the client closed"), "{said}");
    stops
}

#[test]
fn a_killed_program_leaves_nothing() {
    if !traced::is_allowed() {
        println!("skipped: this machine forbids ptrace(2)");
        return;
    }
    let kills = std::env::var("SOFTRDMA_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(20);
    let home = Home::new("kills");
    let fabric = listening(&home.socket());
    // Sessions of this process, until the end: both machines, and one that asks.
    let _machines = [1, 2].map(|last| open(&fabric, last));
    let mut asks = come(&fabric);
    // What is held, unless a program has a session or a queue pair.
    let mut now = || {
        let status = ask(&mut asks, &Request::Status);
        let alone = matches!(status, Reply::Status { sessions, .. } if sessions.len() == 2);
        let none = ask(&mut asks, &Request::Pairs { above: 0 }) == Reply::Pairs(Vec::new());
        (alone && none).then(held)
    };
    let first = await_some("what is held", &mut now);
    let runs: [fn(&Home, u64) -> u64; 2] = [kills_server, kills_client];
    let stops = runs.map(|run| run(&home, u64::MAX));
    let mut bytes = None;
    for kill in 0..=kills {
        let what = format!("kill {kill} of {kills}: {first:?} and {bytes:?}");
        // Not more than at first. A thread that begins has the name of the one that has made it, so
        // that one session may have been counted too many.
        await_some(&what, || now()?.iter().zip(&first).all(|(now, first)| now <= first).then_some(()));
        let most = SLACK + *bytes.get_or_insert_with(|| HEAP.load(Relaxed));
        await_some(&what, || (HEAP.load(Relaxed) <= most).then_some(()));
        if kill < kills {
            let which = (drawn(kill) % 2) as usize;
            let mut of = stops[which];
            loop {
                let at = 1 + (drawn(kill) >> 1) % of;
                of = runs[which](&home, at);
                // A run with fewer stops than the one that was counted was not killed.
                if of >= at {
                    break;
                }
            }
        }
    }
    println!(
        "{kills} kills at up to {stops:?} stops; {first:?} are held; {bytes:?} bytes, and {} after",
        HEAP.load(Relaxed)
    );
}
