//! Links that go down, hosts that die, and leftovers.

use super::*;
use crate::faults::{Connections, Fault, When};
use CompletionStatus as Status;

fn until_given_up(parameters: &Parameters, retries: u32) -> Duration {
    parameters.ack_timeout * (retries + 1)
}

#[test]
fn a_dead_link_ends_requests_after_the_retries_and_not_before() {
    for retry_count in [0, 1, 7] {
        let setup = Setup { connect: ConnectParams { retry_count, ..PARAMS }, ..Setup::default() };
        let mut w = World::new(&setup);
        w.model.set_link(ip(2), Link::Down);
        // The request's retry_count is that of both sides.
        w.a.post(&mut w.model, 1, SendOp::Write(w.b.remote(0)), 4).unwrap();
        w.b.post(&mut w.model, 2, SendOp::Write(w.a.remote(0)), 4).unwrap();
        w.pass(until_given_up(&setup.parameters, retry_count.into()) - Duration::from_nanos(1));
        assert_eq!((w.a.completions(&mut w.model), w.b.completions(&mut w.model)), (vec![], vec![]));
        w.pass(Duration::from_nanos(1));
        assert_eq!(w.a.completions(&mut w.model), [(1, Err(Status::RETRY_EXC_ERR))]);
        assert_eq!(w.b.completions(&mut w.model), [(2, Err(Status::RETRY_EXC_ERR))]);
        w.end();
    }
}

#[test]
fn an_idle_dead_link_is_invisible() {
    let mut w = World::new(&Setup::default());
    w.model.set_link(ip(1), Link::Down);
    w.b.receive(&mut w.model, 9, 0, 64).unwrap();
    w.pass(Duration::from_secs(3600));
    assert_eq!((w.a.completions(&mut w.model), w.b.completions(&mut w.model)), (vec![], vec![]));
    assert_eq!(notice(&mut w.model, w.a.channel), None);
    w.end();
}

#[test]
fn a_link_that_comes_back_in_time_costs_time_only() {
    let mut w = World::new(&Setup::default());
    for id in 10..13 {
        w.b.receive(&mut w.model, id, 0, 64).unwrap();
    }
    w.model.set_link(ip(2), Link::Down);
    for id in 1..=3 {
        w.a.post(&mut w.model, id, SendOp::Send, 4).unwrap();
    }
    w.pass(millis(200));
    w.model.set_link(ip(2), Link::Up);
    w.pass(millis(100));
    let ids: Vec<_> =
        w.a.completions(&mut w.model).iter().map(|(id, result)| (*id, result.is_ok())).collect();
    assert_eq!(ids, [(1, true), (2, true), (3, true)]);
    assert_eq!(w.b.completions(&mut w.model).len(), 3);
    w.end();
}

/// Of two faults of one link, or of one connection, the longer one counts.
#[test]
fn a_short_fault_does_not_end_a_longer_one() {
    for whole in [true, false] {
        let mut w = World::new(&Setup::default());
        let connections = if whole { Connections::All } else { Connections::Pair(w.a.number) };
        for micros in [200_000, 1_000] {
            w.model.inject(w.a.host, connections, Fault::LinkDown { micros }, Ok(When::Event(0)));
        }
        // Both begin with this message.
        w.a.post(&mut w.model, 1, SendOp::Write(w.b.remote(0)), 4).unwrap();
        assert_eq!(w.model.faults_struck(), 2);
        w.pass(millis(200) - Duration::from_nanos(1));
        assert_eq!(w.a.completions(&mut w.model), []);
        w.pass(millis(100));
        assert_eq!(w.a.completions(&mut w.model), [(1, Ok(Completed::Write))]);
        while notice(&mut w.model, w.a.channel).is_some() {}
        w.end();
    }
}

/// A fault is no limit that could be raised.
#[test]
fn an_injected_shortage_names_no_limit() {
    let (mut model, host, _) = hosts(Parameters::default());
    let context = model.open(host).unwrap();
    model.inject(host, Connections::All, Fault::Exhausted, Ok(When::Event(0)));
    let error = model.create_domain_in(context).unwrap_err().to_string();
    assert_eq!(error, "the device has no more protection domains (an injected fault)");
    model.create_domain_in(context).unwrap();
}

#[test]
fn a_lost_acknowledgement_does_not_execute_the_message_twice() {
    let parameters = Parameters { latency: millis(5), ..Parameters::default() };
    let mut w = World::new(&Setup { parameters, ..Setup::default() });
    for id in [8, 9] {
        w.b.receive(&mut w.model, id, 0, 64).unwrap();
    }
    w.a.post(&mut w.model, 1, SendOp::Write(w.b.remote(0)), 4).unwrap();
    w.a.post(&mut w.model, 2, SendOp::Send, 4).unwrap();
    w.a.fill(0, b"once");
    w.pass(millis(6));
    assert_eq!((w.b.bytes(0, 4), w.b.completions(&mut w.model)), (b"once".to_vec(), vec![(8, Ok(recv(4)))]));
    // The answers are lost. Meanwhile both sides write their memory.
    w.model.set_link(ip(1), Link::Down);
    w.pass(millis(5));
    w.model.set_link(ip(1), Link::Up);
    w.a.fill(0, b"done");
    w.b.fill(0, b"mine");
    w.pass(millis(100));
    assert_eq!(w.a.completions(&mut w.model), [(1, Ok(Completed::Write)), (2, Ok(Completed::Send))]);
    assert_eq!((w.b.bytes(0, 4), w.b.completions(&mut w.model)), (b"mine".to_vec(), vec![]));
    w.end();
}

