use std::time::Duration;

use rdma_proto::wire::Message;
use rdma_proto::{Config, Error, Keepalive, PeerMisbehaved, State, TransportError};

use crate::pair::{Client, Pair, Server, Side, peer, quiet};

const SECOND: Duration = Duration::from_secs(1);

fn living(client: Keepalive, server: Keepalive) -> Pair {
    let client = quiet(Config::client()).keepalive(Some(client));
    Pair::connected(client, quiet(Config::server()).keepalive(Some(server)))
}

const SILENT: Keepalive = Keepalive::NONE;

fn keepalives(side: &Side) -> usize {
    side.messages().iter().filter(|message| matches!(message, Message::Keepalive)).count()
}

/// VR-KEEP-001: every three seconds.
#[test]
fn a_server_sends_keepalives_and_a_client_listens() {
    let mut pair = Pair::connected(Config::client().window(64), Config::server().window(64));
    for second in 1..=60 {
        pair.advance(SECOND);
        pair.settle();
        assert_eq!(keepalives(&pair.server), second / 3);
    }
    assert_eq!(keepalives(&pair.client), 0);
    assert_eq!(pair.client.machine.counters().keepalives_received, 20);
    assert_eq!(pair.client.messages().len(), 1, "VR-KEEP-002: a keepalive is not answered");
}

/// VR-KEEP-007: whatever the defaults are.
#[test]
fn both_roles_can_send_them() {
    let every = SILENT.every(Some(SECOND));
    let mut pair = living(every, every);
    pair.pass(SECOND, 10);
    assert_eq!((keepalives(&pair.client), keepalives(&pair.server)), (10, 10));
}

/// One is enough.
#[test]
fn missed_keepalives_are_not_made_up_for() {
    let mut pair = living(SILENT, SILENT.every(Some(SECOND)));
    pair.advance(SECOND * 1000);
    pair.settle();
    assert_eq!(keepalives(&pair.server), 1);
}

/// VR-KEEP-004: they do not pile up at a peer that takes none.
#[test]
fn never_more_than_one_keepalive_is_under_way() {
    let mut pair = living(SILENT, SILENT.every(Some(SECOND)));
    pair.server.carries = false;
    pair.pass(SECOND, 100);
    assert_eq!(keepalives(&pair.server), 1);
    pair.server.carries = true;
    pair.settle();
    pair.advance(SECOND);
    pair.settle();
    assert_eq!(keepalives(&pair.server), 2);
}

/// VR-KEEP-006.
#[test]
fn a_probe_is_sent_into_silence_only() {
    for who in [Client, Server] {
        let probe = SILENT.probe(Some(SECOND * 10));
        let mut pair = living(probe, probe);
        for _ in 0..50 {
            pair.advance(SECOND * 9);
            pair.side(who).write(1);
            pair.settle();
            pair.side(peer(who)).read(1);
        }
        assert_eq!(keepalives(pair.side(peer(who))), 0, "bytes came often enough");
        let before = keepalives(pair.side(who));
        pair.side(peer(who)).handles = false;
        pair.advance(SECOND * 10);
        pair.settle();
        assert!(keepalives(pair.side(who)) <= before + 1);
    }
}

/// The device's time-out finds a dead peer.
#[test]
fn a_busy_peer_satisfies_the_probe_through_its_device() {
    let mut pair = living(SILENT.probe(Some(SECOND * 10)), SILENT);
    pair.server.handles = false;
    for expected in 1..=20 {
        pair.advance(SECOND * 10);
        pair.settle();
        assert_eq!(keepalives(&pair.client), expected);
    }
    assert_eq!(pair.client.state(), State::Open);
}

