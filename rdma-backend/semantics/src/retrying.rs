//! Requests that find no receive: which side retries, how often, and after how long.

use std::time::{Duration, Instant};

use crate::Descriptors;
use rdma_backend::{Completed, CompletionStatus, Identifier as _, RnrTimer, SendOp};

use super::Setting;
use super::ends::{Called, ONE, PATIENCE, Pair, Shape, equal, holds, next_event, rnr_retries, took};
use crate::Failure;

super::table! {
    "verbs.rnr.zero", "with an RNR retry count of 0, the first missing receive is RNR_RETRY_EXC_ERR",
        "rdma_accept(3)", zero;
    "verbs.rnr.three", "with an RNR retry count of 3, a SEND is retried three times, a timer apart",
        "rdma_connect(3), IBA 9.7.5.2.8", three;
    "verbs.rnr.seven", "with an RNR retry count of 7, a SEND is retried without end",
        "rdma_connect(3)", seven;
    "verbs.rnr.whose-count", "each side's RNR retry count is the one that the other side gave",
        "rdma_accept(3)", whose_count;
    "verbs.rnr.timer-of-responder", "the RNR timer is that of the side without a receive",
        "ibv_modify_qp(3)", pace;
    "verbs.rnr.timer-untouched", "the connection manager leaves the slowest RNR timer, 655 ms",
        "IBA 9.7.5.2.8", slowest;
    "verbs.rnr.success-refills", "a successful request restores the RNR retries", "IBA 9.7.5.2.8", refills;
    "verbs.rnr.holds-up", "requests behind one that waits for a receive wait too", "IBA 9.5", holds_up;
    "verbs.rnr.responder-unharmed", "the side without a receive stays connected", "IBA 9.7.5.2.8", unharmed;
}

pub(super) fn timer(code: u8) -> Result<(RnrTimer, Duration), Failure> {
    let timer = RnrTimer::from_code(code).ok_or_else(|| Failure::wrong("no such code"))?;
    Ok((timer, timer.delay()))
}

/// For clocks that tick coarsely.
fn nearly(duration: Duration) -> Duration {
    duration * 9 / 10
}

fn deaf<B: Descriptors>(setting: &Setting<B>, retries: u8) -> Result<Pair<B>, Failure> {
    setting.pair_of(
        Shape { params: rnr_retries(retries), ..Shape::WITHOUT_RECEIVES },
        Shape { receives: 1, ..Shape::USUAL },
    )
}

fn zero<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { client, .. } = &deaf(setting, 0)?;
    client.post_one(SendOp::Send, 0, 4)?;
    client.fails("the sender", ONE, CompletionStatus::RNR_RETRY_EXC_ERR)
}

fn three<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let Pair { server, client, .. } = &deaf(setting, 3)?;
    let (timer, delay) = timer(24)?;
    server.set_timer(timer)?;
    let begun = Instant::now();
    client.post_one(SendOp::Send, 0, 4)?;
    client.fails("the sender", ONE, CompletionStatus::RNR_RETRY_EXC_ERR)?;
    let took = begun.elapsed();
    holds(&format!("it took {took:?}, less than 3 × {delay:?}"), took >= nearly(3 * delay))?;
    Ok(format!("3 × {delay:?}: {took:.1?}"))
}

fn seven<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &deaf(setting, 7)?;
    let (timer, delay) = timer(16)?;
    server.set_timer(timer)?;
    client.post_one(SendOp::Send, 0, 4)?;
    equal("the sender", client.next(40 * delay)?, None)?;
    server.receive(0..1)?;
    client.completes("the sender", ONE, Completed::Send)
}

