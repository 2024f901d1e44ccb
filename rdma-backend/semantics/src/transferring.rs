//! Bytes from one end to the other: what arrives, in which order, and when memory is accessed.

use std::sync::Arc;

use crate::Descriptors;
use rdma_backend::{
    Access, Completed, CompletionStatus, Domain as _, Identifier as _, Immediate, QueuePair as _,
    Region as _, RemoteAddress, RnrTimer, SendOp, SendRequest, Slice,
};

use super::Setting;
use super::ends::{
    Called, End, LEN, ONE, PARAMS, Pair, QUIET, SLOT, Shape, equal, expect, holds, read, remote, requested,
    resolved, took,
};
use crate::Failure;

super::table! {
    "verbs.move.send", "a SEND writes its bytes where the receive says, and nothing beside them",
        "ibv_post_send(3)", send;
    "verbs.move.write", "a WRITE changes exactly the bytes it names, and completes nothing at the peer",
        "ibv_post_send(3)", write;
    "verbs.move.write-immediate", "a WRITE with immediate writes, then notifies",
        "ibv_post_send(3)", write_immediate;
    "verbs.move.immediate-intact", "immediates arrive unchanged", "ibv_post_send(3)", immediates;
    "verbs.move.inline-copied", "inline bytes are copied when posted", "ibv_post_send(3)", inline;
    "verbs.move.source-late", "bytes that are not inline are read when the request is executed",
        "ibv_post_send(3)", source_late;
    "verbs.move.source-permission", "the source of a request needs no permission",
        "ibv_reg_mr(3)", source_permission;
    "verbs.move.empty-write-unchecked", "a WRITE of no bytes needs no valid key", "IBA 9.7.4.1.2", empty_write;
    "verbs.move.empty-immediate", "a WRITE with immediate of no bytes needs no valid key, and notifies",
        "IBA 9.7.4.1.2", empty_immediate;
    "verbs.order.sends", "SENDs arrive and complete in the order posted, and consume receives in that order",
        "ibv_post_send(3), ibv_post_recv(3)", sends_in_order;
    "verbs.order.writes-before-notice", "bytes of earlier WRITEs are there when an immediate arrives",
        "IBA 9.5, ibv_post_send(3)", writes_before_notice;
    "verbs.order.kinds", "requests of all kinds complete in the order posted", "ibv_post_send(3)", kinds_in_order;
    "verbs.order.directions", "a send queue that waits does not delay what arrives",
        "IBA 10.2.4 (RC)", directions;
    "verbs.order.queue-pairs", "a queue pair that waits does not delay another",
        "IBA 10.2.4 (RC)", queue_pairs;
    "verbs.order.shared-queue", "completions of two queue pairs in one queue name theirs, each in order",
        "ibv_poll_cq(3)", shared_queue;
    "verbs.read.fetches", "a READ fetches bytes, and completes nothing at the peer",
        "ibv_post_send(3)", fetches;
    "verbs.read.beyond-depth", "READs beyond the depth wait for earlier ones",
        "rdma_connect(3)", beyond_depth;
    "verbs.read.none-granted", "a connection without READs executes none", "rdma_connect(3)", none_granted;
    "verbs.read.target-permission", "a READ into memory without LOCAL_WRITE fails with LOC_PROT_ERR",
        "ibv_reg_mr(3)", read_target;
}

const NOWHERE: RemoteAddress = RemoteAddress { address: 0x1000, rkey: 0xdead_beef };

fn send<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = setting.pair()?;
    for (from, to) in pair.ends() {
        from.post_one(SendOp::Send, 10, 32)?;
        from.completes("the sender", ONE, Completed::Send)?;
        to.completes("the receiver", 0, took(32))?;
        equal("the bytes", to.received(0, 32)?, (10..42).collect())?;
        equal("the rest", to.received(0, SLOT)?[32..].to_vec(), vec![0; SLOT - 32])?;
    }
    Ok(())
}

fn write<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let target = server.domain.register(LEN, Access::REMOTE_WRITE).called("register")?;
    client.post_one(SendOp::Write(remote::<B>(&target, 5)), 1, 1000)?;
    client.completes("the writer", ONE, Completed::Write)?;
    equal("the bytes", read::<B>(&target, 5, 1000)?, client.bytes(1, 1000)?)?;
    equal("what is before them", read::<B>(&target, 0, 5)?, vec![0; 5])?;
    equal("what is behind them", read::<B>(&target, 1005, 100)?, vec![0; 100])?;
    server.quiet("the peer")
}

const NUMBER: Immediate = Immediate(0x0102_0304);

fn write_immediate<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    client.post_one(SendOp::WriteImmediate(server.remote(0), NUMBER), 100, 1000)?;
    server.completes("the peer", 0, Completed::RecvWrite { immediate: NUMBER })?;
    equal("the bytes", server.bytes(0, 1000)?, client.bytes(100, 1000)?)?;
    equal("the receive's memory", server.received(0, SLOT)?, vec![0; SLOT])?;
    client.completes("the writer", ONE, Completed::Write)
}

