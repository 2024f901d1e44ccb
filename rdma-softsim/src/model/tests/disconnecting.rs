//! How connections end.

use super::*;
use CompletionStatus as Status;

#[test]
fn disconnect_flushes_our_side_and_leaves_the_peers_as_it_is() {
    let mut w = World::new(&Setup::default());
    for side in [&w.a, &w.b] {
        side.receive(&mut w.model, 9, 0, 64).unwrap();
    }
    w.model.disconnect(w.a.id).unwrap();
    w.pass(Duration::ZERO);
    assert_eq!(w.a.completions(&mut w.model), [(9, Err(Status::WR_FLUSH_ERR))]);
    assert_eq!(w.b.completions(&mut w.model), []);
    assert_eq!(notice(&mut w.model, w.b.channel), Some(NoticeKind::Disconnected));
    // Our own event comes when the peer has disconnected too.
    assert_eq!(notice(&mut w.model, w.a.channel), None);
    assert!(matches!(w.model.disconnect(w.a.id), Err(Error::State(_))));
    w.b.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.b.receive(&mut w.model, 10, 0, 64).unwrap();
    w.model.disconnect(w.b.id).unwrap();
    w.pass(Duration::ZERO);
    assert_eq!(notice(&mut w.model, w.a.channel), Some(NoticeKind::Disconnected));
    let flushed: Vec<_> = [1, 9, 10].map(|id| (id, Err(Status::WR_FLUSH_ERR))).into();
    assert_eq!(w.b.completions(&mut w.model), flushed);
    assert_eq!((notice(&mut w.model, w.a.channel), notice(&mut w.model, w.b.channel)), (None, None));
    w.pass(Parameters::default().timewait);
    for side in [&w.a, &w.b] {
        assert_eq!(notice(&mut w.model, side.channel), Some(NoticeKind::TimewaitExit));
        assert_eq!(notice(&mut w.model, side.channel), None);
    }
    w.end();
}

#[test]
fn what_the_peer_sends_to_a_disconnected_side_fails() {
    let mut w = World::new(&Setup::default());
    w.model.disconnect(w.a.id).unwrap();
    w.b.post(&mut w.model, 1, SendOp::Write(w.a.remote(0)), 4).unwrap();
    w.pass(Parameters::default().ack_timeout * 8);
    assert_eq!(w.b.completions(&mut w.model), [(1, Err(Status::RETRY_EXC_ERR))]);
    w.end();
}

#[test]
fn what_was_acknowledged_before_the_end_is_there() {
    let parameters = Parameters { latency: millis(1), ..Parameters::default() };
    let mut w = World::new(&Setup { parameters, ..Setup::default() });
    for id in [8, 9] {
        w.b.receive(&mut w.model, id, 512, 64).unwrap();
    }
    w.a.fill(0, b"last words");
    let target = w.b.remote(0);
    w.a.post(&mut w.model, 1, SendOp::WriteImmediate(target, Immediate(10)), 10).unwrap();
    w.pass(millis(2));
    assert_eq!(w.a.completions(&mut w.model), [(1, Ok(Completed::Write))]);
    // This one is in flight, and may or may not arrive; it is flushed here.
    w.a.post(&mut w.model, 2, SendOp::Send, 4).unwrap();
    w.model.disconnect(w.a.id).unwrap();
    assert_eq!(w.a.completions(&mut w.model), [(2, Err(Status::WR_FLUSH_ERR))]);
    w.pass(millis(1));
    assert_eq!(notice(&mut w.model, w.b.channel), Some(NoticeKind::Disconnected));
    assert_eq!(w.b.completions(&mut w.model)[0], (8, Ok(recv_write(10))));
    assert_eq!(w.b.bytes(0, 10), b"last words");
    w.end();
}

#[test]
fn both_may_disconnect_at_once() {
    let parameters = Parameters { latency: millis(1), ..Parameters::default() };
    let mut w = World::new(&Setup { parameters, ..Setup::default() });
    w.model.disconnect(w.a.id).unwrap();
    w.model.disconnect(w.b.id).unwrap();
    w.pass(Duration::from_secs(10));
    for side in [&w.a, &w.b] {
        assert_eq!(notice(&mut w.model, side.channel), Some(NoticeKind::Disconnected));
        assert_eq!(notice(&mut w.model, side.channel), Some(NoticeKind::TimewaitExit));
        assert_eq!(notice(&mut w.model, side.channel), None);
    }
    w.end();
}

#[test]
fn a_dropped_identifier_disconnects() {
    let mut w = World::new(&Setup::default());
    w.model.destroy_pair(w.a.pair);
    w.pass(Duration::from_secs(1));
    assert_eq!(notice(&mut w.model, w.b.channel), None);
    w.model.destroy_identifier(w.a.id);
    w.pass(Duration::ZERO);
    assert_eq!(notice(&mut w.model, w.b.channel), Some(NoticeKind::Disconnected));
    w.model.disconnect(w.b.id).unwrap();
    w.end();
}

#[test]
fn disconnecting_from_a_dropped_peer_ends_at_once() {
    let parameters = Parameters { latency: millis(1), ..Parameters::default() };
    let mut w = World::new(&Setup { parameters, ..Setup::default() });
    w.model.disconnect(w.a.id).unwrap();
    w.model.destroy_pair(w.b.pair);
    w.model.destroy_identifier(w.b.id);
    w.pass(millis(1));
    assert_eq!(notice(&mut w.model, w.a.channel), Some(NoticeKind::Disconnected));
    w.end();
}

#[test]
fn over_a_dead_link_the_end_is_one_sided() {
    let mut w = World::new(&Setup::default());
    w.model.set_link(ip(2), Link::Down);
    w.model.disconnect(w.a.id).unwrap();
    w.pass(Parameters::default().cm_timeout);
    assert_eq!(notice(&mut w.model, w.a.channel), Some(NoticeKind::Disconnected));
    assert_eq!(notice(&mut w.model, w.b.channel), None);
    w.end();
}

#[test]
fn a_new_connection_takes_nothing_over_from_an_old_one() {
    let mut w = World::new(&Setup::default());
    let old = w.b.remote(0);
    w.model.disconnect(w.a.id).unwrap();
    w.model.destroy_pair(w.b.pair);
    let listening = w.b.channel;
    let id = resolved(&mut w.model, w.a.channel, ip(2));
    let a = equip(&mut w.model, w.a.host, w.a.channel, id, &Setup::default());
    w.model.connect(id, &PARAMS, &[]).unwrap();
    w.pass(Duration::ZERO);
    assert_eq!(notice(&mut w.model, listening), Some(NoticeKind::Disconnected));
    let Some(NoticeKind::ConnectRequest { id, .. }) = notice(&mut w.model, listening) else {
        panic!("no request")
    };
    let b = equip(&mut w.model, w.b.host, listening, id, &Setup::default());
    w.model.accept(id, &PARAMS, &[]).unwrap();
    w.pass(Duration::ZERO);
    while notice(&mut w.model, w.a.channel).is_some() {}
    assert_ne!(a.number, w.a.number);
    // A key of the old domain is invalid here.
    a.post(&mut w.model, 1, SendOp::Write(old), 4).unwrap();
    assert_eq!(a.completions(&mut w.model), [(1, Err(Status::REM_ACCESS_ERR))]);
    assert_eq!(b.completions(&mut w.model), []);
}
