//! Features: questions, answers, and answers without a question.

use std::time::{Duration, Instant};

use rdma_conn::Descriptors;
use rdma_proto::wire::{FeatureSet, Message, Opcode};

use super::case::Case;
use super::context::Context;
use super::session::{Session, told};
use crate::tester::{Incoming, Shape};
use suite::verdict::pass;
use suite::{Judged, Stop};

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        server "feat.skipped", "a client that sends no feature message" => "The server serves it.",
            ["VR-FEAT-008"], |context| context.open()?.unharmed();
        server "feat.unprompted", "a client that asks nothing" => "The server sends no feature message.",
            ["VR-FEAT-005", "VR-FEAT-006"], unprompted;
        server "feat.asked", "GetServerFeature" => "One answer, with no feature in it.",
            ["VR-FEAT-002"], |context| ask(context, &[get(0)]);
        server "feat.select", "GetServerFeature with each bit of `select` in turn, and all" => "The answer repeats `select`.",
            ["VR-FEAT-002"], |context| ask(context, &selects());
        server "feat.bits-in-question", "GetServerFeature with every feature bit set"
            => "The server answers as if none were.", ["VR-FEAT-012"], bits_in_question;
        server "feat.asked-first", "GetServerFeature before either registration" => "It is answered.",
            ["VR-FEAT-013", "VR-FEAT-003"], asked_first;
        server "feat.asked-mid-stream", "GetServerFeature in the middle of a command" => "It is answered, and so is the command.",
            ["VR-FEAT-003", "VR-CTRL-009"], |context| in_between(context, get(0), Some(get(0)));
        server "feat.asked-again", "GetServerFeature a hundred times, one by one" => "Each is answered.",
            ["VR-FEAT-003"], |context| ask(context, &[get(7); 100]);
        server "feat.asked-at-once", "a thousand equal questions in a burst" => "A thousand answers.",
            ["VR-FEAT-003", "VR-RES-007"], |context| burst(context, &[get(7); 1000]);
        server "feat.all-kinds-at-once", "a hundred different questions in a burst" => "The answers, in order.",
            ["VR-FEAT-003", "VR-FEAT-002"], |context| burst(context, &(0..100).map(get).collect::<Vec<_>>());
        server "feat.asked-without-end", "different questions whose answers are never taken"
            => "The server ends the connection, or goes on without harm to others.",
            ["VR-RES-008", "VR-FEAT-007", "VR-FEAT-003"] [Disruptive], asked_without_end;
        server "feat.documents-order", "Get, Set, Register, as the document has it" => "The client is served.",
            ["VR-FEAT-013", "VR-FEAT-001"], documents_order;
        server "feat.set-none", "SetClientFeature with no bit set" => "The server goes on.",
            ["VR-FEAT-009"], set_none;
        server "feat.set-unknown", "SetClientFeature with every bit set"
            => "The server does not answer, and enables nothing; it may end the connection.",
            ["VR-FEAT-004", "VR-FEAT-009"], set_unknown;
        server "feat.set-mid-stream", "SetClientFeature in the middle of a command" => "The command is answered.",
            ["VR-FEAT-009", "VR-CTRL-009"], |context| in_between(context, set(0, 0), None);
        client "feat.unasked", "an answer that the client did not ask for" => "The client ends the connection.",
            ["VR-FEAT-014"], unasked;
        client "feat.other-select", "an answer with another `select` than the question, if there is one"
            => "The client ends the connection.", ["VR-FEAT-014"], other_select;
        client "feat.set-by-server", "SetClientFeature from the server" => "The client ends the connection.",
            ["VR-FEAT-014"], set_by_server;
        client "feat.only-offered", "a server that offers no feature" => "The client asks for none to be in force.",
            ["VR-FEAT-010", "VR-FEAT-011"], only_offered;
        client "feat.every-bit-offered", "a server that offers every feature there could be, if it is asked"
            => "The client asks for none that is not defined, and goes on.",
            ["VR-FEAT-004", "VR-FEAT-010"], |context| answer_with(context, u64::MAX);
        client "feat.registration-first", "the registration before the answer, if there is a question"
            => "The client takes both.", ["VR-FEAT-013"], |context| answer_with(context, 0);
    }
}

const fn get(select: u16) -> Message {
    Message::GetServerFeature { select, features: FeatureSet::NONE }
}

const fn set(select: u16, bits: u64) -> Message {
    Message::SetClientFeature { select, features: FeatureSet(bits) }
}

fn selects() -> Vec<Message> {
    (0..16).map(|bit| get(1 << bit)).chain([get(0xffff)]).collect()
}

fn unprompted<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    (0..20).try_for_each(|_| session.exchange().map(drop))?;
    // A feature message would already have been an error.
    session.listen(Duration::from_millis(100))?;
    session.unharmed()
}

fn ask<B: Descriptors>(context: &Context<'_, B>, questions: &[Message]) -> Judged {
    let mut session = context.open()?;
    for question in questions {
        session.peer.message(*question)?;
        session.expect_message(*question)?;
    }
    told(session.unharmed(), || format!("{} answered", questions.len()))
}

fn bits_in_question<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.message(Message::GetServerFeature { select: 1, features: FeatureSet(u64::MAX) })?;
    session.expect_message(get(1))?;
    session.unharmed()
}

fn asked_first<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    session.peer.message(get(3))?;
    answer_and_window(&mut session, get(3))?;
    session.peer.register()?;
    session.unharmed()
}

fn answer_and_window<B: Descriptors>(session: &mut Session<'_, B>, answer: Message) -> Result<(), Stop> {
    let mut answered = false;
    while !answered || session.peer.seen.windows.is_empty() {
        match session.peer.receive()? {
            Incoming::Message(bytes) if bytes == answer.encode() => answered = true,
            other => session.peer.absorb(other)?,
        }
    }
    Ok(())
}

