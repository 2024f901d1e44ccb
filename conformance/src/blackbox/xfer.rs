//! Payload: bytes in windows, and immediates that give their number.

use std::time::Duration;

use rdma_backend::RemoteAddress;
use rdma_conn::Descriptors;

use super::case::Case;
use super::context::Context;
use super::session::{command, question, sends_again, told};
use crate::workload::Entry;
use suite::{Judged, Stop};

/// The case for which a client stores a long value.
pub(super) const SEND_MEMORY: &str = "xfer.send-memory";

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        both "xfer.round-trip", "few bytes each way" => "They arrive, and the immediate is their number.",
            ["VR-XFER-001", "VR-XFER-002", "VR-XFER-003"], |context| of_lengths(context, &[13, 13, 13]);
        server "xfer.lengths", "payloads of 0 to 70,000 bytes" => "They come back byte for byte.",
            ["VR-XFER-001"], |context| of_lengths(context, &[0, 1, 2, 63, 64, 511, 512, 4095, 4096, 16_384, 20_474, 65_535, 65_536, 70_000]);
        server "xfer.around-the-window", "commands one byte short of the server's window, as long, and one byte longer"
            => "They come back byte for byte.", ["VR-XFER-001", "VR-FLOW-001", "VR-XFER-007"], around_the_window;
        server "xfer.many-windows", "4 MiB each way" => "They come back byte for byte.",
            ["VR-XFER-001", "VR-FLOW-001", "VR-MEM-010"], |context| of_lengths(context, &[4 << 20]);
        server "xfer.kept", "values stored on one connection and read on another" => "They are the same.",
            ["VR-XFER-001"], kept;
        both "xfer.many-writes", "plain WRITEs, then one immediate for all, carried by the last of them"
            => "The stream is the same as with one immediate each.", ["VR-XFER-004", "VR-XFER-006"],
            |context| written(context, |_| Vec::new(), true);
        both "xfer.empty-write", "plain WRITEs, then one immediate for all, carried by a WRITE of no bytes"
            => "The stream is the same as with one immediate each.", ["VR-XFER-006", "VR-XFER-004"],
            |context| written(context, |length| vec![length as u32], false);
        both "xfer.in-arrears", "all is written, and immediates tell of it bit by bit"
            => "The stream is the same as with one immediate for all.", ["VR-XFER-006", "VR-XFER-008"],
            |context| written(context, |length| vec![1, 2, length as u32 - 3], false);
        server "xfer.not-before-told", "a whole command is written, and the immediate tells of half"
            => "The server does not act on what it was not told of.", ["VR-XFER-008", "VR-XFER-002"], not_before_told;
        server "xfer.never-told", "a command that is written, never told of, and followed by the disconnect"
            => "The server never acts on it.", ["VR-XFER-012"], never_told;
        both SEND_MEMORY, "a value of 3 MiB whose WRITEs find no receive for a while"
            => "What the target sends again is what it sent at first.", ["VR-XFER-011"], sends_again;
        both "xfer.one-by-one", "every byte with an immediate of its own" => "The stream is put together.",
            ["VR-FLOW-014", "VR-XFER-007"], one_by_one;
        both "xfer.cut-everywhere", "a command cut in two, at each byte in turn" => "The stream is put together.",
            ["VR-XFER-007"], cut_everywhere;
        server "xfer.many-at-once", "a hundred commands under one immediate" => "A hundred replies, in order.",
            ["VR-XFER-007"], many_at_once;
        server "xfer.pipeline", "5000 commands in one go" => "5000 replies, in order.",
            ["VR-XFER-007", "VR-FLOW-001"], pipeline;
        both "xfer.zero", "an immediate of zero" => "It means nothing; the connection goes on.",
            ["VR-XFER-005"], |context| zeros(context, 1);
        both "xfer.zeros", "three times 500 immediates of zero" => "They mean nothing; the connection goes on.",
            ["VR-XFER-005", "VR-RES-003"], |context| zeros(context, 500);
        both "xfer.no-zero", "a connection that is used" => "The target sends no immediate of zero.",
            ["VR-XFER-010"], no_zero;
        server "xfer.overwritten", "bytes that were told of are written again"
            => "The server takes no harm, whichever of the two it reads.", ["VR-SEC-005"], overwritten;
    }
}

