//! How connections end.

use super::*;
use CompletionStatus as Status;

#[test]
fn what_the_peer_sends_to_a_disconnected_side_fails() {
    let mut w = World::new(&Setup::default());
    w.model.disconnect(w.a.id).unwrap();
    assert!(matches!(w.model.disconnect(w.a.id), Err(Error::State(_))));
    w.b.post(&mut w.model, 1, SendOp::Write(w.a.remote(0)), 4).unwrap();
    // The message and its seven repetitions each wait for an answer.
    w.pass(Parameters::default().ack_timeout * 8);
    assert_eq!(w.b.completions(&mut w.model), [(1, Err(Status::RETRY_EXC_ERR))]);
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
