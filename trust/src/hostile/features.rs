//! Questions for features: unasked, repeated, unanswered.

use rdma_conn::Descriptors;
use rdma_conn::Error::Protocol;
use rdma_conn::Options;
use rdma_proto::Error::PeerMisbehaved;
use rdma_proto::PeerMisbehaved::{FeatureFlood, ServerSent, UnaskedFeatures};
use rdma_proto::wire::{FeatureSet, Message};

use super::Setting;
use super::scene::{Scene, Side, usual};
use crate::{Case, Outcome};
use conformance::peer::Shape;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    cases! {
        server "features-asked", "every question is answered, its select repeated",
            ["VR-FEAT-002", "VR-FEAT-012"], usual() => asked;
        server "features-asked-at-once", "1000 equal questions in a burst",
            ["VR-FEAT-003", "VR-RES-007"], usual() => asked_at_once;
        server "features-of-all-kinds-asked-at-once", "100 different questions in a burst, the answers taken",
            ["VR-FEAT-003", "VR-RES-007"], usual() => all_kinds_asked_at_once;
        server "features-asked-without-end", "different questions whose answers are never taken",
            ["VR-FEAT-007", "VR-RES-008"], usual() => asked_without_end;
        server "features-in-the-documents-order", "Get, Set, Register, as the document has it",
            ["VR-FEAT-001", "VR-FEAT-013"], usual() => documents_order;
        server "features-unknown", "SetClientFeature with every bit, early and late",
            ["VR-FEAT-004", "VR-FEAT-009"], usual() => unknown;
        client "features-unasked", "a server answers what nobody asked", ["VR-FEAT-014"], usual() => unasked;
        client "features-answered-twice", "a server answers one question twice",
            ["VR-FEAT-014"], negotiating() => answered_twice;
        client "features-answered-with-unknown", "a server claims every feature there could be",
            ["VR-FEAT-004", "VR-FEAT-010"], negotiating() => answered_with_unknown;
        client "features-set-by-server", "a server sends SetClientFeature", ["VR-FEAT-014"], usual()
            => set_by_server;
    }
}

fn negotiating() -> Options {
    let mut options = usual();
    options.protocol.negotiate = true;
    options
}

const EVERY: FeatureSet = FeatureSet(u64::MAX);

const fn get(select: u16, features: FeatureSet) -> Message {
    Message::GetServerFeature { select, features }
}

fn asked<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    for select in [0, 1, 0x0102, 0xffff, 0xffff, 0] {
        attack.peer.message(get(select, EVERY))?;
        attack.is_told(get(select, FeatureSet::NONE))?;
        attack.talk(b"between questions")?;
    }
    attack.is_harmless()?;
    Ok("six answers".into())
}

fn asked_at_once<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    burst(scene, side, &[get(7, FeatureSet::NONE); 1000])
}

fn all_kinds_asked_at_once<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let questions: Vec<_> = (0..100).map(|select| get(select, FeatureSet::NONE)).collect();
    burst(scene, side, &questions)
}

fn burst<B: Descriptors>(scene: &Scene<'_, B>, side: Side, questions: &[Message]) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.peer.burst(questions)?;
    questions.iter().try_for_each(|question| attack.is_told(*question))?;
    attack.is_harmless()?;
    Ok(format!("{} answers in order", questions.len()))
}

fn asked_without_end<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    // One receive, for our side's window; no answer ever finds one.
    let mut attack = scene.attack(side, Shape::default().receives(1))?;
    attack.peer.set_reposts(false);
    attack.peer.handshake()?;
    let questions: Vec<_> = (0..1000).map(|select| get(select, FeatureSet::NONE)).collect();
    attack.peer.burst(&questions)?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(FeatureFlood))),
        "the peer broke the protocol: it asks for features faster than it takes the answers",
    )
}

fn documents_order<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.attack(side, Shape::default())?;
    attack.peer.message(get(0, FeatureSet::NONE))?;
    attack.peer.await_window()?;
    attack.is_told(get(0, FeatureSet::NONE))?;
    attack.peer.message(Message::SetClientFeature { select: 0, features: FeatureSet::NONE })?;
    attack.peer.register()?;
    attack.is_harmless()?;
    Ok("served".into())
}

fn unknown<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let set = Message::SetClientFeature { select: 0xffff, features: EVERY };
    let mut attack = scene.attack(side, Shape::default())?;
    attack.peer.message(set)?;
    attack.peer.handshake()?;
    attack.talk(b"before")?;
    attack.peer.burst(&[set; 100])?;
    attack.is_harmless()?;
    Ok("ignored".into())
}

fn unasked<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.peer.message(get(0, FeatureSet::NONE))?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(UnaskedFeatures))),
        "the peer broke the protocol: it answered a question for features that was not asked",
    )
}

fn answered_twice<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.is_told(get(0, FeatureSet::NONE))?;
    attack.peer.burst(&[get(0, FeatureSet::NONE); 2])?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(UnaskedFeatures))),
        "the peer broke the protocol: it answered a question for features that was not asked",
    )
}

fn answered_with_unknown<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.is_told(get(0, FeatureSet::NONE))?;
    attack.peer.message(get(0, EVERY))?;
    attack.is_told(Message::SetClientFeature { select: 0, features: FeatureSet::NONE })?;
    attack.is_harmless()?;
    Ok("none of them is used".into())
}

fn set_by_server<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    attack.peer.message(Message::SetClientFeature { select: 0, features: FeatureSet::NONE })?;
    attack.fails(
        is!(Protocol(PeerMisbehaved(ServerSent { .. }))),
        "the peer broke the protocol: a server sent SetClientFeature, which only a client may",
    )
}