fn of_lengths<B: Descriptors>(context: &Context<'_, B>, lengths: &[usize]) -> Judged {
    let mut session = context.open()?;
    for length in lengths {
        if !session.exchange_of(*length)? {
            break;
        }
    }
    session.leave()
}

fn around_the_window<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let window = session.usable_window()?.length as usize;
    for whole in [window - 1, window, window + 1, 2 * window] {
        let around = question(&vec![b'x'; whole]).send.len() - whole;
        session.exchange_of(whole - around)?;
    }
    told(session.unharmed(), || format!("a window of {window} bytes"))
}

fn kept<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let lengths = [1, 100, 5000, 65_536, 100_000].into_iter().zip(0..);
    let entries: Vec<_> = lengths.map(|(value_len, number)| Entry { number, value_len }).collect();
    let mut writer = context.open()?;
    for entry in &entries {
        writer.peer.send_bytes(&command(&[b"SET", entry.key().as_bytes(), &entry.value()]))?;
        if writer.peer.receive_bytes(5)? != b"+OK\r\n" {
            return Err(Stop::unmet("SET was not answered with +OK"));
        }
    }
    writer.leave()?;
    let mut reader = context.open()?;
    for entry in &entries {
        reader.peer.send_bytes(&command(&[b"GET", entry.key().as_bytes()]))?;
        let head = format!("${}\r\n", entry.value_len);
        let heard = reader.peer.receive_bytes(head.len() + entry.value_len + 2)?;
        let value = heard.get(head.len()..head.len() + entry.value_len).unwrap_or_default();
        if let Some(difference) = entry.difference(value) {
            return Err(Stop::unmet(difference));
        }
    }
    told(reader.leave(), || format!("{} values", entries.len()))
}

/// Writes bytes in pieces without notifying them, then notifies them as `tell` says.
fn written<B: Descriptors>(context: &Context<'_, B>, tell: fn(usize) -> Vec<u32>, with_last: bool) -> Judged {
    let mut session = context.open()?;
    let exchange = session.require_exchange(1000)?;
    let length = exchange.send.len();
    let to = session.room_for(length)?;
    if length < 4 {
        return Err(Stop::undecided(format!("{length} bytes to say are too few")));
    }
    let pieces: Vec<&[u8]> = exchange.send.chunks(length.div_ceil(4)).collect();
    let mut address = to.address;
    for (number, piece) in pieces.iter().enumerate() {
        let to = RemoteAddress { address, ..to };
        if with_last && number + 1 == pieces.len() {
            session.peer.write_immediate(to, piece, length as u32)?;
        } else {
            session.peer.write(to, piece)?;
        }
        address = address.wrapping_add(piece.len() as u64);
    }
    session.peer.advance(&exchange.send)?;
    if !with_last {
        for part in tell(length) {
            session.peer.notify(part)?;
        }
    }
    session.expect_reply(&exchange)?;
    told(session.unharmed(), || format!("{} writes", pieces.len()))
}

fn not_before_told<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let exchange = session.require_exchange(100)?;
    let to = session.room_for(exchange.send.len())?;
    let half = exchange.send.len() as u32 / 2;
    session.peer.write_immediate(to, &exchange.send, half)?;
    session.peer.advance(&exchange.send)?;
    session.listen(Duration::from_millis(200))?;
    if !session.peer.take_received().is_empty() {
        return Err(Stop::unmet("it answered a command of which it was told half"));
    }
    session.peer.notify(exchange.send.len() as u32 - half)?;
    session.expect_reply(&exchange)?;
    session.unharmed()
}

