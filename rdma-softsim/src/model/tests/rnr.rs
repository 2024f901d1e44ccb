//! Receiver not ready.

use super::*;
use CompletionStatus as Status;
use rdma_backend::RnrTimer;

/// A world in which the passive side lets the active one retry `count` times.
fn world(count: u8) -> World {
    World::new(&Setup { accept: ConnectParams { rnr_retry_count: count, ..PARAMS }, ..Setup::default() })
}

fn set_timer(world: &mut World, code: u8) -> Duration {
    let timer = RnrTimer::from_code(code).unwrap();
    world.model.set_min_rnr_timer(world.b.pair, timer).unwrap();
    timer.delay()
}

#[test]
fn three_retries_end_at_the_fourth_nak() {
    let mut w = world(3);
    let delay = set_timer(&mut w, 12);
    assert_eq!(delay, Duration::from_micros(640));
    w.a.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.pass(delay * 3 - Duration::from_nanos(1));
    assert_eq!(w.a.completions(&mut w.model), []);
    w.pass(Duration::from_nanos(1));
    assert_eq!(w.a.completions(&mut w.model), [(1, Err(Status::RNR_RETRY_EXC_ERR))]);
    w.end();
}

#[test]
fn a_receive_posted_late_is_found_at_the_timer_and_not_before() {
    let mut w = world(3);
    let delay = set_timer(&mut w, 14);
    w.a.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.b.receive(&mut w.model, 9, 0, 64).unwrap();
    w.pass(delay - Duration::from_nanos(1));
    assert_eq!(w.b.completions(&mut w.model), []);
    w.pass(Duration::from_nanos(1));
    assert_eq!(w.b.completions(&mut w.model), [(9, Ok(recv(4)))]);
    assert_eq!(w.a.completions(&mut w.model), [(1, Ok(Completed::Send))]);
    w.end();
}

#[test]
fn what_is_posted_meanwhile_waits_too() {
    let mut w = world(7);
    let delay = set_timer(&mut w, 12);
    w.a.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.b.receive(&mut w.model, 8, 0, 64).unwrap();
    w.b.receive(&mut w.model, 9, 0, 64).unwrap();
    w.a.post(&mut w.model, 2, SendOp::Send, 4).unwrap();
    assert_eq!(w.b.completions(&mut w.model), []);
    w.pass(delay);
    assert_eq!(w.b.completions(&mut w.model), [(8, Ok(recv(4))), (9, Ok(recv(4)))]);
    w.end();
}

#[test]
fn messages_in_flight_behind_a_nak_are_sent_again_in_order() {
    let parameters = Parameters { latency: millis(5), ..Parameters::default() };
    let mut w = World::new(&Setup { parameters, ..Setup::default() });
    let delay = set_timer(&mut w, 24);
    w.b.receive(&mut w.model, 10, 0, 64).unwrap();
    for id in 1..=4 {
        w.a.post(&mut w.model, id, SendOp::Send, 4).unwrap();
    }
    // The first is executed, the others are not. The NAK is back after 10 ms.
    w.pass(millis(10));
    assert_eq!(w.a.completions(&mut w.model), [(1, Ok(Completed::Send))]);
    for id in 11..=13 {
        w.b.receive(&mut w.model, id, 0, 64).unwrap();
    }
    w.pass(delay + millis(5) - Duration::from_nanos(1));
    assert_eq!(w.b.completions(&mut w.model), [(10, Ok(recv(4)))]);
    w.pass(Duration::from_nanos(1));
    // The message without a receive is retried alone; those behind it follow its acknowledgement.
    assert_eq!(w.b.completions(&mut w.model), [(11, Ok(recv(4)))]);
    w.pass(millis(10));
    assert_eq!(w.b.completions(&mut w.model), [(12, Ok(recv(4))), (13, Ok(recv(4)))]);
    w.pass(millis(5));
    let sent: Vec<_> = (2..=4).map(|id| (id, Ok(Completed::Send))).collect();
    assert_eq!(w.a.completions(&mut w.model), sent);
    w.end();
}
