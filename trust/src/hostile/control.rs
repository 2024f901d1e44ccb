//! Control messages that are none, and unusual ones that are.

use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_conn::Error::Protocol;
use rdma_proto::wire::{FeatureSet, MESSAGE_LEN, Message};
use rdma_proto::{Error::InvalidMessage, InvalidMessage as Invalid};

use super::Setting;
use super::scene::{Scene, Side, usual};
use crate::{Case, Outcome};
use conformance::client::Failure;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    cases! {
        both "message-of-0", "a SEND of no bytes", ["VR-CTRL-011"], usual() => |scene, side| short(scene, side, 0);
        both "message-of-1", "a SEND of one byte", ["VR-CTRL-011"], usual() => |scene, side| short(scene, side, 1);
        both "message-of-31", "a SEND one byte short", ["VR-CTRL-011"], usual()
            => |scene, side| short(scene, side, 31);
        both "message-of-33", "a SEND one byte long", ["VR-CTRL-011", "VR-CTRL-008"], usual()
            => |scene, side| long(scene, side, 33);
        both "message-of-4096", "a SEND of a page", ["VR-CTRL-011", "VR-CTRL-008"], usual()
            => |scene, side| long(scene, side, 4096);
        both "opcode-4", "the first opcode that is not defined", ["VR-CTRL-012", "VR-CLOSE-007"], usual()
            => |scene, side| unknown(scene, side, 4, "opcode 0x0004 is not defined");
        both "opcode-ffff", "the last opcode that is not defined", ["VR-CTRL-012", "VR-CLOSE-007"], usual()
            => |scene, side| unknown(scene, side, 0xffff, "opcode 0xffff is not defined");
        both "reserved-bytes", "reserved bytes that are not zero", ["VR-CTRL-006"], usual() => reserved_bytes;
        both "send-with-immediate", "messages that carry an immediate", ["VR-CTRL-010"], usual() => immediates;
        both "keepalive-flood", "thousands of keepalives", ["VR-KEEP-002", "VR-RES-007"], usual()
            => keepalive_flood;
        both "keepalive-first", "a keepalive before anything else", ["VR-KEEP-002", "VR-KEEP-007"], usual()
            => keepalive_first;
    }
}

fn short<B: Descriptors>(scene: &Scene<'_, B>, side: Side, length: usize) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.peer.send(&vec![0; length])?;
    attack.fails(
        is!(Protocol(InvalidMessage(Invalid::Length { .. }))),
        &format!("the peer sent an invalid control message: {length} bytes long, not 32"),
    )
}

fn long<B: Descriptors>(scene: &Scene<'_, B>, side: Side, length: usize) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.peer.send(&vec![0; length])?;
    attack.fails(
        is!(Protocol(InvalidMessage(Invalid::TooLong))),
        "the peer sent an invalid control message: longer than 32 bytes",
    )
}

fn unknown<B: Descriptors>(scene: &Scene<'_, B>, side: Side, opcode: u16, text: &str) -> Outcome {
    let mut attack = scene.greet(side)?;
    let mut message = [0; MESSAGE_LEN];
    message[..2].copy_from_slice(&opcode.to_be_bytes());
    attack.peer.send(&message)?;
    attack.fails(is!(Protocol(InvalidMessage(Invalid::UnknownOpcode { .. }))), text)
}

fn reserved_bytes<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.attack(side, Default::default())?;
    let mut registration = Message::RegisterXferMemory(attack.peer.own_window()).encode();
    registration[2..16].fill(0xa5);
    attack.peer.send(&registration)?;
    let mut keepalive = [0xa5; MESSAGE_LEN];
    keepalive[..2].copy_from_slice(&[0, 2]);
    attack.peer.send(&keepalive)?;
    if side == Side::Server {
        let mut question = [0xa5; MESSAGE_LEN];
        question[..2].fill(0);
        attack.peer.send(&question)?;
        attack.peer.await_window()?;
        let features = FeatureSet::NONE;
        attack.is_told(Message::GetServerFeature { select: 0xa5a5, features })?;
    }
    attack.is_harmless()?;
    Ok("ignored in every message".into())
}

fn immediates<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.attack(side, Default::default())?;
    let registration = Message::RegisterXferMemory(attack.peer.own_window());
    // No number of bytes: SENDs are about messages, whatever their immediate says.
    attack.peer.send_immediate(&registration.encode(), u32::MAX)?;
    attack.peer.send_immediate(&Message::Keepalive.encode(), 1)?;
    attack.is_harmless()?;
    Ok("taken as messages".into())
}

fn keepalive_flood<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    const FLOOD: usize = 5000;
    let mut attack = scene.greet(side)?;
    attack.peer.burst(&[Message::Keepalive; FLOOD])?;
    attack.talk(b"between keepalives")?;
    attack.peer.settle()?;
    // What came so far. A server's own keepalives may be among it, one every three seconds.
    while let Some(incoming) = attack.peer.receive_within(Duration::ZERO)? {
        attack.peer.absorb(incoming)?;
    }
    if attack.peer.keepalives() > FLOOD as u64 / 100 {
        return Err(Failure::wrong(format!("{} keepalives came in answer", attack.peer.keepalives())));
    }
    attack.is_harmless()?;
    Ok(format!("{FLOOD} taken, none answered"))
}

fn keepalive_first<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.attack(side, Default::default())?;
    attack.peer.message(Message::Keepalive)?;
    attack.peer.handshake()?;
    attack.is_harmless()?;
    Ok("accepted".into())
}
