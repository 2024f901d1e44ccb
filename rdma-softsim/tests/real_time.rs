//! The fabric in real time: threads that sleep in poll(2) on its descriptors.

// Miri has no poll(2).
#![cfg(not(miri))]

use core::time::Duration;
use std::net::SocketAddr;
use std::time::Instant;

use rdma_backend::{
    Access, Backend, CmEventKind, Completed, Completion, CompletionQueue, CompletionStatus, Domain,
    ErrorKind, EventChannel, Failure, Identifier, Immediate, QueuePair, QueuePairLimits, Region,
    RemoteAddress, RnrTimer, SendOp, SendRequest, Slice,
};
use rdma_softsim::{Error, Fabric, Link, Parameters, Resources};

use crate::common::{Peer, SLOT, SLOTS, events, ip, pair, readable, wait};

/// Encodes the address and the key of a region, as a protocol would send them in its first message.
fn where_is(region: &impl Region) -> [u8; SLOT] {
    let mut bytes = [0; SLOT];
    bytes[..8].copy_from_slice(&region.address().to_be_bytes());
    bytes[8..12].copy_from_slice(&region.rkey().to_be_bytes());
    bytes
}

/// Decodes the region that the peer announced in the receive of this slot.
fn there(slots: &impl Region, slot: u64) -> RemoteAddress {
    let mut bytes = [0; SLOT];
    assert!(slots.memory().read(slot as usize * SLOT, &mut bytes));
    let (address, rkey) = (bytes[..8].try_into().unwrap(), bytes[8..12].try_into().unwrap());
    RemoteAddress { address: u64::from_be_bytes(address), rkey: u32::from_be_bytes(rkey) }
}

/// Writes blocks into the peer's window, each with its length as the immediate, while the peer does
/// the same. Checks every byte. A window is overwritten only when the peer has reported that it was
/// read. The first to leave must wait until its last message is acknowledged: a dropped queue pair
/// sends nothing more.
fn exchange(mut peer: Peer, rounds: u32, seed: u8) {
    const WINDOW: usize = 32 * 1024;
    let len_of = |round: u32| 1 + (round as usize * 7919) % WINDOW;
    let byte = |seed: u8, round: u32, place: usize| seed ^ (round as u8) ^ (place.wrapping_mul(7) as u8);
    let window = peer.domain.register(WINDOW, Access::REMOTE_WRITE).unwrap();
    let source = peer.domain.register(WINDOW, Access::NONE).unwrap();
    assert!(source.memory().write(0, &where_is(&window)));
    let hello = Slice { region: &source, offset: 0, len: SLOT };
    peer.pair
        .post_send(&[SendRequest { id: 1, op: SendOp::Send, local: hello, signaled: true, inline: true }])
        .unwrap();

    let (mut sent, mut got, mut read_by_peer, mut unacknowledged) = (0, 0, 0, 1);
    let mut target = None;
    let mut block = vec![0; WINDOW];
    while got < rounds || read_by_peer < rounds || unacknowledged > 0 {
        if let Some(target) = target
            && sent < rounds
            && sent == read_by_peer
        {
            let len = len_of(sent);
            for (place, to) in block.iter_mut().enumerate().take(len) {
                *to = byte(seed, sent, place);
            }
            assert!(source.memory().write(0, &block[..len]));
            let op = SendOp::WriteImmediate(target, Immediate(len as u32));
            peer.send(2, op, Slice { region: &source, offset: 0, len });
            sent += 1;
            unacknowledged += 1;
        }
        let completion = peer.next(&format!("seed {seed}: sent {sent}, got {got}, read {read_by_peer}"));
        let completed = completion.result.unwrap();
        match completed {
            Completed::Send | Completed::Write => {
                unacknowledged -= 1;
                continue;
            }
            Completed::RecvWrite { immediate } => {
                let len = immediate.0 as usize;
                assert_eq!(len, len_of(got));
                assert!(window.memory().read(0, &mut block[..len]));
                for (place, is) in block[..len].iter().enumerate() {
                    assert_eq!(*is, byte(!seed, got, place), "round {got}, byte {place}");
                }
                got += 1;
                // An empty message: it was read.
                peer.send(3, SendOp::Send, Slice { region: &source, offset: 0, len: 0 });
                unacknowledged += 1;
            }
            Completed::Recv { len: 0, .. } => read_by_peer += 1,
            Completed::Recv { .. } => target = Some(there(&peer.slots, completion.id)),
            Completed::Read => panic!("there is no READ"),
        }
        peer.receive(completion.id);
    }
}

fn both_ways(fabric: &Fabric, rounds: u32) {
    let (a, b) = pair(&fabric.host(&[ip(1)]), &fabric.host(&[ip(2)]), ip(2));
    std::thread::scope(|scope| {
        scope.spawn(|| exchange(a, rounds, 0x0f));
        scope.spawn(|| exchange(b, rounds, 0xf0));
    });
    assert_eq!(fabric.resources(ip(1)), Resources::default());
    assert_eq!(fabric.resources(ip(2)), Resources::default());
}

