use std::time::Duration;

use rdma_proto::wire::Message;
use rdma_proto::{
    Action, ApiMisuse, Config, Effect, Error, Keepalive, Machine, PeerMisbehaved, RegionAddress, State,
    TransportError,
};
use rdma_proto::{CompletionStatus, Immediate};

use crate::pair::{Client, Pair, Server, failure, peer, quiet};

const LINGER: Duration = Duration::from_secs(5);

fn completion(status: CompletionStatus) -> State {
    State::Failed(Error::Transport(TransportError::Completion(failure(status))))
}

/// VR-CLOSE-001: however small the peer's windows are.
#[test]
fn close_delivers_everything_first() {
    for who in [Client, Server] {
        let mut pair = Pair::quiet();
        assert_eq!(pair.side(who).write(250), 250);
        let now = pair.now;
        pair.side(who).machine.close(now, LINGER);
        pair.settle();
        assert_eq!(pair.side(who).state(), State::Closing, "the peer has not read");
        assert_eq!(pair.side(who).disconnects(), 0);
        pair.finish([0, 0]);
        assert_eq!(pair.side(who).state(), State::Closed);
        assert_eq!(pair.side(peer(who)).state(), State::Closed);
        assert_eq!(pair.side(peer(who)).read, 250);
    }
}

/// VR-CLOSE-001: an empty request, which is reported, follows.
#[test]
fn close_asks_for_a_completion_if_none_is_under_way() {
    let mut pair = Pair::quiet();
    pair.client.write(10);
    pair.settle();
    assert_eq!(pair.client.machine.unconfirmed(), 10, "not signalled");
    pair.client.machine.close(pair.now, LINGER);
    pair.settle();
    assert_eq!(pair.client.writes(), [(10, Some(10)), (0, None)]);
    assert_eq!(pair.client.state(), State::Closed);
}

/// VR-CLOSE-008.
#[test]
fn a_flush_before_the_connection_is_no_cause() {
    let mut machine =
        Machine::new(quiet(Config::client()), [RegionAddress::default(); 2]).expect("in bounds");
    machine.handle_receive_failure(failure(CompletionStatus::WR_FLUSH_ERR));
    assert_eq!(machine.state(), State::Connecting);
    machine.handle_disconnected();
    assert_eq!(machine.state(), State::Failed(Error::Transport(TransportError::Disconnected)));
}

#[test]
fn close_with_a_full_send_queue() {
    // No multiple of four, so that the last requests of a full queue may be unsignalled.
    let server = quiet(Config::server()).send_depth(70);
    let client = quiet(Config::client()).window(1 << 10);
    let mut pair = Pair::connected(client, server.send_buffer(1 << 10));
    pair.server.carries = false;
    let question = Message::GetServerFeature { select: 0, features: Default::default() }.encode();
    pair.trickle(Server, 60);
    for _ in 0..20 {
        pair.server.machine.handle_message(pair.now, &question);
    }
    pair.settle();
    assert_eq!(pair.server.machine.unposted(), 0);
    assert!(pair.server.messages().len() < 20, "answers wait for a place");
    pair.server.machine.close(pair.now, LINGER);
    pair.settle();
    assert_eq!(pair.server.state(), State::Closing);
    // The client would not understand the answers.
    while pair.carry(Server) || pair.report(Server) || pair.post(Server) > 0 {}
    assert_eq!(pair.server.state(), State::Closed);
}

/// VR-CLOSE-001: a peer without receives delays no other end.
#[test]
fn close_does_not_wait_for_control_messages() {
    let mut pair = Pair::new(quiet(Config::client()), quiet(Config::server()));
    pair.server.receives = 0;
    pair.establish(Client);
    pair.settle();
    assert_eq!(pair.client.registrations(), 1);
    pair.client.machine.close(pair.now, LINGER);
    pair.settle();
    assert_eq!(pair.client.state(), State::Closed);
    assert_eq!(pair.client.disconnects(), 1);
}

#[test]
fn a_deadline_that_comes_with_the_last_completion_is_met() {
    let mut pair = Pair::quiet();
    pair.client.write(10);
    pair.client.machine.close(pair.now, LINGER);
    pair.client.reports = false;
    pair.settle();
    pair.now = pair.now.after(LINGER);
    while pair.report(Client) {}
    pair.client.machine.handle_timeout(pair.now);
    assert_eq!(pair.client.machine.unconfirmed(), 0);
    pair.settle();
    assert_eq!(pair.client.state(), State::Closed);
}

