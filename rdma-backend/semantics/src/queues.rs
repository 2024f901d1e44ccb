//! Full, oversized and overrun queues, and limits that hold.

use crate::Descriptors;
use rdma_backend::{
    Completed, Completion, CompletionQueue as _, CompletionStatus, Domain as _, ErrorKind, Failure as _,
    Identifier as _, QueuePair as _, QueuePairLimits, RecvRequest, RnrTimer, SendOp, SendRequest, Slice,
};
use std::time::Instant;

use super::Setting;
use super::ends::{Called, LEN, PATIENCE, Pair, QUIET, Shape, equal, holds, resolved, took};
use crate::Failure;

super::table! {
    "verbs.queue.depth", "a queue holds at least as much as requested", "ibv_create_qp(3)", depth;
    "verbs.queue.send-full", "a full send queue takes a part of a chain and reports how much",
        "ibv_post_send(3)", send_full;
    "verbs.queue.receive-full", "a full receive queue takes a part of a chain and reports how much",
        "ibv_post_recv(3)", receive_full;
    "verbs.queue.room-again", "polling completions makes room in a full send queue",
        "ibv_post_send(3)", room_again;
    "verbs.queue.bad-part", "an invalid request ends its chain, and those before it are executed",
        "ibv_post_send(3)", bad_part;
    "verbs.queue.empty-chain", "posting an empty chain does nothing", "ibv_post_send(3)", empty_chain;
    "verbs.queue.long-chain", "a chain may be as long as the queue", "ibv_post_send(3)", long_chain;
    "verbs.limits.depth", "a queue deeper than the device allows is refused", "ibv_create_qp(3)", too_deep;
    "verbs.limits.completions", "a completion queue larger than the device allows is refused",
        "ibv_create_cq(3)", too_many_completions;
    "verbs.limits.region", "a region of an impossible length is refused", "ibv_reg_mr(3), mmap(2)", too_large;
    "verbs.limits.inline", "inline data is granted as far as the device goes, and no further",
        "ibv_create_qp(3)", inline;
    "verbs.limits.vector", "a completion vector is taken modulo the device's number of vectors",
        "ibv_create_cq(3)", vector;
    "verbs.limits.sane", "the device reports the limits that the protocol needs", "ibv_query_device(3)", sane;
    "verbs.queue.batches", "a poll takes at most what it has room for, and loses nothing",
        "ibv_poll_cq(3)", batches;
    "verbs.queue.overrun", "an overrun of a completion queue is reported as an error",
        "ibv_create_cq(3), ibv_get_async_event(3)", overrun;
}

const SMALL: QueuePairLimits = QueuePairLimits { send_depth: 10, recv_depth: 10, inline: 0 };

fn small<B: Descriptors>(setting: &Setting<B>) -> Result<Pair<B>, Failure> {
    let pair =
        setting.pair_of(Shape::WITHOUT_RECEIVES, Shape { limits: SMALL, ..Shape::WITHOUT_RECEIVES })?;
    pair.server.set_timer(RnrTimer::MICROS_640)?;
    Ok(pair)
}

fn depth<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &small(setting)?;
    client.post(&[client.request(0, SendOp::Send, 0, 4); 10])?;
    client.receive(0..10)
}

fn send_full<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let Pair { server, client, .. } = &small(setting)?;
    let chain: Vec<_> = (0..500).map(|id| client.request(id, SendOp::Send, 0, 4)).collect();
    let Err(full) = client.qp.post_send(&chain) else { return Err(Failure::wrong("500 fit into 10")) };
    equal("the error", full.error.kind(), ErrorKind::QueueFull)?;
    let posted = full.posted;
    let Err(still) = client.qp.post_send(&chain[posted..]) else { return Err(Failure::wrong("more fit")) };
    equal("again", (still.posted, still.error.kind()), (0, ErrorKind::QueueFull))?;
    for id in 0..posted {
        server.receive(id..id + 1)?;
        server.completes("the receiver", id as u64, took(4))?;
        client.completes("the sender", id as u64, Completed::Send)?;
    }
    server.receive(posted..posted + 1)?;
    server.quiet("one more")?;
    Ok(format!("a queue for 10 took {posted}"))
}