#[test]
fn an_acknowledgement_that_overtook_a_lost_one_does_not_count() {
    let parameters = Parameters { latency: millis(5), ..Parameters::default() };
    let mut w = World::new(&Setup { parameters, ..Setup::default() });
    let op = SendOp::Write(w.b.remote(0));
    w.a.post(&mut w.model, 1, op, 4).unwrap();
    w.pass(millis(3));
    w.a.post(&mut w.model, 2, op, 4).unwrap();
    w.pass(millis(6));
    // The first answer comes at 10 ms, to a dead link, and the second at 13 ms, to a repaired one.
    w.model.set_link(ip(1), Link::Down);
    w.pass(millis(2));
    w.model.set_link(ip(1), Link::Up);
    w.pass(millis(10));
    assert_eq!(w.a.completions(&mut w.model), []);
    w.pass(parameters.ack_timeout);
    assert_eq!(w.a.completions(&mut w.model), [(1, Ok(Completed::Write)), (2, Ok(Completed::Write))]);
    w.end();
}

#[test]
fn success_gives_the_retries_back() {
    let setup = Setup { connect: ConnectParams { retry_count: 1, ..PARAMS }, ..Setup::default() };
    let mut w = World::new(&setup);
    for id in 0..3 {
        w.model.set_link(ip(2), Link::Down);
        w.a.post(&mut w.model, id, SendOp::Write(w.b.remote(0)), 4).unwrap();
        w.model.set_link(ip(2), Link::Up);
        w.pass(setup.parameters.ack_timeout);
        assert_eq!(w.a.completions(&mut w.model), [(id, Ok(Completed::Write))]);
    }
    w.end();
}

#[test]
fn connecting_over_a_dead_link_is_unreachable_after_the_timeout() {
    let (mut model, host, _) = hosts(Parameters::default());
    let channel = model.create_channel(host).unwrap();
    let id = resolved(&mut model, channel, ip(2));
    let side = equip(&mut model, host, channel, id, &Setup::default());
    model.set_link(ip(2), Link::Down);
    model.connect(side.id, &PARAMS, &[]).unwrap();
    pass(&mut model, millis(2000) - Duration::from_nanos(1));
    assert_eq!(notice(&mut model, channel), None);
    pass(&mut model, Duration::from_nanos(1));
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::Unreachable(-110)));
    // The failed connect has moved the queue pair to the error state.
    side.post(&mut model, 1, SendOp::Send, 4).unwrap();
    assert_eq!(side.completions(&mut model), [(1, Err(Status::WR_FLUSH_ERR))]);
}

#[test]
fn a_request_waits_for_a_link_that_comes_back() {
    let (mut model, a, b) = hosts(Parameters::default());
    let listening = model.create_channel(b).unwrap();
    model.listen(listening, SocketAddr::new(ip(2), PORT), 0).unwrap();
    let channel = model.create_channel(a).unwrap();
    let id = resolved(&mut model, channel, ip(2));
    let side = equip(&mut model, a, channel, id, &Setup::default());
    model.set_link(ip(1), Link::Down);
    model.connect(side.id, &PARAMS, &[]).unwrap();
    pass(&mut model, millis(1600));
    // It is tried again every 250 ms, an eighth of `cm_timeout`.
    model.set_link(ip(1), Link::Up);
    pass(&mut model, millis(250));
    assert!(matches!(notice(&mut model, listening), Some(NoticeKind::ConnectRequest { .. })));
}

#[test]
fn an_accept_that_never_arrives_is_unreachable_on_both_sides() {
    let mut w = World::half_open(&Setup::default());
    w.model.set_link(ip(1), Link::Down);
    w.model.accept(w.b.id, &PARAMS, &[]).unwrap();
    w.pass(millis(2000));
    assert_eq!(notice(&mut w.model, w.b.channel), Some(NoticeKind::Unreachable(-110)));
    assert_eq!(notice(&mut w.model, w.a.channel), None);
    w.end();
}

