//! Flow control: room in windows, and notifications that count against it.

use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_proto::wire::Message;

use super::case::Case;
use super::context::Context;
use super::session::{
    Exchange, Session, asked_without_window, counts, finds_room, question, registered_late, told,
};
use crate::tester::Shape;
use suite::{Judged, Stop};

/// Cases for which a client sends many small commands.
pub(super) const UNHANDLED: &str = "flow.unhandled";
pub(super) const ROOM_TO_ASK: &str = "flow.room-to-ask";

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        both "flow.filled-to-the-end", "small windows" => "The target fills each to its last byte and goes beyond none.",
            ["VR-FLOW-001", "VR-FLOW-007"], filled_to_the_end;
        both "flow.beyond-by-1", "an immediate of one byte more than the window" => "The target ends this connection.",
            ["VR-FLOW-002", "VR-SEC-003", "VR-SEC-004"] [Disruptive], beyond_by_1;
        both "flow.of-4-gib", "the largest immediate there is" => "The target ends this connection.",
            ["VR-FLOW-002", "VR-SEC-003", "VR-SEC-004"] [Disruptive], |context| beyond(context, u32::MAX);
        both "flow.wraps", "immediates whose sum is 2^32" => "The target ends this connection.",
            ["VR-FLOW-002", "VR-SEC-003", "VR-SEC-004"] [Disruptive], wraps;
        both "flow.nothing-before-window", "no window for half a second"
            => "The target writes nothing until there is one, and then what it has to say.",
            ["VR-FLOW-004", "VR-FLOW-012"], |context| registered_late(context, 1, Duration::from_millis(500));
        server "flow.held-replies", "a hundred commands, and then a window" => "The replies leave in order.",
            ["VR-FLOW-012", "VR-FLOW-004"], |context| registered_late(context, 100, Duration::from_millis(100));
        server "flow.held-quietly", "a reply that waits for a window" => "The server uses no processor meanwhile.",
            ["VR-FLOW-013"] [Local], held_quietly;
        both "flow.slow-reader", "a full window that is registered again after 500 ms" => "The target waits, and goes on.",
            ["VR-FLOW-012", "VR-CONN-008"], slow_reader;
        server "flow.slow-readers-neighbour", "a full window that is never registered again" => "Others are served.",
            ["VR-SEC-004", "VR-RES-007"], slow_readers_neighbour;
        both "flow.crossing", "both directions cross window ends at once" => "Both streams are whole.",
            ["VR-FLOW-010", "VR-FLOW-016", "VR-FLOW-001"], crossing;
        server "flow.one-notification", "a command with a reply of 2000 bytes" => "The reply is one notification.",
            ["VR-FLOW-006"], one_notification;
        both "flow.control-when-blocked", "a keepalive flood while the target waits for a window"
            => "The target goes on when the window comes.", ["VR-FLOW-009", "VR-CTRL-009"], control_when_blocked;
        client UNHANDLED, "1024 receives, no RNR retries, and a server that posts a receive again only where it proves that"
            => "The client never has more notifications unhandled than there are receives.",
            ["VR-FLOW-005", "VR-FLOW-008"], counts;
        client ROOM_TO_ASK, "the same, and a server that answers questions late"
            => "The client's question finds room, and the client goes on at the answer.", ["VR-FLOW-009", "VR-FLOW-008"], finds_room;
    }
}

fn filled_to_the_end<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open_with((0..20).map(|exchange| (1000 * exchange, 37)).collect())?;
    session.exchange_of(3000)?;
    session.unharmed()
}

fn beyond_by_1<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let length = session.peer.await_window()?.length;
    let beyond = length.checked_add(1).ok_or_else(|| Stop::undecided("no immediate is beyond its window"))?;
    tempt(&mut session)?;
    session.peer.notify(beyond)?;
    session.ends()
}

fn beyond<B: Descriptors>(context: &Context<'_, B>, immediate: u32) -> Judged {
    let mut session = context.open()?;
    tempt(&mut session)?;
    session.peer.notify(immediate)?;
    session.ends()
}