fn receive_full<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let Pair { server, client, .. } = &small(setting)?;
    let receives: Vec<_> = (0..500).map(|number| client.receive_request(number)).collect();
    let Err(full) = client.qp.post_recv(&receives) else { return Err(Failure::wrong("500 fit into 10")) };
    equal("the error", full.error.kind(), ErrorKind::QueueFull)?;
    client.set_timer(RnrTimer::MICROS_640)?;
    for id in 0..full.posted {
        server.post_one(SendOp::Send, 0, 4)?;
        client.completes("the receiver", id as u64, took(4))?;
        server.completion("the sender")?;
    }
    server.post_one(SendOp::Send, 0, 4)?;
    client.quiet("one more")?;
    Ok(format!("a queue for 10 took {}", full.posted))
}

fn room_again<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &small(setting)?;
    let chain: Vec<_> = (0..500).map(|id| client.request(id, SendOp::Send, 0, 4)).collect();
    let Err(full) = client.qp.post_send(&chain) else { return Err(Failure::wrong("500 fit into 10")) };
    for id in 0..3 {
        server.receive(id..id + 1)?;
        client.completes("the sender", id as u64, Completed::Send)?;
    }
    let Err(again) = client.qp.post_send(&chain[full.posted..]) else {
        return Err(Failure::wrong("all fit"));
    };
    equal("the room", (again.posted, again.error.kind()), (3, ErrorKind::QueueFull))
}

fn bad_part<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } =
        &setting.pair_of(Shape { receives: 10, ..Shape::USUAL }, Shape::USUAL)?;
    let good = |id| client.request(id, SendOp::Send, 0, 4);
    let foreign = SendRequest { local: Slice { region: &server.region, offset: 0, len: 4 }, ..good(9) };
    let outside = client.request(9, SendOp::Send, LEN - 3, 4);
    let overflow = client.request(9, SendOp::Send, usize::MAX, 2);
    let too_long = SendRequest { inline: true, ..client.request(9, SendOp::Send, 0, LEN) };
    let inline_read = SendRequest { inline: true, ..client.request(9, SendOp::Read(server.remote(0)), 0, 4) };
    for (round, bad) in [foreign, outside, overflow, too_long, inline_read].into_iter().enumerate() {
        let result = client.qp.post_send(&[good(1), good(2), bad, good(3)]);
        let Err(error) = result else { return Err(Failure::wrong(format!("number {round} was posted"))) };
        equal("the error", (error.posted, error.error.kind()), (2, ErrorKind::Argument))?;
        for id in 1..3 {
            client.completes("the sender", id, Completed::Send)?;
            server.completes("the receiver", (2 * round) as u64 + id - 1, took(4))?;
        }
    }
    client.quiet("what is behind it")?;
    for (region, offset) in [(&client.inbox, 0), (&server.inbox, LEN - 3)] {
        let bad = RecvRequest { id: 9, local: Slice { region, offset, len: 4 } };
        let Err(error) = server.qp.post_recv(&[bad]) else { return Err(Failure::wrong("it was posted")) };
        equal("a receive", (error.posted, error.error.kind()), (0, ErrorKind::Argument))?;
    }
    Ok(())
}

fn empty_chain<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &setting.pair()?;
    client.post(&[])?;
    client.receive(8..8)?;
    client.quiet("nothing")
}

fn long_chain<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let limits = QueuePairLimits { send_depth: 300, recv_depth: 300, inline: 0 };
    let shape = Shape { limits, receives: 300, ..Shape::USUAL };
    let Pair { server, client, .. } = &setting.pair_of(shape, shape)?;
    let chain: Vec<_> = (0..300).map(|id| client.request(id, SendOp::Send, 0, 4)).collect();
    client.post(&chain)?;
    for id in 0..300 {
        server.completes("the receiver", id, took(4))?;
        client.completes("the sender", id, Completed::Send)?;
    }
    Ok(())
}

fn too_deep<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = setting.pair()?;
    let to = pair.listener.local_addr().ok_or_else(|| Failure::wrong("no address"))?;
    let id = resolved::<B>(&pair.clients, to)?;
    let deep = id.capabilities().called("capabilities")?.max_queue_depth.saturating_add(1);
    let (domain, cq) = (&pair.client.domain, &pair.client.cq);
    for limits in
        [QueuePairLimits { send_depth: deep, ..SMALL }, QueuePairLimits { recv_depth: deep, ..SMALL }]
    {
        let refused = id.create_queue_pair(domain, cq, limits).err().map(|error| error.kind());
        equal(&format!("{limits:?}"), refused, Some(ErrorKind::Argument))?;
    }
    id.create_queue_pair(domain, cq, SMALL).called("create_queue_pair").map(drop)
}

