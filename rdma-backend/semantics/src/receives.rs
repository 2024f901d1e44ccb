//! Requests that consume a receive, and requests that do not.

use crate::Descriptors;
use rdma_backend::{Completed, Immediate, QueuePair as _, RnrTimer, SendOp};

use super::Setting;
use super::ends::{ONE, PATIENCE, Pair, SLOT, Shape, equal, expect, holds, readable, took};
use crate::Failure;
use std::os::fd::AsFd;

super::table! {
    "verbs.receive.send-takes-one", "every SEND consumes one receive, an empty one too",
        "ibv_post_send(3)", send;
    "verbs.receive.immediate-takes-one", "every WRITE with immediate consumes one receive, an empty one too",
        "ibv_post_send(3)", write_immediate;
    "verbs.receive.write-takes-none", "a WRITE is executed without a receive", "ibv_post_send(3)", write;
    "verbs.receive.read-takes-none", "a READ is executed without a receive", "ibv_post_send(3)", read;
    "verbs.receive.length", "a receive takes any length up to its own, and reports it",
        "ibv_poll_cq(3)", lengths;
    "verbs.receive.before-connect", "receives posted before the connection is established are used",
        "rdma_connect(3), rdma_accept(3)", before_connect;
    "verbs.receive.before-established", "a message that arrives before Established was read is kept",
        "rdma_get_cm_event(3), IBA 12.9.8.6", before_established;
    "verbs.receive.taken-later", "a receive posted while a SEND waits for it is consumed",
        "ibv_post_recv(3)", later;
}

/// Of three, two find a receive. The third waits for one.
fn takes_one<B: Descriptors>(
    setting: &Setting<B>,
    len: usize,
    op: impl Fn(&Pair<B>) -> SendOp,
    took: Completed,
) -> Result<(), Failure> {
    let pair = &setting.pair_of(Shape { receives: 2, ..Shape::USUAL }, Shape::USUAL)?;
    let Pair { server, client, .. } = pair;
    server.set_timer(RnrTimer::MICROS_640)?;
    client.post(&[1, 2, 3].map(|id| client.request(id, op(pair), 0, len)))?;
    for id in 0..2 {
        server.completes("the receiver", id, took)?;
        client.next(PATIENCE)?;
    }
    server.quiet("without a receive")?;
    client.quiet("the one that waits")?;
    server.receive(2..3)?;
    server.completes("the receiver", 2, took)
}

fn send<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    takes_one(setting, 8, |_| SendOp::Send, took(8))?;
    takes_one(setting, 0, |_| SendOp::Send, took(0))
}

fn write_immediate<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let immediate = Immediate(8);
    let op = |pair: &Pair<B>| SendOp::WriteImmediate(pair.server.remote(0), immediate);
    takes_one(setting, 8, op, Completed::RecvWrite { immediate })?;
    takes_one(setting, 0, op, Completed::RecvWrite { immediate })
}

fn write<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    client.post_one(SendOp::Write(server.remote(0)), 100, 50)?;
    client.completes("the writer", ONE, Completed::Write)?;
    equal("the bytes", server.bytes(0, 50)?, client.bytes(100, 50)?)
}

fn read<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    client.post_one(SendOp::Read(server.remote(7)), 100, 50)?;
    client.completes("the reader", ONE, Completed::Read)?;
    equal("the bytes", client.bytes(100, 50)?, server.bytes(7, 50)?)
}

fn lengths<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    for (number, len) in [0, 1, SLOT - 1, SLOT].into_iter().enumerate() {
        client.post_one(SendOp::Send, 0, len)?;
        server.completes("the receiver", number as u64, took(len as u32))?;
        equal("the bytes", server.received(number, len)?, client.bytes(0, len)?)?;
        client.completes("the sender", ONE, Completed::Send)?;
    }
    Ok(())
}

fn before_connect<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    // Without retries, a missing receive would be an error.
    let shape = Shape { params: super::ends::rnr_retries(0), ..Shape::USUAL };
    let pair = setting.pair_of(shape, shape)?;
    for (from, to) in pair.ends() {
        from.post_one(SendOp::Send, 0, 4)?;
        from.completes("the sender", ONE, Completed::Send)?;
        to.completes("the receiver", 0, took(4))?;
    }
    Ok(())
}

fn before_established<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = setting.requesting()?.accepted(Shape::USUAL)?;
    let Pair { server, client, servers, clients, .. } = &pair;
    expect::<B>(clients, &client.id, "Established")?;
    client.post_one(SendOp::Send, 0, 4)?;
    server.completes("the receiver", 0, took(4))?;
    client.completes("the sender", ONE, Completed::Send)?;
    holds("the event does not come", readable(servers.as_fd(), PATIENCE))?;
    expect::<B>(servers, &server.id, "Established")
}

fn later<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair_of(Shape::WITHOUT_RECEIVES, Shape::USUAL)?;
    server.set_timer(RnrTimer::MICROS_640)?;
    client.post_one(SendOp::Send, 0, 4)?;
    client.quiet("a SEND without a receive")?;
    server
        .qp
        .post_recv(&[server.receive_request(5)])
        .map_err(|error| Failure::wrong(error.error.to_string()))?;
    server.completes("the receiver", 5, took(4))?;
    client.completes("the sender", ONE, Completed::Send)
}