/// VR-CLOSE-004.
#[test]
fn close_gives_up_when_the_time_is_over_and_says_what_is_missing() {
    let mut pair = Pair::quiet();
    pair.client.write(200);
    pair.client.machine.close(pair.now, LINGER);
    pair.settle();
    assert_eq!(pair.client.machine.next_timeout(), Some(pair.now.after(LINGER)));
    pair.advance(LINGER);
    let unconfirmed = pair.client.machine.unconfirmed();
    assert!(unconfirmed >= 200 - 128);
    let timed_out = Error::Transport(TransportError::CloseTimedOut { unconfirmed });
    assert_eq!(pair.client.state(), State::Failed(timed_out));
    pair.settle();
    assert_eq!(pair.client.disconnects(), 1);
}

#[test]
fn close_is_idempotent() {
    let mut pair = Pair::quiet();
    pair.client.write(200);
    pair.client.machine.close(pair.now, LINGER);
    pair.client.machine.close(pair.now, LINGER * 100);
    pair.settle();
    pair.advance(LINGER);
    assert!(matches!(pair.client.state(), State::Failed(_)));
    pair.client.machine.close(pair.now, LINGER);
    assert!(matches!(pair.client.state(), State::Failed(_)));
    pair.settle();
    assert_eq!(pair.client.disconnects(), 1);
}

/// VR-CLOSE-001.
#[test]
fn close_before_the_connection_is_there_delivers() {
    for who in [Client, Server] {
        let mut pair = Pair::new(quiet(Config::client()), quiet(Config::server()));
        assert_eq!(pair.side(who).write(10), 10);
        let now = pair.now;
        pair.side(who).machine.close(now, LINGER);
        assert_eq!(pair.side(who).state(), State::Connecting);
        assert_eq!(pair.post(who), 0, "nothing leaves before");
        let refused = pair.side(who).machine.commit(1);
        assert_eq!(refused, Err(Error::ApiMisuse(ApiMisuse::WriteAfterClose)));
        pair.establish(Server);
        pair.establish(Client);
        assert_eq!(pair.side(who).state(), State::Closing);
        pair.finish([0, 0]);
        assert_eq!((pair.client.state(), pair.server.state()), (State::Closed, State::Closed));
        assert_eq!(pair.side(peer(who)).read, 10);
    }
}

/// VR-CLOSE-004: it is within `linger`, whatever the keepalive times are.
#[test]
fn close_before_the_connection_is_there_has_an_end() {
    let keepalive = Keepalive::NONE.every(Some(LINGER / 100)).limit(Some(LINGER / 100));
    let client = quiet(Config::client()).keepalive(Some(keepalive));
    let mut pair = Pair::new(client, quiet(Config::server()));
    pair.client.write(10);
    pair.client.machine.close(pair.now, LINGER);
    pair.client.machine.close(pair.now, LINGER * 100);
    assert_eq!(pair.client.machine.next_timeout(), Some(pair.now.after(LINGER)));
    pair.client.machine.handle_timeout(pair.now);
    assert_eq!(pair.client.state(), State::Connecting);
    pair.client.machine.handle_timeout(pair.now.after(LINGER));
    let timed_out = Error::Transport(TransportError::CloseTimedOut { unconfirmed: 10 });
    assert_eq!(pair.client.state(), State::Failed(timed_out));
    pair.post(Client);
    assert_eq!(pair.client.log, [Action::Disconnect]);

    let mut pair = Pair::new(quiet(Config::client()), quiet(Config::server()));
    pair.client.write(10);
    pair.client.machine.close(pair.now, LINGER);
    pair.client.machine.handle_failure(failure(CompletionStatus::WR_FLUSH_ERR));
    assert_eq!(pair.client.state(), State::Connecting, "the event that comes with it says why");
    pair.client.machine.handle_disconnected();
    assert_eq!(pair.client.state(), State::Failed(Error::Transport(TransportError::Disconnected)));
}

#[test]
fn close_before_the_connection_is_there() {
    let mut pair = Pair::new(quiet(Config::client()), quiet(Config::server()));
    pair.client.machine.close(pair.now, LINGER);
    assert_eq!(pair.client.state(), State::Closed);
    pair.establish(Client);
    pair.post(Client);
    assert_eq!(pair.client.log, [Action::Disconnect]);
}

/// VR-CLOSE-002.
#[test]
fn bytes_received_before_the_end_can_be_read_after_it() {
    let mut pair = Pair::quiet();
    pair.server.write(100);
    pair.settle();
    pair.server.machine.close(pair.now, LINGER);
    pair.settle();
    assert_eq!(pair.client.state(), State::Closed);
    assert_eq!(pair.client.read(1000), 100);

    let mut pair = Pair::quiet();
    pair.server.write(50);
    pair.settle();
    pair.client.machine.handle_failure(failure(CompletionStatus::RETRY_EXC_ERR));
    assert_eq!(pair.client.read(1000), 50);
}

