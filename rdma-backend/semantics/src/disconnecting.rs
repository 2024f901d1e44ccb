//! The end of a connection: which side learns of it, and what happens to pending requests.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::Descriptors;
use rdma_backend::{CmEventKind, Completed, Identifier as _, Immediate, SendOp};

use super::Setting;
use super::ends::{
    Called, End, ONE, PATIENCE, Pair, QUIET, Shape, equal, event, expect, holds, next_event, readable,
    requested, took,
};
use crate::Failure;

super::table! {
    "verbs.part.client-first", "if the client disconnects, both sides are told, and both queues are flushed",
        "rdma_disconnect(3)", client_first;
    "verbs.part.server-first", "if the server disconnects, both sides are told, and both queues are flushed",
        "rdma_disconnect(3)", server_first;
    "verbs.part.both-at-once", "if both disconnect at once, both sides are told, and both queues are flushed",
        "rdma_disconnect(3)", both_at_once;
    "verbs.part.other-side-untouched", "the other side's queue pair is unchanged until it disconnects too",
        "rdma_disconnect(3)", other_side;
    "verbs.part.arrived-before", "what arrived before the disconnect can be polled after it", "ibv_poll_cq(3)",
        arrived_before;
    "verbs.part.last-words", "what was acknowledged before a disconnect can be polled when that is reported",
        "ibv_poll_cq(3), rdma_disconnect(3)", last_words;
    "verbs.part.timewait", "the time-wait of a queue pair's number ends", "rdma_get_cm_event(3)", timewait;
    "verbs.part.dropped", "dropping one side disconnects the other", "rdma_destroy_id(3)", dropped;
    "verbs.part.dropped-accepted", "dropping a side before the connection is established ends the other",
        "rdma_destroy_id(3)", dropped_accepted;
    "verbs.part.queue-pair-dropped", "dropping only a queue pair notifies neither side",
        "rdma_destroy_qp(3)", queue_pair_dropped;
    "verbs.part.twice", "after both sides have disconnected, nothing more is reported",
        "rdma_get_cm_event(3)", twice;
}

fn part<B: Descriptors>(
    first: (&End<B>, &B::EventChannel),
    second: (&End<B>, &B::EventChannel),
) -> Result<(), Failure> {
    first.0.id.disconnect().called("disconnect")?;
    expect::<B>(second.1, &second.0.id, "Disconnected")?;
    second.0.id.disconnect().called("disconnect, having heard of it")?;
    expect::<B>(first.1, &first.0.id, "Disconnected")?;
    for (end, _) in [first, second] {
        end.flushes("the receives", 0..8)?;
        end.quiet("after them")?;
        end.post_one(SendOp::Send, 0, 4)?;
        end.flushes("what is posted later", [ONE])?;
    }
    Ok(())
}

fn client_first<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, .. } = &setting.pair()?;
    part((client, clients), (server, servers))
}

fn server_first<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, .. } = &setting.pair()?;
    part((server, servers), (client, clients))
}

fn both_at_once<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, .. } = &setting.pair()?;
    client.id.disconnect().called("disconnect")?;
    server.id.disconnect().called("disconnect")?;
    expect::<B>(clients, &client.id, "Disconnected")?;
    expect::<B>(servers, &server.id, "Disconnected")?;
    client.flushes("the client's receives", 0..8)?;
    server.flushes("the server's receives", 0..8)
}

fn other_side<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, .. } = &setting.pair()?;
    client.id.disconnect().called("disconnect")?;
    client.flushes("the receives of who disconnected", 0..8)?;
    expect::<B>(servers, &server.id, "Disconnected")?;
    server.quiet("the other side")?;
    server.receive(8..10)?;
    server.quiet("the other side, having posted")?;
    server.id.disconnect().called("disconnect")?;
    server.flushes("its receives", 0..10)
}

