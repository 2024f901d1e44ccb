//! VR-FLOW-005: a SEND or an immediate without a receive may be fatal.

use rdma_proto::wire::{FeatureSet, Message};
use rdma_proto::{CompletionStatus, Immediate};
use rdma_proto::{Config, Error, PeerMisbehaved, State};

use crate::pair::{Client, Pair, Server, failure, handle_immediates, quiet};

/// A client of a Valkey server, which accepts with an RNR retry count of 0.
fn valkey(receives: u16) -> Pair {
    let wide = |base| quiet(base).window(1 << 16).send_buffer(1 << 16).peer_receives(receives);
    Pair::with_retries(wide(Config::client()), wide(Config::server()), 0)
}

const WRITES: usize = if cfg!(miri) { 100 } else { 2000 };

fn few<const N: usize>(receives: [u16; N]) -> impl Iterator<Item = u16> {
    receives.into_iter().filter(|receives| usize::from(*receives) < WRITES)
}

fn questions(messages: &[Message]) -> usize {
    messages.iter().filter(|message| matches!(message, Message::GetServerFeature { .. })).count()
}

/// The client stops in time, asks one question, and continues when it is answered.
#[test]
fn a_server_that_does_not_poll_is_not_overrun() {
    for receives in few([2, 3, 8, 17, 64, 1024]) {
        let mut pair = valkey(receives);
        let before = questions(&pair.client.messages());
        pair.server.handles = false;
        for _ in 0..WRITES {
            assert_eq!(pair.client.write(1), 1);
            pair.settle();
            assert!(pair.unhandled(Client) <= usize::from(receives), "{receives} receives");
        }
        assert_eq!(pair.client.state(), State::Open);
        assert_eq!(questions(&pair.client.messages()) - before, 1, "one question is under way, not more");
        assert!(pair.unhandled(Client) * 2 >= usize::from(receives), "half of them were of use");

        pair.server.handles = true;
        pair.finish([2000, 0]);
        assert!(pair.client.machine.counters().most_in_flight <= u64::from(receives));
    }
}

/// VR-FLOW-008: it proves that everything before the question was handled.
#[test]
fn the_answer_returns_the_credits() {
    let mut pair = valkey(16);
    pair.server.handles = false;
    while pair.client.machine.unposted() == 0 {
        pair.client.write(1);
        pair.settle();
    }
    let (before, asked) = (pair.client.writes().len(), questions(&pair.client.messages()));
    assert_eq!(asked, 1);
    while pair.handle(Server) {}
    pair.settle();
    assert!(pair.client.writes().len() > before);
    assert_eq!(pair.client.machine.unposted(), 0);
}

/// VR-FLOW-008: a registration proves as much.
#[test]
fn full_windows_need_no_questions() {
    let narrow = |base| quiet(base).window(8).send_buffer(8).peer_receives(16);
    let mut pair = Pair::with_retries(narrow(Config::client()), narrow(Config::server()), 0);
    pair.finish([1000, 0]);
    assert_eq!(questions(&pair.client.messages()), 0);
}

/// VR-FLOW-008: so do bytes in a window that we announced.
#[test]
fn bytes_in_a_new_window_need_no_questions() {
    let narrow = |base| quiet(base).window(8).peer_receives(4).windows(1);
    let mut pair = Pair::with_retries(narrow(Config::client()), narrow(Config::server()), 0);
    pair.finish([0, 1000]);
    assert!(pair.client.registrations() > 100);
    assert_eq!(questions(&pair.client.messages()), 0);
    assert!(pair.client.machine.counters().most_in_flight <= 4);
}

/// VR-FLOW-008, VR-XFER-005: only a first byte proves that the peer has handled the window.
#[test]
fn a_notification_of_no_bytes_returns_no_credits() {
    let mut pair = valkey(16);
    pair.server.handles = false;
    pair.trickle(Client, 4);
    // A peer that writes to the next window has handled these.
    pair.server.write(1 << 16);
    pair.settle();
    pair.client.read(1 << 16);
    while pair.client.machine.unposted() == 0 {
        assert_eq!(pair.client.write(1), 1);
        pair.settle();
    }
    for (bytes, unposted) in [(0, 1), (1, 0)] {
        handle_immediates(&mut pair.client.machine, pair.now, &[bytes]);
        pair.post(Client);
        assert_eq!(pair.client.machine.unposted(), unposted, "after a notification of {bytes}");
    }
}

