//! Faults at every moment of a session, on either side, and readers that go on after them.

use rdma_softsim::{Fault, Injection, When};

use super::*;

/// Bytes of a snapshot here.
const LEN: usize = 40_321;

/// One run under `seed`: a publisher, a reader with many attempts, and one to three faults drawn from the seed.
fn run(seed: u64) -> (Pull, bool) {
    let mut random = Random::new(seed);
    let device_kind = random.pick(&DeviceKind::ALL);
    let plan = (0..=random.next() % 3)
        .map(|_| {
            let fault = random.pick(&[
                Fault::LinkDown { micros: 1_000_000 },
                Fault::LinkDown { micros: 20_000_000 },
                Fault::PairFatal,
                Fault::QueueLost,
                Fault::Lose,
                Fault::LoseAnswer,
                Fault::Hold { micros: 5000 },
                Fault::SlowReady { micros: 300_000 },
                Fault::Rejected { reason: 28 },
                Fault::Unreachable,
                Fault::ConnectError,
                Fault::SourceGone,
                Fault::Spurious,
                Fault::AddressError,
            ]);
            let host = (random.next() % 2) as u32;
            Injection { when: When::Event(random.next() % 400), host, fault }
        })
        .collect();
    let world = World::new(seed, device_kind, 2, plan);
    let bytes = content(seed, LEN);
    let mut publisher = world.publisher(1, publisher::Config::default());
    publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
    for chunk in bytes.chunks(CHUNK as usize) {
        publisher.append(chunk).expect("a chunk");
    }
    publisher.mark().expect("a mark");
    publisher.end();
    let mut pulls = [world.pull(2, 1, reading())];
    // Two seconds each while a link is down.
    pulls[0].attempts = 60;
    world.run(&mut publisher, &mut pulls);
    let [pull] = pulls;
    // Never a wrong byte, and what a cut wastes is at most what was under way (VS-READ-003).
    assert!(bytes.starts_with(&pull.bytes), "seed {seed}: a wrong byte");
    assert!(pull.wasted.iter().all(|wasted| *wasted <= u64::from(DEPTH)), "seed {seed}: {:?}", pull.wasted);
    assert_eq!(pull.bytes.len() as u64, pull.have.bytes, "seed {seed}");
    let whole = pull.error.is_none() && pull.bytes == bytes;
    drop(publisher);
    let mut pull = pull;
    pull.reader = None;
    assert!(world.is_empty(), "seed {seed}: something is held");
    (pull, whole)
}

/// VS-READ-003, VS-TIME-001: however a session is cut, the reader goes on where it was, and every resource comes back.
#[test]
fn a_cut_wastes_no_more_than_what_was_under_way() {
    let seeds: u64 = std::env::var("SNAPSHOT_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
    let (mut cut, mut whole) = (0, 0);
    for seed in 0..seeds {
        let (pull, is_whole) = run(seed);
        cut += usize::from(!pull.wasted.is_empty());
        whole += usize::from(is_whole);
        // What no attempt can get over is what this machine lacks.
        let is_lacking = matches!(
            pull.error,
            Some(Error::Backend { .. } | Error::Control(rdma_conn::Error::Backend { .. }))
        );
        assert!(is_whole || is_lacking, "seed {seed}: {:?}", pull.error);
    }
    assert!(cut * 10 > seeds as usize, "{cut} of {seeds} runs were cut");
    assert!(whole * 100 > seeds as usize * 95, "{whole} of {seeds} runs came to their end");
}

/// VS-TABLE-001: a publisher that is started again has another snapshot, and says so; nothing of it is mixed into the old one.
#[test]
fn a_publisher_that_was_restarted_has_another_snapshot() {
    let world = World::new(1, DeviceKind::Ibta, 2, Vec::new());
    let begin = |seed| {
        let mut publisher = world.publisher(1, publisher::Config::default());
        publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
        for chunk in content(seed, LEN).chunks(CHUNK as usize) {
            publisher.append(chunk).expect("a chunk");
        }
        publisher.mark().expect("a mark");
        publisher.end();
        publisher
    };
    let mut publisher = begin(1);
    let mut pull = world.pull(2, 1, reading());
    pull.attempts = 5;
    while pull.have.chunks < 10 {
        publisher.progress().expect("the publisher goes on");
        pull.progress(|_| {});
        world.step(pull.next_timeout().into_iter().chain(publisher.next_timeout()).min());
    }
    drop(publisher);
    let mut publisher = begin(2);
    world.run(&mut publisher, std::slice::from_mut(&mut pull));
    assert!(matches!(pull.error, Some(Error::OtherSnapshot)), "{:?}", pull.error);
    assert!(content(1, LEN).starts_with(&pull.bytes));
}
