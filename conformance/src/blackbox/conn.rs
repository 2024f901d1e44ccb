//! Connections: how they are established, and what happens if not.

use std::time::{Duration, Instant};

use raw_peer::Offer;
use rdma_backend::Identifier;
use rdma_conn::Descriptors;
use rdma_proto::wire::{Message, Opcode};

use super::case::{Case, Role};
use super::context::Context;
use super::results::Teardown;
use super::session::{KEPT, reported};
use crate::tester::{Peer, Shape};
use suite::verdict::pass;
use suite::{Judged, Stop};

pub(super) fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    cases! {
        both "conn.plain", "connect, talk, leave" => "It works.", ["VR-CONN-015", "VR-CONN-001", "VR-CONN-013"], plain;
        both "conn.private-data", "56 bytes of private data that mean nothing" => "They are ignored.",
            ["VR-CONN-002"], |context| context.open_as(Shape { private_data: &[0xa5; 56], ..Shape::default() })?.unharmed();
        both "conn.no-private-data", "a look at what comes with the target's request or acceptance" => "Nothing but zeros.",
            ["VR-CONN-016"], |context| offers(context, has_private_data);
        server "conn.rnr-retries", "a look at the target's parameters" => "It gives its peer an RNR retry count of 7.",
            ["VR-CONN-004"], |context| offers(context, wrong_rnr_retries);
        client "conn.rnr-retries", "a look at the target's parameters" => "It gives its peer an RNR retry count of 7.",
            ["VR-CONN-017"], |context| offers(context, wrong_rnr_retries);
        both "conn.depths", "a look at the target's parameters" => "One responder resource, an initiator depth of one.",
            ["VR-CONN-005"], |context| offers(context, wrong_depths);
        both "conn.first-message", "a message as soon as the connection is there" => "It finds a receive.",
            ["VR-CONN-003", "VR-CONN-007", "VR-CTRL-007"], first_message;
        server "conn.withdrawn", "a request that is withdrawn before the answer" => "The server goes on.",
            ["VR-CONN-006", "VR-SEC-004"] [Slow], withdrawn;
        server "conn.never-completed", "a request whose answer is never read" => "The server goes on.",
            ["VR-CONN-008"] [Slow], |context| never_completed(context, 1);
        server "conn.request-flood", "twenty requests at once whose answers are never read" => "The server goes on, and takes others.",
            ["VR-CONN-008", "VR-RES-007"] [Disruptive, Slow], |context| never_completed(context, 20);
        server "conn.many", "thirty connections at once" => "Each is served.", ["VR-SEC-004", "VR-CONN-001"], many;
        server "conn.one-after-the-other", "fifty connections in turn" => "Each is served.",
            ["VR-CONN-001", "VR-RES-001"], in_turn;
        server "conn.leaves-at-once", "a client that leaves before it has sent anything, twenty times"
            => "The server goes on.", ["VR-CONN-006", "VR-CLOSE-003"], leaves_at_once;
        client "conn.rejected", "the server rejects the request" => "The client reports an error.",
            ["VR-CONN-006"] [Disruptive], rejected;
        client "conn.dropped", "the server drops the request" => "The client reports an error.",
            ["VR-CONN-006"] [Disruptive], dropped;
        client "conn.never-accepted", "the server never answers the request" => "The client reports an error in bounded time.",
            ["VR-CONN-008"] [Slow], never_accepted;
        client "conn.never-registered", "the server never gives a window" => "The client reports an error in bounded time.",
            ["VR-CONN-008"] [Slow], never_registered;
        client "conn.leaves-at-once", "the server leaves before it has sent anything" => "The client reports an error.",
            ["VR-CONN-006"], left_at_once;
    }
}

fn plain<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    context.open()?.unharmed()
}

/// Judges what the target offers with its request or acceptance. `wrong` returns the fault in it.
fn offers<B: Descriptors>(context: &Context<'_, B>, wrong: fn(&Offer) -> Option<String>) -> Judged {
    let session = context.open()?;
    let Some(wrong) = session.peer.offered().map(wrong) else {
        return Err(Stop::undecided("the device does not tell"));
    };
    let judged = session.unharmed()?;
    wrong.map_or(Ok(judged), |wrong| Err(Stop::unmet(wrong)))
}