/// VR-FLOW-008: the device had a receive, but its program may be asleep.
#[test]
fn acknowledgements_return_no_credits_where_rnr_is_fatal() {
    let mut pair = valkey(16);
    pair.server.handles = false;
    pair.trickle(Client, 100);
    let unacknowledged = pair.client.send_queue.unacknowledged_notifications();
    assert!(unacknowledged < 4, "all acknowledged that were signalled");
    assert!(pair.client.machine.unposted() > 0, "and yet no credit is left");
}

/// VR-FLOW-015: it makes us wait; nothing is lost.
#[test]
fn a_patient_peer_is_never_asked() {
    for (who, receives) in
        [(Client, 4), (Server, 4), (Client, WRITES as u16 / 2), (Server, WRITES as u16 / 2)]
    {
        let wide = |base| quiet(base).window(1 << 16).send_buffer(1 << 16).peer_receives(receives);
        let mut pair = Pair::connected(wide(Config::client()), wide(Config::server()));
        let other = crate::pair::peer(who);
        pair.side(other).handles = false;
        pair.trickle(who, WRITES);
        assert!(pair.side(who).send_queue.unacknowledged_notifications() <= usize::from(receives));
        assert_eq!(questions(&pair.side(who).messages()), 0);
        pair.side(other).handles = true;
        pair.finish([0, 0]);
    }
}

/// VR-FLOW-015.
#[test]
fn fewer_receives_than_assumed_only_slow_a_patient_peer_down() {
    let mut pair = Pair::quiet();
    pair.server.receives = 1;
    pair.finish([3000, 3000]);
}

/// VR-RES-002: the peer broke the rule that receives are posted.
#[test]
fn fewer_receives_than_assumed_kill_an_impatient_connection() {
    let mut pair = valkey(16);
    pair.server.receives = 3;
    pair.server.handles = false;
    pair.trickle(Client, 10);
    let culprit = PeerMisbehaved::TooFewReceives { limit: 16 };
    assert_eq!(pair.client.state(), State::Failed(Error::PeerMisbehaved(culprit)));
}

/// VR-FLOW-009: a side without credits for data still announces its window.
#[test]
fn data_leaves_credits_to_registrations() {
    for receives in few([2, 4, 16, 1024]) {
        let base = |base| quiet(base).window(1 << 12).windows(1).send_buffer(1 << 13).peer_receives(receives);
        let mut pair = Pair::with_retries(base(Config::client()), base(Config::server()), 0);
        pair.server.handles = false;
        pair.trickle(Client, WRITES);
        pair.server.write(1 << 12);
        pair.settle();
        pair.client.read(1 << 12);
        pair.settle();
        if receives > 2 {
            assert_eq!(pair.client.registrations(), 2, "{receives} receives");
        }
        pair.server.handles = true;
        pair.finish([0, 1 << 13]);
    }
}

/// Questions for features and for credits are the same message.
#[test]
fn the_first_question_serves_both_ends() {
    let ask = quiet(Config::client()).negotiate(true).peer_receives(2);
    let mut pair = Pair::new(ask, quiet(Config::server()).peer_receives(8));
    pair.client.rnr_retry = 0;
    pair.server.receives = 2;
    pair.establish(Server);
    pair.establish(Client);
    pair.finish([100, 100]);
    let set = Message::SetClientFeature { select: 0, features: FeatureSet::NONE };
    assert_eq!(pair.client.messages().iter().filter(|message| **message == set).count(), 1);
}

/// VR-FLOW-009.
#[test]
fn data_leaves_requests_to_registrations() {
    for depth in [2, 3, 4, 16] {
        let client = quiet(Config::client()).send_depth(depth).windows(1);
        let mut pair = Pair::connected(client, quiet(Config::server()));
        pair.client.reports = false;
        pair.trickle(Client, 64);
        assert!(pair.client.machine.unposted() > 0, "the queue is full");
        pair.server.write(64);
        pair.settle();
        pair.client.read(64);
        pair.settle();
        assert_eq!(pair.client.registrations(), 2, "depth {depth}");
        pair.client.reports = true;
        pair.finish([0, 0]);
    }
}

/// VR-RES-002: the peer's fault.
#[test]
fn a_receiver_not_ready_names_the_limit() {
    let mut pair = valkey(16);
    pair.client.machine.handle_failure(failure(CompletionStatus::RNR_RETRY_EXC_ERR));
    let culprit = PeerMisbehaved::TooFewReceives { limit: 16 };
    assert_eq!(pair.client.state(), State::Failed(Error::PeerMisbehaved(culprit)));
    pair.client.machine.handle_immediate(pair.now, Immediate(1));
    assert_eq!(pair.client.machine.unread(), 0, "nothing is taken after the end");
}
