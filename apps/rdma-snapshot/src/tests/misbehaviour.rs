//! Publishers with false announcements. Each is refused with the right error, and no wrong byte is
//! passed on.

use proptest::prelude::*;
use zerocopy::FromZeros;
use zerocopy::byteorder::network_endian::{U16, U32, U64};

use super::*;
use crate::publisher::session::Log;
use crate::reader::machine::{Machine, Order};
use crate::wire::{Challenge, Entry, Frame, Hello, MAGIC, Mapping, Mark, Reason, VERSION, Welcome};

/// Runs a publisher with ten chunks and one reader, after `change` has altered the announcements.
fn told(device_kind: DeviceKind, change: impl Fn(&mut Log)) -> (Pull, Vec<u8>) {
    let world = World::new(1, device_kind, 2, Vec::new());
    let mut publisher = world.publisher(1, publisher::Config::default());
    publisher.offer(None, offer(Layout::Chunks)).expect("an offer");
    let bytes = content(1, 10_000);
    for chunk in bytes.chunks(CHUNK as usize) {
        publisher.append(chunk).expect("a chunk");
    }
    publisher.mark().expect("a mark");
    publisher.end();
    change(&mut publisher.store.log);
    let mut pulls = [world.pull(2, 1, reading())];
    world.run(&mut publisher, &mut pulls);
    let [pull] = pulls;
    assert!(bytes.starts_with(&pull.bytes), "a wrong byte was passed on");
    drop(publisher);
    assert!(world.is_empty());
    (pull, bytes)
}

/// VS-TABLE-002, VS-TABLE-003: entries that are repeated, missing, empty, too long, or reach beyond
/// all memory.
#[test]
fn entries_that_cannot_be_are_refused() {
    type Change = fn(&mut Entry);
    let changes: [Change; 6] = [
        |entry| entry.index = U64::new(entry.index.get() - 1),
        |entry| entry.index = U64::new(entry.index.get() + 1),
        |entry| entry.index = U64::new(u64::MAX),
        |entry| entry.length = U32::new(0),
        |entry| entry.length = U32::new(CHUNK + 1),
        |entry| entry.address = U64::new(u64::MAX - 10),
    ];
    for change in changes {
        let (pull, _) = told(DeviceKind::Ibta, |log| change(&mut log.entries[5]));
        assert!(matches!(pull.error, Some(Error::Misbehaved(_))), "{:?}", pull.error);
    }
}

/// VS-READ-002: an entry that names the wrong bytes.
#[test]
fn a_chunk_with_other_bytes_is_refused() {
    for (at, change) in [(0, "digest"), (5, "digest"), (9, "address")] {
        let (pull, _) = told(DeviceKind::Mlx5, |log| {
            let other = log.entries[1].address;
            let entry = &mut log.entries[at];
            match change {
                "digest" => entry.digest[31] ^= 1,
                // The key is valid for its own region only, so the device refuses.
                _ => entry.address = other,
            }
        });
        // A refused READ may take earlier READs in flight with it. The publisher, whose device
        // reports the READ, may also end the connection before the answer arrives.
        let refused = match pull.error {
            Some(Error::Corrupt { chunk }) => change == "digest" && chunk == at as u64,
            Some(Error::Read { chunk, .. }) => change == "address" && chunk <= at as u64,
            Some(Error::DataEnded(_)) => change == "address",
            _ => false,
        };
        assert!(refused && pull.bytes.len() <= at * CHUNK as usize, "{:?}", pull.error);
    }
}

/// The publisher's device refuses memory that it does not have, and the error names the chunk.
#[test]
fn a_key_that_opens_nothing_is_a_failed_read() {
    for device_kind in DeviceKind::ALL {
        let (pull, _) = told(device_kind, |log| log.entries[4].rkey = U32::new(0xdead_beef));
        assert!(
            matches!(pull.error, Some(Error::Read { chunk: 0..=4, .. })),
            "{device_kind:?}: {:?}",
            pull.error
        );
    }
}

