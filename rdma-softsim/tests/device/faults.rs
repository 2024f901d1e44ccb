//! Faults by chance, by time and by connection, and a link that goes down.

use super::*;

/// Returns which of 64 requests are refused by a fault that strikes half of the time.
fn refused(seed: u64) -> Vec<bool> {
    let (fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    fabric.seed_faults(seed);
    let half = Chance { times: 500_000 };
    assert!(fabric.inject(address(1), Connections::All, Fault::QueueFull, Err(half)));
    let refused: Vec<_> = (0..64)
        .map(|_| {
            let work = NamedSend {
                id: 1,
                op: SendOp::Write(remote).into(),
                local: Local::Inline(&[]),
                signaled: true,
                solicited: false,
            };
            while !a.completions().is_empty() {}
            a.pair.post_named(&[work]).is_err()
        })
        .collect();
    assert_eq!(fabric.faults_struck(), refused.iter().filter(|refused| **refused).count() as u64);
    refused
}

#[test]
fn faults_by_chance_follow_their_seed() {
    let first = refused(1);
    assert!(first.contains(&true) && first.contains(&false));
    assert_eq!(refused(1), first);
    assert_ne!(refused(2), first);
}

/// In real time, on a fabric without earlier faults: times count from the injection.
#[test]
fn a_fault_strikes_a_fabric_in_real_time() {
    let (fabric, a, b) = connected();
    let remote = || RemoteAddress { address: BASE, rkey: b.region.key() };
    for _ in 0..3 {
        a.post(SendOp::Write(remote()), a.sge(0, 8));
    }
    assert!(
        !fabric.inject(address(3), Connections::All, Fault::KeyRefused, Ok(When::Event(0))),
        "there is no such host"
    );
    assert!(
        !fabric.inject(address(2), Connections::All, Fault::PairFatal, Err(Chance { times: 1 })),
        "it strikes by itself"
    );
    assert!(fabric.inject(address(2), Connections::All, Fault::KeyRefused, Ok(When::Pass(Site::Arrive, 2))));
    for _ in 0..2 {
        a.post(SendOp::Write(remote()), a.sge(0, 8));
    }
    let mut expected = vec![Ok(Completed::Write); 4];
    expected.push(Err(CompletionStatus::REM_ACCESS_ERR));
    assert_eq!(a.completions(), expected);
    assert_eq!(fabric.faults_struck(), 1);
    assert_eq!(b.device.next_event().unwrap(), Some((AsyncEvent::QpAccessErr, About::Pair(9))));
}

/// A fault of one connection spares the others of its host.
#[test]
fn a_fault_strikes_the_connection_that_it_names() {
    let (fabric, a, b) = connected();
    let remote = RemoteAddress { address: BASE, rkey: b.region.key() };
    let now = Ok(When::Event(0));
    let inject = |connections| fabric.inject(address(2), connections, Fault::KeyRefused, now);
    for other in [
        Connections::Pair(a.pair.number()),
        Connections::Peer(address(3)),
        Connections::PeerAt((address(1), 1).into()),
    ] {
        assert!(inject(other));
        a.post(SendOp::Write(remote), a.sge(0, 8));
        assert_eq!(a.completions(), [Ok(Completed::Write)], "{other:?}");
    }
    let ours = Connections::Pair(b.pair.number());
    assert!(!fabric.inject(address(2), ours, Fault::DeviceFatal, now), "it strikes a device");
    let seen: Vec<_> = fabric.connections(0, 9).into_iter().map(|seen| (seen.pair, seen.peer)).collect();
    assert_eq!(seen, [(a.pair.number(), Some(b.pair.number())), (b.pair.number(), Some(a.pair.number()))]);
    // The link of one connection: messages sent meanwhile come later, and no port event is raised.
    assert!(fabric.inject(address(2), ours, Fault::LinkDown { micros: 1000 }, now));
    a.post(SendOp::Write(remote), a.sge(0, 8));
    assert_eq!(a.completions(), [], "it is lost");
    assert_eq!(b.device.next_event().unwrap(), None, "the port is as it was");
    let late = loop {
        match a.completions() {
            none if none.is_empty() => std::thread::yield_now(),
            some => break some,
        }
    };
    assert_eq!(late, [Ok(Completed::Write)]);
    assert!(inject(ours));
    a.post(SendOp::Write(remote), a.sge(0, 8));
    assert_eq!(a.completions(), [Err(CompletionStatus::REM_ACCESS_ERR)]);
    assert_eq!(fabric.faults_struck(), 2);
}

/// A device event is reported to everyone who opened the device.
#[test]
fn a_link_that_goes_down_is_told_to_who_opened_the_device() {
    let (fabric, a, b) = connected();
    assert!(fabric.inject(address(1), Connections::All, Fault::LinkDown { micros: 1 }, Ok(When::Event(0))));
    a.post(SendOp::Write(RemoteAddress { address: BASE, rkey: b.region.key() }), a.sge(0, 8));
    assert_eq!(a.device.next_event().unwrap(), Some((AsyncEvent::PortErr, About::Device)));
    assert_eq!(b.device.next_event().unwrap(), None);
}