fn in_between<B: Descriptors>(context: &Context<'_, B>, message: Message, answer: Option<Message>) -> Judged {
    let mut session = context.open()?;
    let exchange = session.require_exchange(100)?;
    let (one, other) = exchange.send.split_at(exchange.send.len() / 2);
    session.peer.send_bytes(one)?;
    session.peer.message(message)?;
    if let Some(answer) = answer {
        session.expect_message(answer)?;
    }
    session.peer.send_bytes(other)?;
    session.expect_reply(&exchange)?;
    session.unharmed()
}

fn burst<B: Descriptors>(context: &Context<'_, B>, questions: &[Message]) -> Judged {
    let mut session = context.open()?;
    // At most as many at once as a server has receives for.
    for questions in questions.chunks(500) {
        session.peer.burst(questions)?;
        questions.iter().try_for_each(|question| session.expect_message(*question))?;
    }
    told(session.unharmed(), || format!("{} answered in order", questions.len()))
}

fn asked_without_end<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    // One receive, for the server's window. No answer ever finds one.
    let mut session = context.connect(Shape::default().receives(1))?;
    session.peer.set_reposts(false);
    session.peer.handshake()?;
    for round in 0..4 {
        let questions: Vec<_> = (0..500).map(|select| get(500 * round + select)).collect();
        if session.peer.burst(&questions).and_then(|()| session.peer.settle()).is_err() {
            break;
        }
    }
    // Acknowledged ones have a receive, and are read at the latest at its disconnect.
    session.dismiss()?;
    Ok(pass("2000 questions"))
}

fn documents_order<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    session.peer.message(get(0))?;
    answer_and_window(&mut session, get(0))?;
    session.peer.message(set(0, 0))?;
    session.peer.register()?;
    session.unharmed()
}

fn set_none<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.message(set(0, 0))?;
    session.exchange()?;
    session.listen(Duration::from_millis(100))?;
    session.unharmed()
}

fn set_unknown<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.message(set(0xffff, u64::MAX))?;
    let ended = session.or_ends(|session| {
        session.exchange()?;
        session.listen(Duration::from_millis(100))?;
        session.goes_on()
    })?;
    Ok(ended.unwrap_or_else(|| pass("goes on")))
}

fn unasked<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    // One more than the answer to its question, if it has asked.
    session.require_exchange(0)?;
    session.peer.message(get(0))?;
    // If a question was in flight, this answers it, and that question's own answer is one too many.
    for _ in 0..10 {
        match asks_or_ends(&mut session, context.patience)? {
            Some(select) => session.or_ends(|session| Ok(session.peer.message(get(select))?)).map(drop)?,
            None => return session.ends(),
        }
    }
    Err(Stop::undecided("the client asks repeatedly: any answer may be one to a question"))
}

/// Returns the next question; `None` if the client ends it, or is silent for `patience`.
fn asks_or_ends<B: Descriptors>(
    session: &mut Session<'_, B>,
    patience: Duration,
) -> Result<Option<u16>, Stop> {
    let deadline = Instant::now() + patience;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match session.peer.receive_within(left)? {
            Some(Incoming::Message(bytes)) => match Message::decode(&bytes) {
                Ok(Message::GetServerFeature { select, .. }) => return Ok(Some(select)),
                _ => session.peer.absorb(Incoming::Message(bytes))?,
            },
            Some(Incoming::Failed(_)) => {}
            None | Some(Incoming::Gone(_)) => return Ok(None),
            Some(other) => session.peer.absorb(other)?,
        }
    }
}

fn set_by_server<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.message(set(0, 0))?;
    session.ends()
}

fn only_offered<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.exchange()?;
    let asked = session.peer.seen.count(Opcode::GET_SERVER_FEATURE);
    match session.peer.seen.features_set {
        0 => told(session.unharmed(), || format!("it asked {asked} times")),
        bits => Err(Stop::unmet(format!("it set the features {bits:#x}, and none was offered"))),
    }
}

/// Waits for a question; `None` if the client sends commands without having asked.
fn is_asked<B: Descriptors>(session: &mut Session<'_, B>) -> Result<Option<u16>, Stop> {
    session.peer.serves = false;
    loop {
        match session.peer.receive()? {
            Incoming::Message(bytes) => {
                if let Ok(Message::GetServerFeature { select, .. }) = Message::decode(&bytes) {
                    return Ok(Some(select));
                }
                session.peer.absorb(Incoming::Message(bytes))?;
            }
            Incoming::Notified(count) => {
                session.peer.absorb(Incoming::Notified(count))?;
                return Ok(None);
            }
            other => session.peer.absorb(other)?,
        }
    }
}

/// Opens a session in which a client has asked, and has no answer yet. Returns its `select`.
fn asked<'a, B: Descriptors>(context: &'a Context<'a, B>) -> Result<(Session<'a, B>, u16), Stop> {
    let mut session = context.connect(Shape::default())?;
    session.peer.register()?;
    match is_asked(&mut session)? {
        Some(select) => Ok((session, select)),
        None => Err(Stop::not_applicable("the client does not ask for features")),
    }
}

fn other_select<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let (mut session, select) = asked(context)?;
    session.peer.message(get(!select))?;
    session.ends()
}

fn answer_with<B: Descriptors>(context: &Context<'_, B>, features: u64) -> Judged {
    let (mut session, select) = asked(context)?;
    session.peer.message(Message::GetServerFeature { select, features: FeatureSet(features) })?;
    session.peer.serves = true;
    session.exchange()?;
    match session.peer.seen.features_set {
        0 => session.unharmed(),
        bits => Err(Stop::unmet(format!("it set the features {bits:#x}, and none is defined"))),
    }
}
