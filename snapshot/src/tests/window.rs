//! Memory that is a window over a snapshot.

use super::*;
use crate::publisher::Filler;
use crate::publisher::filler::ENTRY;

/// Room for four slabs of a page, of four chunks each.
const MEMORY: u64 = 4 * (4096 + 4 * ENTRY);

/// A publisher on the first of some hosts, whose memory is a window.
fn window(hosts: u8) -> (World, Publisher<SoftSim>, Filler<SoftSim>) {
    let world = World::new(50, DeviceKind::Mlx5, hosts, Vec::new());
    let config = publisher::Config { memory: MEMORY, ..publisher::Config::default() };
    let mut publisher = world.publisher(1, config);
    publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
    let filler = publisher.filler(CHUNK).windowed().expect("room");
    (world, publisher, filler)
}

/// Publishes what follows `from`, until the window is full. Returns the end.
fn fill(
    publisher: &mut Publisher<SoftSim>,
    filler: &mut Filler<SoftSim>,
    all: &[u8],
    mut from: usize,
) -> usize {
    for chunk in all[from..].chunks(CHUNK as usize) {
        match filler.write(chunk) {
            Err(Error::TooMuch { .. }) => break,
            written => written.expect("memory"),
        }
        publisher.publish(filler.take().expect("a chunk")).expect("room");
        from += chunk.len();
    }
    from
}

/// VS-TABLE-008: chunks are released once all readers have them, and not while one of them is lost.
/// A reader that comes later is refused.
#[test]
fn a_window_waits_for_a_lost_reader() {
    let (world, mut publisher, mut filler) = window(4);
    let all = content(50, 60_500);
    let mut end = fill(&mut publisher, &mut filler, &all, 0);
    assert_eq!(end, 16_000);

    let begun = world.sim.now();
    let mut pulls = [world.pull(2, 1, reading()), world.pull(3, 1, reading())];
    while pulls[0].have.chunks < 16 || pulls[1].have.chunks < 6 {
        if pulls[1].have.chunks >= 6 {
            pulls[1].reader = None;
            pulls[1].done = true;
        }
        world.turn(&mut publisher, &mut pulls);
    }
    let lost = (pulls[1].have, std::mem::take(&mut pulls[1].bytes));
    (pulls[1].reader, pulls[1].done) = (None, true);
    while publisher.counts().reading > 1 {
        world.turn(&mut publisher, &mut pulls);
    }
    assert!(!publisher.release(2), "one that was lost may come back");

    pulls[1] = world.pull(3, 1, reading());
    (pulls[1].have, pulls[1].bytes) = lost;
    while !publisher.release(2) {
        world.turn(&mut publisher, &mut pulls);
    }
    // They do not wait for a quarter of a lease before they say what they have.
    assert!(world.sim.now().since(begun) < publisher::Config::default().lease / 4);
    let mut late = world.pull(4, 1, reading());
    while late.error.is_none() {
        world.turn(&mut publisher, std::slice::from_mut(&mut late));
    }
    assert!(matches!(late.error, Some(Error::OtherSnapshot)), "{:?}", late.error);
    while end < all.len() {
        end = fill(&mut publisher, &mut filler, &all, end);
        assert!(publisher.store.registered() <= MEMORY);
        world.turn(&mut publisher, &mut pulls);
        publisher.release(2);
    }
    publisher.mark().expect("a mark");
    publisher.end();
    world.run(&mut publisher, &mut pulls);
    for pull in &pulls {
        assert!(pull.error.is_none(), "{:?}", pull.error);
        assert!(pull.bytes == all);
    }
    drop((pulls, late, publisher, filler));
    assert!(world.is_empty());
}

/// VS-TABLE-008, VS-READ-006: neither a peer that has proven nothing nor a reader that is back
/// before its last session has ended counts for one that has not come.
#[test]
fn a_reader_that_comes_back_counts_once() {
    let (world, mut publisher, mut filler) = window(4);
    fill(&mut publisher, &mut filler, &content(52, 60_500), 0);

    let mut pulls = vec![world.pull(2, 1, reading())];
    while publisher.counts().slowest < 16 {
        world.turn(&mut publisher, &mut pulls);
    }
    let mut is_challenged = stranger(&world.hosts[3], publisher.address(), [0; 16]);
    while !is_challenged() {
        world.turn(&mut publisher, &mut pulls);
    }
    assert!(!publisher.release(2), "a stranger is no reader");

    // Its machine is cut off, so its session stays.
    let mut back = world.pull(3, 1, reading());
    back.have = pulls[0].have;
    let _cut_off = std::mem::replace(&mut pulls[0], back);
    while publisher.counts().reading < 2 {
        world.turn(&mut publisher, &mut pulls);
    }
    assert!(!publisher.release(2), "the second reader has not come");

    pulls.push(world.pull(4, 1, reading()));
    while pulls[1].have.chunks < 16 || publisher.counts().slowest < 16 {
        world.turn(&mut publisher, &mut pulls);
    }
    let mut is_challenged = stranger(&world.hosts[3], publisher.address(), [0; 16]);
    while !is_challenged() {
        world.turn(&mut publisher, &mut pulls);
    }
    assert!(publisher.release(2), "a stranger keeps no memory");
}

/// VS-TABLE-008: memory of four chunks is released if all four may go.
#[test]
fn memory_is_released_with_its_last_chunk() {
    let (_world, mut publisher, mut filler) = window(1);
    fill(&mut publisher, &mut filler, &content(53, 60_500), 0);
    assert_eq!([3, 4, 7, 8].map(|chunk| publisher.store.release(chunk)), [false, true, false, true]);
}

/// The limit also holds for tiny chunks, as a log has them that is written to slowly. Once readers
/// have them, more follow, although the last region stays.
#[test]
fn tiny_chunks_of_a_window_are_bounded_and_released() {
    let (_world, mut publisher, mut filler) = window(1);
    let mut chunks = 0;
    for _ in 0..3 {
        let before = chunks;
        while filler.room() > 0 {
            filler.write(b"x").expect("room");
            publisher.publish(filler.take().expect("a chunk")).expect("room");
            chunks += 1;
        }
        assert!(matches!(filler.write(b"x"), Err(Error::TooMuch { .. })));
        assert!(chunks - before >= 16, "{chunks} after {before}");
        let taken = publisher.store.taken();
        assert!(taken <= MEMORY && taken > MEMORY - ENTRY, "{taken}");
        assert!(publisher.store.release(chunks));
    }
}

/// A window has room for four chunks at least.
#[test]
fn a_window_of_three_chunks_is_none() {
    let world = World::new(51, DeviceKind::Mlx5, 1, Vec::new());
    let least = 4 * (4096 + ENTRY);
    for (memory, is_one) in [(least, true), (least - 1, false)] {
        let config = publisher::Config { memory, ..publisher::Config::default() };
        let mut publisher = world.publisher(1, config);
        let filler = publisher.filler(4096).windowed();
        assert_eq!(filler.is_ok(), is_one, "{memory}");
    }
}
