//! Sessions without faults.

use rdma_backend::{Access, Backend, CmEventKind, ConnectParams, EventChannel, Identifier, QueuePairLimits};
use rdma_softsim::trace::EntryKind;

use super::*;
use crate::Secret;
use crate::publisher::session::{Log, Session};
use crate::reader::machine::{Machine, Order};
use crate::wire::{Challenge, Frame, Hello, MAGIC, Reason};

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

/// VS-TABLE-002, VS-READ-001: three readers get every byte, and nothing is left behind, on every
/// kind of device.
#[test]
fn readers_get_every_byte_and_give_everything_back() {
    for (seed, device_kind) in (0..).zip(DeviceKind::ALL) {
        let world = World::new(seed, device_kind, 4, Vec::new());
        let bytes = content(seed, 100_500);
        let mut publisher = published(&world, publisher::Config::default(), &bytes);
        let mut pulls = [2, 3, 4].map(|host| world.pull(host, 1, reading()));
        world.run(&mut publisher, &mut pulls);
        for pull in &pulls {
            assert!(pull.error.is_none(), "{device_kind:?}: {:?}", pull.error);
            assert!(pull.bytes == bytes, "{device_kind:?}");
            assert_eq!((pull.have.chunks, pull.have.bytes), (101, 100_500));
        }
        drop((publisher, pulls));
        assert!(world.is_empty(), "{device_kind:?}");
    }
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
            publisher.progress().expect("the publisher goes on");
            pull.progress(|_| {});
            assert!(pull.is_under_way(), "{:?}", pull.error);
            world.step(pull.next_timeout().into_iter().chain(publisher.next_timeout()).min());
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

/// VS-RCP-001, VS-RCP-002: the seed's table, with a partly filled last area.
#[test]
fn the_seeds_table_is_read_area_by_area() {
    let world = World::new(4, DeviceKind::Mlx5, 2, Vec::new());
    let bytes = content(4, (reader::AREA as usize) * 2 + 77);
    let mut publisher = world.publisher(1, publisher::Config::default());
    let offer = Offer { chunk_size: reader::AREA, ..offer(Layout::Rcp) };
    publisher.offer(None, offer).expect("an offer");
    publisher.begin_mapping(bytes.len() as u64).expect("memory");
    publisher.append(&bytes).expect("room");
    publisher.mark().expect("complete");
    publisher.end();
    let mut pulls = [world.pull(2, 1, reading())];
    world.run(&mut publisher, &mut pulls);
    assert!(pulls[0].error.is_none(), "{:?}", pulls[0].error);
    assert!(pulls[0].bytes == bytes);
    assert_eq!(pulls[0].have.chunks, 3);
}

/// A replica hands on verified chunks while it reads. Two replicas that pull from it have
/// everything before the first publisher serves a second copy.
#[test]
fn a_replica_hands_on_what_it_has_verified() {
    let world = World::new(5, DeviceKind::Rxe, 3, Vec::new());
    let bytes = content(5, 50_000);
    let mut first = published(&world, publisher::Config::default(), &bytes);
    let mut second = world.publisher(2, publisher::Config::default());
    let mut middle = world.pull(2, 1, reading());
    middle.domain = Some(second.domain().expect("a device"));
    let mut last = world.pull(3, 2, reading());
    let mut offered = false;
    while middle.is_under_way() || last.is_under_way() || first.counts().done == 0 {
        first.progress().expect("the publisher goes on");
        middle.progress(|landed| second.hand_on(landed.take().expect("a chunk")).expect("memory"));
        if let Some(offer) = middle.reader.as_ref().and_then(Reader::offer).filter(|_| !offered) {
            second.offer(Some(middle.have.snapshot), offer).expect("an offer");
            offered = true;
        }
        if let Some(mark) = middle.have.mark.filter(|mark| mark.chunks.get() == middle.have.chunks) {
            second.hand_on_mark(mark);
            second.end();
        }
        second.progress().expect("the replica goes on");
        last.progress(|_| {});
        let timeouts =
            [middle.next_timeout(), last.next_timeout(), first.next_timeout(), second.next_timeout()];
        world.step(timeouts.into_iter().flatten().min());
    }
    assert!(middle.error.is_none() && last.error.is_none(), "{:?} {:?}", middle.error, last.error);
    assert!(middle.bytes == bytes && last.bytes == bytes);
    assert_eq!((first.counts().done, second.counts().done), (1, 1));
    drop((middle, last, first, second));
    assert!(world.is_empty());
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
    let memory = 10 * (4096 + size_of::<crate::wire::Entry>() as u64);
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
            publisher.progress().expect("the publisher goes on");
            pull.progress(|_| {});
            world.step(pull.next_timeout().into_iter().chain(publisher.next_timeout()).min());
        }
        publisher.withdraw(Reason::Withdrawn);
        world.run(&mut publisher, std::slice::from_mut(&mut pull));
        assert!(matches!(pull.error, Some(Error::Refused(Reason::Withdrawn))), "{seed}: {:?}", pull.error);
    }
}

