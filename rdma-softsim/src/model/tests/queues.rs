//! Order, slots, arming and overrun.

use super::*;
use CompletionStatus as Status;
use rdma_backend::RnrTimer;

#[test]
fn numbers_are_given_again_and_completions_of_the_former_owner_are_still_there() {
    let setup = Setup::default();
    let mut w = World::new(&setup);
    w.b.receive(&mut w.model, 7, 0, 8).unwrap();
    w.a.post(&mut w.model, 1, SendOp::Send, 8).unwrap();
    assert_ne!(w.a.number, w.b.number);
    w.model.destroy_pair(w.b.pair);
    let next = resolved(&mut w.model, w.b.channel, ip(1));
    let (pair, number, _) = w.model.create_pair(next, w.b.domain, w.b.queue, setup.limits).unwrap();
    assert_eq!(number, w.b.number);
    assert_eq!(w.b.completions(&mut w.model), [(7, Ok(recv(8)))]);
    w.model.destroy_pair(pair);
    w.model.destroy_identifier(next);
    w.end();
}

#[test]
fn buffers_of_inline_data_are_used_again() {
    let mut w = World::new(&Setup::default());
    let op = SendOp::Write(w.b.remote(0));
    for id in 0..100 {
        let payload = Payload::Inline(&[id as u8; 8]);
        w.model.post_named(w.a.pair, Request::new(id, op, true), payload, true).unwrap();
        w.model.ring(w.a.pair);
        w.model.settle();
        assert_eq!(w.a.completions(&mut w.model), [(id, Ok(Completed::Write))]);
        assert_eq!(w.b.bytes(0, 8), [id as u8; 8]);
    }
    assert_eq!(w.model.pairs.get(w.a.pair).unwrap().requester.spare.len(), 1);
    w.end();
}

#[test]
fn send_slots_come_back_when_a_later_signaled_completion_is_polled() {
    let mut w = World::new(&Setup::default());
    let target = w.b.remote(0);
    let write = SendOp::Write(target);
    for id in 0..7 {
        w.a.post_unsignaled(&mut w.model, id, write, 4).unwrap();
    }
    w.a.post(&mut w.model, 7, write, 4).unwrap();
    // All are executed, but not polled.
    let full = Error::QueueFull { queue: "send", depth: 8 };
    assert_eq!(w.a.post(&mut w.model, 8, write, 4), Err(full));
    assert_eq!(w.a.completions(&mut w.model), [(7, Ok(Completed::Write))]);
    for id in 10..18 {
        w.a.post_unsignaled(&mut w.model, id, write, 4).unwrap();
    }
    // Without a signalled one among them the queue stays full for ever, as on hardware.
    assert_eq!(w.a.completions(&mut w.model), []);
    assert_eq!(w.a.post(&mut w.model, 18, write, 4), Err(full));
    w.end();
}

#[test]
fn receive_slots_come_back_when_a_message_consumes_them() {
    let mut w = World::new(&Setup::default());
    for id in 0..8 {
        w.b.receive(&mut w.model, id, 0, 64).unwrap();
    }
    let full = Error::QueueFull { queue: "receive", depth: 8 };
    assert_eq!(w.b.receive(&mut w.model, 8, 0, 64), Err(full));
    w.a.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.b.receive(&mut w.model, 8, 0, 64).unwrap();
    w.end();
}

#[test]
fn an_unsignaled_failure_is_reported_and_frees_its_slots() {
    let mut w = World::new(&Setup::default());
    let good = SendOp::Write(w.b.remote(0));
    let bad = SendOp::Write(RemoteAddress { address: 0, rkey: 0 });
    w.a.post_unsignaled(&mut w.model, 1, good, 4).unwrap();
    w.a.post_unsignaled(&mut w.model, 2, bad, 4).unwrap();
    assert_eq!(w.a.completions(&mut w.model), [(2, Err(Status::REM_ACCESS_ERR))]);
    // In the error state everything is flushed, including unsignalled requests. All eight slots are
    // free.
    for id in 10..18 {
        w.a.post_unsignaled(&mut w.model, id, good, 4).unwrap();
    }
    let flushed: Vec<_> = (10..18).map(|id| (id, Err(Status::WR_FLUSH_ERR))).collect();
    assert_eq!(w.a.completions(&mut w.model), flushed);
    w.end();
}

