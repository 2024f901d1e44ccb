//! Compares the offset machines with simple models of a stream.

use core::cell::Cell;
use std::vec::Vec;
use std::{println, vec};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::{Readable, RxWindow, TxWindow};
use crate::wire::Window;
use crate::{ApiMisuse, Error, PeerMisbehaved};

const LIMIT: u32 = 1 << 24;

fn window(length: u32) -> Window {
    Window { address: 0x1000, length, rkey: 7 }
}

#[derive(Clone, Debug)]
enum Op {
    Announce,
    Receive(u32),
    Consume(u32),
    Add,
    Drop,
    Land(u32),
    StopLanding,
    Ahead(bool),
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => Just(Op::Announce),
        6 => (1..40_u32).prop_map(Op::Receive),
        6 => (1..40_u32).prop_map(Op::Consume),
        2 => Just(Op::Add),
        1 => Just(Op::Drop),
        2 => (0..300_u32).prop_map(Op::Land),
        1 => Just(Op::StopLanding),
        1 => any::<bool>().prop_map(Op::Ahead),
    ]
}

/// The length of a window, the number of regions, whether to announce ahead, and the steps.
fn any_course() -> impl Strategy<Value = (u32, u8, bool, Vec<Op>)> {
    (1..25_u32, 1..3_u8, any::<bool>(), prop::collection::vec(any_op(), 1..300))
}

#[derive(Clone, Copy, Debug, Default)]
struct Reached {
    /// Windows announced ahead that the peer reached.
    ahead: u32,
    /// Landings that began, and put a window there, while a window was announced ahead.
    landed_behind_ahead: u32,
    landed: u32,
    /// Landings given up while the peer had a window there.
    stopped: u32,
    regions: [u32; 2],
}

