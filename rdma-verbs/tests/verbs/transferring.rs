use std::time::Duration;

use rdma_backend::{
    Access, Completed, Completion, CompletionQueue as _, Domain as _, Immediate, QueuePair as _,
    QueuePairLimits, Region as _, SendOp, SendRequest, Slice,
};

use crate::harness::{Pair, Shape, await_some, lab, read, readable};

const IMMEDIATE: Immediate = Immediate(0x0102_0304);

fn took(len: u32) -> Completed {
    Completed::Recv { len, immediate: None }
}

#[test]
fn sends_go_both_ways() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, .. } = &lab.pair();
    for (from, to) in [(client, server), (server, client)] {
        from.post(SendOp::Send, 10, 32);
        assert_eq!(from.completed(), (1000, Completed::Send));
        assert_eq!(to.completed(), (0, took(32)));
        assert_eq!(read(&to.inbox, 0, 32), (10..42).collect::<Vec<u8>>());

        from.post(SendOp::SendImmediate(IMMEDIATE), 0, 0);
        assert_eq!(from.completed(), (1000, Completed::Send));
        assert_eq!(to.completed(), (1, Completed::Recv { len: 0, immediate: Some(IMMEDIATE) }));
    }
}

#[test]
fn writes_land_unseen_and_immediates_tell() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, .. } = &lab.pair();
    let target = server.domain.register(1 << 16, Access::REMOTE_WRITE).unwrap();
    let at = |offset| rdma_backend::RemoteAddress { address: target.address() + offset, rkey: target.rkey() };
    client.post(SendOp::Write(at(5)), 1, 1000);
    assert_eq!(client.completed().1, Completed::Write);
    assert_eq!(read(&target, 5, 1000), client.bytes(1, 1000));
    assert_eq!(read(&target, 0, 5), [0; 5]);
    assert_eq!(read(&target, 1005, 5), [0; 5]);
    server.quiet();

    client.post(SendOp::WriteImmediate(at(0), IMMEDIATE), 0, 1 << 16);
    assert_eq!(client.completed().1, Completed::Write);
    assert_eq!(server.completed(), (0, Completed::RecvWrite { immediate: IMMEDIATE }));
    assert_eq!(read(&target, 0, 1 << 16), client.bytes(0, 1 << 16));

    // Without bytes no valid address is needed.
    let nowhere = rdma_backend::RemoteAddress { address: 0, rkey: 0 };
    client.post(SendOp::WriteImmediate(nowhere, Immediate(0)), 0, 0);
    assert_eq!(client.completed().1, Completed::Write);
    assert_eq!(server.completed(), (1, Completed::RecvWrite { immediate: Immediate(0) }));
}

#[test]
fn reads_fetch() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, .. } = &lab.pair();
    assert!(server.region.memory().write(0, b"what the server has"));
    client.post(SendOp::Read(server.remote(0)), 100, 19);
    assert_eq!(client.completed().1, Completed::Read);
    assert_eq!(client.bytes(100, 19), b"what the server has");
    server.quiet();
    // More than may be outstanding at once.
    let many: Vec<_> = (0..20)
        .map(|index| client.request(index, SendOp::Read(server.remote(0)), 200 + 32 * index as usize, 19))
        .collect();
    client.qp.post_send(&many).unwrap();
    for index in 0..20 {
        assert_eq!(client.completed(), (index, Completed::Read));
        assert_eq!(client.bytes(200 + 32 * index as usize, 19), b"what the server has");
    }
}

#[test]
fn a_chain_runs_in_order_and_only_what_is_signalled_completes() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, .. } = &lab.pair();
    let quiet = |op, offset, len| SendRequest { signaled: false, ..client.request(1, op, offset, len) };
    client
        .qp
        .post_send(&[
            quiet(SendOp::Write(server.remote(0)), 50, 100),
            quiet(SendOp::Write(server.remote(100)), 150, 100),
            client.request(2, SendOp::WriteImmediate(server.remote(200), Immediate(300)), 250, 100),
        ])
        .unwrap();
    assert_eq!(server.completed().1, Completed::RecvWrite { immediate: Immediate(300) });
    assert_eq!(server.bytes(0, 300), client.bytes(50, 300));
    assert_eq!(client.completed(), (2, Completed::Write));
    client.quiet();
    server.quiet();
}