fn immediates<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    for (index, immediate) in [0, 1, 0x0102_0304, u32::MAX].map(Immediate).into_iter().enumerate() {
        let id = 2 * index as u64;
        client.post_one(SendOp::WriteImmediate(server.remote(0), immediate), 0, 1)?;
        server.completes("with a WRITE", id, Completed::RecvWrite { immediate })?;
        client.completes("the writer", ONE, Completed::Write)?;
        client.post_one(SendOp::SendImmediate(immediate), 0, 1)?;
        server.completes("with a SEND", id + 1, Completed::Recv { len: 1, immediate: Some(immediate) })?;
        client.completes("the sender", ONE, Completed::Send)?;
    }
    Ok(())
}

fn inline<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    server.set_timer(RnrTimer::MICROS_640)?;
    let len = client.qp.max_inline().min(SLOT);
    // It cannot be sent before its memory changes: there is no receive.
    client.post(&[SendRequest { inline: true, ..client.request(1, SendOp::Send, 0, len) }])?;
    holds("write", client.region.memory().write(0, &[0xee; SLOT]))?;
    server.receive(0..1)?;
    server.completes("the receiver", 0, took(len as u32))?;
    equal("the bytes", server.received(0, len)?, (0..len as u8).collect())
}

fn source_late<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    server.set_timer(RnrTimer::MICROS_640)?;
    client.post_one(SendOp::Send, 0, 8)?;
    holds("write", client.region.memory().write(0, &[0xee; 8]))?;
    server.receive(0..1)?;
    server.completes("the receiver", 0, took(8))?;
    equal("the bytes", server.received(0, 8)?, vec![0xee; 8])
}

fn source_permission<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let source = client.domain.register(64, Access::NONE).called("register")?;
    holds("write", source.memory().write(0, b"from read-only memory"))?;
    let local = Slice { region: &source, offset: 0, len: 21 };
    client.post(&[
        SendRequest { local, ..client.request(1, SendOp::Send, 0, 0) },
        SendRequest { local, ..client.request(2, SendOp::Write(server.remote(0)), 0, 0) },
    ])?;
    client.completes("the sender", 1, Completed::Send)?;
    client.completes("the writer", 2, Completed::Write)?;
    equal("the bytes sent", server.received(0, 21)?, b"from read-only memory".to_vec())?;
    equal("the bytes written", server.bytes(0, 21)?, b"from read-only memory".to_vec())
}

fn empty_write<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    client.post_one(SendOp::Write(NOWHERE), 0, 0)?;
    client.completes("the writer", ONE, Completed::Write)?;
    server.quiet("the peer")
}

fn empty_immediate<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    client.post_one(SendOp::WriteImmediate(NOWHERE, NUMBER), 0, 0)?;
    client.completes("the writer", ONE, Completed::Write)?;
    server.completes("the peer", 0, Completed::RecvWrite { immediate: NUMBER })
}

fn sends_in_order<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } =
        &setting.pair_of(Shape { receives: 40, ..Shape::USUAL }, Shape::USUAL)?;
    let chain: Vec<_> = (0..40).map(|index| client.request(index, SendOp::Send, index as usize, 8)).collect();
    client.post(&chain)?;
    for index in 0..40 {
        client.completes("the sender", index, Completed::Send)?;
        server.completes("the receiver", index, took(8))?;
        let index = index as u8;
        equal("the bytes", server.received(index.into(), 8)?, (index..index + 8).collect())?;
    }
    Ok(())
}

fn writes_before_notice<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } =
        &setting.pair_of(Shape { receives: 40, ..Shape::USUAL }, Shape::USUAL)?;
    for round in 0..20_u8 {
        holds("write", client.region.memory().write(0, &[round; 9000]))?;
        let notice = SendOp::WriteImmediate(server.remote(8000), NUMBER);
        client.post(&[
            client.silent(1, SendOp::Write(server.remote(0)), 0, 4000),
            client.silent(2, SendOp::Write(server.remote(4000)), 4000, 4000),
            client.request(3, notice, 8000, 1000),
        ])?;
        server.completes("the peer", round.into(), Completed::RecvWrite { immediate: NUMBER })?;
        equal("the bytes", server.bytes(0, 9000)?, vec![round; 9000])?;
        client.completes("the writer", 3, Completed::Write)?;
    }
    Ok(())
}

fn kinds_in_order<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let write = || SendOp::Write(server.remote(0));
    client.post(&[
        client.request(0, write(), 0, 4096),
        client.request(1, SendOp::Send, 0, 4),
        client.request(2, SendOp::Read(server.remote(0)), 8192, 4096),
        client.request(3, SendOp::WriteImmediate(server.remote(0), NUMBER), 0, 4),
        client.request(4, SendOp::Read(server.remote(0)), 12288, 4),
        client.request(5, write(), 0, 4),
    ])?;
    use Completed::{Read, Send, Write};
    for (id, did) in [Write, Send, Read, Write, Read, Write].into_iter().enumerate() {
        client.completes("the requester", id as u64, did)?;
    }
    Ok(())
}