fn never_told<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let key = b"conformance:never-told";
    let mut session = context.open()?;
    session.peer.send_bytes(&command(&[b"DEL", key]))?;
    session.peer.receive_bytes(4)?;
    let untold = command(&[b"SET", key, b"written"]);
    let to = session.room_for(untold.len())?;
    session.peer.write(to, &untold)?;
    session.peer.settle()?;
    session.leave()?;
    let mut other = context.open()?;
    other.peer.send_bytes(&command(&[b"GET", key]))?;
    if other.peer.receive_bytes(5)? != b"$-1\r\n" {
        return Err(Stop::unmet("it acted on a command that no immediate told of"));
    }
    other.leave()
}

fn one_by_one<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let exchange = session.require_exchange(500)?;
    // At most as many at once as a target has receives for.
    let each = if exchange.send.len() < 1000 { 1 } else { exchange.send.len().div_ceil(900) };
    session.peer.send_bytes_in(&exchange.send, each)?;
    session.expect_reply(&exchange)?;
    told(session.unharmed(), || format!("{} bytes", exchange.send.len()))
}

fn cut_everywhere<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let mut cuts = 0;
    while let Some(exchange) = session.next_exchange(8)? {
        let (one, other) = exchange.send.split_at(cuts.min(exchange.send.len()));
        session.peer.send_bytes(one)?;
        session.peer.settle()?;
        session.peer.send_bytes(other)?;
        session.expect_reply(&exchange)?;
        cuts += 1;
        if cuts > 60 || cuts > exchange.send.len() {
            break;
        }
    }
    if cuts < 2 {
        return Err(Stop::undecided("the client left before anything could be cut; it should do more"));
    }
    told(session.leave(), || format!("{cuts} cuts"))
}

fn many_at_once<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let exchanges: Vec<_> = (0..100).map(|number: u32| question(number.to_string().as_bytes())).collect();
    let send: Vec<u8> = exchanges.iter().flat_map(|exchange| exchange.send.clone()).collect();
    session.peer.send_bytes(&send)?;
    exchanges.iter().try_for_each(|exchange| session.expect_reply(exchange))?;
    session.unharmed()
}

fn pipeline<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let exchanges: Vec<_> =
        (0..5000).map(|number: u32| question(format!("{number:08}").as_bytes())).collect();
    // In parts, so that neither side has to buffer more than a window that the other does not take.
    for exchanges in exchanges.chunks(500) {
        let send: Vec<u8> = exchanges.iter().flat_map(|exchange| exchange.send.clone()).collect();
        session.peer.send_bytes(&send)?;
        exchanges.iter().try_for_each(|exchange| session.expect_reply(exchange))?;
    }
    session.unharmed()
}

fn zeros<B: Descriptors>(context: &Context<'_, B>, count: u32) -> Judged {
    let mut session = context.open()?;
    for _ in 0..if count == 1 { 1 } else { 3 } {
        (0..count).try_for_each(|_| session.peer.notify(0))?;
        if !session.exchange()? {
            break;
        }
    }
    session.leave()
}

fn no_zero<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    for _ in 0..20 {
        if !session.exchange_of(5000)? {
            break;
        }
    }
    match (session.peer.seen.empty, session.peer.seen.notifications) {
        (0, all) => told(session.leave(), || format!("{all} notifications")),
        (empty, all) => Err(Stop::unmet(format!("{empty} of its {all} immediates were zero"))),
    }
}

fn overwritten<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let bytes = command(&[b"ECHO", &[b'x'; 1000]]);
    let to = session.room_for(bytes.len())?;
    session.peer.send_bytes(&bytes)?;
    for round in 0..50 {
        session.peer.write(to, &vec![b'0' + round % 10; bytes.len()])?;
    }
    // This connection may be unusable. The case is about the others.
    let _answered_or_not = session.listen(Duration::from_millis(100));
    drop(session);
    context.open()?.unharmed()
}