fn too_many_completions<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &setting.pair()?;
    let most = client.id.capabilities().called("capabilities")?.max_completions;
    for depth in [most.saturating_add(1), u32::MAX] {
        let refused = client.id.create_completion_queue(depth, 0).err().map(|error| error.kind());
        equal(&format!("{depth} completions"), refused, Some(ErrorKind::Argument))?;
    }
    Ok(())
}

fn too_large<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &setting.pair()?;
    let register = |len| client.domain.register(len, rdma_backend::Access::NONE);
    equal("1 PiB", register(1 << 50).err().map(|error| error.kind()), Some(ErrorKind::Memory))?;
    equal("no bytes", register(0).err().map(|error| error.kind()), Some(ErrorKind::Argument))
}

fn inline<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let granted = client.qp.max_inline();
    let asked = Shape::USUAL.limits.inline as usize;
    holds(&format!("{granted} of {asked} bytes"), granted >= asked || granted == 0)?;
    let inline =
        |len| SendRequest { inline: true, ..client.request(1, SendOp::Write(server.remote(0)), 0, len) };
    client.post(&[inline(granted)])?;
    client.completes("what fits", 1, Completed::Write)?;
    let refused = client.qp.post_send(&[inline(granted + 1)]).err().map(|error| error.error.kind());
    equal("a byte more", refused, Some(ErrorKind::Argument))?;

    let limits = QueuePairLimits { inline: 1 << 20, ..SMALL };
    let pair = setting.pair_of(Shape::USUAL, Shape { limits, ..Shape::WITHOUT_RECEIVES })?;
    let most = pair.client.qp.max_inline();
    holds("a MiB inline", most < 1 << 20)?;
    Ok(format!("{asked} bytes asked, {granted} granted; of 1 MiB {most}"))
}

fn vector<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &setting.pair()?;
    client.id.create_completion_queue(16, u32::MAX).called("create_completion_queue").map(drop)
}

fn sane<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let Pair { client, .. } = &setting.pair()?;
    let caps = client.id.capabilities().called("capabilities")?;
    let enough = caps.max_queue_depth >= 1024
        && caps.max_completions >= 2048
        && caps.max_region >= 1 << 20
        && caps.max_read_depth > 0
        && caps.completion_vectors > 0;
    holds(&format!("too little: {caps:?}"), enough)?;
    Ok(format!("{caps:?}"))
}

fn batches<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let chain: Vec<_> = (0..60).map(|id| client.request(id, SendOp::Write(server.remote(0)), 0, 4)).collect();
    client.post(&chain)?;
    let (mut ids, mut sizes) = (Vec::new(), [1, 3, 0, 40].into_iter().cycle());
    let deadline = Instant::now() + PATIENCE;
    while ids.len() < 60 {
        holds("completions did not come", Instant::now() < deadline)?;
        let mut batch = vec![Completion::EMPTY; sizes.next().unwrap_or(1)];
        let count = client.cq.poll(&mut batch).called("poll")?;
        ids.extend(batch[..count].iter().map(|completion| completion.id));
    }
    equal("the ids", ids, (0..60).collect())
}

/// Four completions fit, far more arrive. A poll must report that; the queue pair is not looked at.
fn overrun<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    const MANY: u64 = 60;
    let narrow = Shape { completions: 4, ..Shape::WITHOUT_RECEIVES };
    let Pair { server, client, .. } = &setting.pair_of(Shape::USUAL, narrow)?;
    let write = SendOp::WriteImmediate(server.remote(0), rdma_backend::Immediate(1));
    let mut chain: Vec<_> =
        (0..MANY).map(|id| client.request(id, SendOp::Write(server.remote(0)), 0, 4)).collect();
    // When the server sees the last one, the others have completed, or could not.
    chain.push(client.silent(MANY, write, 0, 4));
    client.post(&chain)?;
    let last = server.next(QUIET)?;
    let mut batch = [Completion::EMPTY; 2 * MANY as usize];
    let (mut taken, mut flushed) = (0, 0);
    // What the program could see before the overrun may come first.
    loop {
        match client.cq.poll(&mut batch) {
            Err(error) => {
                let behind = if last.is_some() { "ran" } else { "did not run" };
                return Ok(format!("{error}; what was behind {behind}"));
            }
            Ok(0) => {
                return Err(Failure::wrong(format!(
                    "{taken} of {MANY} completions, {flushed} of them flushed, and no error"
                )));
            }
            Ok(count) => {
                taken += count;
                let errors = batch[..count].iter().filter_map(|completion| completion.result.err());
                flushed += errors.filter(|error| error.status == CompletionStatus::WR_FLUSH_ERR).count();
            }
        }
    }
}
