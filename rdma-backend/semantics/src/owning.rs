//! Handles: what each keeps alive, and that everything is released, in any order.

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use crate::Descriptors;
use rdma_backend::memory::{CallerMemory, SharedMemory};
use rdma_backend::{
    Access, Completed, CompletionQueue as _, Domain as _, EventChannel as _, Identifier as _, QueuePair as _,
    Region as _, RemoteAddress, SendOp, SendRequest, Slice,
};

use super::Setting;
use super::disconnecting::whole;
use super::ends::{Called, End, ONE, Pair, Shape, equal, expect, holds, in_time, resolved, took};
use crate::Failure;
use suite::resources::{self, ProcessResources};

super::table! {
    "verbs.own.every-order", "an end's handles can be dropped in every order, and the other end is told",
        "ibv_destroy_qp(3), ibv_destroy_cq(3), ibv_dealloc_pd(3), rdma_destroy_id(3)", every_order;
    "verbs.own.queue-pair-keeps", "a queue pair keeps alive what it needs",
        "ibv_destroy_cq(3), ibv_dealloc_pd(3)", queue_pair_keeps;
    "verbs.own.domain-kept", "a region keeps its domain", "ibv_dealloc_pd(3)", domain_kept;
    "verbs.own.channel-kept", "an identifier keeps its event channel alive",
        "rdma_destroy_event_channel(3)", channel_kept;
    "verbs.own.unread-events", "an identifier with unread events can be destroyed", "rdma_destroy_id(3)",
        unread_events;
    "verbs.own.other-threads", "objects of one thread can be destroyed by another",
        "ibv_alloc_td(3)", other_threads;
    "verbs.own.fresh-memory", "a new region is zeroed, and has another key than the one before",
        "ibv_reg_mr(3)", fresh_memory;
    "verbs.own.memory-of-a-program", "existing memory is registered in place, and kept until deregistered",
        "ibv_reg_mr(3)", memory_of_a_program;
    "verbs.own.nothing-left", "connections leave no resources behind", "rdma_destroy_id(3)", nothing_left;
}

fn orders(items: &[usize]) -> Vec<Vec<usize>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    let first = |index: usize| {
        let rest: Vec<_> = items.iter().copied().filter(|item| *item != items[index]).collect();
        orders(&rest).into_iter().map(move |rest| [vec![items[index]], rest].concat())
    };
    (0..items.len()).flat_map(first).collect()
}

fn every_order<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let orders = orders(&[0, 1, 2, 3, 4]);
    for order in &orders {
        let Pair { server, client, servers, clients: _clients, .. } = setting.pair()?;
        client.cq.arm().called("arm")?;
        client.post_one(SendOp::Send, 0, 4)?;
        server.completes("the receiver", 0, took(4))?;
        let End { domain, cq, qp, region, inbox, id } = client;
        let (mut domain, mut cq, mut qp, mut id) = (Some(domain), Some(cq), Some(qp), Some(id));
        let (mut regions, order) = (Some((region, inbox)), order.clone());
        in_time("dropping", move || {
            for handle in order {
                match handle {
                    0 => drop(domain.take()),
                    1 => drop(cq.take()),
                    2 => drop(qp.take()),
                    3 => drop(id.take()),
                    _ => drop(regions.take()),
                }
            }
        })?;
        expect::<B>(&servers, &server.id, "Disconnected")?;
    }
    Ok(format!("{} orders", orders.len()))
}

fn queue_pair_keeps<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, listener } = setting.pair()?;
    let End { domain, cq, qp, region, inbox, id } = client;
    drop((domain, cq, id, inbox, clients, listener));
    let local = Slice { region: &region, offset: 0, len: 4 };
    let request = SendRequest { id: ONE, op: SendOp::Send, local, signaled: true, inline: false };
    qp.post_send(&[request]).map_err(|error| error.error).called("post_send")?;
    server.completes("the receiver", 0, took(4))?;
    drop(region);
    drop(qp);
    expect::<B>(&servers, &server.id, "Disconnected")
}

fn domain_kept<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &setting.pair()?;
    let domain = client.id.create_domain().called("create_domain")?;
    let region = domain.register(4096, Access::LOCAL_WRITE).called("register")?;
    drop(domain);
    holds("its memory cannot be written", region.memory().write(0, &[1; 4096]))
}

fn channel_kept<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, clients, .. } = setting.pair()?;
    drop((servers, clients));
    client.post_one(SendOp::Send, 0, 4)?;
    server.completes("the receiver", 0, took(4))?;
    client.id.disconnect().called("disconnect")?;
    in_time("dropping", move || drop((client, server)))
}

