//! One-shot notification: when a completion queue's descriptor becomes readable.

use std::os::fd::AsFd;
use std::time::Instant;

use crate::Descriptors;
use rdma_backend::{Completed, Completion, CompletionQueue as _, CompletionStatus, Identifier as _, SendOp};

use super::Setting;
use super::ends::{Called, End, ONE, PATIENCE, Pair, QUIET, Shape, equal, holds, in_time, readable, took};
use crate::Failure;

super::table! {
    "verbs.event.unarmed", "without arming no completion raises an event", "ibv_req_notify_cq(3)", unarmed;
    "verbs.event.armed", "after arming, the next completion raises one event", "ibv_req_notify_cq(3)", armed;
    "verbs.event.one-shot", "after the event of an arming, further completions raise none",
        "ibv_req_notify_cq(3)", one_shot;
    "verbs.event.earlier", "a completion from before the arming raises no event",
        "ibv_req_notify_cq(3)", earlier;
    "verbs.event.race", "poll, arm, poll, wait: a completion at any moment is found or ends the wait",
        "ibv_get_cq_event(3)", race;
    "verbs.event.re-armed", "arming again works, with events taken or not", "ibv_req_notify_cq(3)", re_armed;
    "verbs.event.armed-twice", "arming twice raises one event", "ibv_req_notify_cq(3)", armed_twice;
    "verbs.event.spurious", "an event may find nothing to poll", "ibv_get_cq_event(3)", spurious;
    "verbs.event.flush", "flushed requests raise events as well", "ibv_req_notify_cq(3)", flush;
    "verbs.event.send-side", "completions of sends raise events as those of receives do", "ibv_create_cq(3)",
        send_side;
    "verbs.event.silent", "an unsignaled success raises no event", "ibv_post_send(3)", silent;
    "verbs.event.acknowledged", "a queue whose events were all taken can be destroyed", "ibv_ack_cq_events(3)",
        acknowledged;
    "verbs.event.untaken", "a queue with events that were not taken can be destroyed",
        "ibv_ack_cq_events(3)", untaken;
    "verbs.event.moderate", "in many rounds there are as many events as armings, and every completion",
        "ibv_get_cq_event(3)", many;
}

fn ping<B: Descriptors>(pair: &Pair<B>) -> Result<(), Failure> {
    pair.client.post_one(SendOp::Send, 0, 1)?;
    pair.client.completes("the sender", ONE, Completed::Send)
}

fn polled<B: Descriptors>(end: &End<B>) -> Result<Completion, Failure> {
    let deadline = Instant::now() + PATIENCE;
    let mut one = [Completion::EMPTY];
    while end.cq.poll(&mut one).called("poll")? == 0 {
        holds("a completion did not come", Instant::now() < deadline)?;
        std::thread::yield_now();
    }
    Ok(one[0])
}

fn arm<B: Descriptors>(end: &End<B>) -> Result<(), Failure> {
    end.cq.arm().called("arm")
}

fn wakes<B: Descriptors>(what: &str, end: &End<B>) -> Result<(), Failure> {
    holds(what, readable(end.cq.as_fd(), PATIENCE))
}

fn sleeps<B: Descriptors>(what: &str, end: &End<B>) -> Result<(), Failure> {
    holds(what, !readable(end.cq.as_fd(), QUIET))
}

fn takes<B: Descriptors>(end: &End<B>, events: u32) -> Result<(), Failure> {
    equal("events taken", end.cq.take_events().called("take_events")?, events)
}

fn unarmed<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = &setting.pair()?;
    ping(pair)?;
    sleeps("it woke", &pair.server)?;
    takes(&pair.server, 0)
}

fn armed<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = &setting.pair()?;
    arm(&pair.server)?;
    sleeps("it woke before there was anything", &pair.server)?;
    ping(pair)?;
    wakes("it slept on", &pair.server)?;
    takes(&pair.server, 1)?;
    equal("the completion", polled(&pair.server)?.result, Ok(took(1)))
}

fn one_shot<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = &setting.pair()?;
    arm(&pair.server)?;
    for _ in 0..3 {
        ping(pair)?;
    }
    wakes("it slept on", &pair.server)?;
    takes(&pair.server, 1)?;
    ping(pair)?;
    sleeps("it woke again", &pair.server)?;
    for _ in 0..4 {
        equal("the completion", polled(&pair.server)?.result, Ok(took(1)))?;
    }
    Ok(())
}

