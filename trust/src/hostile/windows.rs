//! Windows that cannot be, are not the adversary's to give, or come at the wrong time.

use rdma_conn::Error::Protocol;
use rdma_conn::{Descriptors, Error};
use rdma_proto::Error::{PeerIncompatible, PeerMisbehaved};
use rdma_proto::PeerIncompatible::WindowTooLarge;
use rdma_proto::PeerMisbehaved::{EarlyRegistration, EmptyWindow, WindowRefused, WindowWraps};
use rdma_proto::wire::{Message, Window};

use super::Setting;
use super::scene::{Scene, Side, usual};
use crate::{Case, Outcome};
use conformance::peer::{Peer as Adversary, Shape};
use conformance::workload::Entry;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    cases! {
        both "window-of-0", "a window of no bytes", ["VR-MEM-006"], usual() => empty;
        both "window-of-4-gib", "a window of 4 GiB - 1", ["VR-MEM-005", "VR-SEC-007"], usual() => huge;
        both "window-that-wraps", "a window beyond the address space", ["VR-MEM-007"], usual() => wraps;
        both "window-with-bogus-key", "a window with another rkey", ["VR-MEM-009"], usual() => bogus_key;
        both "window-at-bogus-address", "a window elsewhere", ["VR-MEM-009"], usual() => bogus_address;
        both "window-not-writable", "a window that its owner's device keeps closed", ["VR-MEM-009"], usual()
            => not_writable;
        both "window-twice", "the same window again before it is used", ["VR-MEM-017"], usual() => twice;
        both "window-early", "a new window when one byte of the old is left", ["VR-MEM-017"], usual() => early;
        both "window-flood", "a thousand registrations", ["VR-MEM-017", "VR-RES-007"], usual() => flood;
        both "window-of-other-lengths", "every full window is followed by one of another length and place",
            ["VR-MEM-002", "VR-MEM-011", "VR-MEM-012", "VR-MEM-013"], usual() => other_lengths;
        server "window-before-ours", "a window that comes before our side has seen the connection established",
            ["VR-MEM-014", "VR-CONN-007"], usual() => before_ours;
        both "window-of-1", "answers through windows of one byte", ["VR-MEM-013", "VR-FLOW-001"], usual()
            => one_byte;
    }
}

fn register<B: Descriptors>(
    scene: &Scene<'_, B>,
    side: Side,
    window: impl FnOnce(&Adversary<B>) -> Window,
    expected: fn(&Error) -> bool,
    text: &str,
) -> Outcome {
    let mut attack = scene.attack(side, Shape::default())?;
    let window = window(&attack.peer);
    attack.peer.message(Message::RegisterXferMemory(window))?;
    attack.fails(expected, text)
}

fn empty<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    register(
        scene,
        side,
        |peer| Window { length: 0, ..peer.own_window() },
        is!(Protocol(PeerMisbehaved(EmptyWindow))),
        "the peer broke the protocol: it registered a window of no bytes",
    )
}

fn huge<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    register(
        scene,
        side,
        |peer| Window { length: u32::MAX, ..peer.own_window() },
        is!(Protocol(PeerIncompatible(WindowTooLarge { .. }))),
        "the peer is incompatible with this side's configuration: it registered a window of 4294967295 bytes; this \
         side accepts at most 16777216",
    )
}

fn wraps<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    register(
        scene,
        side,
        |peer| Window { address: u64::MAX - 100, ..peer.own_window() },
        is!(Protocol(PeerMisbehaved(WindowWraps { .. }))),
        "the peer broke the protocol: it registered a window of 65536 bytes at 0xffffffffffffff9b, beyond the end of the \
         address space",
    )
}

/// A window that looks right; that it is not shows when our side writes there.
fn refused<B: Descriptors>(
    scene: &Scene<'_, B>,
    side: Side,
    window: impl FnOnce(&Adversary<B>) -> Window,
) -> Outcome {
    let mut attack = scene.attack(side, Shape::default())?;
    let window = window(&attack.peer);
    attack.peer.message(Message::RegisterXferMemory(window))?;
    let (question, _) = attack.question(b"will this arrive?");
    attack.peer.send_bytes(&question)?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(WindowRefused))),
        "the peer broke the protocol: its device refused the window that it registered",
    )
}

fn bogus_key<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    refused(scene, side, |peer| {
        let window = peer.own_window();
        Window { rkey: window.rkey ^ 0xff, ..window }
    })
}

fn bogus_address<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    refused(scene, side, |peer| {
        let window = peer.own_window();
        Window { address: window.address ^ 1 << 40, ..window }
    })
}

fn not_writable<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    refused(scene, side, Adversary::locked_window)
}

fn twice<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.peer.register()?;
    attack.fails(
        EARLY,
        "the peer broke the protocol: it registered a new window when only 0 of the old one's 65536 bytes",
    )
}

fn early<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.attack(side, Shape::default())?;
    attack.peer.plan = vec![(0, 100)];
    attack.peer.handshake()?;
    let (question, answer) = attack.question_for(99)?;
    attack.peer.send_bytes(&question)?;
    attack.is_answered(&answer)?;
    attack.peer.register()?;
    attack.fails(
        EARLY,
        "the peer broke the protocol: it registered a new window when only 99 of the old one's 100 bytes",
    )
}

fn flood<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    let again = Message::RegisterXferMemory(attack.peer.own_window());
    attack.peer.burst(&[again; 1000])?;
    attack.fails(
        EARLY,
        "the peer broke the protocol: it registered a new window when only 0 of the old one's 65536 bytes",
    )
}

const EARLY: fn(&Error) -> bool = is!(Protocol(PeerMisbehaved(EarlyRegistration { .. })));

fn other_lengths<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.attack(side, Shape::default())?;
    attack.peer.plan =
        vec![(0, 4096), (5000, 100), (1, 8191), (300, 1), (0, 65536), (4096, 4097), (65535, 1)];
    attack.peer.handshake()?;
    let bytes = Entry { number: 1, value_len: 200_000 }.value();
    attack.talk(&bytes)?;
    attack.is_harmless()?;
    Ok(format!("{} bytes arrived in order", bytes.len()))
}

fn one_byte<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.attack(side, Shape::default())?;
    attack.peer.plan = (0..100).map(|offset| (offset, 1)).collect();
    attack.peer.handshake()?;
    let bytes = Entry { number: 2, value_len: 300 }.value();
    attack.talk(&bytes)?;
    attack.is_harmless()?;
    Ok(format!("{} bytes arrived in order", bytes.len()))
}

fn before_ours<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let held = scene.hold();
    let mut attack = scene.attack(side, Shape::default())?;
    attack.peer.register()?;
    attack.peer.settle()?;
    drop(held);
    attack.is_harmless()?;
    Ok("accepted".into())
}