#[test]
fn two_threads_exchange_blocks_and_sleep_in_between() {
    both_ways(&Fabric::new(), 3000);
}

#[test]
fn with_latency_the_timer_thread_moves_the_data() {
    let latency = Duration::from_micros(50);
    both_ways(&Fabric::with_parameters(Parameters { latency, ..Parameters::default() }), 200);
}

#[test]
fn many_connections_share_a_fabric() {
    let fabric = Fabric::new();
    let hosts = [fabric.host(&[ip(1)]), fabric.host(&[ip(2)])];
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (a, b) = pair(&hosts[0], &hosts[1], ip(2));
            scope.spawn(|| exchange(a, 200, 0x33));
            scope.spawn(|| exchange(b, 200, 0xcc));
        }
    });
    assert_eq!(fabric.resources(ip(1)), Resources::default());
}

#[test]
fn a_retry_happens_while_everybody_sleeps() {
    let fabric = Fabric::new();
    let (mut a, mut b) = pair(&fabric.host(&[ip(1)]), &fabric.host(&[ip(2)]), ip(2));
    let timer = RnrTimer::from_code(22).unwrap();
    b.pair.set_min_rnr_timer(timer).unwrap();
    let source = a.domain.register(SLOT, Access::NONE).unwrap();
    let start = Instant::now();
    for id in 0..=SLOTS {
        a.send(id, SendOp::Send, Slice { region: &source, offset: 0, len: SLOT });
        assert_eq!(b.slots.len(), SLOTS as usize * SLOT);
    }
    for id in 0..SLOTS {
        assert_eq!(b.next("what had a receive").id, id);
    }
    b.receive(0);
    assert_eq!(b.next("what had none").id, 0);
    assert!(start.elapsed() >= timer.delay());
    for id in 0..=SLOTS {
        assert_eq!((a.next("sent").id, a.pair.number()), (id, a.pair.number()));
    }
}

#[test]
fn a_dead_link_is_noticed_while_everybody_sleeps() {
    let fabric = Fabric::with_parameters(Parameters {
        ack_timeout: Duration::from_millis(2),
        cm_timeout: Duration::from_millis(20),
        ..Parameters::default()
    });
    let (mut a, _b) = pair(&fabric.host(&[ip(1)]), &fabric.host(&[ip(2)]), ip(2));
    fabric.set_link(ip(1), Link::Down);
    let source = a.domain.register(SLOT, Access::NONE).unwrap();
    a.send(7, SendOp::Send, Slice { region: &source, offset: 0, len: SLOT });
    let failed = a.next("the failure");
    assert_eq!((failed.id, failed.result.unwrap_err().status), (7, CompletionStatus::RETRY_EXC_ERR));
    a.id.disconnect().unwrap();
    assert!(matches!(events(&a.channel, "our own goodbye"), CmEventKind::Disconnected));
}

#[test]
fn killing_a_host_wakes_who_sleeps_there() {
    let fabric = Fabric::new();
    let (a, b) = pair(&fabric.host(&[ip(1)]), &fabric.host(&[ip(2)]), ip(2));
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            wait(&b.completions, "the end");
            b.completions.poll(&mut [Completion::EMPTY])
        });
        let watcher = scope.spawn(|| {
            wait(&b.channel, "the end");
            b.channel.next_event().map(|event| event.is_some())
        });
        fabric.kill_host(ip(2));
        assert!(matches!(sleeper.join().unwrap(), Err(Error::Gone(_))));
        assert_eq!(watcher.join().unwrap().unwrap_err().kind(), ErrorKind::State);
    });
    assert!(matches!(events(&a.channel, "the peer's end"), CmEventKind::Disconnected));
    assert_eq!(fabric.resources(ip(2)), Resources::default());
}

#[test]
fn descriptors_are_readable_while_something_waits() {
    let fabric = Fabric::new();
    let host = fabric.host(&[ip(1)]);
    let channel = host.event_channel().unwrap();
    let [one, two] = [0; 2].map(|_| channel.create_id().unwrap());
    assert!(!readable(&channel, Duration::ZERO));
    for id in [&one, &two] {
        id.resolve_address(None, SocketAddr::new(ip(1), 1), Duration::from_secs(1)).unwrap();
    }
    assert!(readable(&channel, Duration::ZERO));
    assert_eq!(channel.next_event().unwrap().unwrap().id, one.key());
    assert!(readable(&channel, Duration::ZERO), "one more event waits");
    assert_eq!(channel.next_event().unwrap().unwrap().id, two.key());
    assert!(!readable(&channel, Duration::ZERO));

    let (a, b) = pair(&host, &host, ip(1));
    a.completions.arm().unwrap();
    assert!(!readable(&a.completions, Duration::ZERO));
    let source = a.domain.register(SLOT, Access::NONE).unwrap();
    a.send(7, SendOp::Send, Slice { region: &source, offset: 0, len: SLOT });
    assert!(readable(&a.completions, Duration::ZERO));
    assert!(!readable(&b.completions, Duration::ZERO), "it is not armed");
    // Polling does not take the event; `take_events` does.
    assert_eq!(a.completions.poll(&mut [Completion::EMPTY]).unwrap(), 1);
    assert!(readable(&a.completions, Duration::ZERO));
    assert_eq!((a.completions.take_events().unwrap(), a.completions.take_events().unwrap()), (1, 0));
    assert!(!readable(&a.completions, Duration::ZERO));
}

