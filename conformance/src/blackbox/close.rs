//! The end of connections: by which side, when, and what must have arrived before.

use std::time::{Duration, Instant};

use rdma_conn::Descriptors;

use super::case::Case;
use super::context::Context;
use super::results::Teardown;
use super::session::{Exchange, Session, command, half_heard, last_reply, question, told};
use crate::tester::{Incoming, Shape};
use suite::verdict::pass;
use suite::{Judged, Stop};

/// The case in which a client's server leaves first.
pub(super) const LAST_REPLY: &str = "close.last-reply";

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        server "close.quit", "QUIT, twenty times" => "+OK arrives, and then the disconnect.",
            ["VR-CLOSE-001", "VR-CLOSE-005"], quit;
        server "close.last-command", "a SET, and the disconnect right behind it" => "The server does what it was told.",
            ["VR-CLOSE-002"], last_command;
        client LAST_REPLY, "the client's last reply, and the disconnect right behind it"
            => "The client has the reply, and reports success.", ["VR-CLOSE-002"], last_reply;
        both "close.answered", "the peer disconnects when all is said" => "The target answers with its own disconnect.",
            ["VR-CLOSE-005"], answered;
        client "close.clean", "a client that has finished its work" => "It disconnects, and reports success.",
            ["VR-CLOSE-005", "VR-CLOSE-001"], clean;
        server "close.in-a-command", "a client that leaves in the middle of a command" => "The server goes on.",
            ["VR-CLOSE-003", "VR-SEC-004"], in_a_command;
        server "close.in-a-reply", "a client that leaves in the middle of a reply" => "The server goes on.",
            ["VR-CLOSE-003", "VR-SEC-004"], |context| in_a_reply(context, |session| Ok(session.peer.disconnect()?));
        server "close.vanishes-in-a-reply", "a client that drops everything in the middle of a reply"
            => "The server goes on.", ["VR-CLOSE-003", "VR-RES-001"], |context| in_a_reply(context, |_| Ok(()));
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

fn quit<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    for round in 0..20 {
        let mut session = context.open()?;
        session.peer.send_bytes(&command(&[b"QUIT"]))?;
        let heard = session
            .peer
            .receive_bytes(5)
            .map_err(|failure| Stop::unmet(format!("in round {round}: {failure}")))?;
        if heard != b"+OK\r\n" {
            return Err(Stop::unmet("QUIT was not answered with +OK"));
        }
        session.ends()?;
    }
    told(waits_for_its_reply(context), || "20 times".into())
}

/// The reply to QUIT finds no receive for a while. A server that waits for it still exists.
fn waits_for_its_reply<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    const HELD: Duration = Duration::from_millis(60);
    // A server need not wait longer; a longer round shows nothing: this machine may be busy.
    const SOON: Duration = Duration::from_millis(250);
    // A server that stood still meanwhile looks as if it had waited. It does not each time.
    const TIMES: u32 = 5;
    let mut times = 0;
    let quit = command(&[b"QUIT"]);
    for _ in 0..20 {
        let mut session = context.connect(Shape::default().posting(1))?;
        session.peer.hurries()?;
        session.peer.set_reposts(false);
        session.peer.register()?;
        session.listen_until(SOON, |peer| peer.has_window())?;
        let Some(windows) = session.peer.has_window().then(|| session.peer.await_window()).transpose()?
        else {
            continue;
        };
        // The command took the only receive. Each further window needs another.
        session.peer.post_receives(quit.len().div_ceil(windows.length.max(1) as usize) - 1);
        let begun = Instant::now();
        session.peer.send_bytes(&quit)?;
        let _end_or_not = session.listen_until(HELD, |peer| peer.has_left());
        let is_told = begun.elapsed() < SOON;
        if session.peer.has_left() {
            // A registration from before receives were held back left one for the reply.
            let has_replied = session.peer.has_received();
            if is_told && !has_replied {
                return Err(Stop::unmet("it left before its reply to QUIT had arrived"));
            }
            continue;
        }
        session.peer.set_reposts(true);
        session.peer.post_receives(usize::MAX);
        if is_told {
            let reply = Exchange { send: Vec::new(), expect: b"+OK\r\n".to_vec() };
            match session.expect_reply(&reply) {
                Ok(()) => {
                    let ended = session.ends()?;
                    times += 1;
                    if times == TIMES {
                        return told(Ok(ended), || "waits until the reply has arrived".into());
                    }
                }
                Err(stop) if begun.elapsed() < SOON => return Err(stop),
                // The receives may have come too late, or the server may have stood still.
                Err(_) => {}
            }
        }
    }
    Ok(pass("this machine is too slow to show whether it waits"))
}