fn has_private_data(offer: &Offer) -> Option<String> {
    // Zeros stand for none: a transport appends them to the given data.
    offer.private_data.iter().any(|byte| *byte != 0).then(|| "it gave private data".into())
}

fn wrong_rnr_retries(offer: &Offer) -> Option<String> {
    let count = offer.params.rnr_retry_count;
    (count != 7).then(|| format!("its rnr_retry_count is {count}, not 7 (without end)"))
}

fn wrong_depths(offer: &Offer) -> Option<String> {
    // Each side's values are the other's, crosswise.
    let (depth, resources) = (offer.params.responder_resources, offer.params.initiator_depth);
    let told =
        || format!("its initiator_depth is {depth} and its responder_resources {resources}, not 1 and 1");
    ((depth, resources) != (1, 1)).then(told)
}

fn first_message<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    // A held server does not look at the connection meanwhile: its receives were posted before.
    let held = match context.role() {
        Role::Server => context.server()?.hold(),
        Role::Client => None,
    };
    let mut session = context.connect(Shape::default())?;
    session.peer.message(Message::Keepalive)?;
    session.peer.register()?;
    // Without a receive, neither would be acknowledged.
    session.peer.settle()?;
    drop(held);
    session.peer.await_window()?;
    session.unharmed()
}

fn request<B: Descriptors>(context: &Context<'_, B>) -> Result<Peer<B>, Stop> {
    let shape = Shape { patience: context.patience, ..Shape::default() };
    Ok(Peer::request(context.backend, context.server()?.address(), shape)?)
}

fn withdrawn<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    drop(request(context)?);
    until_a_keepalive(context)
}

/// Serves another client until its next keepalive is due, so that delayed damage shows in its case.
pub(super) fn until_a_keepalive<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    const DUE: Duration = Duration::from_millis(3500);
    let mut session = context.open()?;
    let deadline = Instant::now() + DUE;
    while session.peer.seen.count(Opcode::KEEPALIVE) == 0 {
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(incoming) = session.peer.receive_within(left)? else { break };
        session.peer.absorb(incoming)?;
    }
    session.unharmed()
}

fn never_completed<B: Descriptors>(context: &Context<'_, B>, count: usize) -> Judged {
    let unread = (0..count).map(|_| request(context)).collect::<Result<Vec<_>, _>>()?;
    plain(context)?;
    context.open()?.listen(context.patience.min(KEPT))?;
    drop(unread);
    until_a_keepalive(context)
}

fn many<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut sessions = (0..30).map(|_| context.open_as(Shape::small())).collect::<Result<Vec<_>, _>>()?;
    for session in &mut sessions {
        session.exchange()?;
    }
    let count = sessions.len();
    for session in sessions {
        session.unharmed()?;
    }
    Ok(pass(format!("{count} at once")))
}

fn in_turn<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    for _ in 0..50 {
        context.open_as(Shape::small())?.unharmed()?;
    }
    Ok(pass("50 in turn"))
}

fn leaves_at_once<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    for _ in 0..20 {
        let session = context.connect(Shape::small())?;
        session.peer.disconnect()?;
    }
    plain(context)
}

fn rejected<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let (id, _, mut client) = context.request()?;
    id.reject(&[]).map_err(|error| Stop::broken(error.to_string()))?;
    reported(context, Some(&mut *client), context.patience)
}

fn dropped<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let (id, _, mut client) = context.request()?;
    drop(id);
    reported(context, Some(&mut *client), context.patience)
}

fn never_accepted<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let (_unanswered, _, mut client) = context.request()?;
    let patience = 4 * context.patience;
    reported(context, Some(&mut *client), patience)
}

fn never_registered<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    let patience = 4 * context.patience;
    session.peer.set_patience(patience);
    // The client gives up, and disconnects.
    let _whatever_ends_it = session.peer.await_end();
    session.tells_of_failure()
}

fn left_at_once<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default())?;
    session.peer.disconnect()?;
    let judged = session.tells_of_failure();
    context.note(Teardown::Clean);
    judged
}