/// VS-LEASE-001: a silent reader loses its place after its lease. A reader whose caller takes no
/// chunks keeps it.
#[test]
fn a_silent_reader_loses_its_lease_and_a_slow_one_does_not() {
    let world = World::new(7, DeviceKind::Ibta, 3, Vec::new());
    let mut publisher = published(&world, publisher::Config::default(), &content(7, 50_000));
    let mut silent = world.pull(2, 1, reading());
    let mut slow = world.pull(3, 1, reading());
    let begin = |pull: &Pull| pull.have.chunks >= 3;
    while !(begin(&silent) && begin(&slow)) {
        publisher.progress().expect("the publisher goes on");
        for pull in [&mut silent, &mut slow] {
            if !begin(pull) {
                pull.progress(|_| {});
            }
        }
        world.step(publisher.next_timeout());
    }
    slow.room = 0;
    let until = world.sim.now().after(Duration::from_secs(120));
    while world.sim.now() < until {
        publisher.progress().expect("the publisher goes on");
        slow.progress(|_| {});
        world.step(slow.next_timeout().into_iter().chain(publisher.next_timeout()).chain([until]).min());
    }
    assert_eq!((publisher.counts().reading, publisher.counts().lost), (1, 1));
    slow.room = 4;
    world.run(&mut publisher, std::slice::from_mut(&mut slow));
    assert!(slow.error.is_none(), "{:?}", slow.error);
    silent.progress(|_| {});
    assert!(matches!(silent.error, Some(Error::Refused(Reason::Lease))), "{:?}", silent.error);
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
        publisher.progress().expect("the publisher goes on");
        pulls.iter_mut().for_each(|pull| pull.progress(|_| {}));
        world.step(pulls.iter().filter_map(Pull::next_timeout).chain(publisher.next_timeout()).min());
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

/// VS-AUTH-003: before a reader has proven the secret and announced its address, it has no queue
/// pair in the snapshot's protection domain, and learns of no memory.
#[test]
fn a_stranger_gets_no_queue_pair_and_no_address() {
    let world = World::new(10, DeviceKind::Ibta, 2, Vec::new());
    let mut publisher = published(&world, publisher::Config::default(), &content(10, 3000));
    let at = publisher.data_listener.local_addr().expect("a port");
    let events = world.hosts[1].event_channel().expect("a channel");
    let id = events.create_id().expect("an identifier");
    id.resolve_address(None, at, Duration::from_secs(1)).expect("an address");
    let (mut pair, mut ended) = (None, None);
    while ended.is_none() {
        publisher.progress().expect("the publisher goes on");
        while let Some(event) = events.next_event().expect("events") {
            match event.kind {
                CmEventKind::AddressResolved => id.resolve_route(Duration::from_secs(1)).expect("a route"),
                CmEventKind::RouteResolved => {
                    let domain = id.create_domain().expect("a domain");
                    let queue = id.create_completion_queue(2, 0).expect("a queue");
                    let limits = QueuePairLimits { send_depth: 1, recv_depth: 1, inline: 0 };
                    pair = Some(id.create_queue_pair(&domain, &queue, limits).expect("a queue pair"));
                    let params = ConnectParams {
                        responder_resources: 1,
                        initiator_depth: 1,
                        retry_count: 7,
                        rnr_retry_count: 7,
                    };
                    id.connect(&params, &[]).expect("asked");
                }
                other => ended = Some(format!("{other:?}")),
            }
        }
        if ended.is_none() {
            world.step(publisher.next_timeout());
        }
    }
    assert!(
        pair.is_some() && ended.as_deref().is_some_and(|ended| ended.starts_with("Rejected")),
        "{ended:?}"
    );
    assert_eq!(world.sim.fabric().resources(address(1)).queue_pairs, 0);
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

/// VS-WIRE-003: either side refuses other versions: the previous one, whose digests differ, and the
/// next.
#[test]
fn another_version_is_refused_by_both_sides() {
    for version in [1, 3] {
        is_refused(version);
    }
}

fn is_refused(version: u16) {
    let now = Instant::default();
    let mut machine = Machine::new(reading(), Have::default(), [0; 32], now);
    let Some(Order::Send(Frame::Hello(hello))) = machine.poll_order() else { panic!("no greeting") };
    let challenge = Challenge {
        magic: MAGIC,
        version: version.into(),
        data_port: 1.into(),
        reserved: [0; 4],
        snapshot: [1; 16],
        nonce: [1; 32],
    };
    let outcome = machine.handle_frame(Frame::Challenge(challenge), now);
    assert!(matches!(outcome, Err(Error::Version { theirs }) if theirs == version), "{outcome:?}");

    let mut session = Session::new(Duration::from_secs(1), now);
    let hello = Frame::Hello(Hello { version: version.into(), ..hello });
    let answer = session.handle_frame(&hello, &links::terms(), &Log::default(), [0; 32], now);
    assert_eq!(answer, Err(Reason::Version));
}

/// VS-TABLE-001: a restarted publisher has another snapshot, and says so. Nothing of it is mixed
/// into the old one.
#[test]
fn a_publisher_that_was_restarted_has_another_snapshot() {
    let world = World::new(1, DeviceKind::Ibta, 2, Vec::new());
    let mut first = published(&world, publisher::Config::default(), &content(1, 40_000));
    let mut cut = world.pull(2, 1, reading());
    while cut.have.chunks < 10 {
        first.progress().expect("the publisher goes on");
        cut.progress(|_| {});
        world.step(cut.next_timeout().into_iter().chain(first.next_timeout()).min());
    }
    drop(first);
    let mut second = published(&world, publisher::Config::default(), &content(2, 40_000));
    world.run(&mut second, std::slice::from_mut(&mut cut));
    assert!(cut.error.as_ref().is_some_and(Error::may_resume), "{:?}", cut.error);
    let mut again = world.pull(2, 1, reading());
    again.have = cut.have;
    world.run(&mut second, std::slice::from_mut(&mut again));
    assert!(matches!(again.error, Some(Error::OtherSnapshot)), "{:?}", again.error);
    assert!(again.bytes.is_empty());
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
        publisher.progress().expect("the publisher goes on");
        pull.progress(|_| {});
        world.step(pull.next_timeout().into_iter().chain(publisher.next_timeout()).min());
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
