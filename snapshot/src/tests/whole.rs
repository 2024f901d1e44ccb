//! Sessions without faults.

use rdma_backend::Access;
use rdma_softsim::trace::EntryKind;

use super::*;
use crate::Secret;
use crate::wire::Reason;

/// Returns a publisher of all `bytes`.
fn published(world: &World, config: publisher::Config, bytes: &[u8]) -> Publisher<SoftSim> {
    let mut publisher = world.publisher(1, config);
    publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
    for chunk in bytes.chunks(CHUNK as usize) {
        publisher.append(chunk).expect("a chunk");
    }
    publisher.mark().expect("a mark");
    publisher.end();
    publisher
}

/// VS-READ-001: READs in flight stay within the limits of the reader's device, the publisher's
/// device and the caller's room.
#[test]
fn as_many_reads_are_under_way_as_both_sides_allow() {
    for (ours, theirs, room, most) in [(16, 16, 100, 16), (16, 3, 100, 3), (2, 16, 100, 2), (16, 16, 5, 5)] {
        let world = World::new(1, DeviceKind::Ibta, 2, Vec::new());
        let config = publisher::Config { depth: theirs, ..publisher::Config::default() };
        let mut publisher = published(&world, config, &content(1, 60_000));
        let mut pull = world.pull(2, 1, reader::Config { depth: ours, ..reader::Config::default() });
        pull.room = room;
        let mut pulls = [pull];
        world.run(&mut publisher, &mut pulls);
        assert!(pulls[0].error.is_none(), "{:?}", pulls[0].error);
        assert_eq!((pulls[0].counters.reads, pulls[0].counters.most_in_flight), (60, most));
    }
}

/// Chunks can be read before the snapshot is complete, and later ones come after the mark.
#[test]
fn building_and_reading_overlap_and_the_log_follows_the_snapshot() {
    let world = World::new(2, DeviceKind::Rxe, 2, Vec::new());
    let mut publisher = world.publisher(1, publisher::Config::default());
    publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
    let mut pull = world.pull(2, 1, reading());
    let bytes = content(2, 12_000);
    for (at, chunk) in bytes.chunks(CHUNK as usize).enumerate() {
        if at == 8 {
            publisher.mark().expect("a mark");
        }
        publisher.append(chunk).expect("a chunk");
        while pull.have.chunks <= at as u64 {
            world.turn(&mut publisher, std::slice::from_mut(&mut pull));
            assert!(pull.is_under_way(), "{:?}", pull.error);
        }
        assert_eq!(pull.have.mark.is_some(), at >= 8, "chunk {at}");
    }
    publisher.end();
    world.run(&mut publisher, std::slice::from_mut(&mut pull));
    assert!(pull.error.is_none() && pull.bytes == bytes);
    let mark = pull.have.mark.expect("a mark");
    assert_eq!((mark.chunks.get(), mark.bytes.get()), (8, 8000));
}

/// VS-AUTH-001, VS-AUTH-002: each side refuses a peer with another secret, and says so.
#[test]
fn a_peer_with_another_secret_is_refused() {
    let secret = |text: &str| Secret::new(text.as_bytes());
    for (theirs, ours, right) in [("a", "a", true), ("a", "b", false), ("", "b", false), ("a", "", false)] {
        let world = World::new(3, DeviceKind::Ibta, 2, Vec::new());
        let config = publisher::Config { secret: secret(theirs), ..publisher::Config::default() };
        let mut publisher = published(&world, config, &content(3, 3000));
        let mut pulls = [world.pull(2, 1, reader::Config { secret: secret(ours), ..reading() })];
        world.run(&mut publisher, &mut pulls);
        let refused = matches!(pulls[0].error, Some(Error::Refused(Reason::Secret)));
        assert_eq!(refused, !right, "{:?}", pulls[0].error);
        assert_eq!(pulls[0].bytes.is_empty(), !right);
    }
}

/// Chunks of a byte take memory and an entry each, so a replica that hands them on has a bound,
/// also after the mark.
#[test]
fn tiny_chunks_reach_the_limit_of_one_who_hands_on() {
    let world = World::new(11, DeviceKind::Ibta, 2, Vec::new());
    let mut first = world.publisher(1, publisher::Config::default());
    first.offer(None, offer(Layout::Chunks)).expect("an offer");
    first.mark().expect("a mark");
    for byte in content(11, 100) {
        first.append(&[byte]).expect("a chunk");
    }
    first.end();
    // For ten pages and their entries.
    let memory = 10 * (4096 + crate::publisher::filler::ENTRY);
    let mut second = world.publisher(2, publisher::Config { memory, ..publisher::Config::default() });
    let mut middle = world.pull(2, 1, reading());
    middle.domain = Some(second.domain().expect("a device"));
    let mut outcomes = Vec::new();
    while middle.is_under_way() {
        first.progress().expect("the publisher goes on");
        middle.progress(|landed| outcomes.push(second.hand_on(landed.take().expect("a chunk"))));
        world.step(middle.next_timeout().into_iter().chain(first.next_timeout()).min());
    }
    assert!(middle.error.is_none(), "{:?}", middle.error);
    assert_eq!((outcomes.len(), outcomes.iter().position(Result::is_err)), (100, Some(10)));
    assert!(matches!(outcomes[10], Err(Error::TooMuch { .. })), "{:?}", outcomes[10]);
}

