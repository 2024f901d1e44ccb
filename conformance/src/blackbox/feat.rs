//! Features: questions, answers, and what nobody asked for.

use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_proto::wire::{FeatureSet, Message, Opcode};

use super::bench::Bench;
use super::case::Case;
use super::meeting::told;
use super::verdict::{Judged, Stop};
use crate::adversary::{Incoming, Shape};

pub(super) fn cases<B: Descriptors>() -> Vec<Case<B>> {
    cases! {
        server "feat.skipped", "a client that sends no feature message" => "The server serves it.",
            ["VR-FEAT-008"], skipped;
        server "feat.unprompted", "a client that asks nothing" => "The server sends no feature message.",
            ["VR-FEAT-005", "VR-FEAT-006"], unprompted;
        server "feat.asked", "GetServerFeature" => "One answer, with no feature in it.",
            ["VR-FEAT-002"], |bench| ask(bench, &[get(0)]);
        server "feat.select", "GetServerFeature with each bit of `select` in turn, and all" => "The answer repeats `select`.",
            ["VR-FEAT-002"], |bench| ask(bench, &selects());
        server "feat.bits-in-question", "GetServerFeature with every feature bit set"
            => "The server answers as if none were.", ["VR-FEAT-012"], bits_in_question;
        server "feat.asked-first", "GetServerFeature before either registration" => "It is answered.",
            ["VR-FEAT-013", "VR-FEAT-003"], asked_first;
        server "feat.asked-mid-stream", "GetServerFeature in the middle of a command" => "It is answered, and so is the command.",
            ["VR-FEAT-003", "VR-CTRL-009"], asked_mid_stream;
        server "feat.asked-again", "GetServerFeature a hundred times, one by one" => "Each is answered.",
            ["VR-FEAT-003"], |bench| ask(bench, &[get(7); 100]);
        server "feat.asked-at-once", "a thousand equal questions in a burst" => "A thousand answers.",
            ["VR-FEAT-003", "VR-RES-007"], |bench| burst(bench, &[get(7); 1000]);
        server "feat.all-kinds-at-once", "a hundred different questions in a burst" => "The answers, in order.",
            ["VR-FEAT-003", "VR-FEAT-002"], |bench| burst(bench, &(0..100).map(get).collect::<Vec<_>>());
        server "feat.asked-without-end", "different questions whose answers are never taken"
            => "The server ends the connection, or goes on without harm to anybody.",
            ["VR-RES-008", "VR-FEAT-007", "VR-FEAT-003"] [Disruptive], asked_without_end;
        server "feat.documents-order", "Get, Set, Register, as the document has it" => "The client is served.",
            ["VR-FEAT-013", "VR-FEAT-001"], documents_order;
        server "feat.set-none", "SetClientFeature with no bit set" => "The server goes on.",
            ["VR-FEAT-009"], |bench| set(bench, 0);
        server "feat.set-unknown", "SetClientFeature with every bit set"
            => "The server does not answer, and enables nothing; it may end the connection.",
            ["VR-FEAT-004", "VR-FEAT-009"], set_unknown;
        server "feat.set-mid-stream", "SetClientFeature in the middle of a command" => "The command is answered.",
            ["VR-FEAT-009", "VR-CTRL-009"], set_mid_stream;
        client "feat.unasked", "an answer that the client did not ask for" => "The client ends the connection.",
            ["VR-FEAT-014"], unasked;
        client "feat.set-by-server", "SetClientFeature from the server" => "The client ends the connection.",
            ["VR-FEAT-014"], set_by_server;
        client "feat.only-offered", "a server that offers no feature" => "The client asks for none to be in force.",
            ["VR-FEAT-010", "VR-FEAT-011"], only_offered;
        client "feat.every-bit-offered", "a server that offers every feature there could be, if it is asked"
            => "The client asks for none that is not defined, and goes on.",
            ["VR-FEAT-004", "VR-FEAT-010"], every_bit_offered;
        client "feat.registration-first", "the registration before the answer, if there is a question"
            => "The client takes both.", ["VR-FEAT-013"], registration_first;
    }
}

const fn get(select: u16) -> Message {
    Message::GetServerFeature { select, features: FeatureSet::NONE }
}

fn selects() -> Vec<Message> {
    (0..16).map(|bit| get(1 << bit)).chain([get(0xffff)]).collect()
}

fn skipped<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    bench.greet()?.unharmed()
}

fn unprompted<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    (0..20).try_for_each(|_| meeting.talk().map(drop))?;
    // A feature message would have been an error already.
    meeting.listen(Duration::from_millis(100))?;
    meeting.unharmed()
}

fn ask<B: Descriptors>(bench: &Bench<'_, B>, questions: &[Message]) -> Judged {
    let mut meeting = bench.greet()?;
    for question in questions {
        meeting.peer.message(*question)?;
        meeting.is_told(*question)?;
    }
    told(meeting.unharmed(), || format!("{} answered", questions.len()))
}

fn bits_in_question<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.peer.message(Message::GetServerFeature { select: 1, features: FeatureSet(u64::MAX) })?;
    meeting.is_told(get(1))?;
    meeting.unharmed()
}

fn asked_first<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    meeting.peer.message(get(3))?;
    answer_and_window(&mut meeting, get(3))?;
    meeting.peer.register()?;
    meeting.unharmed()
}

