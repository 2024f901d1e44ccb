//! Peers that keep our side waiting: no window, no room in it, no receives, no life.

use std::time::Duration;

use rdma_conn::Error::Protocol;
use rdma_conn::{Descriptors, Options};
use rdma_proto::Error::{PeerMisbehaved, Transport};
use rdma_proto::PeerMisbehaved::{NeverDrained, NeverReceives, NeverRegistered, TooFewReceives};
use rdma_proto::TransportError::Completion;
use rdma_proto::backend::{CompletionError, CompletionStatus};
use rdma_proto::wire::{FeatureSet, Message};
use rustix::time::{ClockId, clock_gettime};

use super::Setting;
use super::scene::{Scene, Side, WINDOW, chatter, impatient, usual};
use crate::{Case, Outcome};
use conformance::client::Failure;
use conformance::peer::Shape;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    cases! {
        server "never-registers", "commands, and no window for replies", ["VR-RES-004"], impatient()
            => never_registers;
        both "never-drains", "a window that is full and stays so", ["VR-RES-004", "VR-RES-008"], impatient()
            => never_drains;
        both "never-reposts", "receives that are used up and not posted again", ["VR-RES-005", "VR-RES-008"],
            impatient() => never_reposts;
        both "never-polls", "a peer that looks at nothing that comes", ["VR-RES-004", "VR-RES-005"], impatient()
            => never_polls;
        both "too-few-receives", "no receive for a keepalive, and no patience of the devices either",
            ["VR-RES-002", "VR-FLOW-008"], vigilant() => too_few_receives;
        both "queue-pair-lost", "a peer whose device no longer answers", ["VR-KEEP-006", "VR-CLOSE-003"],
            vigilant() => queue_pair_lost;
        server "commands-before-registering", "replies wait without using the processor, then leave in order",
            ["VR-FLOW-004", "VR-FLOW-012", "VR-FLOW-013"], usual() => commands_before_registering;
    }
}

/// Settings under which our side always has something to send.
fn vigilant() -> Options {
    let mut options = usual();
    options.protocol.keepalive.every = Some(Duration::from_millis(50));
    options
}

fn never_registers<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.attack(side, Shape::default())?;
    attack.peer.send_bytes(b"PING\r\n")?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(NeverRegistered { .. }))),
        "the peer broke the protocol: it registered no window for 300ms while data waits for it",
    )
}

fn never_drains<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.peer.drains = false;
    let (question, _) = attack.question(&[b'x'; WINDOW as usize + 1000]);
    attack.peer.send_bytes(&question)?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(NeverDrained { .. }))),
        "the peer broke the protocol: it did not empty its window for 300ms while data waits for it",
    )
}

fn never_reposts<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let shape = Shape::default().receives(16);
    let mut attack = match side {
        Side::Server => scene.attack(side, shape)?,
        Side::Client => scene.lure(shape, chatter)?,
    };
    attack.peer.set_reposts(false);
    attack.peer.handshake()?;
    if side == Side::Server {
        let question = Message::GetServerFeature { select: 0, features: FeatureSet::NONE };
        attack.peer.burst(&[question; 1000])?;
    }
    attack.fails(
        is!(Protocol(PeerMisbehaved(NeverReceives { .. }))),
        "the peer broke the protocol: it took no notification for 300ms",
    )
}

fn never_polls<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    match side {
        // What the server answers is longer than the window.
        Side::Server => {
            let mut attack = scene.greet(side)?;
            attack.peer.send_bytes(&b"PING\r\n".repeat(WINDOW as usize / 6))?;
            attack.fails(
                is!(Protocol(PeerMisbehaved(NeverDrained { .. }))),
                "the peer broke the protocol: it did not empty its window for 300ms",
            )
        }
        // What the client sends are more notifications than there are receives.
        Side::Client => {
            let mut attack = scene.lure(Shape::default(), chatter)?;
            attack.peer.handshake()?;
            attack.fails(
                is!(Protocol(PeerMisbehaved(NeverReceives { .. }))),
                "the peer broke the protocol: it took no notification for 300ms",
            )
        }
    }
}

fn too_few_receives<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.attack(side, Shape::default().receives(3).without_rnr_retries())?;
    attack.peer.set_reposts(false);
    attack.peer.handshake()?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(TooFewReceives { .. }))),
        "the peer broke the protocol: it had no receive posted for a notification",
    )
}

fn queue_pair_lost<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.peer.lose_queue_pair();
    attack.fails(
        is!(Protocol(Transport(Completion(CompletionError { status: CompletionStatus::RETRY_EXC_ERR, .. })))),
        "the RDMA transport failed: the peer's device no longer acknowledges",
    )
}

fn commands_before_registering<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    const WAIT: Duration = Duration::from_millis(500);
    let mut attack = scene.attack(side, Shape::default())?;
    let mut answers = Vec::new();
    for number in 0..100 {
        let (question, answer) = attack.question(format!("number {number}").as_bytes());
        attack.peer.send_bytes(&question)?;
        answers.extend(answer);
    }
    attack.peer.settle()?;
    let before = processor_time();
    std::thread::sleep(WAIT);
    let used = processor_time() - before;
    if used > WAIT / 4 {
        return Err(Failure::wrong(format!("waiting took {used:?} of processor time in {WAIT:?}")));
    }
    attack.peer.register()?;
    attack.is_answered(&answers)?;
    attack.is_harmless()?;
    Ok(format!("100 replies held for {WAIT:?} at {used:?} of processor time"))
}

/// What this process, both sides in it, has used of the processors so far.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