/// VR-KEEP-005: only what the peer itself sends resets it, and it is exact.
#[test]
fn silence_beyond_the_limit_ends_the_connection() {
    let limit = SECOND * 30;
    let mut pair = living(SILENT.probe(Some(SECOND)).limit(Some(limit)), SILENT);
    pair.pass(SECOND, 20);
    pair.server.write(1);
    pair.settle();
    pair.pass(SECOND, 29);
    assert!(keepalives(&pair.client) >= 40, "its device acknowledges every one");
    pair.advance(SECOND - Duration::from_nanos(1));
    assert_eq!(pair.client.state(), State::Open);
    pair.advance(Duration::from_nanos(1));
    let silent = PeerMisbehaved::Silent { waited: limit };
    assert_eq!(pair.client.state(), State::Failed(Error::PeerMisbehaved(silent)));
    assert_eq!(pair.client.machine.next_timeout(), None);
}

/// VR-KEEP-003.
#[test]
fn no_keepalive_after_the_end() {
    let mut pair = living(SILENT, SILENT.every(Some(SECOND)));
    pair.server.machine.close(pair.now, SECOND);
    pair.settle();
    assert_eq!(pair.server.state(), State::Closed);
    pair.advance(SECOND * 10);
    pair.settle();
    assert_eq!(keepalives(&pair.server), 0);
}

/// VR-FLOW-013: they would make a time-out that is always due.
#[test]
fn intervals_of_zero_are_refused() {
    let zero = Some(Duration::ZERO);
    let mut refused = [SILENT.every(zero), SILENT.probe(zero), SILENT.limit(zero)]
        .map(|keepalive| Config::client().keepalive(Some(keepalive)))
        .to_vec();
    refused.push(Config::client().stall_limit(zero));
    for config in refused {
        assert!(config.check().is_err(), "{config:?}");
    }
}

/// VR-KEEP-006: even if our device never gives up, or the send queue is full.
#[test]
fn a_peer_whose_device_acknowledges_nothing_is_gone() {
    let limited = rdma_proto::UNACKNOWLEDGED + SECOND * 10;
    for (probing, full) in [(false, false), (true, false), (false, true)] {
        let keepalive =
            if probing { SILENT.probe(Some(SECOND * 10)) } else { SILENT.every(Some(SECOND * 3)) };
        let server = quiet(Config::server()).keepalive(Some(keepalive)).send_depth(16);
        let mut pair = Pair::connected(quiet(Config::client()), server);
        pair.server.carries = false;
        pair.trickle(Server, if full { 64 } else { 0 });
        for _ in 0..limited.as_secs() {
            assert_eq!(pair.server.state(), State::Open);
            pair.advance(SECOND);
            pair.settle();
            if pair.server.state() != State::Open {
                break;
            }
        }
        let waited = rdma_proto::UNACKNOWLEDGED;
        let gone = Error::Transport(TransportError::Unacknowledged { waited });
        assert_eq!(pair.server.state(), State::Failed(gone), "probing {probing}, full {full}");
    }
}

/// VR-KEEP-004, VR-KEEP-006: it reposts none, but is alive, and can continue after any time.
#[test]
fn an_idle_peer_is_left_its_receives() {
    let server = SILENT.every(Some(SECOND));
    let receives = quiet(Config::server()).peer_receives(16);
    let mut pair = Pair::connected(quiet(Config::client()), receives.keepalive(Some(server)));
    for _ in 0..2 {
        let before = keepalives(&pair.server);
        pair.client.handles = false;
        pair.pass(SECOND, 2 * rdma_proto::UNACKNOWLEDGED.as_secs());
        assert_eq!(pair.server.state(), State::Open);
        assert!((1..16).contains(&(keepalives(&pair.server) - before)));
        pair.client.handles = true;
        pair.settle();
        pair.client.write(1);
        pair.settle();
        pair.server.read(1);
        pair.server.write(1);
        pair.settle();
        pair.client.read(1);
    }
}

#[test]
fn late_acknowledgements_count() {
    let mut pair = living(SILENT, SILENT.every(Some(SECOND * 3)));
    for _ in 0..5 {
        pair.server.carries = false;
        pair.pass(SECOND, 100);
        pair.server.carries = true;
        pair.settle();
        assert_eq!(pair.server.state(), State::Open);
    }
}