/// Follows a run with a model. A peer that obeys the announcements is never refused, and its bytes
/// come out in order, in the right place. A region is announced only when it is read. Windows
/// announced ahead are filled in that order (VM-002, VM-005).
fn follows(
    (length, windows, ahead, ops): (u32, u8, bool, Vec<Op>),
    reached: &mut Reached,
) -> Result<(), TestCaseError> {
    let (mut windows, mut ahead) = (windows, ahead);
    let mut rx = RxWindow::new(length, windows, 0);
    rx.go_ahead(ahead);
    // Regions hold stream positions. A window is its region, offset and bytes used.
    let mut regions = [vec![None; length as usize], vec![None; length as usize], vec![]];
    let mut peer: Option<(u8, u32, u32)> = None;
    let mut queued: Option<(u8, u32, u32)> = None;
    let (mut written, mut read) = (0_u64, 0_u64);
    let (mut landing, mut promised, mut landed) = (0, 0, 0);
    let mut began_behind = false;
    for op in ops {
        match op {
            Op::Announce => {
                if let Some((region, offset)) = rx.unannounced() {
                    let full = peer.is_none_or(|(.., used)| used == length);
                    prop_assert!(full || ahead && queued.is_none(), "announced before the window was full");
                    let lands = region == Readable::LANDED || rx.is_landing();
                    prop_assert!(full || !lands, "what lands comes in its turn, and nothing is behind it");
                    let window = &regions[region as usize][offset as usize..][..length as usize];
                    prop_assert!(window.iter().all(Option::is_none), "announced over unread bytes");
                    prop_assert!(
                        peer.is_none_or(|(at, ..)| full || at != region),
                        "announced where the peer writes"
                    );
                    rx.announce();
                    *(if full { &mut peer } else { &mut queued }) = Some((region, offset, 0));
                }
            }
            Op::Receive(bytes) => {
                let Some((region, offset, used)) = peer else { continue };
                let bytes = bytes.min(length - used);
                for offset in offset + used..offset + used + bytes {
                    if region == Readable::LANDED {
                        prop_assert_eq!(landing + u64::from(offset), written, "it lies elsewhere");
                        landed += 1;
                    }
                    regions[region as usize][offset as usize] = Some(written);
                    written += 1;
                }
                peer = Some((region, offset, used + bytes));
                if bytes > 0 && used + bytes == length {
                    let lands = region == Readable::LANDED;
                    reached.landed += u32::from(lands);
                    reached.landed_behind_ahead += u32::from(lands && std::mem::take(&mut began_behind));
                    if queued.is_some() {
                        reached.ahead += 1;
                        peer = queued.take();
                    }
                }
                let is_full = bytes > 0 && used + bytes == length;
                prop_assert!(rx.receive(bytes.into()).is_some_and(|full| full || !is_full));
            }
            Op::Consume(bytes) => {
                let Some(readable) = rx.readable() else {
                    prop_assert_eq!(read, written);
                    continue;
                };
                let bytes = bytes.min(readable.len);
                for offset in readable.offset..readable.offset + bytes {
                    prop_assert_eq!(regions[readable.region as usize][offset as usize].take(), Some(read));
                    read += 1;
                }
                prop_assert_eq!(rx.consume(bytes), Ok(()));
            }
            Op::Add => {
                if let Some(region) = rx.lacks_region() {
                    prop_assert_eq!(windows, 1);
                    prop_assert!(
                        regions[region as usize].iter().all(Option::is_none),
                        "added with bytes in it"
                    );
                    rx.add_region();
                    windows = 2;
                    reached.regions[0] += 1;
                    if !ahead {
                        prop_assert_eq!(rx.unannounced(), Some((region, 0)), "the peer can go on at once");
                    }
                }
            }
            Op::Drop => {
                if let Some(region) = rx.drop_region() {
                    prop_assert_eq!(windows, 2);
                    prop_assert!(
                        regions[region as usize].iter().all(Option::is_none),
                        "dropped with bytes in it"
                    );
                    let used_up = peer.is_none_or(|(at, _, used)| at != region || used == length);
                    prop_assert!(
                        used_up && queued.is_none() && !ahead,
                        "dropped while the peer may write to it"
                    );
                    windows = 1;
                    reached.regions[1] += 1;
                }
            }
            Op::Land(bytes) => {
                if rx.is_landing() {
                    prop_assert_eq!(rx.land(bytes), Err(ApiMisuse::LandingUnderWay));
                    continue;
                }
                prop_assert_eq!(promised, landed, "not all has landed");
                let part = rx.land(bytes).unwrap();
                // An announced window stays, and so does a due one, if the peer has only full ones.
                let filling = peer.map_or(length, |(.., used)| length - used);
                let queue = if queued.is_some() { length } else { 0 };
                let before = u64::from(filling + queue) + (written - read);
                let most = u64::from(bytes).saturating_sub(before) / u64::from(length) * u64::from(length);
                let expected = (most > 0).then_some((before, most));
                let told = part.map(|part| (u64::from(part.offset), u64::from(part.len)));
                if peer.is_none_or(|(.., used)| used < length) {
                    prop_assert_eq!(told, expected, "every window that can, lands");
                }
                if let Some(part) = part {
                    prop_assert!(
                        rx.is_landing() && part.offset + part.len <= bytes && part.len % length == 0
                    );
                    prop_assert!(bytes - part.offset - part.len < length, "more would have landed");
                    (landing, promised, landed) = (read, part.len, 0);
                    regions[Readable::LANDED as usize] = vec![None; bytes as usize];
                    began_behind = queued.is_some();
                }
            }
            Op::StopLanding => {
                let before = rx.unannounced();
                rx.stop_landing();
                let after = rx.unannounced();
                // Without landing, the other region may be announced behind the landing window.
                let goes_ahead = before.is_none() && ahead && queued.is_none() && windows == 2;
                let added = goes_ahead && after.is_some_and(|(region, _)| region != Readable::LANDED);
                prop_assert!(after == before || added, "a window was taken back, or given");
                let under_way = match (before, peer) {
                    (Some((Readable::LANDED, _)), _) => length,
                    (None, Some((Readable::LANDED, _, used))) => length - used,
                    _ => 0,
                };
                reached.stopped += u32::from(under_way > 0 && landed + under_way < promised);
                promised = landed + under_way;
            }
            Op::Ahead(now) => {
                ahead = now;
                rx.go_ahead(now);
            }
        }
        prop_assert_eq!(rx.unread(), written - read);
        let all = rx.all_readable().into_iter().flatten();
        let positions: Vec<_> = all
            .flat_map(|part| {
                regions[part.region as usize][part.offset as usize..][..part.len as usize].to_vec()
            })
            .collect();
        prop_assert_eq!(positions, (read..written).map(Some).collect::<Vec<_>>());
        if !rx.is_landing() {
            let at = peer.filter(|(region, _, used)| *region == Readable::LANDED && *used < length);
            prop_assert_eq!(at, None, "the peer may still write to it");
        }
        if written == read && peer.is_some_and(|(.., used)| used == length) {
            prop_assert!(rx.unannounced().is_some());
        }
        if written == read && ahead && windows == 2 && !rx.is_landing() && queued.is_none() {
            prop_assert!(rx.unannounced().is_some(), "nothing is announced ahead");
        }
    }
    Ok(())
}

const COURSES: u32 = if cfg!(miri) { 4 } else { 1000 };

