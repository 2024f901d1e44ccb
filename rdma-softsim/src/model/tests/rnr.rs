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
fn without_retries_the_first_nak_is_fatal() {
    let mut w = world(0);
    w.a.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.a.post(&mut w.model, 2, SendOp::Send, 4).unwrap();
    assert_eq!(
        w.a.completions(&mut w.model),
        [(1, Err(Status::RNR_RETRY_EXC_ERR)), (2, Err(Status::WR_FLUSH_ERR))]
    );
    // The responder does not notice: its receives stay posted.
    w.b.receive(&mut w.model, 9, 0, 64).unwrap();
    assert_eq!(w.b.completions(&mut w.model), []);
    w.end();
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
fn success_gives_the_retries_back() {
    let mut w = world(1);
    let delay = set_timer(&mut w, 12);
    for id in 0..3 {
        w.a.post(&mut w.model, id, SendOp::Send, 4).unwrap();
        w.b.receive(&mut w.model, 100 + id, 0, 64).unwrap();
        w.pass(delay);
        assert_eq!(w.a.completions(&mut w.model), [(id, Ok(Completed::Send))]);
    }
    w.end();
}

#[test]
fn seven_is_for_ever_and_the_default_timer_is_the_slowest() {
    let mut w = world(7);
    w.a.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.pass(Duration::from_secs(3600));
    assert_eq!(w.a.completions(&mut w.model), []);
    w.b.receive(&mut w.model, 9, 0, 64).unwrap();
    // 655.36 ms after some NAK; the hour is not a multiple of it.
    w.pass(Duration::from_micros(655_360));
    assert_eq!(w.a.completions(&mut w.model), [(1, Ok(Completed::Send))]);
    w.end();
}

#[test]
fn each_side_lives_by_the_count_that_the_other_gave() {
    let setup = Setup {
        connect: ConnectParams { rnr_retry_count: 7, ..PARAMS },
        accept: ConnectParams { rnr_retry_count: 0, ..PARAMS },
        ..Setup::default()
    };
    let mut w = World::new(&setup);
    // The passive side retries for ever, because the active one passed seven.
    w.b.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.pass(Duration::from_secs(60));
    assert_eq!(w.b.completions(&mut w.model), []);
    // The active side never retries, because the passive one passed zero.
    w.a.post(&mut w.model, 2, SendOp::Send, 4).unwrap();
    assert_eq!(w.a.completions(&mut w.model), [(2, Err(Status::RNR_RETRY_EXC_ERR))]);
    w.end();
}

#[test]
fn what_waits_holds_up_what_is_behind() {
    let mut w = world(7);
    let delay = set_timer(&mut w, 12);
    let target = w.b.remote(0);
    w.a.fill(0, b"late");
    w.a.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.a.post(&mut w.model, 2, SendOp::Write(target), 4).unwrap();
    w.pass(delay * 5);
    assert_eq!(w.b.bytes(0, 4), [0; 4]);
    assert_eq!(w.a.completions(&mut w.model), []);
    w.b.receive(&mut w.model, 9, 64, 64).unwrap();
    w.pass(delay);
    assert_eq!(w.b.bytes(0, 4), b"late");
    assert_eq!(w.a.completions(&mut w.model), [(1, Ok(Completed::Send)), (2, Ok(Completed::Write))]);
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

#[test]
fn write_with_immediate_consumes_a_receive_and_plain_write_does_not() {
    let mut w = world(0);
    let target = w.b.remote(0);
    w.a.post(&mut w.model, 1, SendOp::Write(target), 4).unwrap();
    assert_eq!(w.a.completions(&mut w.model), [(1, Ok(Completed::Write))]);
    w.b.receive(&mut w.model, 9, 0, 0).unwrap();
    w.a.post(&mut w.model, 2, SendOp::WriteImmediate(target, Immediate(77)), 4).unwrap();
    assert_eq!(w.b.completions(&mut w.model), [(9, Ok(recv_write(77)))]);
    w.a.post(&mut w.model, 3, SendOp::WriteImmediate(target, Immediate(78)), 0).unwrap();
    assert_eq!(
        w.a.completions(&mut w.model),
        [(2, Ok(Completed::Write)), (3, Err(Status::RNR_RETRY_EXC_ERR))]
    );
    w.end();
}

#[test]
fn the_timer_is_for_connected_queue_pairs() {
    let mut w = World::half_open(&Setup::default());
    let refused = w.model.set_min_rnr_timer(w.b.pair, RnrTimer::MICROS_640);
    assert!(matches!(refused, Err(Error::State(_))));
    w.end();
}
