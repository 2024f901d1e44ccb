//! The cost of an operation on the software fabric: `cargo run --release -p rdma-softsim --example
//! cost`.

use core::time::Duration;
use std::time::Instant;

use rdma_backend::{
    Access, Backend, CmEventKind, Completion, CompletionQueue, ConnectParams, Domain, EventChannel,
    Identifier, Immediate, QueuePair, QueuePairLimits, RecvRequest, Region, RemoteAddress, SendOp,
    SendRequest, Slice,
};
use rdma_softsim::{Error, Fabric, SoftSim};

const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 1, initiator_depth: 1, retry_count: 7, rnr_retry_count: 7 };
const LIMITS: QueuePairLimits = QueuePairLimits { send_depth: 64, recv_depth: 64, inline: 64 };

type Parts = <SoftSim as Backend>::Region;

fn main() -> Result<(), Error> {
    let fabric = Fabric::new();
    let (here, there) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
    let listening = fabric.host(&[there]).event_channel()?;
    let _listener = listening.listen((there, 1).into(), 0)?;
    let channel = fabric.host(&[here]).event_channel()?;
    let active = channel.create_id()?;
    active.resolve_address(None, (there, 1).into(), Duration::from_secs(1))?;
    channel.next_event()?;
    active.resolve_route(Duration::from_secs(1))?;
    channel.next_event()?;
    let domain = active.create_domain()?;
    let completions = active.create_completion_queue(256, 0)?;
    let pair = active.create_queue_pair(&domain, &completions, LIMITS)?;
    active.connect(&PARAMS, &[])?;
    let Some(CmEventKind::ConnectRequest { id: passive, .. }) =
        listening.next_event()?.map(|event| event.kind)
    else {
        unreachable!("without latency the request is there")
    };
    let peer_domain = passive.create_domain()?;
    let peer_completions = passive.create_completion_queue(256, 0)?;
    let peer = passive.create_queue_pair(&peer_domain, &peer_completions, LIMITS)?;
    passive.accept(&PARAMS, &[])?;
    channel.next_event()?;

    let source = domain.register(1 << 20, Access::NONE)?;
    let window = peer_domain.register(1 << 20, Access::REMOTE_WRITE)?;
    let target = RemoteAddress { address: window.address(), rkey: window.rkey() };
    let post = |op, len, inline| {
        let local = Slice { region: &source, offset: 0, len };
        pair.post_send(&[SendRequest { id: 1, op, local, signaled: true, inline }]).map_err(|e| e.error)
    };
    let receive = |region: &Parts| {
        let local = Slice { region, offset: 0, len: 0 };
        peer.post_recv(&[RecvRequest { id: 1, local }]).map_err(|e| e.error)
    };
    let take = |queue: &<SoftSim as Backend>::CompletionQueue| {
        let mut one = [Completion::EMPTY];
        queue.poll(&mut one).map(|count| assert_eq!(count, 1))
    };

    measure("post_recv, 64 B WRITE with immediate, poll on both sides", 64, || {
        receive(&window)?;
        post(SendOp::WriteImmediate(target, Immediate(64)), 64, false)?;
        take(&peer_completions)?;
        take(&completions)
    })?;
    measure("the same, inline", 64, || {
        receive(&window)?;
        post(SendOp::WriteImmediate(target, Immediate(64)), 64, true)?;
        take(&peer_completions)?;
        take(&completions)
    })?;
    measure("64 B WRITE, post and poll", 64, || {
        post(SendOp::Write(target), 64, false)?;
        take(&completions)
    })?;
    let chain = [SendRequest {
        id: 1,
        op: SendOp::Write(target),
        local: Slice { region: &source, offset: 0, len: 64 },
        signaled: true,
        inline: false,
    }; 32];
    measure("32 WRITEs of 64 B, one post, one poll", 32 * 64, || {
        pair.post_send(&chain).map_err(|e| e.error)?;
        completions.poll(&mut [Completion::EMPTY; 32]).map(|count| assert_eq!(count, 32))
    })?;
    measure("a poll that finds nothing", 0, || completions.poll(&mut [Completion::EMPTY]).map(|_| ()))?;
    measure("arm, 64 B WRITE, take the event, poll", 64, || {
        completions.arm()?;
        post(SendOp::Write(target), 64, false)?;
        completions.take_events()?;
        take(&completions)
    })?;
    measure("1 MiB WRITE, post and poll", 1 << 20, || {
        post(SendOp::Write(target), 1 << 20, false)?;
        take(&completions)
    })
}

/// Runs `step` for a while and prints the time of one and the bytes in it.
fn measure(what: &str, bytes: usize, mut step: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    let mut best = Duration::MAX;
    for _ in 0..20 {
        let count = if bytes > 1 << 16 { 100 } else { 20_000 };
        let start = Instant::now();
        for _ in 0..count {
            step()?;
        }
        best = best.min(start.elapsed() / count);
    }
    let rate = bytes as f64 / best.as_secs_f64() / f64::from(1 << 30);
    println!("{:>10.0} ns {rate:>8.2} GiB/s  {what}", best.as_secs_f64() * 1e9);
    Ok(())
}
