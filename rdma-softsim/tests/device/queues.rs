//! Shared receive queues, drained send queues, solicited events and time-outs.

use rdma_backend::CompletionQueue as _;

use super::*;

/// Two queue pairs take their receives from one queue, whose limit raises one event.
#[test]
fn a_shared_queue_gives_its_receives_to_whoever_comes() {
    let (_fabric, a, b) = connected();
    let shared = b.device.create_shared_receives(11, &b.domain, 2, 0).unwrap();
    assert!(!shared.is_used());
    let queues = [&b.queue, &b.queue];
    let pair =
        b.device.create_queue_pair(12, Service::Connected, &b.domain, queues, Some(&shared), LIMITS).unwrap();
    assert!(shared.is_used());
    // The peer of `a` is now this one.
    let b = End { pair, ..b };
    a.pair.modify(Transition::Reset).unwrap();
    connect(&a, 1, 2, b.pair.number());
    connect(&b, 2, 1, a.pair.number());
    let receive = |id| NamedReceive { id, local: &[] };
    assert!(b.pair.post_named_receives(&[receive(1)]).is_err(), "it has no queue of its own");
    let full = shared.post(&[receive(1), receive(2), receive(3)]).unwrap_err();
    assert_eq!(full.posted, 2);
    shared.set_limit(2).unwrap();
    assert!(shared.set_limit(3).is_err());
    a.post_list(SendOp::Send, &[]);
    assert_eq!(b.device.next_event().unwrap(), Some((AsyncEvent::Other(15), About::Shared(11))));
    assert_eq!(shared.limit(), Ok(0), "the limit is told once");
    a.post_list(SendOp::Send, &[]);
    let received = Completed::Recv { len: 0, immediate: None };
    assert_eq!(b.completions(), [Ok(received); 2]);
    assert_eq!(b.device.next_event().unwrap(), None);
    // Shared receives are not flushed with one of their queue pairs.
    shared.post(&[receive(4)]).unwrap();
    b.pair.modify(Transition::Fail).unwrap();
    assert_eq!(b.completions(), []);
    assert_eq!(b.device.next_event().unwrap(), Some((AsyncEvent::Other(16), About::Pair(12))));
}

/// SQD: posted requests wait, and an event reports that nothing is in flight any more. RTS lets
/// them go on.
#[test]
fn a_drained_send_queue_waits() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    assert!(a.pair.modify(Transition::Drain { notify: true }).is_ok());
    assert_eq!(a.pair.state(), Ok(PairState::Draining));
    assert_eq!(a.device.next_event().unwrap(), Some((AsyncEvent::Other(5), About::Pair(9))));
    a.post(SendOp::Write(remote), a.sge(0, 8));
    assert_eq!(a.completions(), []);
    // It still answers.
    let back = RemoteAddress { address: BASE, rkey: a.region.key() };
    b.post(SendOp::Write(back), b.sge(0, 8));
    assert_eq!(b.completions(), [Ok(Completed::Write)]);
    a.pair.modify(Transition::Send { retry: 1, rnr_retry: 7, read_depth: 1 }).unwrap();
    assert_eq!(a.completions(), [Ok(Completed::Write)]);
    assert_eq!(a.device.next_event().unwrap(), None, "it was told once");
}

/// The event waits for the end of requests in flight.
#[test]
fn draining_waits_for_what_is_on_its_way() {
    let (fabric, a, b) = connected();
    fabric.set_latency(Duration::from_millis(2));
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    a.post(SendOp::Write(remote), a.sge(0, 8));
    a.pair.modify(Transition::Drain { notify: true }).unwrap();
    a.post(SendOp::Write(remote), a.sge(0, 8));
    let told = loop {
        match a.device.next_event().unwrap() {
            None => std::thread::yield_now(),
            told => break told,
        }
    };
    assert_eq!(told, Some((AsyncEvent::Other(5), About::Pair(9))));
    assert_eq!(a.completions(), [Ok(Completed::Write)], "the first one, and not the second");
}

/// `ibv_req_notify_cq(3)`: a waiter for solicited events is woken by those, and by failures.
#[test]
fn solicited_events_come_when_they_are_asked_for() {
    let (_fabric, a, b) = connected();
    let receives: Vec<_> = (0..4).map(|id| NamedReceive { id, local: &[] }).collect();
    b.pair.post_named_receives(&receives).unwrap();
    let send = |solicited| {
        let local = Local::Inline(&[]);
        let work = NamedSend { id: 1, op: SendOp::Send.into(), local, signaled: false, solicited };
        a.pair.post_named(&[work]).unwrap();
    };
    let raised = || b.signals.count.load(Relaxed);
    b.arm(Arming::Solicited);
    send(false);
    assert_eq!(raised(), 0);
    send(true);
    assert_eq!(raised(), 1);
    b.arm(Arming::Solicited);
    b.queue.called().unwrap();
    // An arming for all is never narrowed (`ibv_req_notify_cq(3)` has no way back).
    b.arm(Arming::All);
    b.queue.called().unwrap();
    b.arm(Arming::Solicited);
    send(false);
    assert_eq!(raised(), 2);
    b.arm(Arming::Solicited);
    b.pair.modify(Transition::Fail).unwrap();
    assert_eq!(raised(), 3, "the flush of the last receive");
}

