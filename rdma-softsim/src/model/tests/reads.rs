//! RDMA READ.

use super::*;

#[test]
fn reads_beyond_the_depth_wait_and_so_does_all_behind_them() {
    let parameters = Parameters { latency: millis(1), ..Parameters::default() };
    let two = ConnectParams { initiator_depth: 2, responder_resources: 2, ..PARAMS };
    let mut w = World::new(&Setup { parameters, connect: two, accept: two, ..Setup::default() });
    let at = w.b.remote(0);
    for id in 1..=3 {
        w.a.post(&mut w.model, id, SendOp::Read(at), 4).unwrap();
    }
    w.a.post(&mut w.model, 4, SendOp::Write(at), 4).unwrap();
    let ids = |w: &mut World| w.a.completions(&mut w.model).iter().map(|(id, _)| *id).collect::<Vec<_>>();
    w.pass(millis(2));
    assert_eq!(ids(&mut w), [1, 2]);
    w.pass(millis(2));
    assert_eq!(ids(&mut w), [3, 4]);
    w.end();
}

#[test]
fn the_depth_is_what_both_sides_allow() {
    let none = ConnectParams { initiator_depth: 0, ..PARAMS };
    let refuses = ConnectParams { responder_resources: 0, ..PARAMS };
    for (connect, accept) in [(none, PARAMS), (PARAMS, refuses)] {
        let mut w = World::new(&Setup { connect, accept, ..Setup::default() });
        let (to_b, to_a) = (w.b.remote(0), w.a.remote(0));
        assert!(matches!(w.a.post(&mut w.model, 1, SendOp::Read(to_b), 4), Err(Error::Argument(_))));
        // The other direction has a depth of its own.
        w.b.post(&mut w.model, 2, SendOp::Read(to_a), 4).unwrap();
        assert_eq!(w.b.completions(&mut w.model), [(2, Ok(Completed::Read))]);
        w.end();
    }
}