/// Waits for both, in either order.
fn answer_and_window<B: Descriptors>(
    meeting: &mut super::meeting::Meeting<'_, B>,
    answer: Message,
) -> Result<(), Stop> {
    let mut answered = false;
    while !answered || meeting.peer.seen.windows.is_empty() {
        match meeting.peer.receive()? {
            Incoming::Message(bytes) if bytes == answer.encode() => answered = true,
            other => meeting.peer.absorb(other)?,
        }
    }
    Ok(())
}

/// Says something in two parts, with a message in between.
fn in_between<B: Descriptors>(bench: &Bench<'_, B>, message: Message, answer: Option<Message>) -> Judged {
    let mut meeting = bench.greet()?;
    let turn = meeting.occasion(100)?;
    let (one, other) = turn.say.split_at(turn.say.len() / 2);
    meeting.peer.say(one)?;
    meeting.peer.message(message)?;
    if let Some(answer) = answer {
        meeting.is_told(answer)?;
    }
    meeting.peer.say(other)?;
    meeting.hears(&turn)?;
    meeting.unharmed()
}

fn asked_mid_stream<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    in_between(bench, get(0), Some(get(0)))
}

fn burst<B: Descriptors>(bench: &Bench<'_, B>, questions: &[Message]) -> Judged {
    let mut meeting = bench.greet()?;
    // No more at once than a server has receives for.
    for questions in questions.chunks(500) {
        meeting.peer.burst(questions)?;
        questions.iter().try_for_each(|question| meeting.is_told(*question))?;
    }
    told(meeting.unharmed(), || format!("{} answered in order", questions.len()))
}

fn asked_without_end<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    // One receive, for the server's window; no answer ever finds one.
    let mut meeting = bench.meet(Shape::default().receives(1))?;
    meeting.peer.set_reposts(false);
    meeting.peer.handshake()?;
    for round in 0..4 {
        let questions: Vec<_> = (0..500).map(|select| get(500 * round + select)).collect();
        // The server may have ended it by now.
        if meeting.peer.burst(&questions).and_then(|()| meeting.peer.settle()).is_err() {
            break;
        }
    }
    drop(meeting);
    Ok(super::verdict::pass("2000 questions"))
}

fn documents_order<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    meeting.peer.message(get(0))?;
    answer_and_window(&mut meeting, get(0))?;
    meeting.peer.message(Message::SetClientFeature { select: 0, features: FeatureSet::NONE })?;
    meeting.peer.register()?;
    meeting.unharmed()
}

fn set<B: Descriptors>(bench: &Bench<'_, B>, bits: u64) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.peer.message(Message::SetClientFeature { select: 0, features: FeatureSet(bits) })?;
    meeting.talk()?;
    meeting.listen(Duration::from_millis(100))?;
    meeting.unharmed()
}

fn set_unknown<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.peer.message(Message::SetClientFeature { select: 0xffff, features: FeatureSet(u64::MAX) })?;
    if meeting.talk().is_err() {
        return told(meeting.ends(), || "refused".into());
    }
    meeting.listen(Duration::from_millis(100))?;
    meeting.unharmed()
}

fn set_mid_stream<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    in_between(bench, Message::SetClientFeature { select: 0, features: FeatureSet::NONE }, None)
}

fn unasked<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    // If it has asked, it has its answer; this is one more.
    meeting.occasion(0)?;
    meeting.peer.message(get(0))?;
    meeting.ends()
}

fn set_by_server<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.peer.message(Message::SetClientFeature { select: 0, features: FeatureSet::NONE })?;
    meeting.ends()
}

fn only_offered<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.talk()?;
    let asked = meeting.peer.seen.count(Opcode::GET_SERVER_FEATURE);
    match meeting.peer.seen.features_set {
        0 => told(meeting.unharmed(), || format!("it asked {asked} times")),
        bits => Err(Stop::unmet(format!("it set the features {bits:#x}, and none was offered"))),
    }
}

/// Waits for a question; nothing if the client talks without having asked.
fn is_asked<B: Descriptors>(meeting: &mut super::meeting::Meeting<'_, B>) -> Result<Option<u16>, Stop> {
    meeting.peer.serves = false;
    loop {
        match meeting.peer.receive()? {
            Incoming::Message(bytes) => {
                if let Ok(Message::GetServerFeature { select, .. }) = Message::decode(&bytes) {
                    return Ok(Some(select));
                }
                meeting.peer.absorb(Incoming::Message(bytes))?;
            }
            Incoming::Notified(count) => {
                meeting.peer.absorb(Incoming::Notified(count))?;
                return Ok(None);
            }
            other => meeting.peer.absorb(other)?,
        }
    }
}

fn answer_with<B: Descriptors>(bench: &Bench<'_, B>, features: u64) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    meeting.peer.register()?;
    let Some(select) = is_asked(&mut meeting)? else {
        return Err(Stop::not_applicable("the client does not ask for features"));
    };
    meeting.peer.message(Message::GetServerFeature { select, features: FeatureSet(features) })?;
    meeting.peer.serves = true;
    meeting.talk()?;
    match meeting.peer.seen.features_set {
        0 => meeting.unharmed(),
        bits => Err(Stop::unmet(format!("it set the features {bits:#x}, and none is defined"))),
    }
}

fn every_bit_offered<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    answer_with(bench, u64::MAX)
}

fn registration_first<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    answer_with(bench, 0)
}
