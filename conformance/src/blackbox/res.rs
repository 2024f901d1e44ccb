//! Resources: what is kept, what is given back, and what others do not notice.

use std::time::{Duration, Instant};

use rdma_conn::Descriptors;
use rdma_proto::wire::Message;

use super::bench::Bench;
use super::case::Case;
use super::conn::until_a_keepalive;
use super::keep::keepalives;
use super::meeting::{Meeting, command, half_heard, question, told};
use super::verdict::{Judged, Stop, Teardown, pass};
use crate::adversary::Shape;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<B>> {
    cases! {
        server "res.receives", "a thousand keepalives at once to a server that is busy for a second"
            => "Each finds a receive.", ["VR-RES-002"], receives;
        both "res.reposts", "2500 keepalives, 500 at a time" => "Each finds a receive.",
            ["VR-RES-003", "VR-CONN-003"], |bench| keepalives(bench, 5);
        server "res.nothing-left", "a hundred connections, opened, used and closed" => "The server's process holds no more than before.",
            ["VR-RES-001"] [Local], |bench| nothing_left(bench, true);
        server "res.nothing-left-of-the-vanished", "a hundred connections whose clients drop everything"
            => "The server's process holds no more than before.",
            ["VR-RES-001", "VR-CLOSE-003"] [Local], |bench| nothing_left(bench, false);
        server "res.never-registers", "a client that asks and gives no window" => "The server waits or ends the connection.",
            ["VR-RES-004"], never_registers;
        server "res.never-drains", "a client that takes a part of a reply and no more" => "The server waits or ends the connection.",
            ["VR-RES-004", "VR-RES-008"], never_drains;
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

fn receives<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let shape = Shape { sends: 2048, ..Shape::default() };
    let mut meeting = bench.greet_as(shape)?;
    let mut holder = bench.greet()?;
    // Nobody is served meanwhile, where the server has one thread.
    holder.peer.say(&command(&[b"DEBUG", b"SLEEP", b"1"]))?;
    holder.peer.settle()?;
    meeting.peer.burst(&[Message::Keepalive; 1000])?;
    meeting.peer.settle()?;
    let told_by_holder = holder.peer.hear(1)?;
    let rest = holder.peer.hear(4)?;
    if told_by_holder != b"+" {
        return Err(Stop::undecided(format!(
            "the server cannot be held (DEBUG SLEEP: {}{}…)",
            String::from_utf8_lossy(&told_by_holder),
            String::from_utf8_lossy(&rest)
        )));
    }
    holder.leave()?;
    told(meeting.unharmed(), || "1000 at once".into())
}

fn nothing_left<B: Descriptors>(bench: &Bench<'_, B>, in_order: bool) -> Judged {
    let server = bench.server()?;
    let cycle = || -> Result<(), Stop> {
        let mut meeting = bench.greet_as(Shape::small())?;
        meeting.talk()?;
        if in_order { meeting.leave().map(drop) } else { Ok(()) }
    };
    // Once before counting, for what a process opens only once.
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
    let deadline = Instant::now() + bench.patience;
    loop {
        let held = server.held().ok_or_else(unseen)?;
        if !held.exceeds(before) {
            return Ok(pass(format!("{held}, as before")));
        }
        if Instant::now() >= deadline {
            bench.note(Teardown::Leaked);
            return Err(Stop::unmet(format!("before: {before}; after 100 connections: {held}")));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn never_registers<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default())?;
    meeting.peer.say(b"PING\r\n")?;
    waits_or_ends(bench, meeting)
}

/// The server may do either, and others are served meanwhile.
fn waits_or_ends<B: Descriptors>(bench: &Bench<'_, B>, meeting: Meeting<'_, B>) -> Judged {
    let judged = bench.greet()?.unharmed();
    drop(meeting);
    judged
}

fn never_drains<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    waits_or_ends(bench, half_heard(bench)?)
}

fn never_reposts<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.meet(Shape::default().receives(16))?;
    meeting.peer.set_reposts(false);
    meeting.peer.handshake()?;
    for _ in 0..50 {
        // The server may have had enough by now.
        if meeting.peer.say(&question(b"x").say).and_then(|()| meeting.peer.settle()).is_err() {
            break;
        }
    }
    waits_or_ends(bench, meeting)
}

fn never_polls<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    // What the server answers is longer than the window.
    meeting.peer.say(&b"PING\r\n".repeat(10_000))?;
    waits_or_ends(bench, meeting)
}

fn long_replies<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let value = vec![b'x'; 1 << 20];
    meeting.peer.say(&command(&[b"SET", b"conformance:long", &value]))?;
    meeting.peer.hear(5)?;
    meeting.peer.drains = false;
    meeting.peer.say(&command(&[b"GET", b"conformance:long"]).repeat(8))?;
    waits_or_ends(bench, meeting)
}

fn storm<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let shape = Shape { sends: 4, patience: bench.patience, ..Shape::default().receives(8) };
    let address = bench.server()?.address();
    for _ in 0..5 {
        let requests: Vec<_> =
            (0..20).map(|_| crate::adversary::Adversary::request(bench.backend, address, shape)).collect();
        drop(requests);
    }
    until_a_keepalive(bench)
}
