//! Peers with false announcements and claims, to the state machines of both sides. The simulator's
//! forgeries are those that need memory.

use proptest::prelude::*;
use zerocopy::FromZeros;
use zerocopy::byteorder::network_endian::U16;

use super::*;
use crate::publisher::session::{Log, Session, Terms};
use crate::reader::machine::{Machine, Order};
use crate::wire::{Challenge, Entry, Frame, Hello, MAGIC, Mapping, Mark, Reason, VERSION};

fn terms(layout: Layout) -> Terms {
    Terms {
        secret: crate::Secret::default(),
        snapshot: [1; 16],
        offer: Offer { chunk_size: reader::AREA, ..offer(layout) },
        data_port: 1,
        lease: Duration::from_secs(20),
        handshake: Duration::from_secs(10),
    }
}

/// Performs the handshake, up to the connection for READs.
fn joined(limits: reader::Limits, have: Have, log: &Log, terms: &Terms) -> Result<(Machine, Session), Error> {
    let now = Instant::default();
    let mut machine = Machine::new(reader::Config { limits, ..reading() }, have, [7; 32], now);
    let mut session = Session::new(terms.handshake, now);
    while let Some(order) = machine.poll_order() {
        match order {
            Order::Send(frame) => {
                let answer = session.handle_frame(&frame, terms, log, [2; 32], now).expect("a right frame");
                machine.handle_frame(answer.expect("an answer"), now)?;
            }
            Order::Resolve(_) => machine.handle_resolved("10.0.0.2:9".parse().expect("an address"), now),
            _ => {
                session.handle_established(terms.lease, now);
                machine.handle_established(DEPTH, now)?;
            }
        }
    }
    Ok((machine, session))
}

/// Returns a machine that was welcomed to read `layout`, and has a part of the snapshot.
fn welcomed(layout: Layout, limits: reader::Limits, have: Have) -> Machine {
    joined(limits, have, &Log::default(), &terms(layout)).expect("a right welcome").0
}

/// Returns a session whose reader has proven itself and is connected for READs.
fn serving(log: &Log, terms: &Terms) -> Session {
    joined(reader::Limits::default(), Have::default(), log, terms).expect("a right welcome").1
}

