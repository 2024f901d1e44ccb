//! VR-RES-004 and VR-RES-005: limits on how long a peer may keep data waiting.

use std::time::Duration;

use rdma_proto::Immediate;
use rdma_proto::wire::{FeatureSet, Message};
use rdma_proto::{Config, Error, Keepalive, PeerMisbehaved, State};

use crate::pair::{Client, Pair, Server, quiet};

const LIMIT: Duration = Duration::from_secs(20);
const ALMOST: Duration = Duration::from_millis(19_999);
const REST: Duration = Duration::from_millis(1);

fn limited(base: Config) -> Config {
    quiet(base).stall_limit(Some(LIMIT))
}

fn failed(misbehaved: PeerMisbehaved) -> State {
    State::Failed(Error::PeerMisbehaved(misbehaved))
}

/// VR-RES-004.
#[test]
fn a_peer_that_never_registers() {
    let mut pair = Pair::new(limited(Config::client()), quiet(Config::server()));
    pair.establish(Client);
    pair.settle();
    pair.advance(LIMIT * 10);
    pair.settle();
    assert_eq!(pair.client.state(), State::Open, "nothing waits yet");
    pair.client.write(1);
    pair.settle();
    pair.advance(ALMOST);
    assert_eq!(pair.client.state(), State::Open);
    pair.advance(REST);
    assert_eq!(pair.client.state(), failed(PeerMisbehaved::NeverRegistered { waited: LIMIT }));
}

/// VR-RES-004.
#[test]
fn a_peer_that_never_drains() {
    let mut pair = Pair::connected(quiet(Config::client()), limited(Config::server()));
    pair.server.write(200);
    pair.settle();
    pair.advance(ALMOST);
    pair.settle();
    assert_eq!(pair.client.read(64), 64);
    pair.settle();
    pair.advance(ALMOST);
    pair.settle();
    assert_eq!(pair.server.state(), State::Open);
    pair.advance(REST);
    assert_eq!(pair.server.state(), failed(PeerMisbehaved::NeverDrained { waited: LIMIT }));
}

/// VR-RES-005: without receives, a patient peer's device does not acknowledge.
#[test]
fn a_peer_that_never_receives() {
    for who in [Client, Server] {
        let base = |base| limited(base).peer_receives(8);
        let mut pair = Pair::connected(base(Config::client()), base(Config::server()));
        let other = crate::pair::peer(who);
        pair.side(other).handles = false;
        pair.trickle(who, 50);
        pair.advance(ALMOST);
        pair.settle();
        assert_eq!(pair.side(who).state(), State::Open);
        pair.advance(REST);
        let never = failed(PeerMisbehaved::NeverReceives { waited: LIMIT });
        assert_eq!(pair.side(who).state(), never, "{who:?}");
    }
}

/// VR-RES-005: the client gets credits back only by questions.
#[test]
fn a_server_that_never_polls() {
    let client = limited(Config::client()).peer_receives(16);
    let mut pair = Pair::with_retries(client, quiet(Config::server()), 0);
    pair.server.handles = false;
    pair.trickle(Client, 50);
    pair.advance(LIMIT);
    assert_eq!(pair.client.state(), failed(PeerMisbehaved::NeverReceives { waited: LIMIT }));
}

/// There is not enough credit for the answers.
fn ask_ten_times(pair: &mut Pair) {
    let question = Message::GetServerFeature { select: 0, features: FeatureSet::NONE }.encode();
    for _ in 0..10 {
        pair.server.machine.handle_message(pair.now, &question);
    }
}

/// VR-RES-005: the limit is that for data.
#[test]
fn answers_that_are_not_taken() {
    let server = limited(Config::server()).peer_receives(4);
    let mut pair = Pair::connected(quiet(Config::client()), server);
    pair.client.handles = false;
    pair.client.receives = 0;
    ask_ten_times(&mut pair);
    pair.settle();
    pair.advance(LIMIT);
    assert_eq!(pair.server.state(), failed(PeerMisbehaved::NeverReceives { waited: LIMIT }));
}