fn arrived_before<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    for id in 0..3 {
        client.post(&[client.request(100 + id, SendOp::Send, 0, 4)])?;
        client.completes("the sender", 100 + id, Completed::Send)?;
    }
    server.id.disconnect().called("disconnect")?;
    for id in 0..3 {
        server.completes("what arrived", id, took(4))?;
    }
    server.flushes("the other receives", 3..8)
}

fn last_words<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, .. } = &setting.pair()?;
    let immediate = Immediate(1000);
    client.post_one(SendOp::WriteImmediate(server.remote(0), immediate), 5, 1000)?;
    client.completes("the writer", ONE, Completed::Write)?;
    client.id.disconnect().called("disconnect")?;
    expect::<B>(servers, &server.id, "Disconnected")?;
    server.completes("the last words", 0, Completed::RecvWrite { immediate })?;
    equal("the bytes", server.bytes(0, 1000)?, client.bytes(5, 1000)?)
}

fn timewait<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let Pair { server, client, servers, clients, .. } = &setting.pair()?;
    client.id.disconnect().called("disconnect")?;
    expect::<B>(servers, &server.id, "Disconnected")?;
    server.id.disconnect().called("disconnect")?;
    expect::<B>(clients, &client.id, "Disconnected")?;
    let begun = Instant::now();
    expect::<B>(clients, &client.id, "TimewaitExit")?;
    Ok(format!("after {:.1?}", begun.elapsed()))
}

fn dropped<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients: _clients, .. } = setting.pair()?;
    drop(client);
    expect::<B>(&servers, &server.id, "Disconnected")?;
    let Pair { server, client, servers: _servers, clients, .. } = setting.pair()?;
    drop(server);
    expect::<B>(&clients, &client.id, "Disconnected")
}

/// The server's event depends on its host's progress.
fn dropped_accepted<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let Pair { server, client, servers, clients, .. } = setting.requesting()?.accepted(Shape::USUAL)?;
    holds("the answer does not come", readable(clients.as_fd(), PATIENCE))?;
    drop(client);
    match event::<B>(&servers, &server.id)? {
        kind @ (CmEventKind::Rejected { .. }
        | CmEventKind::Unreachable { .. }
        | CmEventKind::ConnectError { .. }) => Ok(format!("{kind:?}")),
        CmEventKind::Established { .. } => {
            expect::<B>(&servers, &server.id, "Disconnected")?;
            Ok("Established, then Disconnected".into())
        }
        other => Err(Failure::wrong(format!("the event: {other:?}"))),
    }
}

fn queue_pair_dropped<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, .. } = setting.pair()?;
    let End { qp, id, .. } = client;
    drop(qp);
    holds("a side was notified", next_event::<B>(&servers, QUIET)?.is_none())?;
    server.quiet("the other side")?;
    drop(id);
    drop(clients);
    expect::<B>(&servers, &server.id, "Disconnected")
}

fn twice<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, .. } = &setting.pair()?;
    part((client, clients), (server, servers))?;
    let deadline = Instant::now() + QUIET;
    for channel in [servers, clients] {
        // Only the end of timewait may follow.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if let Some(event) = next_event::<B>(channel, left)? {
            equal("the event", format!("{:?}", event.kind), "TimewaitExit".into())?;
        }
    }
    Ok(())
}

/// A whole connection. The destruction cases use it too.
pub(super) fn whole<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let requesting = setting.requesting()?;
    let (id, _) = requested::<B>(&requesting.servers, &requesting.listener)?;
    let server = End::<B>::new(id, Shape::USUAL)?;
    server.id.accept(&Shape::USUAL.params, &[]).called("accept")?;
    expect::<B>(&requesting.clients, &requesting.client.id, "Established")?;
    expect::<B>(&requesting.servers, &server.id, "Established")?;
    requesting.client.post_one(SendOp::Send, 0, 4)?;
    requesting.client.completes("the sender", ONE, Completed::Send)?;
    requesting.client.id.disconnect().called("disconnect")?;
    expect::<B>(&requesting.servers, &server.id, "Disconnected")
}