/// VS-LEASE-002: a snapshot withdrawn during a READ is reported as withdrawn, and its memory is
/// gone.
#[test]
fn a_withdrawn_snapshot_is_reported_as_withdrawn() {
    for seed in 0..8 {
        let world = World::new(seed, DeviceKind::ALL[seed as usize % 4], 2, Vec::new());
        let mut publisher = published(&world, publisher::Config::default(), &content(6, 50_000));
        let mut pull = world.pull(2, 1, reading());
        while pull.have.chunks < 10 + seed {
            world.turn(&mut publisher, std::slice::from_mut(&mut pull));
        }
        publisher.withdraw(Reason::Withdrawn);
        world.run(&mut publisher, std::slice::from_mut(&mut pull));
        assert!(matches!(pull.error, Some(Error::Refused(Reason::Withdrawn))), "{seed}: {:?}", pull.error);
    }
}

/// A reader too many is told so.
#[test]
fn one_reader_too_many_is_told_so() {
    let world = World::new(8, DeviceKind::Ibta, 3, Vec::new());
    let config = publisher::Config { readers: 1, ..publisher::Config::default() };
    let mut publisher = world.publisher(1, config);
    publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
    let mut pulls = [world.pull(2, 1, reading()), world.pull(3, 1, reading())];
    while pulls.iter().all(|pull| pull.error.is_none()) {
        world.turn(&mut publisher, &mut pulls);
    }
    let error = pulls.iter().find_map(|pull| pull.error.clone());
    assert!(matches!(error, Some(Error::Refused(Reason::Full))), "{error:?}");
}

/// A snapshot beyond the publisher's limit is the publisher's error, before any memory is
/// registered for it.
#[test]
fn a_publisher_keeps_no_more_than_it_may() {
    let world = World::new(9, DeviceKind::Ibta, 1, Vec::new());
    let mut publisher =
        world.publisher(1, publisher::Config { memory: 5000, ..publisher::Config::default() });
    publisher.append(&[0; 1000]).expect("room");
    assert!(matches!(publisher.append(&[0; 1000]), Err(Error::TooMuch { .. })));
    assert!(matches!(publisher.begin_mapping(1000), Err(Error::TooMuch { .. })));
}

/// VS-SEC-001, VS-TABLE-004: of all memory of a run, peers may write only to that of the control
/// streams, which is in other domains.
#[test]
fn no_chunk_can_be_written_by_a_peer() {
    let world = World::new(11, DeviceKind::Ibta, 2, Vec::new());
    let mut publisher = published(&world, publisher::Config::default(), &content(11, 60_000));
    let mut pulls = [world.pull(2, 1, reading())];
    world.run(&mut publisher, &mut pulls);
    let (mut read_only, mut windows) = (0, 0);
    for entry in world.sim.take_trace() {
        if let EntryKind::Registered { access, .. } = entry.what {
            let (read, written) = (access.allows(Access::REMOTE_READ), access.allows(Access::REMOTE_WRITE));
            assert!(!(read && written), "{access:?}");
            read_only += usize::from(read);
            windows += usize::from(written);
        }
    }
    // Slabs of the chunks, each as long as all earlier ones together.
    assert_eq!(read_only, 7);
    // One window each way: the frames fit into it.
    assert_eq!(windows, 2);
}

/// VS-TIME-001: a reader whose READ has failed waits for the publisher's reason, and does not
/// busy-loop meanwhile.
#[test]
fn a_reader_that_waits_for_the_last_word_sleeps() {
    let world = World::new(12, DeviceKind::Ibta, 2, Vec::new());
    let mut publisher = published(&world, publisher::Config::default(), &content(12, 10_000));
    publisher.store.log.entries[4].rkey = 0xdead_beef.into();
    let mut pull = world.pull(2, 1, reading());
    while pull.counters.reads < 5 {
        world.turn(&mut publisher, std::slice::from_mut(&mut pull));
    }
    // The publisher does not run from now on, so the READ fails without a reason.
    let failed = |pull: &Pull| {
        pull.next_timeout().is_some_and(|at| at.since(world.sim.now()) <= Duration::from_secs(1))
    };
    while !failed(&pull) {
        pull.progress(|_| {});
        world.step(pull.next_timeout());
    }
    let mut turns = 0;
    while let Some(reader) = &pull.reader {
        if is_readable(&reader.sources()) {
            turns += 1;
            assert!(turns < 10, "it is woken again and again");
        } else {
            world.step(pull.next_timeout());
        }
        pull.progress(|_| {});
    }
    assert!(matches!(pull.error, Some(Error::Read { .. })), "{:?}", pull.error);
}
