use rdma_proto::wire::{Message, Window};
use rdma_proto::{Config, State};

use crate::pair::{Client, Pair, Server, peer, quiet};

fn fresh() -> Pair {
    Pair::new(quiet(Config::client()), quiet(Config::server()))
}

#[test]
fn nothing_is_posted_before_the_connection_is_established() {
    let mut pair = fresh();
    for who in [Client, Server] {
        pair.side(who).write(10);
        assert_eq!(pair.post(who), 0);
        assert_eq!(pair.side(who).state(), State::Connecting);
        assert_eq!(pair.side(who).machine.next_timeout(), None);
    }
}

/// VR-MEM-001: it is the first request.
#[test]
fn each_registers_when_established_and_waits_for_nothing() {
    for who in [Client, Server] {
        let mut pair = fresh();
        pair.establish(who);
        pair.post(who);
        let length = pair.side(who).machine.config().window;
        let messages = pair.side(who).messages();
        assert!(
            matches!(messages[..], [Message::RegisterXferMemory(Window { length: told, .. })] if told == length),
            "{who:?} posted {messages:?}"
        );
    }
}

/// VR-MEM-014, VR-CONN-007: the events, too.
#[test]
fn registrations_may_cross_in_any_order() {
    for first in [Client, Server] {
        for heard_early in [false, true] {
            let mut pair = fresh();
            pair.establish(first);
            pair.post(first);
            pair.carry(first);
            if heard_early {
                pair.handle(peer(first));
                assert_eq!(pair.side(peer(first)).state(), State::Connecting);
                assert!(pair.side(peer(first)).machine.has_peer_window());
            }
            pair.establish(peer(first));
            pair.finish([100, 100]);
            assert_eq!((pair.client.state(), pair.server.state()), (State::Open, State::Open));
        }
    }
}

/// VR-FLOW-004, VR-FLOW-012: then all leave.
#[test]
fn no_payload_leaves_before_the_peers_window() {
    for who in [Client, Server] {
        let mut pair = fresh();
        pair.side(who).write(20);
        pair.establish(who);
        pair.post(who);
        assert_eq!(pair.side(who).writes(), [], "the peer registered nothing yet");
        pair.establish(peer(who));
        pair.settle();
        assert_eq!(pair.side(who).writes(), [(20, Some(20))]);
        assert_eq!(pair.side(peer(who)).read(100), 20);
    }
}

/// VR-KEEP-002, VR-CONN-007: even before the established event.
#[test]
fn a_keepalive_may_come_before_anything_else() {
    let mut pair = fresh();
    let now = pair.now;
    pair.client.machine.handle_message(now, &Message::Keepalive.encode());
    assert_eq!(pair.client.machine.counters().keepalives_received, 1);
    pair.establish(Client);
    pair.establish(Server);
    pair.finish([1, 1]);
}

#[test]
fn a_second_event_that_says_established_changes_nothing() {
    let mut pair = Pair::quiet();
    let before = pair.client.messages();
    pair.establish(Client);
    pair.finish([100, 0]);
    assert_eq!(pair.client.messages()[..before.len()], before);
    assert_eq!(pair.client.registrations(), 1);
}