#[test]
fn receiving_keeps_the_stream() {
    let mut runner = TestRunner::new(Config { source_file: Some(file!()), ..Config::with_cases(COURSES) });
    let reached = Cell::new(Reached::default());
    let followed = runner.run(&any_course(), |course| {
        let mut counts = reached.get();
        let followed = follows(course, &mut counts);
        reached.set(counts);
        followed
    });
    let reached = reached.get();
    if let Err(error) = followed {
        panic!("{error}\n{reached:?}");
    }
    println!("{reached:?}");
    if cfg!(miri) {
        return;
    }
    // At most a fourth of what a run reaches. A place that no run reaches proves nothing.
    let Reached { ahead, landed_behind_ahead, landed, stopped, regions } = reached;
    assert!(ahead > COURSES / 4 && landed > COURSES && stopped > COURSES / 4, "{reached:?}");
    assert!(
        landed_behind_ahead > COURSES / 40 && regions.iter().all(|count| *count > COURSES / 8),
        "{reached:?}"
    );
}

proptest! {
    /// Any immediate is within the window, or refused without a change (VR-FLOW-002).
    #[test]
    fn no_immediate_passes_the_end(length in 1..100_u32, immediates in prop::collection::vec(prop_oneof![0..120_u32, any::<u32>()], 1..20)) {
        let mut rx = RxWindow::new(length, 1, 0);
        rx.announce();
        let mut used = 0_u64;
        for immediate in immediates {
            let fits = used + u64::from(immediate) <= u64::from(length);
            let before = rx;
            let received = rx.receive(immediate.into());
            prop_assert_eq!(received.is_some(), fits);
            if received.is_none() {
                let refusal = PeerMisbehaved::WindowOverrun { immediate, received: used as u32, length };
                prop_assert_eq!(rx.refusal(immediate), refusal);
                prop_assert_eq!(rx, before);
            }
            if fits {
                used += u64::from(immediate);
            }
            prop_assert_eq!(rx.unread(), used);
        }
    }

    /// Taken bytes lie in the window, without gap or overlap, to its last byte (VR-FLOW-001).
    #[test]
    fn sending_fills_each_window(lengths in prop::collection::vec(1..50_u32, 1..5), steps in prop::collection::vec(1..30_u32, 1..50)) {
        let mut tx = TxWindow::new();
        prop_assert_eq!((tx.room(), tx.take(1)), (0, None));
        let mut steps = steps.into_iter().cycle();
        for length in lengths {
            prop_assert_eq!(tx.register(window(length), LIMIT, false), Ok(()));
            let mut used = 0;
            while used < length {
                let bytes = steps.next().unwrap_or(1).min(length - used);
                let at = tx.take(bytes);
                prop_assert_eq!(at.map(|at| (at.address, at.rkey)), Some((0x1000 + u64::from(used), 7)));
                used += bytes;
                prop_assert_eq!(tx.room(), length - used);
                prop_assert_eq!(tx.take(length - used + 1), None);
            }
        }
    }
}

/// VM-002, VM-003: in turn, each to its last byte. One too many, or any without queues, is refused.
#[test]
fn windows_queue_behind_the_one_that_is_filled() {
    let at = |number: u64| Window { address: number << 12, length: 8, rkey: 7 };
    let mut tx = TxWindow::new();
    for number in 1..=4 {
        assert_eq!(tx.register(at(number), LIMIT, true), Ok(()));
    }
    let early = PeerMisbehaved::EarlyRegistration { used: 0, length: 8 };
    assert_eq!(tx.register(at(5), LIMIT, true), Err(Error::PeerMisbehaved(early)));
    let starts = |tx: &mut TxWindow| {
        let starts = [3, 5].map(|bytes| tx.take(bytes).map(|at| at.address));
        assert!(tx.leave_full());
        starts
    };
    for number in 1..=4_u64 {
        assert_eq!(tx.take(9), None, "over the end of a window");
        assert_eq!(starts(&mut tx), [number << 12, (number << 12) + 3].map(Some));
        if number == 1 {
            assert_eq!(tx.register(at(5), LIMIT, true), Ok(()));
        }
    }
    assert_eq!(starts(&mut tx), [5 << 12, (5 << 12) + 3].map(Some));
    assert_eq!(tx.room(), 0);
    assert_eq!(tx.register(at(6), LIMIT, false), Ok(()));
    let early = PeerMisbehaved::EarlyRegistration { used: 0, length: 8 };
    assert_eq!(tx.register(at(7), LIMIT, false), Err(Error::PeerMisbehaved(early)));
}

/// VM-005: the other region is announced again once it is read.
#[test]
fn the_other_region_is_announced_ahead() {
    let mut rx = RxWindow::new(8, 2, 0);
    rx.go_ahead(true);
    for due in [(0, 0), (1, 0)] {
        assert_eq!(rx.unannounced(), Some(due));
        rx.announce();
    }
    assert_eq!(rx.unannounced(), None);
    assert_eq!((rx.receive(8), rx.unannounced()), (Some(true), None), "unread");
    assert_eq!(rx.receive(5), Some(false), "in the second");
    assert_eq!((rx.consume(8), rx.unannounced()), (Ok(()), Some((0, 0))));
    assert_eq!(rx.drop_region(), None, "a region that may be announced is kept");
}
