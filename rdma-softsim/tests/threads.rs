//! The fabric's own thread. The only test of its process, so that the threads it counts are its
//! own.

// Miri has no poll(2), shuttle schedules no sleep in it.
#![cfg(not(any(miri, shuttle)))]

mod common;

use core::time::Duration;
use std::time::Instant;

use rdma_backend::{Access, Domain, QueuePair, SendOp, Slice};
use rdma_softsim::Fabric;

use common::{SLOTS, ip, pair, readable, wait};

fn timers() -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
        .filter(|name| name.trim() == "softsim")
        .count()
}

/// Threads take a moment to get their name, and to leave /proc after they were joined.
fn soon(count: usize) -> bool {
    let end = Instant::now() + Duration::from_secs(10);
    while timers() != count && Instant::now() < end {
        std::thread::yield_now();
    }
    timers() == count
}

#[test]
fn starts_with_the_first_deadline_and_ends_with_the_last_handle() {
    let fabric = Fabric::new();
    let (mut a, b) = pair(&fabric.host(&[ip(1)]), &fabric.host(&[ip(2)]), ip(2));
    let source = a.domain.register(4, Access::NONE).unwrap();
    assert_eq!(timers(), 0);
    // One more than there are receives: the last one waits.
    for id in 0..=SLOTS {
        a.send(id, SendOp::Send, Slice { region: &source, offset: 0, len: 4 });
    }
    a.next("the first");
    assert!(soon(1));
    drop((source, a, fabric));
    assert_eq!(timers(), 1);
    assert!(b.pair.number() > 0);
    wait(&b.channel, "the end");
    assert!(!readable(&b.completions, Duration::ZERO));
    drop(b);
    assert!(soon(0));
}