/// VR-CLOSE-005: ours answers it.
#[test]
fn the_peers_disconnect_ends_the_connection_in_order() {
    for who in [Client, Server] {
        let mut pair = Pair::quiet();
        pair.side(who).machine.handle_disconnected();
        assert_eq!(pair.side(who).state(), State::Closed);
        pair.post(who);
        pair.side(who).machine.handle_disconnected();
        pair.post(who);
        assert_eq!(pair.side(who).disconnects(), 1);
        let refused = pair.side(who).machine.commit(1);
        assert_eq!(refused, Err(Error::Transport(TransportError::Disconnected)));
    }
}

/// VR-CONN-006.
#[test]
fn a_disconnect_before_the_connection_is_there_is_an_error() {
    let mut pair = Pair::new(quiet(Config::client()), quiet(Config::server()));
    pair.client.machine.handle_disconnected();
    assert_eq!(pair.client.state(), State::Failed(Error::Transport(TransportError::Disconnected)));
}

/// VR-CLOSE-006.
#[test]
fn errors_are_sticky() {
    let mut pair = Pair::quiet();
    pair.client.machine.handle_message(pair.now, &[0; 31]);
    let first = pair.client.state();
    assert!(matches!(first, State::Failed(Error::InvalidMessage(_))));
    pair.client.machine.handle_message(pair.now, &[0xff; 32]);
    pair.client.machine.handle_immediate(pair.now, Immediate(u32::MAX));
    pair.client.machine.handle_sent(pair.now, 12345);
    pair.client.machine.handle_failure(failure(CompletionStatus::RETRY_EXC_ERR));
    pair.client.machine.handle_refusal("ibv_post_send");
    pair.client.machine.handle_disconnected();
    pair.client.machine.handle_timeout(pair.now.after(LINGER));
    pair.client.machine.close(pair.now, LINGER);
    assert_eq!(pair.client.state(), first);
    let State::Failed(error) = first else { unreachable!() };
    assert_eq!(pair.client.machine.commit(1), Err(error));
    pair.post(Client);
    assert_eq!(pair.client.log.iter().filter(|action| matches!(action, Action::Disconnect)).count(), 1);
    assert_eq!(pair.post(Client), 0, "nothing after the disconnect");
}

/// VR-CLOSE-008: in whichever order.
#[test]
fn the_first_failure_with_a_cause_wins_over_flushes() {
    let (flush, cause, later) =
        (CompletionStatus::WR_FLUSH_ERR, CompletionStatus::RETRY_EXC_ERR, CompletionStatus::REM_OP_ERR);
    for (order, expected) in [
        (vec![flush, flush], completion(flush)),
        (vec![flush, cause, flush, later], completion(cause)),
        (vec![cause, flush, later], completion(cause)),
        (
            vec![flush, CompletionStatus::REM_ACCESS_ERR, cause],
            State::Failed(Error::PeerMisbehaved(PeerMisbehaved::WindowRefused)),
        ),
    ] {
        let mut pair = Pair::quiet();
        for status in order {
            pair.client.machine.handle_failure(failure(status));
        }
        assert_eq!(pair.client.state(), expected);
        pair.post(Client);
        assert_eq!(pair.client.disconnects(), 1);
    }
}

/// VR-CLOSE-008.
#[test]
fn flushes_after_an_orderly_end_are_no_errors() {
    let mut pair = Pair::quiet();
    pair.client.machine.close(pair.now, LINGER);
    pair.settle();
    assert_eq!(pair.client.state(), State::Closed);
    pair.client.machine.handle_failure(failure(CompletionStatus::WR_FLUSH_ERR));
    pair.client.machine.handle_disconnected();
    assert_eq!(pair.client.state(), State::Closed);
}