/// VS-TABLE-006: an end in the wrong place.
#[test]
fn an_end_that_lies_is_refused() {
    let (pull, _) = told(DeviceKind::Ibta, |log| {
        let mark = log.mark.as_mut().expect("a mark");
        mark.bytes = U64::new(mark.bytes.get() + 1);
    });
    assert!(matches!(pull.error, Some(Error::Misbehaved(_))), "{:?}", pull.error);
}

/// Returns a machine that was welcomed to read `layout`.
fn welcomed(layout: Layout, limits: reader::Limits) -> Machine {
    welcomed_with(layout, limits, Have::default())
}

/// The same of one that has a part of the snapshot.
fn welcomed_with(layout: Layout, limits: reader::Limits, have: Have) -> Machine {
    let (machine, outcome) = greeted(layout, limits, have, |_, _| {});
    outcome.expect("a right welcome");
    machine
}

/// VS-AUTH-002: a publisher that accepts every reader, but cannot prove that it has the secret.
#[test]
fn a_publisher_without_the_secret_is_refused() {
    let (_, outcome) =
        greeted(Layout::Chunks, reader::Limits::default(), Have::default(), |hello, welcome| {
            welcome.code = crate::Secret::new("another").publisher_code(hello, &CHALLENGE);
        });
    assert!(matches!(outcome, Err(Error::Secret)), "{outcome:?}");
}

/// An offset that no history can have, after which later writes could not be counted.
#[test]
fn an_offset_beyond_all_histories_is_refused() {
    for (offset, is_one) in [(i64::MAX as u64, true), (i64::MAX as u64 + 1, false), (u64::MAX, false)] {
        let (_, outcome) =
            greeted(Layout::Chunks, reader::Limits::default(), Have::default(), |_, welcome| {
                welcome.history = [b'a'; 40];
                welcome.offset = offset.into();
            });
        assert_eq!(outcome.is_ok(), is_one, "{offset}: {outcome:?}");
    }
}

/// VS-TABLE-001: a reader that has a part of a snapshot does not continue with another one,
/// whatever the publisher says.
#[test]
fn another_snapshot_is_refused() {
    let now = Instant::default();
    let have = Have { snapshot: [9; 16], chunks: 3, bytes: 3000, ..Have::default() };
    let mut machine = Machine::new(reading(), have, [7; 32], now);
    let outcome = machine.handle_frame(Frame::Challenge(CHALLENGE), now);
    assert!(matches!(outcome, Err(Error::OtherSnapshot)), "{outcome:?}");
}

/// The first frame of a publisher of snapshot `[1; 16]`.
const CHALLENGE: Challenge = Challenge {
    magic: MAGIC,
    version: U16::new(VERSION),
    data_port: U16::new(1),
    reserved: [0; 4],
    snapshot: [1; 16],
    nonce: [2; 32],
};

/// Returns a machine, and its reaction to a welcome after `change` has altered that.
fn greeted(
    layout: Layout,
    limits: reader::Limits,
    have: Have,
    change: impl FnOnce(&Hello, &mut Welcome),
) -> (Machine, Result<(), Error>) {
    let now = Instant::default();
    let config = reader::Config { limits, ..reader::Config::default() };
    let mut machine = Machine::new(config, have, [7; 32], now);
    let Some(Order::Send(Frame::Hello(hello))) = machine.poll_order() else { panic!("no greeting") };
    machine.handle_frame(Frame::Challenge(CHALLENGE), now).expect("challenged");
    machine.handle_resolved("10.0.0.2:9".parse().expect("an address"), now);
    let mut welcome = Welcome {
        code: crate::Secret::default().publisher_code(&hello, &CHALLENGE),
        layout: layout.number(),
        content: Content::Bytes.number(),
        reserved: [0; 2],
        chunk_size: reader::AREA.into(),
        lease: 1000.into(),
        total: 0.into(),
        history: [0; 40],
        offset: 0.into(),
    };
    change(&hello, &mut welcome);
    let outcome = machine.handle_frame(Frame::Welcome(welcome), now);
    if outcome.is_ok() {
        machine.handle_established(4, now).expect("established");
        while machine.poll_order().is_some() {}
    }
    (machine, outcome)
}