fn directions<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    // The client's queue waits for a receive for 655 ms at a time.
    client.post_one(SendOp::Send, 0, 4)?;
    server.post_one(SendOp::Send, 0, 4)?;
    client.completes("what arrives meanwhile", 0, took(4))?;
    server.completes("its sender", ONE, Completed::Send)
}

/// Two connections between the same domains and completion queues. Returns the server's ends.
fn two<B: Descriptors>(pair: &Pair<B>, shape: Shape) -> Result<[End<B>; 2], Failure> {
    let to = pair.listener.local_addr().ok_or_else(|| Failure::wrong("the listener has no address"))?;
    let Pair { server, client, servers, clients, listener } = pair;
    let id = resolved::<B>(clients, to)?;
    let second = End::<B>::with(id, &client.domain, &client.cq, Shape::USUAL)?;
    second.id.connect(&PARAMS, &[]).called("connect")?;
    let (id, _) = requested::<B>(servers, listener)?;
    let accepted = End::<B>::with(id, &server.domain, &Arc::clone(&server.cq), shape)?;
    accepted.id.accept(&PARAMS, &[]).called("accept")?;
    expect::<B>(clients, &second.id, "Established")?;
    expect::<B>(servers, &accepted.id, "Established")?;
    Ok([second, accepted])
}

fn queue_pairs<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    let [second, _accepted] = two(&pair, Shape::USUAL)?;
    pair.client.post_one(SendOp::Send, 0, 4)?;
    second.post(&[second.request(7, SendOp::Send, 0, 4)])?;
    second.completes("the other queue pair", 7, Completed::Send)
}

fn shared_queue<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = setting.pair()?;
    let [second, accepted] = two(&pair, Shape::USUAL)?;
    for _ in 0..8 {
        pair.client.post(&[pair.client.silent(0, SendOp::Send, 0, 4)])?;
        second.post(&[second.silent(0, SendOp::Send, 0, 4)])?;
    }
    let mut next = [(pair.server.qp.number(), 0), (accepted.qp.number(), 0)];
    for _ in 0..16 {
        let completion = accepted.completion("a receiver")?;
        let whose = next.iter_mut().find(|(number, _)| *number == completion.queue_pair);
        let (_, due) =
            whose.ok_or_else(|| Failure::wrong("a completion of a queue pair that is not there"))?;
        equal("the completion", (completion.id, completion.result.ok()), (*due, Some(took(4))))?;
        *due += 1;
    }
    equal("what each completed", next.map(|(_, count)| count), [8, 8])
}

fn fetches<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let source = server.domain.register(64, Access::REMOTE_READ).called("register")?;
    holds("write", source.memory().write(0, b"what the server has"))?;
    client.post_one(SendOp::Read(remote::<B>(&source, 0)), 100, 19)?;
    client.completes("the reader", ONE, Completed::Read)?;
    equal("the bytes", client.bytes(100, 19)?, b"what the server has".to_vec())?;
    server.quiet("the peer")
}

fn beyond_depth<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    holds("write", server.region.memory().write(0, b"what the server has"))?;
    let read = |index| client.request(index, SendOp::Read(server.remote(0)), 32 * index as usize, 19);
    let chain: Vec<_> = (0..5 * u64::from(PARAMS.initiator_depth)).map(read).collect();
    client.post(&chain)?;
    for request in &chain {
        client.completes("the reader", request.id, Completed::Read)?;
        equal("the bytes", client.bytes(request.local.offset, 19)?, b"what the server has".to_vec())?;
    }
    Ok(())
}

/// Devices refuse it at once, fail it, or let it wait for ever.
fn none_granted<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let params = rdma_backend::ConnectParams { responder_resources: 0, initiator_depth: 0, ..PARAMS };
    let shape = Shape { params, ..Shape::USUAL };
    let Pair { server, client, .. } = &setting.pair_of(shape, shape)?;
    holds("write", server.region.memory().write(0, b"not to be fetched"))?;
    let told = match client.qp.post_send(&[client.request(ONE, SendOp::Read(server.remote(0)), 0, 17)]) {
        Err(error) => format!("refused: {}", error.error),
        Ok(()) => match client.next(QUIET)? {
            Some(completion) => match completion.result {
                Ok(did) => return Err(Failure::wrong(format!("it did: {did:?}"))),
                Err(error) => format!("failed: {:?}", error.status),
            },
            None => "waits".into(),
        },
    };
    equal("the bytes", client.bytes(0, 17)?, (0..17).collect())?;
    Ok(told)
}

fn read_target<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let target = client.domain.register(64, Access::NONE).called("register")?;
    let local = Slice { region: &target, offset: 0, len: 8 };
    client.post(&[SendRequest { local, ..client.request(ONE, SendOp::Read(server.remote(0)), 0, 0) }])?;
    client.fails("the reader", ONE, CompletionStatus::LOC_PROT_ERR)?;
    equal("the bytes", read::<B>(&target, 0, 8)?, vec![0; 8])
}
