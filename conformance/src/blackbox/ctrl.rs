//! Control messages: how they are made, and what becomes of those that are none.

use rdma_conn::Descriptors;
use rdma_proto::wire::{FeatureSet, MESSAGE_LEN, Message, Opcode};

use super::bench::Bench;
use super::case::Case;
use super::meeting::told;
use super::verdict::{Judged, Stop};
use crate::adversary::{Adversary, Shape};
use crate::client::Failure;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<B>> {
    cases! {
        both "ctrl.first-message", "a connection, and nothing else"
            => "The first message of the target is a RegisterXferMemory of 32 bytes whose fields make sense as big-endian numbers.",
            ["VR-CTRL-003", "VR-CTRL-001", "VR-CTRL-002"], first_message;
        both "ctrl.reserved-zero", "a connection that is used"
            => "Reserved bytes of the target's messages are zero.", ["VR-CTRL-005"], reserved_zero;
        both "ctrl.message-of-0", "a SEND of no bytes" => "The target ends this connection.",
            ["VR-CTRL-011"], |bench| of_length(bench, 0);
        both "ctrl.message-of-1", "a SEND of one byte" => "The target ends this connection.",
            ["VR-CTRL-011"], |bench| of_length(bench, 1);
        both "ctrl.message-of-31", "a SEND one byte short" => "The target ends this connection.",
            ["VR-CTRL-011"], |bench| of_length(bench, 31);
        both "ctrl.message-of-33", "a SEND one byte long" => "The target ends this connection.",
            ["VR-CTRL-011", "VR-CTRL-008"], |bench| of_length(bench, 33);
        both "ctrl.message-of-4096", "a SEND of a page" => "The target ends this connection.",
            ["VR-CTRL-011", "VR-CTRL-008"], |bench| of_length(bench, 4096);
        both "ctrl.opcode-4", "the first opcode that is not defined" => "The target ends this connection.",
            ["VR-CTRL-012", "VR-CLOSE-007"], |bench| unknown(bench, 4);
        both "ctrl.opcode-ffff", "the last opcode that is not defined" => "The target ends this connection.",
            ["VR-CTRL-012", "VR-CLOSE-007"], |bench| unknown(bench, 0xffff);
        both "ctrl.opcode-swapped", "a keepalive whose opcode is little-endian" => "The target ends this connection.",
            ["VR-CTRL-012", "VR-CTRL-003"], |bench| unknown(bench, 0x0200);
        both "ctrl.reserved-in-registration", "a registration with reserved bytes that are not zero"
            => "The target takes the registration for what it is.", ["VR-CTRL-006"], reserved_in_registration;
        both "ctrl.reserved-in-keepalive", "a keepalive with reserved bytes that are not zero"
            => "The target takes the keepalive for what it is.", ["VR-CTRL-006"], reserved_in_keepalive;
        server "ctrl.reserved-in-question", "a GetServerFeature with reserved bytes that are not zero"
            => "The server answers as if they were zero.", ["VR-CTRL-006"], reserved_in_question;
        both "ctrl.send-with-immediate", "messages that carry an immediate"
            => "The target takes them as messages, whatever the immediate says, or ends the connection.",
            ["VR-CTRL-010"], with_immediate;
        both "ctrl.between-payload", "a keepalive between any two pieces of what is said"
            => "The stream is put together as if they were not there.", ["VR-CTRL-009"], between_payload;
    }
}

fn first_message<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    let window = meeting.peer.await_window()?;
    if window.length == 0 || window.length > 1 << 30 || window.address >> 48 != 0 || window.address < 4096 {
        return Err(Stop::unmet(format!("its first registration makes no sense: {window:?}")));
    }
    meeting.peer.register()?;
    told(meeting.unharmed(), || format!("a window of {} bytes", window.length))
}

fn reserved_zero<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    if meeting.client_asks() {
        meeting.talk()?;
    } else {
        meeting.peer.message(Message::GetServerFeature { select: 0, features: FeatureSet::NONE })?;
        meeting.is_told(Message::GetServerFeature { select: 0, features: FeatureSet::NONE })?;
    }
    match meeting.peer.seen.reserved {
        0 => told(meeting.unharmed(), || "in every message".into()),
        count => Err(Stop::unmet(format!("{count} of its messages have reserved bytes that are not zero"))),
    }
}

fn of_length<B: Descriptors>(bench: &Bench<'_, B>, length: usize) -> Judged {
    let mut meeting = bench.greet()?;
    let mut bytes = vec![0; length];
    // What of it is there is a keepalive, which a target might take for one.
    bytes.iter_mut().skip(1).take(1).for_each(|byte| *byte = 2);
    meeting.peer.send(&bytes)?;
    meeting.ends()
}

fn unknown<B: Descriptors>(bench: &Bench<'_, B>, opcode: u16) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.peer.send(&message(Opcode(opcode), 0))?;
    meeting.ends()
}

/// A message with all of its other bytes set to `fill`.
fn message(opcode: Opcode, fill: u8) -> [u8; MESSAGE_LEN] {
    let mut bytes = [fill; MESSAGE_LEN];
    let [high, low] = opcode.0.to_be_bytes();
    bytes[0] = high;
    bytes[1] = low;
    bytes
}

/// The registration of the adversary's window, disguised.
fn disguised<B: Descriptors>(
    peer: &mut Adversary<B>,
    immediate: Option<u32>,
    fill: u8,
) -> Result<(), Failure> {
    let mut bytes = peer.registration().encode();
    bytes[2..16].fill(fill);
    match immediate {
        None => peer.send(&bytes),
        Some(immediate) => peer.send_immediate(&bytes, immediate),
    }
}

fn reserved_in_registration<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    disguised(&mut meeting.peer, None, 0xa5)?;
    meeting.peer.await_window()?;
    meeting.unharmed()
}

fn reserved_in_keepalive<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.peer.send(&message(Opcode::KEEPALIVE, 0xa5))?;
    meeting.unharmed()
}

fn reserved_in_question<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.peer.send(&message(Opcode::GET_SERVER_FEATURE, 0xa5))?;
    meeting.is_told(Message::GetServerFeature { select: 0xa5a5, features: FeatureSet::NONE })?;
    meeting.unharmed()
}

fn with_immediate<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    // No number of bytes: SENDs are about messages.
    disguised(&mut meeting.peer, Some(u32::MAX), 0)?;
    meeting.peer.send_immediate(&Message::Keepalive.encode(), 1)?;
    let talked = meeting.peer.await_window().map_err(Stop::from).and_then(|_| meeting.talk());
    match talked {
        Ok(_) => meeting.leave(),
        Err(_) => told(meeting.ends(), || "ends the connection".into()),
    }
}

fn between_payload<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let turn = meeting.occasion(200)?;
    for piece in turn.say.chunks(10) {
        meeting.peer.say(piece)?;
        meeting.peer.message(Message::Keepalive)?;
    }
    meeting.hears(&turn)?;
    told(meeting.unharmed(), || format!("{} pieces", turn.say.len().div_ceil(10)))
}