#[test]
fn overrun_loses_the_queue_and_its_queue_pairs() {
    let mut w = World::new(&Setup { completions: 4, ..Setup::default() });
    let target = w.b.remote(0);
    for id in 0..4 {
        w.a.post(&mut w.model, id, SendOp::Write(target), 4).unwrap();
    }
    assert_eq!(w.model.wakes().count(), 0);
    w.a.post(&mut w.model, 4, SendOp::Write(target), 4).unwrap();
    // Sleepers are woken to see it.
    assert_eq!(
        w.model.wakes().collect::<Vec<_>>(),
        [Wake::Completions(w.a.queue), Wake::Events(w.a.channel)]
    );
    let lost = Error::Overrun { depth: 4 };
    assert_eq!(w.model.poll(w.a.queue, &mut [Completion::EMPTY]), Err(lost));
    assert_eq!(w.model.arm(w.a.queue), Err(lost));
    assert_eq!(w.model.pairs.get(w.a.pair).unwrap().state, pairs::queue_pair::QueuePairState::Error);
    // The peer notices only by its own requests.
    w.b.post(&mut w.model, 9, SendOp::Write(w.a.remote(0)), 4).unwrap();
    // Eight time-outs of 67 ms are less.
    w.pass(Duration::from_secs(1));
    assert_eq!(w.b.completions(&mut w.model), [(9, Err(Status::RETRY_EXC_ERR))]);
    w.end();
}

#[test]
fn a_queue_pair_of_one_slot_each_and_no_inline_works() {
    let limits = QueuePairLimits { send_depth: 1, recv_depth: 1, inline: 0 };
    let mut w = World::new(&Setup { limits, ..Setup::default() });
    for id in 0..3 {
        w.b.receive(&mut w.model, id, 0, 64).unwrap();
        w.a.post(&mut w.model, id, SendOp::Send, 4).unwrap();
        assert_eq!(w.a.completions(&mut w.model), [(id, Ok(Completed::Send))]);
    }
    w.end();
}

/// To RTS, with the queue pair of this number at `remote`.
fn renew(model: &mut Model, pair: PairId, local: u8, remote: u8, number: u32) {
    model.reset(pair).unwrap();
    model.initialise(pair).unwrap();
    model.begin_receiving(pair, ip(local), ip(remote), number, RnrTimer::SLOWEST).unwrap();
    model.begin_sending(pair, 7, 7, 1).unwrap();
}

#[test]
fn completions_from_before_a_reset_give_back_no_slots_after_it() {
    let limits = QueuePairLimits { send_depth: 1, recv_depth: 1, inline: 0 };
    let mut w = World::new(&Setup { limits, ..Setup::default() });
    let op = SendOp::Write(w.b.remote(0));
    w.a.post(&mut w.model, 1, op, 8).unwrap();
    renew(&mut w.model, w.a.pair, 1, 2, w.b.number);
    renew(&mut w.model, w.b.pair, 2, 1, w.a.number);
    w.a.post(&mut w.model, 2, op, 8).unwrap();
    let mut one = [Completion::EMPTY];
    assert_eq!((w.model.poll(w.a.queue, &mut one), one[0].id), (Ok(1), 1));
    let full = Error::QueueFull { queue: "send", depth: 1 };
    assert_eq!(w.a.post(&mut w.model, 3, op, 8), Err(full));
    assert_eq!((w.model.poll(w.a.queue, &mut one), one[0].id), (Ok(1), 2));
    w.a.post(&mut w.model, 3, op, 8).unwrap();
    w.end();
}

#[test]
fn answers_to_what_was_sent_before_a_reset_end_nothing_after_it() {
    let parameters = Parameters { latency: millis(2), ..Parameters::default() };
    let mut w = World::new(&Setup { parameters, ..Setup::default() });
    let op = SendOp::Write(w.b.remote(0));
    w.a.post(&mut w.model, 1, op, 8).unwrap();
    // It has arrived, and its answer is in flight.
    w.pass(millis(3));
    renew(&mut w.model, w.a.pair, 1, 2, w.b.number);
    renew(&mut w.model, w.b.pair, 2, 1, w.a.number);
    w.a.post(&mut w.model, 2, op, 8).unwrap();
    w.pass(millis(2));
    assert_eq!(w.a.completions(&mut w.model), [], "the second is not answered yet");
    w.pass(millis(2));
    assert_eq!(w.a.completions(&mut w.model), [(2, Ok(Completed::Write))]);
    w.end();
}
