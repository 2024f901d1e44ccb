//! The error state: which request fails first, which are flushed after it, and what is reported.

use crate::Descriptors;
use rdma_backend::{
    Access, Completed, CompletionStatus, Domain as _, Identifier as _, QueuePair as _, RemoteAddress, SendOp,
    SendRequest, Slice,
};

use super::Setting;
use super::ends::{Called, End, ONE, Pair, Shape, equal, holds, rnr_retries, took};
use crate::Failure;

super::table! {
    "verbs.fail.cause-first", "a failed request completes first, and those behind it are flushed in order",
        "ibv_modify_qp(3), IBA 10.3.1.7", cause_first;
    "verbs.fail.receives-flushed", "receives of a failed queue pair are flushed in order",
        "IBA 10.3.1.7", receives_flushed;
    "verbs.fail.later-sends", "sends posted after a failure are flushed, signaled or not",
        "IBA 10.3.1.7", later_sends;
    "verbs.fail.later-receives", "receives posted after a failure are flushed",
        "IBA 10.3.1.7", later_receives;
    "verbs.fail.unsignaled", "the failure of an unsignaled request is reported",
        "IBA 10.7.3.1, ibv_post_send(3)", unsignaled;
    "verbs.fail.once", "each request of a failed queue pair completes once", "ibv_poll_cq(3)", once;
    "verbs.fail.behind-is-not-executed", "a flushed request was not executed", "IBA 10.3.1.7", not_executed;
    "verbs.fail.source-gone", "a send whose memory was deregistered fails with LOC_PROT_ERR",
        "ibv_poll_cq(3)", source_gone;
    "verbs.fail.source-gone-alone", "a send whose memory was deregistered is not noticed by the other side",
        "IBA 9.9.2.4", source_gone_alone;
    "verbs.fail.silent-peer", "a request to a destroyed queue pair is not answered: RETRY_EXC_ERR",
        "ibv_poll_cq(3)", silent_peer;
    "verbs.signal.silent", "an unsignaled success is not reported", "ibv_post_send(3)", silent;
    "verbs.signal.covers", "a completion gives back the slots of the unsignaled requests before it",
        "ibv_post_send(3)", covers;
}

fn fragile<B: Descriptors>(setting: &Setting<B>) -> Result<Pair<B>, Failure> {
    setting.pair_of(Shape { params: rnr_retries(0), ..Shape::WITHOUT_RECEIVES }, Shape::USUAL)
}

fn break_down<B: Descriptors>(client: &End<B>) -> Result<(), Failure> {
    client.post_one(SendOp::Send, 0, 4)?;
    client.fails("the cause", ONE, CompletionStatus::RNR_RETRY_EXC_ERR)
}

fn cause_first<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &setting
        .pair_of(Shape { params: rnr_retries(0), ..Shape::WITHOUT_RECEIVES }, Shape::WITHOUT_RECEIVES)?;
    let chain: Vec<_> = (0..10).map(|id| client.request(id, SendOp::Send, 0, 4)).collect();
    client.post(&chain)?;
    client.fails("the cause", 0, CompletionStatus::RNR_RETRY_EXC_ERR)?;
    client.flushes("those behind it", 1..10)
}

fn receives_flushed<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &fragile(setting)?;
    break_down(client)?;
    client.flushes("the receives", 0..8)?;
    client.quiet("after them")
}

fn later_sends<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &fragile(setting)?;
    break_down(client)?;
    client.flushes("the receives", 0..8)?;
    client.post(&[
        client.request(20, SendOp::Send, 0, 4),
        client.silent(21, SendOp::Send, 0, 4),
        client.request(22, SendOp::Write(server.remote(0)), 0, 4),
        client.silent(23, SendOp::Read(server.remote(0)), 0, 4),
    ])?;
    client.flushes("what is posted later", 20..24)
}

fn later_receives<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &fragile(setting)?;
    break_down(client)?;
    client.flushes("the receives", 0..8)?;
    client.receive(8..12)?;
    client.flushes("receives posted later", 8..12)
}