#[test]
fn a_killed_host_leaves_nothing_and_its_peers_are_told() {
    let mut w = World::new(&Setup::default());
    let context = w.model.open(w.b.host).unwrap();
    let shared = w.model.create_shared(context, 1, w.b.domain, 1, 0).unwrap();
    w.model.wakes().for_each(drop);
    w.model.kill_host(w.b.host);
    w.pass(Duration::ZERO);
    assert_eq!(w.model.resources(w.b.host), Resources::default());
    let woken: Vec<_> = w.model.wakes().collect();
    for wake in [Wake::Events(w.b.channel), Wake::Completions(w.b.queue), Wake::Asynchronous(context)] {
        assert!(woken.contains(&wake), "{wake:?}");
    }
    assert_eq!(notice(&mut w.model, w.a.channel), Some(NoticeKind::Disconnected));
    w.a.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    w.pass(Duration::from_secs(1));
    assert_eq!(w.a.completions(&mut w.model), [(1, Err(Status::RETRY_EXC_ERR))]);

    // Every call on destroyed objects fails.
    let gone = |result: Result<(), Error>| assert!(matches!(result, Err(Error::Gone(_))), "{result:?}");
    gone(w.model.take_notice(w.b.channel).map(|_| ()));
    gone(w.model.create_identifier(w.b.channel).map(|_| ()));
    gone(w.model.create_channel(w.b.host).map(|_| ()));
    gone(w.model.poll(w.b.queue, &mut []).map(|_| ()));
    gone(w.model.take_async(context).map(|_| ()));
    gone(w.model.create_domain_in(context).map(|_| ()));
    gone(w.model.shared_limit(shared).map(|_| ()));
    gone(w.model.arm(w.b.queue));
    gone(w.b.post(&mut w.model, 1, SendOp::Send, 4));
    gone(w.b.receive(&mut w.model, 1, 0, 4));
    gone(w.model.disconnect(w.b.id));
    gone(w.model.may_register(w.b.domain, 1).map(|_| ()));

    // The machine exists: its address resolves, but there is no listener. A new process may take it
    // over.
    let id = resolved(&mut w.model, w.a.channel, ip(2));
    let side = equip(&mut w.model, w.a.host, w.a.channel, id, &Setup::default());
    w.model.connect(id, &PARAMS, &[]).unwrap();
    w.pass(Duration::ZERO);
    assert_eq!(notice(&mut w.model, w.a.channel), Some(NoticeKind::Rejected(8)));
    let again = w.model.add_host(&[ip(2)], Limits::default());
    assert_eq!(w.model.host_at(ip(2)), Some(again));
    w.model.destroy_pair(side.pair);
    w.model.destroy_identifier(id);
    w.model.destroy_queue(side.queue);
    w.model.deregister(side.region.id);
    w.model.destroy_domain(side.domain);
    w.end();
}

#[test]
fn limits_are_errors_that_say_which() {
    let mut model = Model::new(Parameters::default());
    let limits = Limits {
        locked_memory: 10_000,
        max_region: 8_000,
        max_regions: 2,
        max_queue_pairs: 1,
        max_completion_queues: 1,
        max_inline: 16,
        ..Limits::default()
    };
    let host = model.add_host(&[ip(1)], limits);
    let channel = model.create_channel(host).unwrap();
    let id = resolved(&mut model, channel, ip(1));
    let domain = model.create_domain(id).unwrap();
    let mut register = |len| model.register(domain, Arc::new(Memory::zeroed(len).unwrap()), Access::NONE);
    let first = register(6_000).unwrap();
    let error = register(6_000).unwrap_err();
    assert_eq!(error, Error::LockedMemory { asked: 6_000, registered: 6_000, limit: 10_000 });
    assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    assert!(register(8_001).unwrap_err().to_string().contains("max_region is 8000"));
    let second = register(4_000).unwrap();
    assert!(second.address > first.address + 6_000 + 4_096, "a page lies in between");
    assert!(register(1).unwrap_err().to_string().contains("max_regions is 2"));
    model.deregister(first.id);
    assert_eq!(model.resources(host).registered_bytes, 4_000);

    assert!(matches!(model.create_queue(id, 0), Err(Error::Argument(_))));
    assert!(matches!(model.create_queue(id, limits.max_completions + 1), Err(Error::Argument(_))));
    let queue = model.create_queue(id, 8).unwrap();
    assert!(matches!(model.create_queue(id, 8), Err(Error::Exhausted { .. })));
    let deep = QueuePairLimits { send_depth: limits.max_queue_depth + 1, recv_depth: 1, inline: 0 };
    assert!(matches!(model.create_pair(id, domain, queue, deep), Err(Error::Argument(_))));
    // Inline data is granted up to the limit.
    let sizes = QueuePairLimits { send_depth: 1, recv_depth: 1, inline: 1000 };
    assert_eq!(model.create_pair(id, domain, queue, sizes).unwrap().2, 16);
    assert!(matches!(model.create_pair(id, domain, queue, sizes), Err(Error::State(_))));
    let other = resolved(&mut model, channel, ip(1));
    assert!(matches!(model.create_pair(other, domain, queue, sizes), Err(Error::Exhausted { .. })));
}