fn earlier<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = &setting.pair()?;
    ping(pair)?;
    // The device has the message, but the queue may not show it; to look takes it out.
    std::thread::sleep(QUIET);
    arm(&pair.server)?;
    sleeps("it woke", &pair.server)
}

/// A SEND at any moment, in particular between a poll and the arming after it.
fn race<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    const ROUNDS: u64 = 100;
    let Pair { server, client, .. } = &setting.pair()?;
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            (0..ROUNDS).try_for_each(|_| {
                client.post_one(SendOp::Send, 0, 1)?;
                client.completes("the sender", ONE, Completed::Send)
            })
        });
        for round in 0..ROUNDS {
            // The tested way of waiting: a lost wake-up would end in its deadline.
            server.completes("the receiver", round, took(1))?;
            server.receive(round as usize + 8..round as usize + 9)?;
        }
        sender.join().unwrap_or_else(|_| Err(Failure::wrong("the sender panicked")))
    })
}

fn re_armed<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = &setting.pair()?;
    for _ in 0..2 {
        arm(&pair.server)?;
        ping(pair)?;
        wakes("it slept on", &pair.server)?;
        polled(&pair.server)?;
    }
    takes(&pair.server, 2)?;
    arm(&pair.server)?;
    ping(pair)?;
    wakes("it slept on, after all were taken", &pair.server)?;
    takes(&pair.server, 1)
}

fn armed_twice<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = &setting.pair()?;
    arm(&pair.server)?;
    arm(&pair.server)?;
    ping(pair)?;
    ping(pair)?;
    wakes("it slept on", &pair.server)?;
    polled(&pair.server)?;
    polled(&pair.server)?;
    takes(&pair.server, 1)
}

fn spurious<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = &setting.pair()?;
    arm(&pair.server)?;
    ping(pair)?;
    polled(&pair.server)?;
    wakes("the event is not there", &pair.server)?;
    takes(&pair.server, 1)?;
    equal("a poll", pair.server.cq.poll(&mut [Completion::EMPTY]).called("poll")?, 0)
}

fn flush<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = &setting.pair()?;
    arm(&pair.client)?;
    pair.client.id.disconnect().called("disconnect")?;
    wakes("it slept on", &pair.client)?;
    let status = polled(&pair.client)?.result.map_err(|error| error.status);
    equal("the completion", status, Err(CompletionStatus::WR_FLUSH_ERR))
}

fn send_side<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &setting.pair()?;
    arm(client)?;
    client.post_one(SendOp::Send, 0, 1)?;
    wakes("it slept on", client)?;
    equal("the completion", polled(client)?.result, Ok(Completed::Send))
}

fn silent<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &setting.pair()?;
    arm(client)?;
    client.post(&[client.silent(1, SendOp::Send, 0, 1)])?;
    equal("the receiver", polled(server)?.result, Ok(took(1)))?;
    sleeps("it woke", client)
}

fn acknowledged<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = setting.pair()?;
    for _ in 0..5 {
        arm(&pair.server)?;
        ping(&pair)?;
        wakes("it slept on", &pair.server)?;
        takes(&pair.server, 1)?;
        polled(&pair.server)?;
    }
    in_time("destroying the queue", move || drop(pair))
}

fn untaken<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = setting.pair()?;
    arm(&pair.server)?;
    ping(&pair)?;
    wakes("it slept on", &pair.server)?;
    in_time("destroying the queue", move || drop(pair))
}

fn many<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let pair = &setting.pair_of(Shape { receives: 64, ..Shape::USUAL }, Shape::USUAL)?;
    let (mut events, mut completions) = (0, 0);
    for round in 1..=16 {
        arm(&pair.server)?;
        for _ in 0..round % 4 + 1 {
            ping(pair)?;
        }
        wakes("it slept on", &pair.server)?;
        events += pair.server.cq.take_events().called("take_events")?;
        for _ in 0..round % 4 + 1 {
            equal("the completion", polled(&pair.server)?.id, completions)?;
            completions += 1;
        }
    }
    equal("events", events, 16)
}