#[test]
fn handles_drop_in_any_order() {
    let fabric = Fabric::new();
    let hosts = [fabric.host(&[ip(1)]), fabric.host(&[ip(2)])];
    let (a, b) = pair(&hosts[0], &hosts[1], ip(2));
    let Peer { channel, id, pair: queue_pair, completions, domain, slots, .. } = a;
    drop(channel);
    drop(domain);
    drop(completions);
    drop(id);
    let held = fabric.resources(ip(1));
    assert_eq!((held.event_channels, held.identifiers, held.domains, held.completion_queues), (1, 1, 1, 1));
    // Still connected: what the queue pair needs is alive.
    queue_pair
        .post_send(&[SendRequest {
            id: 1,
            op: SendOp::Send,
            local: Slice { region: &slots, offset: 0, len: 4 },
            signaled: true,
            inline: true,
        }])
        .unwrap();
    assert!(b.channel.next_event().unwrap().is_none());
    drop(queue_pair);
    assert!(matches!(events(&b.channel, "goodbye"), CmEventKind::Disconnected));
    let held = fabric.resources(ip(1));
    assert_eq!(held, Resources { domains: 1, regions: 1, registered_bytes: slots.len() as u64, ..held });
    assert_eq!((held.identifiers, held.event_channels, held.completion_queues), (0, 0, 0));
    drop(slots);
    assert_eq!(fabric.resources(ip(1)), Resources::default());
}

#[test]
fn a_migrated_identifier_keeps_its_new_channel_alive() {
    let fabric = Fabric::new();
    let (a, b) = pair(&fabric.host(&[ip(1)]), &fabric.host(&[ip(2)]), ip(2));
    let Peer { channel: old, id, pair: _pair, .. } = b;
    let new = fabric.host(&[ip(3)]).event_channel().unwrap();
    assert_eq!(id.migrate(&new).unwrap_err().kind(), ErrorKind::Argument);
    let host = fabric.host(&[ip(4)]);
    let (first, second) = (host.event_channel().unwrap(), host.event_channel().unwrap());
    let moving = first.create_id().unwrap();
    moving.migrate(&second).unwrap();
    drop((first, second));
    assert_eq!(fabric.resources(ip(4)).event_channels, 1);
    drop(moving);
    assert_eq!(fabric.resources(ip(4)), Resources::default());
    drop(old);
    drop(a);
}

#[test]
fn a_host_that_joins_wakes_who_resolves_its_address() {
    for latency in [Duration::ZERO, Duration::from_millis(1)] {
        let fabric = Fabric::with_parameters(Parameters { latency, ..Parameters::default() });
        let channel = fabric.host(&[ip(1)]).event_channel().unwrap();
        let id = channel.create_id().unwrap();
        id.resolve_address(None, SocketAddr::new(ip(2), 1), Duration::from_secs(3600)).unwrap();
        assert!(!readable(&channel, Duration::ZERO), "no host has the address");
        let _joined = fabric.host(&[ip(2)]);
        assert!(matches!(events(&channel, "the address"), CmEventKind::AddressResolved));
    }
}

#[test]
fn handles_of_another_fabric_are_refused() {
    let (here, elsewhere) = (Fabric::new(), Fabric::new());
    let (a, _b) = pair(&here.host(&[ip(1)]), &here.host(&[ip(2)]), ip(2));
    let (c, _d) = pair(&elsewhere.host(&[ip(1)]), &elsewhere.host(&[ip(2)]), ip(2));
    let local = Slice { region: &c.slots, offset: 0, len: 4 };
    let request = SendRequest { id: 1, op: SendOp::Send, local, signaled: true, inline: false };
    assert_eq!(a.pair.post_send(&[request]).unwrap_err().error.kind(), ErrorKind::Argument);
    assert_eq!(a.id.migrate(&c.channel).unwrap_err().kind(), ErrorKind::Argument);
    let limits = QueuePairLimits { send_depth: 1, recv_depth: 1, inline: 0 };
    let refused = a.id.create_queue_pair(&c.domain, &c.completions, limits);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Argument);
}