#[test]
fn answers_that_are_taken_one_by_one() {
    let server = limited(Config::server()).peer_receives(4);
    let mut pair = Pair::connected(quiet(Config::client()), server);
    // The device has receives. The client would not understand the answers.
    (pair.client.handles, pair.client.receives) = (false, 100);
    pair.server.carries = false;
    ask_ten_times(&mut pair);
    while pair.server.messages().len() < 11 {
        pair.settle();
        pair.advance(ALMOST);
        assert_eq!(pair.server.state(), State::Open);
        while pair.carry(Server) && !pair.report(Server) {}
    }
}

/// Returned credits are progress, even by the peer's first bytes in a new window.
/// VR-RES-013.
#[test]
fn a_proof_by_bytes_begins_the_wait_anew() {
    let client = limited(Config::client()).peer_receives(6);
    let mut pair = Pair::with_retries(client, quiet(Config::server()), 0);
    pair.server.handles = false;
    pair.client.write(1);
    pair.settle();
    // The server fills our window; the next one is announced behind the byte just written.
    pair.client.machine.handle_immediate(pair.now, Immediate(64));
    pair.trickle(Client, 20);
    assert_eq!(pair.client.registrations(), 2);
    assert!(pair.client.machine.unposted() > 0, "no credit is left");
    pair.advance(ALMOST);
    pair.settle();
    pair.client.machine.handle_immediate(pair.now, Immediate(1));
    pair.advance(REST);
    assert_eq!(pair.client.state(), State::Open, "a credit came back in time");
    assert!(pair.post(Client) > 0);
}

#[test]
fn bytes_that_prove_nothing_do_not_extend_the_limit() {
    let client = limited(Config::client()).peer_receives(6);
    let mut pair = Pair::with_retries(client, quiet(Config::server()), 0);
    pair.server.handles = false;
    pair.client.machine.handle_immediate(pair.now, Immediate(1));
    pair.trickle(Client, 20);
    for _ in 0..20 {
        pair.client.machine.handle_immediate(pair.now, Immediate(1));
        pair.settle();
        pair.advance(Duration::from_secs(1));
    }
    assert_eq!(pair.client.state(), failed(PeerMisbehaved::NeverReceives { waited: LIMIT }));
}

/// A sleeping server's device acknowledges them while it has receives.
#[test]
fn acknowledged_keepalives_do_not_extend_the_limit() {
    let probe = Keepalive::NONE.probe(Some(Duration::from_secs(1)));
    let client = limited(Config::client()).peer_receives(16).keepalive(Some(probe));
    let mut pair = Pair::with_retries(client, quiet(Config::server()), 0);
    pair.server.handles = false;
    pair.trickle(Client, 20);
    pair.pass(Duration::from_secs(1), 20);
    assert_eq!(pair.client.state(), failed(PeerMisbehaved::NeverReceives { waited: LIMIT }));
}

#[test]
fn slow_progress_is_progress() {
    for (rnr_retry, send_depth) in [(0, 1), (0, 256), (7, 1), (7, 256)] {
        let client = limited(Config::client()).peer_receives(4).send_depth(send_depth);
        let mut pair = Pair::with_retries(client, quiet(Config::server()), rnr_retry);
        (pair.client.reports, pair.client.carries) = (false, false);
        for _ in 0..100 {
            pair.client.write(1);
            pair.settle();
            pair.carry(Client);
            pair.report(Client);
            pair.settle();
            pair.server.read(1);
            pair.advance(LIMIT / 4);
            assert_eq!(pair.client.state(), State::Open, "RNR retry {rnr_retry}, depth {send_depth}");
        }
    }
}

#[test]
fn without_a_limit_nothing_is_waited_for() {
    let mut pair = Pair::quiet();
    pair.server.handles = false;
    pair.client.write(256);
    pair.settle();
    assert_eq!(pair.client.machine.next_timeout(), None);
    pair.advance(Duration::from_secs(1 << 30));
    assert_eq!(pair.client.state(), State::Open);
}
