//! Ends: whose, when, and what must have arrived before.

use std::time::Duration;

use rdma_conn::Descriptors;

use super::bench::Bench;
use super::case::Case;
use super::meeting::{Meeting, command, half_heard, question};
use super::verdict::{Judged, Stop, Teardown, pass};
use crate::adversary::{Incoming, Shape};

pub(super) fn cases<B: Descriptors>() -> Vec<Case<B>> {
    cases! {
        server "close.quit", "QUIT, twenty times" => "+OK arrives, and then the disconnect.",
            ["VR-CLOSE-001", "VR-CLOSE-005"], quit;
        server "close.last-command", "a SET, and the disconnect right behind it" => "The server does what it was told.",
            ["VR-CLOSE-002"], last_command;
        both "close.answered", "the peer disconnects when all is said" => "The target answers with its own disconnect.",
            ["VR-CLOSE-005"], answered;
        client "close.clean", "a client that has done what it came for" => "It disconnects, and reports success.",
            ["VR-CLOSE-005", "VR-CLOSE-001"], clean;
        server "close.in-a-command", "a client that leaves in the middle of a command" => "The server goes on.",
            ["VR-CLOSE-003", "VR-SEC-004"], in_a_command;
        server "close.in-a-reply", "a client that leaves in the middle of a reply" => "The server goes on.",
            ["VR-CLOSE-003", "VR-SEC-004"], |bench| in_a_reply(bench, |meeting| Ok(meeting.peer.disconnect()?));
        server "close.vanishes-in-a-reply", "a client that drops everything in the middle of a reply"
            => "The server goes on.", ["VR-CLOSE-003", "VR-RES-001"], |bench| in_a_reply(bench, |_| Ok(()));
        server "close.before-the-reply", "a client that leaves when it has asked, twenty times" => "The server goes on.",
            ["VR-CLOSE-003", "VR-SEC-004"], before_the_reply;
        server "close.together", "thirty clients that leave at once, each in the middle of a command"
            => "The server goes on.", ["VR-CLOSE-003", "VR-RES-007"], together;
        client "close.before-the-reply", "a server that leaves when it has been asked" => "The client reports an error.",
            ["VR-CLOSE-003"], instead_of_the_reply;
        client "close.in-a-reply", "a server that leaves in the middle of a reply" => "The client reports an error.",
            ["VR-CLOSE-003"], in_the_middle_of_a_reply;
        client "close.vanishes", "a server that drops everything when it has been asked" => "The client reports an error.",
            ["VR-CLOSE-003", "VR-RES-001"], vanishes;
        client "close.registered-only", "a server that leaves after its registration" => "The client reports an error.",
            ["VR-CLOSE-003"], registered_only;
    }
}

fn quit<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    for round in 0..20 {
        let mut meeting = bench.greet()?;
        meeting.peer.say(&command(&[b"QUIT"]))?;
        let heard =
            meeting.peer.hear(5).map_err(|failure| Stop::unmet(format!("in round {round}: {failure}")))?;
        if heard != b"+OK\r\n" {
            return Err(Stop::unmet("QUIT was not answered with +OK"));
        }
        meeting.ends()?;
    }
    Ok(pass("20 times"))
}

fn last_command<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    for round in 0..10 {
        let key = format!("conformance:last:{round}");
        let mut meeting = bench.greet()?;
        meeting.peer.say(&command(&[b"DEL", key.as_bytes()]))?;
        meeting.peer.hear(4)?;
        meeting.peer.say(&command(&[b"SET", key.as_bytes(), b"kept"]))?;
        meeting.peer.settle()?;
        meeting.peer.disconnect()?;
        drop(meeting);
        let mut other = bench.greet()?;
        if !kept(&mut other, &key, bench.patience)? {
            return Err(Stop::unmet(format!("in round {round} of 10 the last command was lost")));
        }
        other.leave()?;
    }
    Ok(pass("10 times"))
}

/// Whether the key is there, or comes to be: the other connection may still be at work.
fn kept<B: Descriptors>(meeting: &mut Meeting<'_, B>, key: &str, patience: Duration) -> Result<bool, Stop> {
    let deadline = std::time::Instant::now() + patience.min(Duration::from_secs(2));
    loop {
        meeting.peer.say(&command(&[b"GET", key.as_bytes()]))?;
        if meeting.peer.hear(5)? == b"$4\r\nk" {
            return Ok(meeting.peer.hear(5)? == b"ept\r\n");
        }
        if std::time::Instant::now() >= deadline {
            return Ok(false);
        }
        meeting.listen(Duration::from_millis(20))?;
    }
}

fn answered<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let judged = bench.greet()?.unharmed();
    match bench.teardown.get() {
        Some(Teardown::Clean) | None => judged,
        Some(_) => Err(Stop::unmet(format!("no answer to the disconnect within {:?}", bench.patience))),
    }
}

fn clean<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    bench.greet()?.comes_to_an_end()
}

fn in_a_command<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let say = question(b"never finished").say;
    meeting.peer.say(&say[..say.len() - 3])?;
    meeting.leave()?;
    bench.greet()?.unharmed()
}

fn in_a_reply<B: Descriptors>(
    bench: &Bench<'_, B>,
    end: fn(&mut Meeting<'_, B>) -> Result<(), Stop>,
) -> Judged {
    let mut meeting = half_heard(bench)?;
    end(&mut meeting)?;
    drop(meeting);
    bench.greet()?.unharmed()
}

fn before_the_reply<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    for _ in 0..20 {
        let mut meeting = bench.greet_as(Shape::small())?;
        meeting.peer.say(&question(&[b'x'; 5000]).say)?;
        meeting.peer.disconnect()?;
    }
    bench.greet()?.unharmed()
}

fn together<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meetings = (0..30).map(|_| bench.greet_as(Shape::small())).collect::<Result<Vec<_>, _>>()?;
    let say = question(b"never finished").say;
    for meeting in &mut meetings {
        meeting.peer.say(&say[..say.len() - 3])?;
    }
    for meeting in &meetings {
        meeting.peer.disconnect()?;
    }
    drop(meetings);
    bench.greet()?.unharmed()
}

/// The client is cut off, and must say so.
fn cut_off<B: Descriptors>(bench: &Bench<'_, B>, mut meeting: Meeting<'_, B>) -> Judged {
    meeting.peer.disconnect()?;
    bench.note(Teardown::Clean);
    meeting.tells_of_failure()
}

fn instead_of_the_reply<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.occasion(0)?;
    cut_off(bench, meeting)
}

fn in_the_middle_of_a_reply<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    let turn = meeting.occasion(0)?;
    meeting.peer.say(&turn.say[..turn.say.len() / 2])?;
    meeting.peer.settle()?;
    cut_off(bench, meeting)
}

fn vanishes<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    meeting.occasion(0)?;
    meeting.vanish()
}

fn registered_only<B: Descriptors>(bench: &Bench<'_, B>) -> Judged {
    let mut meeting = bench.greet()?;
    // Its first command is under way by now, or will find nobody.
    if let Some(Incoming::Gone(_)) = meeting.peer.receive_within(Duration::ZERO)? {
        return Err(Stop::undecided("the client left first"));
    }
    cut_off(bench, meeting)
}
