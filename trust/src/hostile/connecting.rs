//! Connections that do not come about, and peers that leave in the middle of something.

use std::io::{self, Read};
use std::net::SocketAddr;

use rdma_conn::Error::{Backend, Protocol, Refused, Rejected, TimedOut};
use rdma_conn::{Descriptors, Error, Stream};
use rdma_proto::Error::Transport;
use rdma_proto::TransportError::Disconnected;

use super::Setting;
use super::scene::{Attack, Ended, Scene, Side, WINDOW, echo, impatient, usual};
use crate::{Case, Outcome};
use conformance::client::Failure;
use conformance::peer::{Listener as Lurker, Peer as Adversary, Shape};

pub(super) fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    cases! {
        both "private-data", "a connection that comes with private data", ["VR-CONN-002"], usual() => private_data;
        both "leaves-when-connected", "a peer that disconnects before it has sent anything",
            ["VR-CONN-006", "VR-CLOSE-003"], usual() => leaves_when_connected;
        both "leaves-when-registered", "a peer that disconnects after its registration",
            ["VR-CLOSE-003", "VR-CLOSE-005"], usual() => leaves_when_registered;
        both "leaves-in-a-question", "a peer that disconnects in the middle of what it says",
            ["VR-CLOSE-003"], usual() => leaves_in_a_question;
        both "leaves-in-an-answer", "a peer that disconnects in the middle of an answer",
            ["VR-CLOSE-003"], usual() => leaves_in_an_answer;
        both "vanishes-in-an-answer", "a peer that drops everything in the middle of an answer",
            ["VR-CLOSE-003", "VR-RES-001"], usual() => vanishes_in_an_answer;
        server "request-withdrawn", "a request that is withdrawn before the answer",
            ["VR-CONN-006"], impatient() => withdrawn;
        server "request-never-completed", "accepted, and then nothing", ["VR-CONN-008"], impatient()
            => never_completed;
        server "request-flood", "twenty requests at once that are never completed",
            ["VR-CONN-008", "VR-RES-007"], impatient() => request_flood;
        client "refused", "nobody listens", ["VR-CONN-006"], usual() => refused;
        client "rejected", "the server says no", ["VR-CONN-006"], usual() => rejected;
        client "request-dropped", "the server drops the request", ["VR-CONN-006"], usual() => request_dropped;
        client "never-answered", "the server reads the request and is silent", ["VR-CONN-008"], impatient()
            => silent;
        client "never-registered", "the server never gives a window", ["VR-CONN-008"], impatient() => windowless;
        client "last-words", "bytes right before the disconnect", ["VR-CLOSE-002"], usual() => last_words;
    }
}

fn private_data<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let shape = Shape { private_data: &[0xa5; 56], ..Shape::default() };
    let mut attack = scene.attack(side, shape)?;
    attack.peer.handshake()?;
    attack.is_harmless()?;
    Ok("ignored".into())
}

/// The peer is gone, and no answer was owed: the end of the stream.
fn parts<B: Descriptors>(scene: &Scene<'_, B>, attack: Attack<'_, B>) -> Outcome {
    attack.peer.disconnect()?;
    scene.ends_in_order()?;
    Ok("the end of the stream".into())
}

const GONE: fn(&Error) -> bool = is!(Protocol(Transport(Disconnected)));
const GONE_TEXT: &str = "the RDMA transport failed: the peer has disconnected";

fn leaves_when_connected<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let attack = scene.attack(side, Shape::default())?;
    match side {
        Side::Server => parts(scene, attack),
        // Without a window the client's connect has not succeeded yet.
        Side::Client => {
            attack.peer.disconnect()?;
            scene.fails(GONE, GONE_TEXT)
        }
    }
}

fn leaves_when_registered<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    parts(scene, scene.greet(side)?)
}

fn leaves_in_a_question<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let mut attack = scene.greet(side)?;
    let (question, _) = attack.question(b"never finished");
    match side {
        Side::Server => attack.peer.send_bytes(&question[..question.len() - 1])?,
        Side::Client => attack.talk(&question)?,
    }
    parts(scene, attack)
}

/// The adversary in the middle of an answer that does not fit into its window.
fn in_an_answer<'a, B: Descriptors>(scene: &'a Scene<'a, B>, side: Side) -> Result<Attack<'a, B>, Failure> {
    let mut attack = scene.greet(side)?;
    attack.peer.drains = false;
    let (question, _) = attack.question(&[b'x'; 2 * WINDOW as usize + 1000]);
    attack.peer.send_bytes(&question)?;
    attack.peer.receive_bytes(WINDOW as usize)?;
    Ok(attack)
}

