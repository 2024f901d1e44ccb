//! Flow control: room in windows, and what is counted against it.

use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_proto::wire::Message;

use super::bench::Bench;
use super::case::Case;
use super::meeting::{Meeting, Turn, asked_without_window, question, registered_late, told};
use super::verdict::{Judged, Stop};
use crate::adversary::Shape;

pub(super) fn cases<B: Descriptors>() -> Vec<Case<B>> {
    cases! {
        both "flow.filled-to-the-end", "small windows" => "The target fills each to its last byte and goes beyond none.",
            ["VR-FLOW-001", "VR-FLOW-007"], filled_to_the_end;
        both "flow.beyond-by-1", "an immediate of one byte more than the window" => "The target ends this connection.",
            ["VR-FLOW-002", "VR-SEC-003", "VR-SEC-004"] [Disruptive], beyond_by_1;
        both "flow.of-4-gib", "the largest immediate there is" => "The target ends this connection.",
            ["VR-FLOW-002", "VR-SEC-003", "VR-SEC-004"] [Disruptive], |bench| beyond(bench, u32::MAX);
        both "flow.wraps", "immediates whose sum is 2^32" => "The target ends this connection.",
            ["VR-FLOW-002", "VR-SEC-003", "VR-SEC-004"] [Disruptive], wraps;
        both "flow.nothing-before-window", "no window for half a second"
            => "The target writes nothing until there is one, and then what it has to say.",
            ["VR-FLOW-004", "VR-FLOW-012"], |bench| registered_late(bench, 1, Duration::from_millis(500));
        server "flow.held-replies", "a hundred commands, and then a window" => "The replies leave in order.",
            ["VR-FLOW-012", "VR-FLOW-004"], |bench| registered_late(bench, 100, Duration::from_millis(100));
        server "flow.held-quietly", "a reply that waits for a window" => "The server uses no processor meanwhile.",
            ["VR-FLOW-013"] [Local], held_quietly;
        both "flow.slow-reader", "a full window that is registered again after 500 ms" => "The target waits, and goes on.",
            ["VR-FLOW-012", "VR-CONN-008"], slow_reader;
        server "flow.slow-readers-neighbour", "a full window that stays so" => "Others are served.",
            ["VR-SEC-004", "VR-RES-007"], slow_readers_neighbour;
        both "flow.crossing", "both directions cross window ends at once" => "Both streams are whole.",
            ["VR-FLOW-010", "VR-FLOW-001"], crossing;
        server "flow.one-notification", "a command with a reply of 2000 bytes" => "The reply is one notification.",
            ["VR-FLOW-006"], one_notification;
        both "flow.control-when-blocked", "a keepalive flood while the target waits for a window"
            => "The target goes on when the window comes.", ["VR-FLOW-009", "VR-CTRL-009"], control_when_blocked;
    }
}

fn filled_to_the_end<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet_with((0..20).map(|turn| (1000 * turn, 37)).collect())?;
    // A gap at the end of a window, and the adversary would wait for ever.
    meeting.talk_of(3000)?;
    meeting.unharmed()
}

fn beyond_by_1<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let length = meeting.peer.await_window()?.length;
    let beyond = length.checked_add(1).ok_or_else(|| Stop::undecided("no immediate is beyond its window"))?;
    meeting.peer.notify(beyond)?;
    meeting.ends()
}

fn beyond<B: Descriptors>(bench: &Bench<'_, B>, immediate: u32) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.peer.notify(immediate)?;
    meeting.ends()
}

fn wraps<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let turn = meeting.occasion(16)?;
    meeting.peer.say(&turn.say)?;
    meeting.hears(&turn)?;
    meeting.peer.notify((turn.say.len() as u32).wrapping_neg())?;
    meeting.ends()
}

fn held_quietly<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    const WAIT: Duration = Duration::from_millis(1000);
    let server = bench.server()?;
    let Some(_) = server.processor_time() else {
        return Err(Stop::not_applicable("the server's process cannot be seen from here (--exec shows it)"));
    };
    let mut meeting = bench.meet(Shape::default())?;
    asked_without_window(&mut meeting, 100)?;
    let unseen = || Stop::undecided("what the server's process uses can no longer be seen");
    let before = server.processor_time().ok_or_else(unseen)?;
    std::thread::sleep(WAIT);
    let used = server.processor_time().ok_or_else(unseen)?.saturating_sub(before);
    if used > WAIT / 2 {
        return Err(Stop::unmet(format!("waiting for a window took {used:?} of processor time in {WAIT:?}")));
    }
    meeting.peer.register()?;
    told(meeting.leave(), || format!("{used:?} in {WAIT:?}"))
}

/// The adversary with a full window, which it does not register anew.
fn full<'a, B: Descriptors>(bench: &'a Bench<'a, B>) -> Result<(Meeting<'a, B>, Turn), Stop> {
    let mut meeting = bench.meet(Shape::default())?;
    // Less than the first command of any client.
    meeting.peer.plan = vec![(0, 10)];
    meeting.be_brief();
    meeting.peer.drains = false;
    meeting.peer.handshake()?;
    let turn = if meeting.client_asks() {
        Turn { say: Vec::new(), hear: Vec::new() }
    } else {
        question(&[b'x'; 1000])
    };
    meeting.peer.say(&turn.say)?;
    while meeting.peer.taken() < 10 {
        let incoming = meeting.peer.receive()?;
        meeting.peer.absorb(incoming)?;
    }
    Ok((meeting, turn))
}

/// The full window is given again.
fn go_on<B: Descriptors>(meeting: &mut Meeting<'_, B>) -> Result<(), Stop> {
    meeting.peer.drains = true;
    Ok(meeting.peer.register()?)
}

fn slow_reader<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let (mut meeting, turn) = full(bench)?;
    meeting.listen(Duration::from_millis(500))?;
    go_on(&mut meeting)?;
    meeting.hears(&turn)?;
    meeting.unharmed()
}

fn slow_readers_neighbour<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let (meeting, _) = full(bench)?;
    let other = bench.greet()?;
    let judged = other.unharmed();
    drop(meeting);
    judged
}

fn crossing<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet_with(vec![(0, 1000), (1000, 1000)])?;
    for _ in 0..10 {
        if !meeting.talk_of(30_000)? {
            break;
        }
    }
    meeting.leave()
}

fn one_notification<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.talk()?;
    let before = meeting.peer.seen.notifications;
    meeting.talk_of(2000)?;
    match meeting.peer.seen.notifications - before {
        1 => meeting.unharmed(),
        count => Err(Stop::unmet(format!("the reply came in {count} notifications"))),
    }
}

fn control_when_blocked<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let (mut meeting, turn) = full(bench)?;
    for _ in 0..4 {
        meeting.peer.burst(&[Message::Keepalive; 500])?;
        meeting.peer.settle()?;
    }
    go_on(&mut meeting)?;
    meeting.hears(&turn)?;
    meeting.unharmed()
}
