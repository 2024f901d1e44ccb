//! Immediates: how many bytes are said to have come.

use rdma_conn::Descriptors;
use rdma_conn::Error::Protocol;
use rdma_proto::Error::PeerMisbehaved;
use rdma_proto::PeerMisbehaved::{NoWindow, WindowOverrun};
use rdma_proto::backend::RemoteAddress;

use super::Setting;
use super::scene::{Scene, Side, WINDOW, usual};
use crate::{Case, Outcome};
use conformance::peer::Shape;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    cases! {
        both "immediate-beyond-by-1", "one byte more than the window", ["VR-FLOW-002"], usual() => by_one;
        both "immediate-of-4-gib", "the largest number there is", ["VR-FLOW-002"], usual() => largest;
        both "immediate-that-wraps", "a sum of exactly 2^32, which is 0", ["VR-FLOW-002", "VR-SEC-003"], usual()
            => wraps;
        both "immediate-of-0", "thousands of zeros are neither data nor an end", ["VR-XFER-005"], usual() => zeros;
        both "immediates-of-1", "every byte on its own", ["VR-FLOW-014", "VR-XFER-007"], usual() => ones;
        both "immediate-for-many-writes", "plain WRITEs, then one immediate for all",
            ["VR-XFER-004", "VR-XFER-006"], usual() => many_writes;
        both "immediate-in-arrears", "more is written than the immediate says; the rest is told later",
            ["VR-XFER-002", "VR-XFER-008"], usual() => in_arrears;
        server "immediate-before-registration", "bytes before there is a window to put them in",
            ["VR-FLOW-003"], usual() => before_registration;
    }
}

fn notify<B: Descriptors>(scene: &Scene<'_, B>, side: Side, immediate: u32) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.peer.notify(immediate)?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(WindowOverrun { .. }))),
        &format!(
            "the peer broke the protocol: it notified {immediate} bytes when 0 of the window's 65536 were already used"
        ),
    )
}

fn by_one<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    notify(scene, side, WINDOW + 1)
}

fn largest<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    notify(scene, side, u32::MAX)
}

fn wraps<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    let (question, answer) = attack.question(b"some bytes first");
    attack.peer.send_bytes(&question)?;
    attack.is_answered(&answer)?;
    let used = question.len() as u32;
    let immediate = used.wrapping_neg();
    attack.peer.notify(immediate)?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(WindowOverrun { .. }))),
        &format!(
            "the peer broke the protocol: it notified {immediate} bytes when {used} of the window's 65536 were already \
             used"
        ),
    )
}

fn zeros<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    for _ in 0..3 {
        (0..1000).try_for_each(|_| attack.peer.notify(0))?;
        attack.talk(b"between zeros")?;
    }
    attack.is_harmless()?;
    Ok("3000 taken".into())
}

fn ones<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    let (question, answer) = attack.question(&[b'x'; 2000]);
    attack.peer.send_bytes_in(&question, 1)?;
    attack.is_answered(&answer)?;
    attack.is_harmless()?;
    Ok(format!("{} bytes put together", question.len()))
}

fn many_writes<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    tell_at_end(scene, side, 0)
}

fn in_arrears<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    tell_at_end(scene, side, 30)
}

/// Writes a question in pieces, says nothing of it, then that the first `first` bytes have come, and then the rest.
fn tell_at_end<B: Descriptors>(scene: &Scene<'_, B>, side: Side, first: u32) -> Outcome {
    let mut attack = scene.greet(side)?;
    let (question, answer) = attack.question(&[b'x'; 1000]);
    let (RemoteAddress { address, rkey }, _) = attack.peer.room()?;
    let pieces = question.chunks(100);
    for (number, piece) in pieces.enumerate() {
        attack.peer.write(RemoteAddress { address: address + 100 * number as u64, rkey }, piece)?;
    }
    attack.peer.notify(first)?;
    attack.peer.notify(question.len() as u32 - first)?;
    attack.is_answered(&answer)?;
    attack.peer.disconnect()?;
    scene.ends_in_order()?;
    Ok("put together".into())
}

fn before_registration<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let held = scene.hold();
    let mut attack = scene.attack(side, Shape::default())?;
    attack.peer.notify(5)?;
    attack.peer.settle()?;
    drop(held);
    attack.fails(
        is!(Protocol(PeerMisbehaved(NoWindow { .. }))),
        "the peer broke the protocol: it notified 5 bytes before it was given a window",
    )
}