fn leaves_in_an_answer<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let attack = in_an_answer(scene, side)?;
    attack.peer.disconnect()?;
    scene.fails(GONE, GONE_TEXT)
}

fn vanishes_in_an_answer<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    drop(in_an_answer(scene, side)?);
    scene.fails(GONE, GONE_TEXT)
}

fn withdrawn<B: Descriptors>(scene: &Scene<'_, B>, _: Side) -> Outcome {
    drop(Adversary::request(&scene.setting.theirs, scene.address, Shape::default())?);
    // Answered in turn: when a later request is served, this one has been seen.
    drop(scene.neighbour()?);
    // It depends on how far our side had come. A request that was withdrawn before it was accepted is nobody's end.
    let mut told = "the listener went on".to_owned();
    loop {
        match scene.ended()? {
            Ended::InOrder => return Ok(told),
            Ended::With(error @ (Rejected { .. } | Backend { .. } | Protocol(Transport(Disconnected)))) => {
                told = error.to_string();
            }
            other => return Err(Failure::wrong(format!("our side ended {}", other.told()))),
        }
    }
}

const INCOMPLETE: fn(&Error) -> bool = is!(TimedOut { .. });
const INCOMPLETE_TEXT: &str = "timed out after 300ms waiting for the peer to complete the connection";

fn never_completed<B: Descriptors>(scene: &Scene<'_, B>, _: Side) -> Outcome {
    // An answer that nobody reads is not acknowledged.
    let _adversary = Adversary::request(&scene.setting.theirs, scene.address, Shape::default())?;
    scene.fails(INCOMPLETE, INCOMPLETE_TEXT)
}

fn request_flood<B: Descriptors>(scene: &Scene<'_, B>, _: Side) -> Outcome {
    let request = |_| Adversary::request(&scene.setting.theirs, scene.address, Shape::default());
    let adversaries = (0..20).map(request).collect::<Result<Vec<_>, _>>()?;
    for _ in &adversaries {
        scene.fails(INCOMPLETE, INCOMPLETE_TEXT)?;
    }
    Ok(format!("{} times: {INCOMPLETE_TEXT}", adversaries.len()))
}

/// An adversary that waits for a client of ours, which is on its way to it.
fn awaiting<B: Descriptors>(scene: &Scene<'_, B>) -> Result<(Lurker<B>, SocketAddr), Failure> {
    let lurker = Lurker::new(&scene.setting.theirs, scene.setting.their_address)?;
    let address = lurker.address()?;
    scene.send_client(address, echo);
    Ok((lurker, address))
}

fn refused<B: Descriptors>(scene: &Scene<'_, B>, _: Side) -> Outcome {
    let nobody = Lurker::new(&scene.setting.theirs, scene.setting.their_address)?.address()?;
    scene.send_client(nobody, echo);
    let text = format!("{nobody} refused the connection: nothing listens there for RDMA");
    scene.fails(is!(Refused { .. }), &text)
}

fn rejected<B: Descriptors>(scene: &Scene<'_, B>, _: Side) -> Outcome {
    let (lurker, address) = awaiting(scene)?;
    lurker.reject()?;
    scene.fails(is!(Rejected { .. }), &format!("{address} rejected the connection (reason 28)"))
}

fn request_dropped<B: Descriptors>(scene: &Scene<'_, B>, _: Side) -> Outcome {
    let (lurker, address) = awaiting(scene)?;
    drop(lurker.request()?);
    scene.fails(is!(Rejected { .. }), &format!("{address} rejected the connection (reason 28)"))
}

fn silent<B: Descriptors>(scene: &Scene<'_, B>, _: Side) -> Outcome {
    let (lurker, _) = awaiting(scene)?;
    let _unanswered = lurker.request()?;
    scene.fails(is!(TimedOut { .. }), "timed out after 300ms connecting")
}

fn windowless<B: Descriptors>(scene: &Scene<'_, B>, side: Side) -> Outcome {
    let _attack = scene.attack(side, Shape::default())?;
    scene.fails(is!(TimedOut { .. }), "timed out after 300ms waiting for the server to register its window")
}

const LAST_WORDS: &[u8] = b"all of this must arrive";

/// Reads to the end.
fn listen<B: Descriptors>(mut stream: Stream<B>) -> io::Result<()> {
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard)?;
    if heard == LAST_WORDS { Ok(()) } else { Err(io::Error::other(format!("heard only {heard:?}"))) }
}

fn last_words<B: Descriptors>(scene: &Scene<'_, B>, _: Side) -> Outcome {
    let mut attack = scene.lure(Shape::default(), listen)?;
    attack.peer.handshake()?;
    attack.peer.send_bytes(LAST_WORDS)?;
    attack.peer.settle()?;
    parts(scene, attack)
}