#[test]
fn a_chain_longer_than_one_doorbell_is_still_one_chain() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, .. } = &lab.pair();
    let chain: Vec<_> = (0..100)
        .map(|index| client.request(index, SendOp::Write(server.remote(index as usize)), 128, 1))
        .collect();
    client.qp.post_send(&chain).unwrap();
    for index in 0..100 {
        assert_eq!(client.completed(), (index, Completed::Write));
    }
    assert_eq!(server.bytes(0, 101), [&[128; 100][..], &[100]].concat());
    client.qp.post_send(&[]).unwrap();
    client.qp.post_recv(&[]).unwrap();
}

#[test]
fn many_completions_are_taken_at_once() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, .. } = &lab.pair();
    let chain: Vec<_> =
        (0..90).map(|index| client.request(index, SendOp::Write(server.remote(0)), 0, 1)).collect();
    client.qp.post_send(&chain).unwrap();
    let mut taken = Vec::new();
    await_some("all completions", || {
        let mut batch = [Completion::EMPTY; 70];
        let count = client.cq.poll(&mut batch).unwrap();
        taken.extend(batch[..count].iter().map(|completion| completion.id));
        (taken.len() == 90).then_some(())
    });
    assert!(taken.iter().copied().eq(0..90));
    assert_eq!(client.cq.poll(&mut []).unwrap(), 0);
}

#[test]
fn inline_bytes_are_taken_during_the_call() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, .. } = &lab.pair();
    assert!(client.qp.max_inline() >= 64, "{}", client.qp.max_inline());
    // The region is of no use to the device: inline needs only the processor.
    let local = client.domain.register(64, Access::NONE).unwrap();
    assert!(local.memory().write(0, &[1; 64]));
    let request = SendRequest {
        id: 3,
        op: SendOp::Send,
        local: Slice { region: &local, offset: 0, len: 64 },
        signaled: true,
        inline: true,
    };
    client.qp.post_send(&[request]).unwrap();
    assert!(local.memory().write(0, &[2; 64]));
    assert_eq!(server.completed().1, took(64));
    assert_eq!(read(&server.inbox, 0, 64), [1; 64]);
    assert_eq!(client.completed(), (3, Completed::Send));
    let nothing = Slice { len: 0, ..request.local };
    client.qp.post_send(&[SendRequest { local: nothing, ..request }]).unwrap();
    assert_eq!(server.completed().1, took(0));
}

#[test]
fn inline_that_is_not_granted_is_none() {
    let Some(lab) = lab() else { return };
    let limits = QueuePairLimits { send_depth: 16, recv_depth: 16, inline: 1 << 20 };
    let shape = Shape { limits, ..Shape::default() };
    let Pair { client, server, .. } = &lab.pair_of(Shape::default(), shape);
    println!("max_inline {}", client.qp.max_inline());
    assert!(client.qp.max_inline() < 1 << 20);
    client.post(SendOp::Send, 0, 4);
    assert_eq!(server.completed().1, took(4));
}

#[test]
fn notification_is_one_shot() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, .. } = &lab.pair();
    let short = Duration::from_millis(100);
    let ping = || {
        client.post(SendOp::Send, 0, 1);
        assert_eq!(client.completed().1, Completed::Send);
    };
    ping();
    assert!(!readable(&server.cq, short));
    assert_eq!(server.cq.take_events().unwrap(), 0);
    server.cq.arm().unwrap();
    println!("an earlier completion raises an event: {}", readable(&server.cq, short));
    server.cq.take_events().unwrap();
    assert_eq!(server.completed().1, took(1));
    server.cq.arm().unwrap();
    ping();
    assert!(readable(&server.cq, Duration::from_secs(5)));
    ping();
    assert_eq!(server.cq.take_events().unwrap(), 1);
    assert_eq!(server.cq.take_events().unwrap(), 0);
    assert!(!readable(&server.cq, short));
    assert_eq!([server.completed().1, server.completed().1], [took(1); 2]);
    // Untaken events do not keep the queue from being destroyed.
    server.cq.arm().unwrap();
    ping();
    assert!(readable(&server.cq, Duration::from_secs(5)));
}

#[test]
fn a_connection_carries_much() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, .. } = &lab.pair();
    let (rounds, chunk) = (200_usize, 4096);
    for round in 0..rounds {
        let offset = round % 16 * chunk;
        client.post(SendOp::WriteImmediate(server.remote(offset), Immediate(round as u32)), offset, chunk);
        assert_eq!(server.completed().1, Completed::RecvWrite { immediate: Immediate(round as u32) });
        server.receive(round..round + 1);
        assert_eq!(client.completed().1, Completed::Write);
    }
}