/// An offset that no history can have, after which later writes could not be counted.
#[test]
fn an_offset_beyond_all_histories_is_refused() {
    for (offset, is_one) in [(i64::MAX as u64, true), (i64::MAX as u64 + 1, false), (u64::MAX, false)] {
        let mut terms = terms(Layout::Chunks);
        terms.offer.position = Some(reader::Position { history: [b'a'; 40], offset });
        let outcome = joined(reader::Limits::default(), Have::default(), &Log::default(), &terms);
        assert_eq!(outcome.is_ok(), is_one, "{offset}");
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

fn mapping(address: u64, areas: u32, bytes: u64) -> Mapping {
    Mapping { address: address.into(), rkey: 1.into(), areas: areas.into(), bytes: bytes.into() }
}

/// VS-RCP-002: a table of the seed's layout that is endless, or whose addresses point elsewhere or
/// at each other.
#[test]
fn the_seeds_table_is_not_believed() {
    let now = Instant::default();
    let area = u64::from(reader::AREA);
    let limits = reader::Limits { areas: 3, ..reader::Limits::default() };
    let mut machine = welcomed(Layout::Rcp, limits, Have::default());
    let long = Frame::Mapping(mapping(0, 4, area * 4));
    assert!(matches!(machine.handle_frame(long, now), Err(Error::TooMuch { .. })));

    let right = [4096 + 16, 4096 + 16 + area];
    let loops = [right[0], right[0]];
    let back = [right[0], 4096];
    let elsewhere = [right[0], right[1] + 8];
    for (addresses, is_right) in [(right, true), (loops, false), (back, false), (elsewhere, false)] {
        let mut machine = welcomed(Layout::Rcp, reader::Limits::default(), Have::default());
        machine.handle_frame(Frame::Mapping(mapping(4096, 2, area + 5)), now).expect("a table");
        let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_be_bytes()).collect();
        let outcome = machine.handle_addresses(&bytes, now);
        assert_eq!(outcome.is_ok(), is_right, "{addresses:?}: {outcome:?}");
        assert_eq!(machine.next_read().is_some(), is_right);
    }
}

fn entry(index: u64, length: u32) -> Entry {
    Entry { index: index.into(), length: length.into(), ..FromZeros::new_zeroed() }
}

/// VS-TABLE-002: an entry that repeats another one, or comes too early, is refused when it comes.
#[test]
fn an_entry_out_of_its_place_is_refused() {
    for indices in [&[1][..], &[u64::MAX], &[0, 0], &[0, 2], &[0, 1, 0]] {
        let mut machine = welcomed(Layout::Chunks, reader::Limits::default(), Have::default());
        let entries = indices.iter().map(|index| entry(*index, 1)).collect();
        let outcome = machine.handle_frame(Frame::Chunks(entries), Instant::default());
        assert!(matches!(outcome, Err(Error::Misbehaved(_))), "{indices:?}: {outcome:?}");
    }
}

/// A history without end goes beyond the limits of a snapshot, also after a lost connection. What
/// waits to be read stays bounded (VS-TABLE-005).
#[test]
fn later_writes_have_no_end() {
    let now = Instant::default();
    let limits = reader::Limits { chunks: 2, bytes: 20, ..reader::Limits::default() };
    let most = crate::wire::MOST_ENTRIES as u64;
    let entries = |from, count| Frame::Chunks((from..from + count).map(|index| entry(index, 10)).collect());
    let mark = Mark { chunks: 2.into(), bytes: 20.into(), digest: [0; 32] };
    let mut machine = welcomed(Layout::Chunks, limits, Have::default());
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
    let mut machine = welcomed(Layout::Chunks, limits, machine.have());
    machine.handle_frame(entries(index, 1), now).expect("after a lost connection");
}

/// VS-LEASE-003: a reader that claims chunks which were not announced to it, or everything before
/// the end, is refused. Otherwise it could let a window go on without the others.
#[test]
fn a_reader_has_no_more_than_it_was_told_of() {
    let now = Instant::default();
    let terms = terms(Layout::Chunks);
    let mut log = Log { entries: vec![entry(0, 9); 3], ..Log::default() };
    for ended in [false, true] {
        for (claim, is_true) in [
            (Frame::Progress(crate::wire::Progress { chunks: 3.into() }), true),
            (Frame::Progress(crate::wire::Progress { chunks: 4.into() }), false),
            (Frame::Progress(crate::wire::Progress { chunks: u64::MAX.into() }), false),
            (Frame::Done, ended),
        ] {
            let mut session = serving(&log, &terms);
            while session.announce(&log, terms.lease, now).is_some_and(|news| news != Frame::Alive) {}
            let outcome = session.handle_frame(&claim, &terms, &log, [0; 32], now);
            assert_eq!(outcome, if is_true { Ok(None) } else { Err(Reason::Misbehaved) }, "{claim:?}");
        }
        log.mark = Some(Mark { chunks: 3.into(), bytes: 27.into(), digest: [0; 32] });
        log.ended = true;
    }
}

/// Returns any frame, with numbers that are small, large, or at a limit.
fn frames() -> impl Strategy<Value = Frame> {
    let number = prop_oneof![0_u64..5, Just(u64::MAX), any::<u64>()];
    let entry = (number.clone(), number.clone(), any::<u32>(), prop_oneof![0_u32..3, any::<u32>()]).prop_map(
        |(index, address, rkey, length)| Entry {
            address: address.into(),
            rkey: rkey.into(),
            ..self::entry(index, length)
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
        Just(Frame::Challenge(CHALLENGE)),
        (prop_oneof![0_u64..5, Just(u64::MAX)], prop_oneof![Just([0; 16]), Just([1; 16]), Just([9; 16])])
            .prop_map(|(first, snapshot)| {
                let (version, reserved) = (VERSION.into(), [0; 6]);
                Frame::Hello(Hello {
                    magic: MAGIC,
                    version,
                    reserved,
                    snapshot,
                    first: first.into(),
                    nonce: [5; 32],
                })
            }),
        (prop_oneof![0_u64..5, Just(u64::MAX)])
            .prop_map(|chunks| Frame::Progress(crate::wire::Progress { chunks: chunks.into() })),
        any::<u32>().prop_map(|reason| Frame::Refused(crate::wire::Refused { reason: reason.into() })),
    ]
}

proptest! {
    /// Whatever a publisher sends, a machine neither panics nor takes a chunk out of order.
    #[test]
    fn no_sequence_of_frames_breaks_a_reader(rcp: bool, frames in proptest::collection::vec(frames(), 0..20)) {
        let layout = if rcp { Layout::Rcp } else { Layout::Chunks };
        let now = Instant::default();
        let mut machine = welcomed(layout, reader::Limits::default(), Have::default());
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

    /// VS-AUTH-003: whatever a reader sends, a session neither panics nor names memory before the
    /// connection for READs is there, and it believes no claim beyond what it has announced.
    #[test]
    fn no_sequence_of_frames_breaks_a_session(connected: bool, frames in proptest::collection::vec(frames(), 0..20)) {
        let (now, terms) = (Instant::default(), terms(Layout::Chunks));
        let log = Log { entries: vec![entry(0, 9); 3], ..Log::default() };
        let mut session =
            if connected { serving(&log, &terms) } else { Session::new(terms.handshake, now) };
        for frame in frames {
            if session.handle_frame(&frame, &terms, &log, [0; 32], now).is_err() {
                return Ok(());
            }
            let news = session.announce(&log, terms.lease, now);
            prop_assert!(connected || news.is_none());
            prop_assert!(session.has <= 3);
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
