//! Control messages: their encoding, and the handling of invalid ones.

use intercept::trace::words;
use rdma_conn::Descriptors;
use rdma_proto::wire::{FeatureSet, MESSAGE_LEN, Message, Opcode};

use super::case::{Case, Role};
use super::context::Context;
use super::session::told;
use crate::client::Failure;
use crate::tester::{Peer, Shape};
use suite::verdict::pass;
use suite::{Judged, Stop};

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        both "ctrl.first-message", "a connection, and nothing else"
            => "The first message of the target is a RegisterXferMemory of 32 bytes whose fields make sense as big-endian numbers.",
            ["VR-CTRL-003", "VR-CTRL-001", "VR-CTRL-002"], first_message;
        both "ctrl.reserved-zero", "a connection that is used"
            => "Reserved bytes of the target's messages are zero.", ["VR-CTRL-005"], reserved_zero;
        both "ctrl.message-of-0", "a SEND of no bytes" => "The target ends this connection.",
            ["VR-CTRL-011"], |context| of_length(context, 0);
        both "ctrl.message-of-1", "a SEND of one byte" => "The target ends this connection.",
            ["VR-CTRL-011"], |context| of_length(context, 1);
        both "ctrl.message-of-31", "a SEND of 31 bytes, one too few" => "The target ends this connection.",
            ["VR-CTRL-011"], |context| of_length(context, 31);
        both "ctrl.message-of-33", "a SEND of 33 bytes, one too many" => "The target ends this connection.",
            ["VR-CTRL-011", "VR-CTRL-008"], |context| of_length(context, 33);
        both "ctrl.message-of-4096", "a SEND of a page" => "The target ends this connection.",
            ["VR-CTRL-011", "VR-CTRL-008"], |context| of_length(context, 4096);
        both "ctrl.opcode-4", "the first opcode that is not defined" => "The target ends this connection.",
            ["VR-CTRL-012", "VR-CLOSE-007"], |context| unknown(context, 4);
        both "ctrl.opcode-ffff", "the last opcode that is not defined" => "The target ends this connection.",
            ["VR-CTRL-012", "VR-CLOSE-007"], |context| unknown(context, 0xffff);
        both "ctrl.opcode-swapped", "a keepalive whose opcode is little-endian" => "The target ends this connection.",
            ["VR-CTRL-012", "VR-CTRL-003"], |context| unknown(context, 0x0200);
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

fn first_message<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    let window = session.peer.await_window()?;
    if window.length == 0 || window.length > 1 << 30 || window.address >> 48 != 0 || window.address < 4096 {
        return Err(Stop::unmet(format!(
            "no window can be where its first registration says: {}",
            words::control(&Message::RegisterXferMemory(window))
        )));
    }
    session.peer.register()?;
    told(session.unharmed(), || format!("a window of {} bytes", window.length))
}

fn reserved_zero<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    if session.client_asks() {
        session.exchange()?;
    } else {
        session.peer.message(Message::GetServerFeature { select: 0, features: FeatureSet::NONE })?;
        session.expect_message(Message::GetServerFeature { select: 0, features: FeatureSet::NONE })?;
    }
    match session.peer.seen.reserved {
        0 => told(session.unharmed(), || "in every message".into()),
        count => Err(Stop::unmet(format!("reserved bytes are not zero in {count} of its messages"))),
    }
}

fn of_length<B: Descriptors>(context: &Context<'_, B>, length: usize) -> Judged {
    let mut session = context.open()?;
    let mut bytes = vec![0; length];
    // The part that exists is a keepalive, which a target might accept.
    bytes.iter_mut().skip(1).take(1).for_each(|byte| *byte = 2);
    session.peer.send(&bytes)?;
    session.ends()
}

fn unknown<B: Descriptors>(context: &Context<'_, B>, opcode: u16) -> Judged {
    let mut session = context.open()?;
    session.peer.send(&message(Opcode(opcode), 0))?;
    session.ends()
}

fn message(opcode: Opcode, fill: u8) -> [u8; MESSAGE_LEN] {
    let mut bytes = [fill; MESSAGE_LEN];
    let [high, low] = opcode.0.to_be_bytes();
    bytes[0] = high;
    bytes[1] = low;
    bytes
}

fn disguised<B: Descriptors>(peer: &mut Peer<B>, immediate: Option<u32>, fill: u8) -> Result<(), Failure> {
    let mut bytes = peer.registration().encode();
    bytes[2..16].fill(fill);
    match immediate {
        None => peer.send(&bytes),
        Some(immediate) => peer.send_immediate(&bytes, immediate),
    }
}

fn reserved_in_registration<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    disguised(&mut session.peer, None, 0xa5)?;
    session.peer.await_window()?;
    session.unharmed()
}

fn reserved_in_keepalive<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.send(&message(Opcode::KEEPALIVE, 0xa5))?;
    session.unharmed()
}

fn reserved_in_question<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.send(&message(Opcode::GET_SERVER_FEATURE, 0xa5))?;
    session.expect_message(Message::GetServerFeature { select: 0xa5a5, features: FeatureSet::NONE })?;
    session.unharmed()
}

fn with_immediate<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    // Not a number of bytes: the immediate of a SEND belongs to a message.
    disguised(&mut session.peer, Some(u32::MAX), 0)?;
    session.peer.send_immediate(&Message::Keepalive.encode(), 1)?;
    let ended = session.or_ends(|session| {
        session.peer.await_window()?;
        session.goes_on()
    })?;
    if context.role() == Role::Server {
        return not_counted(context);
    }
    Ok(ended.unwrap_or_else(|| pass("takes them as messages")))
}

/// The immediate of a message is no number of bytes. A server that counts it reads that many bytes
/// too early from the second exchange on, or as the beginning of a later command.
fn not_counted<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let ended = session.or_ends(|session| {
        session.peer.send_immediate(&Message::Keepalive.encode(), 6)?;
        session.exchange()?;
        session.exchange().map(drop)
    })?;
    // A server that has answered has taken the message, and not ended the connection for it.
    ended.map_or_else(|| session.unharmed(), Ok)
}

fn between_payload<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let exchange = session.require_exchange(200)?;
    for piece in exchange.send.chunks(10) {
        session.peer.send_bytes(piece)?;
        session.peer.message(Message::Keepalive)?;
    }
    session.expect_reply(&exchange)?;
    told(session.unharmed(), || format!("{} pieces", exchange.send.len().div_ceil(10)))
}