#[test]
fn misuse_is_refused_and_the_connection_goes_on() {
    let mut pair = Pair::quiet();
    let misuse = ApiMisuse::CommitBeyondSpace { bytes: 257, space: 256 };
    assert_eq!(pair.client.machine.commit(257), Err(Error::ApiMisuse(misuse)));
    let misuse = ApiMisuse::CommitBeyondSpace { bytes: usize::MAX, space: 256 };
    assert_eq!(pair.client.machine.commit(usize::MAX), Err(Error::ApiMisuse(misuse)));
    let misuse = ApiMisuse::ConsumeBeyondReadable { bytes: 1, readable: 0 };
    assert_eq!(pair.client.machine.consume(1), Err(misuse));
    pair.server.write(10);
    pair.settle();
    let misuse = ApiMisuse::ConsumeBeyondReadable { bytes: 11, readable: 10 };
    assert_eq!(pair.client.machine.consume(11), Err(misuse));
    pair.finish([500, 500]);

    pair.client.machine.close(pair.now, LINGER);
    assert_eq!(pair.client.machine.commit(1), Err(Error::ApiMisuse(ApiMisuse::WriteAfterClose)));
    assert_eq!(pair.client.state(), State::Closing);
    pair.settle();
    assert_eq!(pair.client.state(), State::Closed);
}

#[test]
fn settings_out_of_bounds_are_refused_and_bounds_are_not() {
    let base = Config::client();
    let refused = [
        base.window(0),
        base.windows(0),
        base.windows(3),
        base.send_buffer(0),
        base.send_buffer((1 << 30) + 1),
        base.send_depth(0),
        base.send_depth((1 << 14) + 1),
        base.peer_receives(1),
        base.peer_receives((1 << 14) + 1),
        base.window_limit(0),
    ];
    for config in refused {
        assert!(config.check().is_err(), "{config:?}");
    }
    let allowed = [
        base.window(1).windows(1).send_buffer(1).send_depth(1).peer_receives(2).window_limit(1),
        base.window(u32::MAX)
            .send_buffer(1 << 30)
            .send_depth(1 << 14)
            .peer_receives(1 << 14)
            .window_limit(u32::MAX),
    ];
    for config in allowed {
        assert_eq!(config.check(), Ok(()), "{config:?}");
    }
}

#[test]
fn a_backend_that_fails_is_named() {
    let mut pair = Pair::quiet();
    pair.client.machine.handle_refusal("ibv_post_send");
    let refused = Error::Transport(TransportError::Backend { call: "ibv_post_send" });
    assert_eq!(pair.client.state(), State::Failed(refused));

    // All bits of an id are parts of counts, which are zero.
    for bit in 0..63 {
        let mut pair = Pair::new(quiet(Config::client()), quiet(Config::server()));
        pair.client.machine.handle_sent(pair.now, 1 << bit);
        assert!(matches!(pair.client.state(), State::Failed(Error::Bug(_))), "bit {bit}");
    }
}

/// A client that has posted 10 of a flush of 25 bytes, behind 30 that arrived.
fn within_a_flush() -> Pair {
    let client = quiet(Config::client()).send_buffer(40);
    let mut pair = Pair::connected(client, quiet(Config::server()).window(1000));
    pair.client.write(30);
    pair.settle();
    pair.client.write(25);
    assert!(pair.post_one(Client));
    pair
}

#[test]
fn an_end_within_a_flush() {
    let mut pair = within_a_flush();
    assert_eq!(pair.client.writes().last(), Some(&(10, None)));
    pair.client.machine.handle_disconnected();
    pair.post(Client);
    assert_eq!(pair.client.log.last(), Some(&Action::Disconnect));
    assert_eq!(pair.client.writes().len(), 2);
}

#[test]
fn closing_within_a_flush() {
    let mut pair = within_a_flush();
    pair.client.machine.close(pair.now, LINGER);
    pair.client.machine.handle_message(pair.now, &Message::Keepalive.encode());
    pair.settle();
    assert_eq!(pair.server.read(100), 55);
    assert_eq!((pair.client.state(), pair.server.state()), (State::Closed, State::Closed));
    assert_eq!(pair.side(Server).disconnects(), 1);
}

/// Soft-RoCE gives it the status of a refused WRITE.
#[test]
fn a_receive_fails_by_the_peer() {
    for (status, seen) in [
        (CompletionStatus::REM_ACCESS_ERR, CompletionStatus::LOC_ACCESS_ERR),
        (CompletionStatus::LOC_LEN_ERR, CompletionStatus::LOC_LEN_ERR),
    ] {
        let (mut pair, mut other) = (Pair::quiet(), Pair::quiet());
        pair.server.machine.handle_receive_failure(failure(status));
        other.server.machine.handle_failure(failure(seen));
        assert_eq!(pair.server.state(), other.server.state());
        let State::Failed(error) = pair.server.state() else { panic!("{:?}", pair.server.state()) };
        assert_eq!(error.effect(), Effect::Disconnect);
    }
    assert_eq!(Error::ApiMisuse(ApiMisuse::WriteAfterClose).effect(), Effect::CallRefused);
}
