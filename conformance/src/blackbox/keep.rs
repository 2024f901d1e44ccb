//! Keepalives, and peers that vanish.

use std::time::{Duration, Instant};

use rdma_conn::Descriptors;
use rdma_proto::wire::{Message, Opcode};

use super::case::Case;
use super::context::Context;
use super::results::Teardown;
use super::session::told;
use crate::tester::Shape;
use suite::verdict::pass;
use suite::{Judged, Stop};

/// How often a server sends a keepalive.
const EVERY: Duration = Duration::from_secs(3);
pub(super) const IDLE: &str = "keep.idle";

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        both "keep.accepted", "a keepalive" => "The connection goes on.", ["VR-KEEP-002", "VR-KEEP-007"], accepted;
        both "keep.first", "a keepalive before anything else" => "The connection goes on.",
            ["VR-KEEP-002", "VR-KEEP-007"], first;
        both "keep.unanswered", "a hundred keepalives" => "None is answered.", ["VR-KEEP-002"], unanswered;
        both "keep.flood", "5000 keepalives" => "The connection goes on: receives are posted again.",
            ["VR-KEEP-002", "VR-RES-003", "VR-KEEP-008", "VR-RES-011"], |context| keepalives(context, 10);
        server "keep.interval", "a connection that is idle" => "The server sends a keepalive every 3 seconds.",
            ["VR-KEEP-001"] [Slow], |context| interval(context, false);
        server "keep.beside-traffic", "a connection that is busy" => "The server sends a keepalive every 3 seconds.",
            ["VR-KEEP-001"] [Slow], |context| interval(context, true);
        client IDLE, "1500 keepalives, while the client's program is idle" => "Each finds a receive.",
            ["VR-KEEP-008", "VR-RES-003"], idle;
        client "keep.vanished", "a server whose device no longer answers, when a reply is due"
            => "The client reports an error in bounded time.", ["VR-KEEP-006", "VR-CLOSE-003"] [Slow], vanished;
    }
}

fn accepted<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.message(Message::Keepalive)?;
    session.unharmed()
}

fn first<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    session.peer.message(Message::Keepalive)?;
    session.peer.handshake()?;
    session.unharmed()
}

fn unanswered<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.burst(&[Message::Keepalive; 100])?;
    session.exchange()?;
    session.listen(Duration::from_millis(100))?;
    // The server's own keepalive, every three seconds, may be among the received ones.
    match session.peer.seen.count(Opcode::KEEPALIVE) {
        0..=5 => session.unharmed(),
        count => Err(Stop::unmet(format!("{count} keepalives came in answer to 100"))),
    }
}

pub(super) fn keepalives<B: Descriptors>(context: &Context<'_, B>, rounds: usize) -> Judged {
    let mut session = context.open()?;
    for _ in 0..rounds {
        session.peer.burst(&[Message::Keepalive; 500])?;
        session.peer.settle()?;
        // Handled, not only received: the next ones may come.
        if !session.exchange()? {
            break;
        }
    }
    session.leave()
}

fn interval<B: Descriptors>(context: &Context<'_, B>, is_busy: bool) -> Judged {
    // A server may pause, and so may the machine: time in which the suite stands still is left out.
    const SLICE: Duration = Duration::from_millis(100);
    let most = 2 * EVERY + context.patience;
    let mut session = context.open()?;
    let begun = Instant::now();
    let mut waited = Duration::ZERO;
    let mut came = Vec::new();
    while came.len() < 2 && waited < most {
        let since = Instant::now();
        if is_busy {
            session.exchange()?;
        }
        if let Some(incoming) = session.peer.receive_within(SLICE)? {
            session.peer.absorb(incoming)?;
        }
        waited += since.elapsed().min(2 * SLICE);
        if session.peer.seen.count(Opcode::KEEPALIVE) > came.len() as u64 {
            came.push(begun.elapsed());
        }
    }
    match came[..] {
        [one, other, ..] => {
            told(session.unharmed(), || format!("{:.1} s apart", (other - one).as_secs_f64()))
        }
        _ => Err(Stop::unmet(format!("{} keepalives came within {most:?}", came.len()))),
    }
}

fn idle<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    const CROWD: usize = 1500;
    let mut session = context.open()?;
    while !session.is_idle() {
        if !session.exchange()? {
            return Err(Stop::undecided(
                "the client never said that it is idle: ECHO idle, and no call of its library until its stdin ends",
            ));
        }
    }
    let found = session.peer.burst(&[Message::Keepalive; CROWD]).and_then(|()| session.peer.settle());
    if let Err(failure) = found {
        return Err(Stop::unmet(format!(
            "an idle client let keepalives find no receive, {} of those on their way: {failure}",
            session.peer.outstanding()
        )));
    }
    session.go_on();
    told(session.leave(), || format!("{CROWD} keepalives"))
}

fn vanished<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    // After a second command, no control message is in flight whose loss the device would notice.
    session.exchange()?;
    session.require_exchange(0)?;
    session.peer.lose_queue_pair();
    context.note(Teardown::Unclean);
    let begun = Instant::now();
    let patience = (4 * context.patience).max(Duration::from_secs(40));
    if !session.await_exit(patience)? {
        return Err(Stop::hung(format!("the client noticed nothing within {patience:?}")));
    }
    session.tells_of_failure()?;
    Ok(pass(format!("after {:.1} s", begun.elapsed().as_secs_f64())))
}