fn mapping(address: u64, areas: u32, bytes: u64) -> Mapping {
    Mapping { address: address.into(), rkey: 1.into(), areas: areas.into(), bytes: bytes.into() }
}

/// VS-RCP-002: a table of the seed's layout that is endless, wraps, or whose addresses point
/// elsewhere or at each other.
#[test]
fn the_seeds_table_is_not_believed() {
    let now = Instant::default();
    let area = u64::from(reader::AREA);
    for change in
        [mapping(0, 0, 0), mapping(0, 2, area), mapping(0, 1, area + 1), mapping(u64::MAX - 8, 1, 1)]
    {
        let mut machine = welcomed(Layout::Rcp, reader::Limits::default());
        assert!(
            matches!(machine.handle_frame(Frame::Mapping(change), now), Err(Error::Misbehaved(_))),
            "{change:?}"
        );
    }
    let limits = reader::Limits { areas: 3, ..reader::Limits::default() };
    let mut machine = welcomed(Layout::Rcp, limits);
    let long = Frame::Mapping(mapping(0, 4, area * 4));
    assert!(matches!(machine.handle_frame(long, now), Err(Error::TooMuch { .. })));

    let right = [4096 + 16, 4096 + 16 + area];
    let loops = [right[0], right[0]];
    let back = [right[0], 4096];
    let elsewhere = [right[0], right[1] + 8];
    for (addresses, is_right) in [(right, true), (loops, false), (back, false), (elsewhere, false)] {
        let mut machine = welcomed(Layout::Rcp, reader::Limits::default());
        machine.handle_frame(Frame::Mapping(mapping(4096, 2, area + 5)), now).expect("a table");
        let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_be_bytes()).collect();
        let outcome = machine.handle_addresses(&bytes, now);
        assert_eq!(outcome.is_ok(), is_right, "{addresses:?}: {outcome:?}");
        assert_eq!(machine.next_read().is_some(), is_right);
    }
}

/// VS-RCP-002: frames right after the seed's table are handled once the addresses were read, and
/// not before.
#[test]
fn the_end_of_the_seeds_table_may_come_before_its_addresses() {
    let now = Instant::default();
    let mut machine = welcomed(Layout::Rcp, reader::Limits::default());
    let mark = Mark { chunks: 1.into(), bytes: 5.into(), digest: [0; 32] };
    let end = crate::wire::End { chunks: 1.into() };
    let mut frames = [Frame::Mapping(mapping(4096, 1, 5)), Frame::Mark(mark), Frame::End(end)].into_iter();
    let mut hear = |machine: &mut Machine| {
        while machine.listens()
            && let Some(frame) = frames.next()
        {
            machine.handle_frame(frame, now).expect("it is as it should be");
        }
        frames.len()
    };
    assert_eq!(hear(&mut machine), 2, "the end waits");
    machine.handle_addresses(&(4096_u64 + 8).to_be_bytes(), now).expect("addresses");
    assert_eq!(hear(&mut machine), 0);
    let area = machine.next_read().expect("an area");
    machine.posted(now);
    machine.handle_chunk(&area, &[0; 32], now).expect("an area");
    assert!(machine.is_done());
}

/// VS-TABLE-003: this side's limits hold for any sequence of announcements.
#[test]
fn a_table_beyond_the_limits_is_refused() {
    let limits = reader::Limits { chunks: 3, bytes: 2500, chunk: reader::AREA, areas: 1 };
    let entry = |index: u64, length: u32| Entry {
        index: index.into(),
        address: 0.into(),
        rkey: 0.into(),
        length: length.into(),
        reserved: [0; 8],
        digest: [0; 32],
    };
    for entries in [
        vec![entry(0, 2501)],
        (0..4).map(|index| entry(index, 1)).collect(),
        vec![entry(0, 2000), entry(1, 501)],
    ] {
        let mut machine = welcomed(Layout::Chunks, limits);
        let outcome = machine.handle_frame(Frame::Chunks(entries), Instant::default());
        assert!(matches!(outcome, Err(Error::TooMuch { .. })), "{outcome:?}");
    }
}

