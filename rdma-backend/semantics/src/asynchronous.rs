//! Asynchronous events of a device, and the objects that receive them.

use crate::Descriptors;
use rdma_backend::{
    AsyncEvent, CmEventKind, CompletionStatus, Identifier as _, Immediate, RemoteAddress, SendOp,
};

use super::Setting;
use super::ends::{Called, ONE, Pair, QUIET, Shape, equal, event, holds, next_event};
use crate::Failure;

super::table! {
    "verbs.async.overrun", "an overrun of a completion queue is reported to the queue pairs that use it",
        "ibv_get_async_event(3), ibv_create_cq(3)", overrun;
    "verbs.async.moved", "asynchronous events follow their identifier to another channel",
        "ibv_get_async_event(3), rdma_migrate_id(3)", moved;
    "verbs.async.access", "a refused WRITE without a receive is reported to the responder by an event",
        "ibv_get_async_event(3), IBA 9.9.3.1.3", access;
    "verbs.async.access-receive", "a refused WRITE that consumed a receive is reported by that alone",
        "IBA 9.9.3.1.3", access_receive;
    "verbs.async.quiet", "a connection that is made, used and closed raises no asynchronous event",
        "ibv_get_async_event(3)", quiet;
    "verbs.async.notify", "rdma_notify on an established connection raises no event",
        "rdma_notify(3)", notify;
}

fn told<B: Descriptors>(
    channel: &B::EventChannel,
    id: &B::Identifier,
    expected: AsyncEvent,
) -> Result<(), Failure> {
    match event::<B>(channel, id)? {
        CmEventKind::Async(event) => equal("the event", event, expected),
        other => Err(Failure::wrong(format!("the event: {other:?}, not {expected:?}"))),
    }
}

fn nothing<B: Descriptors>(channel: &B::EventChannel) -> Result<(), Failure> {
    match next_event::<B>(channel, QUIET)? {
        None => Ok(()),
        Some(event) => Err(Failure::wrong(format!("an event came: {:?}", event.kind))),
    }
}

fn overrunning<B: Descriptors>(setting: &Setting<B>) -> Result<Pair<B>, Failure> {
    const MANY: u64 = 60;
    let pair = setting.pair_of(Shape::USUAL, Shape { completions: 4, ..Shape::WITHOUT_RECEIVES })?;
    let to = SendOp::Write(pair.server.remote(0));
    let chain: Vec<_> = (0..MANY).map(|id| pair.client.request(id, to, 0, 4)).collect();
    pair.client.post(&chain)?;
    Ok(pair)
}

fn overrun<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, servers, clients, .. } = &overrunning(setting)?;
    told::<B>(clients, &client.id, AsyncEvent::CqErr)?;
    nothing::<B>(servers)
}

fn moved<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, clients, .. } = &overrunning(setting)?;
    let other = setting.client.event_channel().called("event_channel")?;
    client.id.migrate(&other).called("migrate")?;
    told::<B>(&other, &client.id, AsyncEvent::CqErr)?;
    nothing::<B>(clients)
}

fn access<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, .. } = &setting.pair()?;
    client.post_one(
        SendOp::Write(RemoteAddress { rkey: !server.remote(0).rkey, ..server.remote(0) }),
        0,
        4,
    )?;
    client.fails("the sender", ONE, CompletionStatus::REM_ACCESS_ERR)?;
    nothing::<B>(clients)?;
    told::<B>(servers, &server.id, AsyncEvent::QpAccessErr)
}

fn access_receive<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, .. } = &setting.pair()?;
    let nowhere = RemoteAddress { rkey: !server.remote(0).rkey, ..server.remote(0) };
    client.post_one(SendOp::WriteImmediate(nowhere, Immediate(4)), 0, 4)?;
    holds("the receive succeeds", server.completion("the receive")?.result.is_err())?;
    nothing::<B>(servers)
}

fn quiet<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, .. } = &setting.pair()?;
    client.post_one(SendOp::Send, 0, 4)?;
    client.completion("the sender")?;
    server.completion("the receiver")?;
    client.id.disconnect().called("disconnect")?;
    let end = event::<B>(servers, &server.id)?;
    holds(&format!("the event: {end:?}, not Disconnected"), matches!(end, CmEventKind::Disconnected))?;
    server.id.disconnect().called("disconnect")?;
    let end = event::<B>(clients, &client.id)?;
    holds(&format!("the event: {end:?}, not Disconnected"), matches!(end, CmEventKind::Disconnected))
}

fn notify<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, .. } = &setting.pair()?;
    for id in [&server.id, &client.id] {
        // Whether it is refused depends on the kernel.
        let _refused = id.notify_established();
    }
    nothing::<B>(servers)?;
    nothing::<B>(clients)
}
