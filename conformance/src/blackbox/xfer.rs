//! Payload: bytes in windows, and immediates that say how many.

use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_proto::backend::RemoteAddress;

use super::bench::Bench;
use super::case::Case;
use super::meeting::{command, question, told};
use super::verdict::{Judged, Stop};
use crate::workload::Entry;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<B>> {
    cases! {
        both "xfer.round-trip", "few bytes each way" => "They arrive, and the immediate is their number.",
            ["VR-XFER-001", "VR-XFER-002", "VR-XFER-003"], |bench| of_lengths(bench, &[13, 13, 13]);
        server "xfer.lengths", "payloads of 0 to 70,000 bytes" => "They come back byte for byte.",
            ["VR-XFER-001"], |bench| of_lengths(bench, &[0, 1, 2, 63, 64, 511, 512, 4095, 4096, 16_384, 20_474, 65_535, 65_536, 70_000]);
        server "xfer.around-the-window", "commands one byte short of the server's window, as long, and one byte longer"
            => "They come back byte for byte.", ["VR-XFER-001", "VR-FLOW-001", "VR-XFER-007"], around_the_window;
        server "xfer.many-windows", "4 MiB each way" => "They come back byte for byte.",
            ["VR-XFER-001", "VR-FLOW-001", "VR-MEM-010"], |bench| of_lengths(bench, &[4 << 20]);
        server "xfer.kept", "values stored on one connection and read on another" => "They are the same.",
            ["VR-XFER-001"], kept;
        both "xfer.many-writes", "plain WRITEs, then one immediate for all, carried by the last of them"
            => "The stream is the same as with one immediate each.", ["VR-XFER-004", "VR-XFER-006"], many_writes;
        both "xfer.empty-write", "plain WRITEs, then one immediate for all, carried by a WRITE of no bytes"
            => "The stream is the same as with one immediate each.", ["VR-XFER-006", "VR-XFER-004"], empty_write;
        both "xfer.in-arrears", "all is written, and immediates tell of it bit by bit"
            => "The stream is the same as with one immediate for all.", ["VR-XFER-006", "VR-XFER-008"], in_arrears;
        server "xfer.not-before-told", "a whole command is written, and the immediate tells of half"
            => "The server does not act on what it was not told of.", ["VR-XFER-008", "VR-XFER-002"], not_before_told;
        server "xfer.never-told", "a command that is written, never told of, and followed by the disconnect"
            => "The server never acts on it.", ["VR-XFER-012"], never_told;
        both "xfer.one-by-one", "every byte with an immediate of its own" => "The stream is put together.",
            ["VR-FLOW-014", "VR-XFER-007"], one_by_one;
        both "xfer.cut-everywhere", "cut in two at each byte in turn" => "The stream is put together.",
            ["VR-XFER-007"], cut_everywhere;
        server "xfer.many-at-once", "a hundred commands under one immediate" => "A hundred replies, in order.",
            ["VR-XFER-007"], many_at_once;
        server "xfer.pipeline", "5000 commands in one go" => "5000 replies, in order.",
            ["VR-XFER-007", "VR-FLOW-001"], pipeline;
        both "xfer.zero", "an immediate of zero" => "It means nothing; the connection goes on.",
            ["VR-XFER-005"], |bench| zeros(bench, 1);
        both "xfer.zeros", "three times 500 immediates of zero" => "They mean nothing; the connection goes on.",
            ["VR-XFER-005", "VR-RES-003"], |bench| zeros(bench, 500);
        both "xfer.no-zero", "a connection that is used" => "The target sends no immediate of zero.",
            ["VR-XFER-010"], no_zero;
        server "xfer.overwritten", "bytes that were told of are written again"
            => "The server takes no harm, whichever of the two it reads.", ["VR-SEC-005"], overwritten;
    }
}

fn of_lengths<B: Descriptors>(bench: &Bench<'_, B>, lengths: &[usize]) -> Judged {
    let mut meeting = bench.greet()?;
    for length in lengths {
        if !meeting.talk_of(*length)? {
            break;
        }
    }
    meeting.leave()
}

fn around_the_window<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let window = meeting.usable_window()?.length as usize;
    for whole in [window - 1, window, window + 1, 2 * window] {
        // The question around so many bytes is that long.
        let around = question(&vec![b'x'; whole]).say.len() - whole;
        meeting.talk_of(whole - around)?;
    }
    told(meeting.unharmed(), || format!("a window of {window} bytes"))
}

fn kept<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let entries: Vec<Entry> = [1, 100, 5000, 65_536, 100_000]
        .into_iter()
        .zip(0..)
        .map(|(value_len, number)| Entry { number, value_len })
        .collect();
    let mut writer = bench.greet()?;
    for entry in &entries {
        writer.peer.say(&command(&[b"SET", entry.key().as_bytes(), &entry.value()]))?;
        if writer.peer.hear(5)? != b"+OK\r\n" {
            return Err(Stop::unmet("SET was not answered with +OK"));
        }
    }
    writer.leave()?;
    let mut reader = bench.greet()?;
    for entry in &entries {
        reader.peer.say(&command(&[b"GET", entry.key().as_bytes()]))?;
        let head = format!("${}\r\n", entry.value_len);
        let heard = reader.peer.hear(head.len() + entry.value_len + 2)?;
        let value = heard.get(head.len()..head.len() + entry.value_len).unwrap_or_default();
        if let Some(difference) = entry.difference(value) {
            return Err(Stop::unmet(difference));
        }
    }
    told(reader.leave(), || format!("{} values", entries.len()))
}