/// A history without end goes beyond the limits of a snapshot, also after a lost connection. What
/// waits to be read stays bounded (VS-TABLE-005).
#[test]
fn later_writes_have_no_end() {
    let now = Instant::default();
    let limits = reader::Limits { chunks: 2, bytes: 20, ..reader::Limits::default() };
    let most = crate::wire::MOST_ENTRIES as u64;
    let entries = |from: u64, count: u64| {
        let entry = |index: u64| Entry {
            index: index.into(),
            address: 0.into(),
            rkey: 0.into(),
            length: 10.into(),
            reserved: [0; 8],
            digest: [0; 32],
        };
        Frame::Chunks((from..from + count).map(entry).collect())
    };
    let mark = Mark { chunks: 2.into(), bytes: 20.into(), digest: [0; 32] };
    let mut machine = welcomed(Layout::Chunks, limits);
    machine.handle_frame(entries(0, 2), now).expect("a snapshot");
    machine.handle_frame(Frame::Mark(mark), now).expect("its end");
    let mut index = 2;
    let mut taken = 0;
    while index < 20 * most {
        while machine.listens() {
            machine.handle_frame(entries(index, most), now).expect("later writes");
            index += most;
        }
        assert!(index - taken <= 8 * most + 2, "{} wait", index - taken);
        while let Some(chunk) = machine.next_read() {
            machine.posted(now);
            machine.handle_chunk(&chunk, &[0; 32], now).expect("a chunk");
            taken += 1;
        }
    }
    assert_eq!(machine.have().chunks, index);
    let mut machine = welcomed_with(Layout::Chunks, limits, machine.have());
    machine.handle_frame(entries(index, 1), now).expect("after a lost connection");
}

/// VS-TABLE-005: if a publisher announces without end, the reader stops reading frames until there
/// is room again.
#[test]
fn what_waits_to_be_read_is_bounded() {
    let mut machine = welcomed(Layout::Chunks, reader::Limits::default());
    let mut index = 0;
    while machine.listens() {
        let entries = (0..crate::wire::MOST_ENTRIES as u64).map(|one| Entry {
            index: (index + one).into(),
            address: 0.into(),
            rkey: 0.into(),
            length: 1.into(),
            reserved: [0; 8],
            digest: [0; 32],
        });
        machine.handle_frame(Frame::Chunks(entries.collect()), Instant::default()).expect("entries");
        index += crate::wire::MOST_ENTRIES as u64;
        assert!(index < 100_000, "it listens on");
    }
}

/// VS-LEASE-003: a reader that claims chunks which were not announced to it, or everything before
/// the end, is refused. Otherwise it could let a window go on without the others.
#[test]
fn a_reader_has_no_more_than_it_was_told_of() {
    let now = Instant::default();
    let terms = links::terms();
    let entry = Entry { length: 9.into(), ..FromZeros::new_zeroed() };
    let mut log = Log { entries: vec![entry; 3], ..Log::default() };
    for ended in [false, true] {
        for (claim, is_true) in [
            (Frame::Progress(crate::wire::Progress { chunks: 3.into() }), true),
            (Frame::Progress(crate::wire::Progress { chunks: 4.into() }), false),
            (Frame::Progress(crate::wire::Progress { chunks: u64::MAX.into() }), false),
            (Frame::Done, ended),
        ] {
            let mut session = links::joined(&log, DEPTH).1;
            while session.announce(&log, terms.lease, now).is_some_and(|news| news != Frame::Alive) {}
            let outcome = session.handle_frame(&claim, &terms, &log, [0; 32], now);
            assert_eq!(outcome, if is_true { Ok(None) } else { Err(Reason::Misbehaved) }, "{claim:?}");
        }
        log.mark = Some(Mark { chunks: 3.into(), bytes: 27.into(), digest: [0; 32] });
        log.ended = true;
    }
}

