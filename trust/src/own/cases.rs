//! Cases that only our own side can be shown: they need its options, a held server, or its client.

use std::time::Duration;

use rdma_conn::Descriptors;

use conformance::blackbox::builtin::WINDOW;
use conformance::blackbox::case::{Case, Role};
use conformance::blackbox::context::{Context, Side};
use conformance::blackbox::session::{Session, reported};
use conformance::tester::{Listener, Shape};
use rdma_proto::wire::{FeatureSet, Message};
use suite::verdict::pass;
use suite::{Judged, Stop};

/// Cases that the suite has for servers only, because a client need not open two connections.
const FOR_CLIENTS_TOO: [&str; 2] = ["sec.foreign-key", "sec.stale-key"];

/// All of them.
pub fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    let mut cases: Vec<Case<'a, B>> = conformance::cases! {
        server "own.notified-before-window", "bytes before there is a window for them" => "",
            ["VR-FLOW-003"], notified_before_window;
        both "own.too-few-receives", "no receive for a keepalive, and no retries either" => "",
            ["VR-RES-002", "VR-FLOW-008"], too_few_receives;
        server "own.queue-pair-lost", "a client whose device no longer answers" => "",
            ["VR-KEEP-006", "VR-CLOSE-003"], queue_pair_lost;
        client "own.refused", "there is no listener" => "", ["VR-CONN-006"], refused;
        client "own.leaves-in-a-command", "a server that leaves in the middle of a command" => "",
            ["VR-CLOSE-003"], leaves_in_a_command;
        client "own.never-drains", "a full window that is never registered again" => "",
            ["VR-RES-004", "VR-RES-008"], |context| full(context)?.ends();
        server "own.never-reposts", "questions whose answers find no receive any more" => "",
            ["VR-RES-005", "VR-RES-008"], never_reposts;
    };
    let of_suite = conformance::blackbox::cases().into_iter();
    let for_clients_too = of_suite.filter(|case| FOR_CLIENTS_TOO.contains(&case.id));
    cases.extend(for_clients_too.map(|case| Case { role: Some(Role::Client), ..case }));
    cases
}

fn notified_before_window<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    // A held server has not registered a window when the notification arrives.
    let held = context.server()?.hold();
    let mut session = context.connect(Shape::default())?;
    session.peer.notify(5)?;
    session.peer.settle()?;
    drop(held);
    session.ends()
}

fn too_few_receives<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    // With endless retries our side would wait instead (VR-FLOW-015).
    let mut session = context.connect(Shape::default().receives(3).without_rnr_retries())?;
    session.peer.set_reposts(false);
    session.peer.handshake()?;
    session.ends()
}

fn queue_pair_lost<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    session.peer.lose_queue_pair();
    // A device repeats a request eight times, up to four seconds apart.
    session.peer.set_patience(Duration::from_secs(60));
    session.peer.await_end()?;
    Ok(pass("it ended the connection"))
}

fn refused<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let Side::Client(listener, clients) = context.side else {
        return Err(Stop::not_applicable("about clients only"));
    };
    // A port that was free a moment ago: the listener is dropped at once.
    let unused = Listener::new(context.backend, (listener.address()?.ip(), 0).into())?.address()?;
    let mut client = clients.start(context.case, unused).map_err(Stop::broken)?;
    reported(context, Some(&mut *client), context.patience)
}

fn full<'a, B: Descriptors>(context: &'a Context<'a, B>) -> Result<Session<'a, B>, Stop> {
    let mut session = context.connect(Shape::default())?;
    session.peer.plan = vec![(0, 10)];
    session.peer.drains = false;
    session.peer.handshake()?;
    while session.peer.taken() < 10 {
        let incoming = session.peer.receive()?;
        session.peer.absorb(incoming)?;
    }
    Ok(session)
}

fn leaves_in_a_command<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.open()?;
    loop {
        let exchange = session.require_exchange(0)?;
        session.peer.send_bytes(&exchange.send)?;
        // Our client's next data is longer than a window and its send buffer.
        if exchange.send.len() > WINDOW as usize {
            break;
        }
    }
    session.peer.drains = false;
    while session.peer.taken() < WINDOW {
        let incoming = session.peer.receive()?;
        session.peer.absorb(incoming)?;
    }
    session.peer.disconnect()?;
    session.tells_of_failure()
}

fn never_reposts<B: Descriptors>(context: &Context<'_, B>) -> Judged {
    let mut session = context.connect(Shape::default().receives(16))?;
    session.peer.set_reposts(false);
    session.peer.handshake()?;
    // Equal questions are answered one by one, and waiting answers are not refused.
    let question = Message::GetServerFeature { select: 0, features: FeatureSet::NONE };
    session.peer.burst(&[question; 1000])?;
    session.ends()
}
