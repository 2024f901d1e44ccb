//! Resources: what a target keeps and releases, and what other clients do not notice.

use std::time::{Duration, Instant};

use rdma_conn::Descriptors;
use rdma_proto::wire::Message;

use super::case::Case;
use super::conn::until_a_keepalive;
use super::context::Context;
use super::keep::keepalives;
use super::results::Teardown;
use super::session::{Session, command, half_heard, has_receives, question, told};
use crate::tester::Shape;
use suite::verdict::pass;
use suite::{Judged, Stop};

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        server "res.receives", "a thousand keepalives at once to a server that is busy for a second"
            => "Each finds a receive.", ["VR-RES-002"], receives;
        both "res.at-once", "nearly as many keepalives at once as there are receives, while the target stands still"
            => "Each finds a receive.", ["VR-RES-002"], |context| has_receives(context, 0);
        server "res.reposts-each", "the same, when keepalives before a question, and its answer, have come"
            => "Each finds a receive: those before the question were posted again.",
            ["VR-RES-003", "VR-RES-012"], |context| has_receives(context, SPENT);
        client "res.reposts-each", "the same, when keepalives before a reply, and the next command, have come"
            => "Each finds a receive: those before the reply were posted again.",
            ["VR-RES-003"], |context| has_receives(context, SPENT);
        both "res.reposts", "2500 keepalives, 500 at a time" => "Each finds a receive.",
            ["VR-RES-003", "VR-CONN-003"], |context| keepalives(context, 5);
        server "res.nothing-left", "a hundred connections, opened, used and closed" => "The server's process holds no more than before.",
            ["VR-RES-001"] [Local], |context| nothing_left(context, true);
        server "res.nothing-left-of-the-vanished", "a hundred connections whose clients drop everything"
            => "The server's process holds no more than before.",
            ["VR-RES-001", "VR-CLOSE-003"] [Local], |context| nothing_left(context, false);
        server "res.never-registers", "a client that asks and gives no window" => "The server waits or ends the connection.",
            ["VR-RES-004"], never_registers;
        server "res.never-drains", "a client that takes a part of a reply and no more" => "The server waits or ends the connection.",
            ["VR-RES-004", "VR-RES-008"], |context| waits_or_ends(context, half_heard(context)?);
        server "res.never-reposts", "a client whose sixteen receives are all there are" => "The server waits or ends the connection.",
            ["VR-RES-005", "VR-RES-008"] [Disruptive], never_reposts;
        server "res.never-polls", "a client that looks at nothing that comes" => "The server waits or ends the connection.",
            ["VR-RES-005", "VR-RES-004"], never_polls;
        server "res.long-replies", "a client that asks for 8 MiB and takes nothing" => "Others are served.",
            ["VR-RES-008", "VR-SEC-004"], long_replies;
        server "res.storm", "a hundred connections that come and go at once" => "Others are served.",
            ["VR-RES-007", "VR-RES-006"] [Disruptive, Slow], storm;
    }
}

/// Notifications before a target is stopped: fewer than a batch of one that posts late.
const SPENT: usize = 40;

fn receives<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    // Most devices that find no receive retry forever (VR-CONN-004). What counts is the number of
    // acknowledged messages while the server posts no receive.
    if let Some(held) = context.server()?.hold() {
        let mut session = context.connect(crowd())?;
        session.peer.burst(&[Message::Keepalive; CROWD])?;
        let settled = session.peer.settle();
        drop(held);
        if let Err(failure) = settled {
            let found = CROWD.saturating_sub(session.peer.outstanding());
            return Err(Stop::unmet(format!("{found} of {CROWD} keepalives found a receive: {failure}")));
        }
        session.peer.handshake()?;
        return told(session.unharmed(), || format!("{CROWD} at once"));
    }
    let mut before = None;
    for seconds in [1, 3, 10] {
        match found_while_asleep(context, seconds)? {
            Found::All(session) => return told(session.unharmed(), || format!("{CROWD} at once")),
            // A slow machine reaches different counts.
            Found::Only(found) if found > 0 && before == Some(found) => {
                let found =
                    format!("{found} of {CROWD} keepalives found a receive while the server was busy");
                return Err(Stop::unmet(found));
            }
            Found::Only(found) => before = Some(found),
        }
    }
    Err(Stop::undecided("this machine is too slow for a server that is busy for 10 s"))
}

const CROWD: usize = 1000;

fn crowd() -> Shape {
    Shape { sends: 2048, ..Shape::default() }
}