fn whose_count<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let server = Shape { params: rnr_retries(0), ..Shape::WITHOUT_RECEIVES };
    let Pair { server, client, .. } = &setting.pair_of(server, Shape::WITHOUT_RECEIVES)?;
    client.set_timer(RnrTimer::MICROS_640)?;
    server.post_one(SendOp::Send, 0, 4)?;
    server.quiet("the server, who may try for ever")?;
    client.receive(0..1)?;
    server.completes("the server, who may try for ever", ONE, Completed::Send)?;
    client.completes("what it sent", 0, took(4))?;
    client.post_one(SendOp::Send, 0, 4)?;
    client.fails("the client, who may try once", ONE, CompletionStatus::RNR_RETRY_EXC_ERR)
}

/// Returns the time of a SEND that finds its receive at the second attempt.
fn second_attempt<B: Descriptors>(
    setting: &Setting<B>,
    timer: Option<RnrTimer>,
) -> Result<Duration, Failure> {
    let Pair { server, client, .. } = &deaf(setting, 7)?;
    if let Some(timer) = timer {
        server.set_timer(timer)?;
        // The other side's own timer applies to what is sent to it.
        client.set_timer(RnrTimer::SLOWEST)?;
    }
    let begun = Instant::now();
    client.post_one(SendOp::Send, 0, 4)?;
    equal("the sender", client.next(Duration::from_millis(20))?, None)?;
    server.receive(0..1)?;
    client.completes("the sender", ONE, Completed::Send)?;
    Ok(begun.elapsed())
}

fn pace<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let fast = second_attempt(setting, Some(RnrTimer::MICROS_640))?;
    holds(&format!("0.64 ms: {fast:?}"), fast < RnrTimer::SLOWEST.delay() / 2)?;
    let (timer, delay) = timer(28)?;
    let slow = second_attempt(setting, Some(timer))?;
    holds(&format!("{delay:?}: {slow:?}"), slow >= nearly(delay))?;
    Ok(format!("0.64 ms: {fast:.1?}; {delay:?}: {slow:.1?}"))
}

fn slowest<B: Descriptors>(setting: &Setting<B>) -> Result<String, Failure> {
    let took = second_attempt(setting, None)?;
    holds(&format!("it took {took:?}"), took >= nearly(RnrTimer::SLOWEST.delay()))?;
    Ok(format!("{took:.1?}"))
}

fn refills<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &deaf(setting, 3)?;
    let (timer, delay) = timer(28)?;
    server.set_timer(timer)?;
    for number in 0..2 {
        // The receive comes after two of three retries. A second SEND needs a refill.
        client.post_one(SendOp::Send, 0, 4)?;
        equal("the sender", client.next(delay * 3 / 2)?, None)?;
        server.receive(number..number + 1)?;
        client.completes("the sender", ONE, Completed::Send)?;
    }
    Ok(())
}

fn holds_up<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, .. } = &deaf(setting, 7)?;
    let before = server.bytes(0, 50)?;
    client.post(&[
        client.request(1, SendOp::Send, 0, 4),
        client.request(2, SendOp::Write(server.remote(0)), 100, 50),
    ])?;
    client.quiet("the sender")?;
    equal("the bytes meanwhile", server.bytes(0, 50)?, before)?;
    server.receive(0..1)?;
    client.completes("the SEND", 1, Completed::Send)?;
    client.completes("the WRITE behind it", 2, Completed::Write)?;
    equal("the bytes then", server.bytes(0, 50)?, client.bytes(100, 50)?)
}

fn unharmed<B: Descriptors>(setting: &Setting<B>) -> Result<(), Failure> {
    let Pair { server, client, servers, .. } = &deaf(setting, 0)?;
    client.post_one(SendOp::Send, 0, 4)?;
    client.fails("the sender", ONE, CompletionStatus::RNR_RETRY_EXC_ERR)?;
    server.receive(0..4)?;
    server.quiet("the receiver")?;
    let told = next_event::<B>(servers, Duration::ZERO)?;
    holds("the receiver was told", told.is_none())?;
    client.id.disconnect().called("disconnect")?;
    let told = next_event::<B>(servers, PATIENCE)?;
    holds("the receiver is not told", told.is_some())
}