fn unread_events<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = setting.requesting()?.accepted(Shape::USUAL)?;
    let to = pair.listener.local_addr().ok_or_else(|| Failure::wrong("no address"))?;
    let id = pair.clients.create_id().called("create_id")?;
    id.resolve_address(None, to, super::ends::PATIENCE).called("resolve_address")?;
    in_time("dropping", move || drop((id, pair)))?;
    setting.pair().map(drop)
}

fn other_threads<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    for _ in 0..10 {
        let Pair { server, client, servers, clients, listener } = setting.pair()?;
        let client = Arc::new(client);
        let sender = Arc::clone(&client);
        let sent = in_time("sending", move || {
            sender.post_one(SendOp::Send, 0, 4)?;
            sender.completes("the sender", ONE, Completed::Send)
        })?;
        sent?;
        in_time("dropping the client", move || drop((client, clients)))?;
        expect::<B>(&servers, &server.id, "Disconnected")?;
        in_time("dropping the server", move || drop((listener, servers, server)))?;
    }
    Ok(())
}

fn fresh_memory<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &setting.pair()?;
    let mut last = None;
    for _ in 0..20 {
        let region = client.domain.register(4096, Access::REMOTE_WRITE).called("register")?;
        equal("its bytes", super::ends::read::<B>(&region, 0, 4096)?, vec![0; 4096])?;
        holds("its memory cannot be written", region.memory().write(0, &[0xee; 4096]))?;
        holds("it has the key of the one before", last != Some(region.rkey()))?;
        last = Some(region.rkey());
    }
    Ok(())
}

struct Handle(Arc<[AtomicU8]>);

impl CallerMemory for Handle {
    fn shared(&self) -> SharedMemory<'_> {
        SharedMemory::new(&self.0)
    }
}

fn memory_of_a_program<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    const LEN: usize = 4096 + 5;
    let Pair { server, client, .. } = &setting.pair()?;
    let kept: Arc<[AtomicU8]> = (0..LEN).map(|_| AtomicU8::new(7)).collect();
    let memory = Handle(Arc::clone(&kept));
    let region = server.domain.register_memory(memory, Access::REMOTE_WRITE).called("register_memory")?;
    equal("its length", region.len(), LEN)?;
    equal("its bytes", super::ends::read::<B>(&region, 0, LEN)?, vec![7; LEN])?;
    let to = RemoteAddress { address: region.address() + LEN as u64 - 13, rkey: region.rkey() };
    holds("the source cannot be written", client.region.write(0, b"thirteen byte"))?;
    client.post_one(SendOp::Write(to), 0, 13)?;
    client.completes("the writer", ONE, Completed::Write)?;
    let last = Handle(Arc::clone(&kept));
    let mut bytes = [0; 15];
    holds("it is shorter", last.shared().read(LEN - 15, &mut bytes))?;
    equal("the program's bytes", &bytes, b"\x07\x07thirteen byte")?;
    drop(last);
    let local = Slice { region: &region, offset: LEN - 13, len: 13 };
    client.receive(0..1)?;
    server.post(&[SendRequest { id: ONE, op: SendOp::Send, local, signaled: true, inline: false }])?;
    client.completes("the receiver", 0, took(13))?;
    equal("what was sent", client.received(0, 13)?, b"thirteen byte".to_vec())?;
    equal("handles on the memory", Arc::strong_count(&kept), 2)?;
    drop(region);
    equal("handles on the memory once it is deregistered", Arc::strong_count(&kept), 1)?;
    let none = server.domain.register_memory(Handle(Arc::clone(&kept)), Access::NONE).map(drop);
    none.called("register_memory")?;
    equal("handles on the memory at the end", Arc::strong_count(&kept), 1)
}

fn nothing_left<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    // Once before counting: some descriptors are opened only once.
    whole(setting)?;
    resources::settle();
    let before = ProcessResources::now();
    for _ in 0..30 {
        whole(setting)?;
        let channel = setting.client.event_channel().called("event_channel")?;
        let listening = setting.server.event_channel().called("event_channel")?;
        let listener = listening.listen(setting.address(), 1).called("listen")?;
        let to = listener.local_addr().ok_or_else(|| Failure::wrong("no address"))?;
        drop(resolved::<B>(&channel, to)?);
    }
    let after = resources::await_no_more_than(before);
    holds(&format!("before: {before}; after: {after}"), !after.exceeds(before))?;
    Ok(format!("30 connections, then {after}, as before"))
}