/// A program finds its completions without a call, as long as there is room for them, and is told
/// when there is not. What it has taken gives its slots back when it posts.
#[test]
fn completions_are_shown() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    let write = || a.post(SendOp::Write(remote), a.sge(0, 8));
    for shown in 1..=ROOM {
        write();
        assert_eq!((a.shown.len(), a.shown.must_call()), (shown, false));
    }
    write();
    assert!(a.shown.must_call());
    let rest = LIMITS.send_depth as usize - ROOM - 1;
    (0..rest).for_each(|_| write());
    assert_eq!(a.pair.send_room(), 0);
    assert_eq!(a.shown.take().len(), ROOM);
    assert_eq!(a.pair.send_room(), ROOM as u32);
    assert_eq!(a.completions().len(), LIMITS.send_depth as usize - ROOM);
    assert_eq!((a.pair.send_room(), a.shown.must_call()), (LIMITS.send_depth, false));
}

/// An arming is for what comes later, also if the model learns of it with the next completion.
#[test]
fn an_arming_is_for_what_comes_later() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    let write = || a.post(SendOp::Write(remote), a.sge(0, 8));
    let raised = || a.signals.count.load(Relaxed);
    write();
    a.arm(Arming::All);
    a.queue.called().unwrap();
    assert_eq!(raised(), 0, "it was there before");
    write();
    assert_eq!(raised(), 1);
    write();
    assert_eq!(raised(), 1, "once for each arming");
    a.arm(Arming::All);
    write();
    assert_eq!(raised(), 2);
}

/// A program that arms its queue, and does not find the completion that is on its way, is woken:
/// whether the completion finds room or not.
#[test]
fn a_program_that_arms_meanwhile_is_woken() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    let write = || a.post(SendOp::Write(remote), a.sge(0, 8));
    let raised = || a.signals.count.load(Relaxed);
    let arm = |page: &mut Page| page.arm(Arming::All);
    a.shown.meanwhile(Moment::Showing, arm);
    write();
    assert_eq!(raised(), 1);
    (1..ROOM).for_each(|_| write());
    a.shown.meanwhile(Moment::Asking, arm);
    write();
    assert_eq!((a.shown.len(), raised()), (ROOM, 2));
    write();
    assert_eq!(raised(), 2, "once for each arming");
}

/// A program that has found the completion before it arms its queue waits for the next one.
#[test]
fn a_program_that_has_found_a_completion_is_not_woken_for_it() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    let write = || a.post(SendOp::Write(remote), a.sge(0, 8));
    let raised = || a.signals.count.load(Relaxed);
    a.shown.meanwhile(Moment::Shown, |page| {
        page.take();
        page.arm(Arming::All);
    });
    write();
    assert_eq!(raised(), 0);
    write();
    assert_eq!(raised(), 1);
    // The event of an earlier arming leaves the next arming as it is.
    a.arm(Arming::All);
    a.shown.meanwhile(Moment::Shown, |page| {
        page.take();
        page.arm(Arming::All);
    });
    write();
    assert_eq!(raised(), 2);
    write();
    assert_eq!(raised(), 3);
}

/// What a program takes after it has armed its queue is taken, and the queue stays armed.
#[test]
fn completions_are_taken_after_an_arming() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    let write = || a.post(SendOp::Write(remote), a.sge(0, 8));
    let raised = || a.signals.count.load(Relaxed);
    write();
    assert_eq!(a.shown.take().len(), 1);
    (0..2).for_each(|_| write());
    a.arm(Arming::All);
    assert_eq!(a.shown.take().len(), 2);
    assert_eq!((a.pair.send_room(), raised()), (LIMITS.send_depth, 0));
    write();
    assert_eq!(raised(), 1);
}

/// What a completion costs: it is shown once, with a look before, and another one after if no event
/// is due.
#[test]
fn a_completion_costs_two_looks() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    let write = || a.post(SendOp::Write(remote), a.sge(0, 8));
    a.shown.counts();
    write();
    assert_eq!(a.shown.counts(), (2, 1));
    a.arm(Arming::All);
    write();
    assert_eq!(a.shown.counts(), (1, 1));
    assert_eq!((a.pair.send_room(), a.shown.counts()), (LIMITS.send_depth - 2, (1, 0)));
}

/// A completion that is polled by a call is shown no more, and the next one is.
#[test]
fn a_queue_may_be_polled_by_call() {
    let (_fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    let write = || a.post(SendOp::Write(remote), a.sge(0, 8));
    for shown in 1..ROOM {
        write();
        assert_eq!(a.queue.poll(&mut [Completion::EMPTY; 2]), Ok(1));
        assert_eq!(a.shown.len(), shown);
    }
}

/// `timeout` of a queue pair: how long its retries last.
#[test]
fn a_queue_pair_has_a_time_out_of_its_own() {
    // The fabric's own time-out ends nothing while this runs.
    let ack_timeout = Duration::from_secs(1 << 20);
    let parameters = Parameters { ack_timeout, ..Parameters::default() };
    let (fabric, a, b) = connected_on(Fabric::with_parameters(parameters));
    assert!(a.pair.set_ack_timeout(32).is_err());
    // 8 µs, and one retry.
    a.pair.set_ack_timeout(1).unwrap();
    fabric.set_link(address(2), rdma_softsim::Link::Down);
    a.post(SendOp::Write(RemoteAddress { address: BASE, rkey: b.region.key() }), a.sge(0, 8));
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let failed = loop {
        match a.completions() {
            none if none.is_empty() => {
                assert!(std::time::Instant::now() < deadline, "nothing ends the retries");
                std::thread::yield_now();
            }
            some => break some,
        }
    };
    assert_eq!(failed, [Err(CompletionStatus::RETRY_EXC_ERR)]);
}