/// Fills the rest of a server's window without notifying. A server that takes an excess for bytes
/// answers the commands in it.
fn tempt<B: Descriptors>(session: &mut Session<'_, B>) -> Result<(), Stop> {
    const MOST: usize = 1 << 20;
    const PIECE: usize = 60_000;
    if session.client_asks() {
        return Ok(());
    }
    let (mut to, room) = session.peer.room()?;
    // A server that reads up to the cut in the last command finds no mistake.
    let commands: Vec<u8> = b"PING\r\n".iter().copied().cycle().take((room as usize).min(MOST)).collect();
    for piece in commands.chunks(PIECE) {
        session.peer.write(to, piece)?;
        to.address = to.address.wrapping_add(piece.len() as u64);
    }
    Ok(())
}

fn wraps<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    let exchange = session.require_exchange(16)?;
    session.peer.send_bytes(&exchange.send)?;
    session.expect_reply(&exchange)?;
    tempt(&mut session)?;
    session.peer.notify((exchange.send.len() as u32).wrapping_neg())?;
    session.ends()
}

fn held_quietly<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    const WAIT: Duration = Duration::from_millis(1000);
    // A server that busy-polls uses all processor time, little on a busy machine; asleep, none.
    const QUIET: Duration = Duration::from_millis(125);
    let server = context.server()?;
    let Some(_) = server.processor_time() else {
        return Err(Stop::not_applicable("the server's process cannot be seen from here (--exec shows it)"));
    };
    let mut session = context.connect(Shape::default())?;
    let exchanges = asked_without_window(&mut session, 100)?;
    let unseen = || Stop::undecided("what the server's process uses can no longer be seen");
    let before = server.processor_time().ok_or_else(unseen)?;
    std::thread::sleep(WAIT);
    let used = server.processor_time().ok_or_else(unseen)?.saturating_sub(before);
    if used > QUIET {
        return Err(Stop::unmet(format!("waiting for a window took {used:?} of processor time in {WAIT:?}")));
    }
    session.peer.register()?;
    exchanges.iter().try_for_each(|exchange| session.expect_reply(exchange))?;
    told(session.leave(), || format!("{used:?} in {WAIT:?}"))
}

/// Opens a session in which the target has filled the peer's window, which is not registered again.
fn full<'a, B: Descriptors>(context: &'a Context<'a, B>) -> Result<(Session<'a, B>, Exchange), Stop> {
    let mut session = context.connect(Shape::default())?;
    // Shorter than the first command of any client.
    session.peer.plan = vec![(0, 10)];
    session.be_brief();
    session.peer.drains = false;
    session.peer.handshake()?;
    let exchange = if session.client_asks() {
        Exchange { send: Vec::new(), expect: Vec::new() }
    } else {
        question(&[b'x'; 1000])
    };
    session.peer.send_bytes(&exchange.send)?;
    while session.peer.taken() < 10 {
        let incoming = session.peer.receive()?;
        session.peer.absorb(incoming)?;
    }
    Ok((session, exchange))
}

fn go_on<B: Descriptors>(session: &mut Session<'_, B>) -> Result<(), Stop> {
    session.peer.drains = true;
    Ok(session.peer.register()?)
}

fn slow_reader<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let (mut session, exchange) = full(context)?;
    session.listen(Duration::from_millis(500))?;
    go_on(&mut session)?;
    session.expect_reply(&exchange)?;
    session.unharmed()
}

fn slow_readers_neighbour<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let (session, _) = full(context)?;
    let other = context.open()?;
    let judged = other.unharmed();
    drop(session);
    judged
}

fn crossing<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open_with(vec![(0, 1000), (1000, 1000)])?;
    for _ in 0..10 {
        if !session.exchange_of(30_000)? {
            break;
        }
    }
    session.leave()
}

fn one_notification<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.exchange()?;
    let before = session.peer.seen.notifications;
    session.exchange_of(2000)?;
    match session.peer.seen.notifications - before {
        1 => session.unharmed(),
        count => Err(Stop::unmet(format!("the reply came in {count} notifications"))),
    }
}

fn control_when_blocked<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let (mut session, exchange) = full(context)?;
    for _ in 0..4 {
        session.peer.burst(&[Message::Keepalive; 500])?;
        session.peer.settle()?;
    }
    go_on(&mut session)?;
    session.expect_reply(&exchange)?;
    session.unharmed()
}