/// Writes what is to be said in pieces and says nothing of it; then tells of it as `parts` say.
fn written<B: Descriptors>(bench: &Bench<'_, B>, tell: fn(usize) -> Vec<u32>, with_last: bool) -> Judged {
    let mut meeting = bench.greet()?;
    let turn = meeting.occasion(1000)?;
    let length = turn.say.len();
    let (to, room) = meeting.peer.room()?;
    if length > room as usize || length < 4 {
        return Err(Stop::undecided(format!("{length} bytes to say do not suit a window of {room}")));
    }
    let pieces: Vec<&[u8]> = turn.say.chunks(length.div_ceil(4)).collect();
    let mut address = to.address;
    for (number, piece) in pieces.iter().enumerate() {
        let to = RemoteAddress { address, ..to };
        if with_last && number + 1 == pieces.len() {
            meeting.peer.write_immediate(to, piece, length as u32)?;
        } else {
            meeting.peer.write(to, piece)?;
        }
        address = address.wrapping_add(piece.len() as u64);
    }
    meeting.peer.advance(length as u32);
    if !with_last {
        for part in tell(length) {
            meeting.peer.notify(part)?;
        }
    }
    meeting.hears(&turn)?;
    told(meeting.unharmed(), || format!("{} writes", pieces.len()))
}

fn many_writes<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    written(bench, |_| Vec::new(), true)
}

fn empty_write<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    written(bench, |length| vec![length as u32], false)
}

fn in_arrears<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    written(bench, |length| vec![1, 2, length as u32 - 3], false)
}

fn not_before_told<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let turn = meeting.occasion(100)?;
    let (to, _) = meeting.peer.room()?;
    let half = turn.say.len() as u32 / 2;
    meeting.peer.write_immediate(to, &turn.say, half)?;
    meeting.peer.advance(turn.say.len() as u32);
    meeting.listen(Duration::from_millis(200))?;
    if !meeting.peer.take_heard().is_empty() {
        return Err(Stop::unmet("it answered a command of which it was told half"));
    }
    meeting.peer.notify(turn.say.len() as u32 - half)?;
    meeting.hears(&turn)?;
    meeting.unharmed()
}

fn never_told<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let key = b"conformance:never-told";
    let mut meeting = bench.greet()?;
    meeting.peer.say(&command(&[b"DEL", key]))?;
    meeting.peer.hear(4)?;
    let (to, _) = meeting.peer.room()?;
    meeting.peer.write(to, &command(&[b"SET", key, b"written"]))?;
    meeting.peer.settle()?;
    meeting.leave()?;
    let mut other = bench.greet()?;
    other.peer.say(&command(&[b"GET", key]))?;
    if other.peer.hear(5)? != b"$-1\r\n" {
        return Err(Stop::unmet("it acted on a command that no immediate told of"));
    }
    other.leave()
}

fn one_by_one<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let turn = meeting.occasion(500)?;
    // No more at once than a target has receives for.
    meeting.peer.say_in(&turn.say, if turn.say.len() < 1000 { 1 } else { turn.say.len().div_ceil(900) })?;
    meeting.hears(&turn)?;
    told(meeting.unharmed(), || format!("{} bytes", turn.say.len()))
}

fn cut_everywhere<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let mut cuts = 0;
    while let Some(turn) = meeting.turn(8)? {
        let (one, other) = turn.say.split_at(cuts.min(turn.say.len()));
        meeting.peer.say(one)?;
        meeting.peer.settle()?;
        meeting.peer.say(other)?;
        meeting.hears(&turn)?;
        cuts += 1;
        if cuts > 60 || cuts > turn.say.len() {
            break;
        }
    }
    if cuts < 2 {
        return Err(Stop::undecided("the client left before anything could be cut; it should do more"));
    }
    told(meeting.leave(), || format!("{cuts} cuts"))
}

fn many_at_once<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let turns: Vec<_> = (0..100).map(|number: u32| question(number.to_string().as_bytes())).collect();
    let say: Vec<u8> = turns.iter().flat_map(|turn| turn.say.clone()).collect();
    meeting.peer.say(&say)?;
    turns.iter().try_for_each(|turn| meeting.hears(turn))?;
    meeting.unharmed()
}

fn pipeline<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let turns: Vec<_> = (0..5000).map(|number: u32| question(format!("{number:08}").as_bytes())).collect();
    // In parts of 500, so that neither side need hold more than a window of what the other does not take.
    for turns in turns.chunks(500) {
        let say: Vec<u8> = turns.iter().flat_map(|turn| turn.say.clone()).collect();
        meeting.peer.say(&say)?;
        turns.iter().try_for_each(|turn| meeting.hears(turn))?;
    }
    meeting.unharmed()
}

fn zeros<B: Descriptors>(bench: &Bench<'_, B>, count: u32) -> Judged {
    let mut meeting = bench.greet()?;
    for _ in 0..if count == 1 { 1 } else { 3 } {
        (0..count).try_for_each(|_| meeting.peer.notify(0))?;
        if !meeting.talk()? {
            break;
        }
    }
    meeting.leave()
}

fn no_zero<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    for _ in 0..20 {
        if !meeting.talk_of(5000)? {
            break;
        }
    }
    match (meeting.peer.seen.empty, meeting.peer.seen.notifications) {
        (0, all) => told(meeting.leave(), || format!("{all} notifications")),
        (empty, all) => Err(Stop::unmet(format!("{empty} of its {all} immediates were zero"))),
    }
}

fn overwritten<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let (to, _) = meeting.peer.room()?;
    let bytes = command(&[b"ECHO", &[b'x'; 1000]]);
    meeting.peer.say(&bytes)?;
    for round in 0..50 {
        meeting.peer.write(to, &vec![b'0' + round % 10; bytes.len()])?;
    }
    // The connection may have become useless to the adversary; it is the others that count.
    let _answered_or_not = meeting.listen(Duration::from_millis(100));
    drop(meeting);
    bench.greet()?.unharmed()
}