enum Found<'a, B: Descriptors> {
    All(Box<Session<'a, B>>),
    Only(usize),
}

/// Makes the server sleep for some seconds. With one thread, it posts no receive meanwhile.
fn found_while_asleep<'a, B: Descriptors>(
    context: &'a Context<'a, B>,
    seconds: u64,
) -> Result<Found<'a, B>, Stop> {
    let mut session = context.open_as(crowd())?;
    let mut holder = context.open()?;
    holder.peer.set_patience(context.patience + Duration::from_secs(seconds));
    holder.peer.send_bytes(&command(&[b"DEBUG", b"SLEEP", seconds.to_string().as_bytes()]))?;
    holder.peer.settle()?;
    session.peer.burst(&[Message::Keepalive; CROWD])?;
    let mut found = 0;
    while found < CROWD && !holder.peer.has_received() {
        // Counted before polling for the reply: after that the server may be at work again.
        found = CROWD.saturating_sub(session.peer.outstanding());
        holder.listen(Duration::ZERO)?;
        session.listen(Duration::from_millis(5))?;
    }
    let reply = holder.peer.receive_bytes(5)?;
    if reply != b"+OK\r\n" {
        let start = String::from_utf8_lossy(&reply).into_owned();
        return Err(Stop::undecided(format!("the server cannot be held (DEBUG SLEEP: {start}…)")));
    }
    holder.leave()?;
    if found == CROWD {
        return Ok(Found::All(Box::new(session)));
    }
    session.peer.settle()?;
    Ok(Found::Only(found))
}

fn nothing_left<B: Descriptors>(context: &Context<'_, B>, in_order: bool) -> Judged {
    let server = context.server()?;
    let cycle = || -> Result<(), Stop> {
        let mut session = context.open_as(Shape::small())?;
        session.exchange()?;
        if in_order { session.leave().map(drop) } else { Ok(()) }
    };
    // Once before counting, for resources that a process opens only once.
    cycle()?;
    if server.held().is_none() {
        return Err(Stop::not_applicable("the server's process cannot be seen from here (--exec shows it)"));
    }
    std::thread::sleep(Duration::from_millis(300));
    let unseen = || Stop::undecided("what the server's process holds can no longer be seen");
    let before = server.held().ok_or_else(unseen)?;
    for _ in 0..100 {
        cycle()?;
    }
    let deadline = Instant::now() + context.patience;
    loop {
        let held = server.held().ok_or_else(unseen)?;
        if !held.exceeds(before) {
            return Ok(pass(format!("{held}, as before")));
        }
        if Instant::now() >= deadline {
            context.note(Teardown::Leaked);
            return Err(Stop::unmet(format!("before: {before}; after 100 connections: {held}")));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn never_registers<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    session.peer.send_bytes(b"PING\r\n")?;
    waits_or_ends(context, session)
}

/// Lets the server wait or end the connection. Meanwhile it must serve others.
fn waits_or_ends<B: Descriptors>(context: &Context<'_, B>, mut session: Session<'_, B>) -> Judged {
    let judged = context.open()?.unharmed();
    session.lasts();
    judged
}

fn never_reposts<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default().receives(16))?;
    session.peer.set_reposts(false);
    session.peer.handshake()?;
    for _ in 0..50 {
        if !presses(&mut session, &question(b"x").send) || session.peer.settle().is_err() {
            break;
        }
    }
    waits_or_ends(context, session)
}

/// Sends as much as the server takes, and returns whether it took all. It may end the connection.
fn presses<B: Descriptors>(session: &mut Session<'_, B>, bytes: &[u8]) -> bool {
    session.peer.send_bytes(bytes).is_ok()
}

fn never_polls<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    // The server's answers are longer than the window.
    presses(&mut session, &b"PING\r\n".repeat(10_000));
    waits_or_ends(context, session)
}

fn long_replies<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let value = vec![b'x'; 1 << 20];
    session.peer.send_bytes(&command(&[b"SET", b"conformance:long", &value]))?;
    session.peer.receive_bytes(5)?;
    session.peer.drains = false;
    presses(&mut session, &command(&[b"GET", b"conformance:long"]).repeat(8));
    waits_or_ends(context, session)
}

fn storm<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let shape = Shape { sends: 4, patience: context.patience, ..Shape::default().receives(8) };
    let address = context.server()?.address();
    for _ in 0..5 {
        let requests: Vec<_> =
            (0..20).map(|_| crate::tester::Peer::request(context.backend, address, shape)).collect();
        drop(requests);
    }
    until_a_keepalive(context)
}