fn last_command<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    for round in 0..10 {
        let key = format!("conformance:last:{round}");
        let mut session = context.open()?;
        session.peer.send_bytes(&command(&[b"DEL", key.as_bytes()]))?;
        session.peer.receive_bytes(4)?;
        session.peer.send_bytes(&command(&[b"SET", key.as_bytes(), b"kept"]))?;
        session.peer.settle()?;
        session.peer.disconnect()?;
        drop(session);
        let mut other = context.open()?;
        if !kept(&mut other, &key, context.patience)? {
            return Err(Stop::unmet(format!("in round {round} of 10 the last command was lost")));
        }
        other.leave()?;
    }
    Ok(pass("10 times"))
}

/// Returns whether the key exists, now or soon: the other connection may still be at work.
fn kept<B: Descriptors>(session: &mut Session<'_, B>, key: &str, patience: Duration) -> Result<bool, Stop> {
    let deadline = std::time::Instant::now() + patience.min(Duration::from_secs(2));
    loop {
        session.peer.send_bytes(&command(&[b"GET", key.as_bytes()]))?;
        if session.peer.receive_bytes(5)? == b"$4\r\nk" {
            return Ok(session.peer.receive_bytes(5)? == b"ept\r\n");
        }
        if std::time::Instant::now() >= deadline {
            return Ok(false);
        }
        session.listen(Duration::from_millis(20))?;
    }
}

fn answered<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let judged = context.open()?.unharmed();
    match context.teardown.get() {
        Some(Teardown::Clean) | None => judged,
        Some(_) => Err(Stop::unmet(format!("no answer to the disconnect within {:?}", context.patience))),
    }
}

fn clean<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    context.open()?.comes_to_an_end()
}

fn in_a_command<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let send = question(b"never finished").send;
    session.peer.send_bytes(&send[..send.len() - 3])?;
    session.leave()?;
    context.open()?.unharmed()
}

fn in_a_reply<B: Descriptors>(
    context: &Context<'_, B>,
    end: fn(&mut Session<'_, B>) -> Result<(), Stop>,
) -> Judged {
    let mut session = half_heard(context)?;
    end(&mut session)?;
    drop(session);
    context.open()?.unharmed()
}

fn before_the_reply<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    for _ in 0..20 {
        let mut session = context.open_as(Shape::small())?;
        session.peer.send_bytes(&question(&[b'x'; 5000]).send)?;
        session.peer.disconnect()?;
    }
    context.open()?.unharmed()
}

fn together<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut sessions = (0..30).map(|_| context.open_as(Shape::small())).collect::<Result<Vec<_>, _>>()?;
    let send = question(b"never finished").send;
    for session in &mut sessions {
        session.peer.send_bytes(&send[..send.len() - 3])?;
    }
    for session in &sessions {
        session.peer.disconnect()?;
    }
    drop(sessions);
    context.open()?.unharmed()
}

fn cut_off<B: Descriptors>(context: &Context<'_, B>, mut session: Session<'_, B>) -> Judged {
    session.peer.disconnect()?;
    context.note(Teardown::Clean);
    session.tells_of_failure()
}

fn instead_of_the_reply<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.require_exchange(0)?;
    cut_off(context, session)
}

fn in_the_middle_of_a_reply<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let exchange = session.require_exchange(0)?;
    session.peer.send_bytes(&exchange.send[..exchange.send.len() / 2])?;
    session.peer.settle()?;
    cut_off(context, session)
}

fn vanishes<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.require_exchange(0)?;
    session.vanish()
}

fn registered_only<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    if let Some(Incoming::Gone(_)) = session.peer.receive_within(Duration::ZERO)? {
        return Err(Stop::undecided("the client left first"));
    }
    cut_off(context, session)
}