/// Frames that a publisher sent before it learned that the reader has everything are ignored, and
/// the pull succeeds.
#[test]
fn what_crosses_the_readers_last_word_changes_nothing() {
    let now = Instant::default();
    let mut machine = welcomed(Layout::Chunks, reader::Limits::default());
    let entry = Entry { length: 9.into(), ..FromZeros::new_zeroed() };
    machine.handle_frame(Frame::Chunks(vec![entry]), now).expect("a chunk");
    let chunk = machine.next_read().expect("a chunk");
    machine.posted(now);
    let mark = Mark { chunks: 1.into(), bytes: u64::from(chunk.length).into(), digest: [0; 32] };
    machine.handle_frame(Frame::Mark(mark), now).expect("an end");
    machine.handle_frame(Frame::End(crate::wire::End { chunks: 1.into() }), now).expect("an end");
    machine.handle_chunk(&chunk, &[0; 32], now).expect("a chunk");
    assert!(machine.is_done());
    let withdrawn = crate::wire::Refused { reason: Reason::Withdrawn.number().into() };
    for frame in [Frame::Alive, Frame::Refused(withdrawn)] {
        machine.handle_frame(frame, now).expect("it has everything");
    }
}

/// Returns any frame, with numbers that are small, large, or at a limit.
fn frames() -> impl Strategy<Value = Frame> {
    let number = prop_oneof![0_u64..5, Just(u64::MAX), any::<u64>()];
    let entry = (number.clone(), number.clone(), any::<u32>(), prop_oneof![0_u32..3, any::<u32>()]).prop_map(
        |(index, address, rkey, length)| Entry {
            index: index.into(),
            address: address.into(),
            rkey: rkey.into(),
            length: length.into(),
            reserved: [0; 8],
            digest: [0; 32],
        },
    );
    prop_oneof![
        proptest::collection::vec(entry, 1..4).prop_map(Frame::Chunks),
        (number.clone(), 0_u32..5, number.clone()).prop_map(|(a, b, c)| Frame::Mapping(mapping(a, b, c))),
        (number.clone(), number.clone()).prop_map(|(chunks, bytes)| {
            Frame::Mark(Mark { chunks: chunks.into(), bytes: bytes.into(), digest: [0; 32] })
        }),
        number.prop_map(|chunks| Frame::End(crate::wire::End { chunks: chunks.into() })),
        Just(Frame::Alive),
        Just(Frame::Done),
        any::<u32>().prop_map(|reason| Frame::Refused(crate::wire::Refused { reason: reason.into() })),
    ]
}

proptest! {
    /// Whatever a publisher sends, a machine neither panics nor takes a chunk out of order.
    #[test]
    fn no_sequence_of_frames_breaks_a_reader(rcp: bool, frames in proptest::collection::vec(frames(), 0..20)) {
        let layout = if rcp { Layout::Rcp } else { Layout::Chunks };
        let now = Instant::default();
        let mut machine = welcomed(layout, reader::Limits::default());
        for frame in frames {
            if machine.handle_frame(frame, now).is_err() {
                return Ok(());
            }
            while let Some(order) = machine.poll_order() {
                if let Order::ReadAddresses(_, length) = order
                    && machine.handle_addresses(&vec![0; length as usize], now).is_err() {
                    return Ok(());
                }
            }
            while let Some(chunk) = machine.next_read() {
                prop_assert!(chunk.length > 0 && chunk.length <= reader::AREA);
                prop_assert_eq!(chunk.index, machine.have().chunks);
                machine.posted(now);
                machine.handle_chunk(&chunk, &[0; 32], now).expect("the digest is right");
            }
        }
    }

    /// Any bytes are a frame, an incomplete frame, or an error. A frame is encoded to the same
    /// bytes.
    #[test]
    fn bytes_are_frames_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0_u8..14, length in 0_u32..200) {
        for bytes in [bytes.clone(), [&length.to_be_bytes()[..], &[kind, 0, 0, 0], &bytes].concat()] {
            if let Ok(Some((frame, taken))) = Frame::decode(&bytes) {
                let mut again = Vec::new();
                frame.encode(&mut again);
                prop_assert_eq!(taken, again.len());
                prop_assert_eq!(Frame::decode(&again), Ok(Some((frame, taken))));
            }
        }
    }
}