fn unsignaled<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &fragile(setting)?;
    client.post(&[client.silent(5, SendOp::Send, 0, 4)])?;
    client.fails("the unsignaled request", 5, CompletionStatus::RNR_RETRY_EXC_ERR)
}

fn once<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &fragile(setting)?;
    let chain: Vec<_> = (100..110)
        .map(|id| SendRequest { signaled: id % 3 == 0, ..client.request(id, SendOp::Send, 0, 4) })
        .collect();
    client.post(&chain)?;
    let mut ids =
        (0..18).map(|_| Ok(client.completion("a request")?.id)).collect::<Result<Vec<_>, Failure>>()?;
    client.quiet("one too many")?;
    ids.sort_unstable();
    equal("the ids", ids, (0..8).chain(100..110).collect())
}

fn not_executed<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &fragile(setting)?;
    let before = server.bytes(0, 50)?;
    client.post(&[
        client.request(ONE, SendOp::Send, 0, 4),
        client.silent(1, SendOp::Write(server.remote(0)), 100, 50),
    ])?;
    client.fails("the cause", ONE, CompletionStatus::RNR_RETRY_EXC_ERR)?;
    server.quiet("the peer")?;
    equal("the bytes", server.bytes(0, 50)?, before)
}

/// A request loses its memory while it waits for a receive, which the other side then posts.
fn robbed<B: Descriptors>(setting: &Setting<B>) -> Result<Pair<B>, Failure> {
    let pair = setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    let Pair { server, client, .. } = &pair;
    let (timer, _) = super::retrying::timer(24)?;
    server.set_timer(timer)?;
    let source = client.domain.register(64, Access::NONE).called("register")?;
    let local = Slice { region: &source, offset: 0, len: 8 };
    client.post(&[SendRequest { local, ..client.request(ONE, SendOp::Send, 0, 0) }])?;
    drop(source);
    server.receive(0..4)?;
    Ok(pair)
}

fn source_gone<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    robbed(setting)?.client.fails("the sender", ONE, CompletionStatus::LOC_PROT_ERR)
}

fn source_gone_alone<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &robbed(setting)?;
    holds("the sender succeeds", client.completion("the sender")?.result.is_err())?;
    server.quiet("the other side")
}

fn silent_peer<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let params = rdma_backend::ConnectParams { retry_count: 1, ..super::ends::PARAMS };
    let shape = Shape { params, ..Shape::USUAL };
    let Pair { server, client, servers: _servers, .. } = setting.pair_of(shape, shape)?;
    let End { qp, id, .. } = server;
    drop(qp);
    let begun = std::time::Instant::now();
    client.post_one(SendOp::Write(RemoteAddress { address: 0, rkey: 0 }), 0, 4)?;
    client.fails("the sender", ONE, CompletionStatus::RETRY_EXC_ERR)?;
    holds("the identifier has gone", id.peer_addr().is_some())?;
    Ok(format!("{:.1?}", begun.elapsed()))
}

fn silent<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    client.post(&[
        client.silent(1, SendOp::Send, 0, 4),
        client.silent(2, SendOp::Write(server.remote(0)), 0, 4),
    ])?;
    server.completes("the receiver", 0, took(4))?;
    client.quiet("the sender")
}

fn covers<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    let depth = u64::from(Shape::USUAL.limits.send_depth);
    // Ten times the depth: each round's last request frees all of its slots.
    for _ in 0..10 {
        let chain: Vec<_> = (1..=depth)
            .map(|id| {
                let write = client.silent(id, SendOp::Write(server.remote(0)), 0, 4);
                SendRequest { signaled: id == depth, ..write }
            })
            .collect();
        let posted = client.qp.post_send(&chain);
        posted.map_err(|error| Failure::wrong(format!("{} of {depth}: {}", error.posted, error.error)))?;
        client.completes("the last", depth, Completed::Write)?;
    }
    client.quiet("the others")
}
