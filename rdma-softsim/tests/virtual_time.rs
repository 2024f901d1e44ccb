//! The fabric as a simulation: the crate documentation's rules of virtual time, one by one.

use core::time::Duration;
use std::net::{IpAddr, SocketAddr};

use rdma_backend::time::Instant;
use rdma_backend::{
    Access, Backend as _, CmEventKind, Completed, Completion, CompletionQueue as _, CompletionStatus,
    ConnectParams, Domain as _, EventChannel as _, Identifier as _, Immediate, QueuePair as _,
    QueuePairLimits, RecvRequest, Region as _, RemoteAddress, SendOp, SendRequest, Slice,
};
use rdma_softsim::trace::EntryKind;
use rdma_softsim::{
    CompletionQueue, DeviceKind, Domain, EventChannel, FailureClass, Fault, FaultPlan, Identifier, Injection,
    Limits, Parameters, QueuePair, Region, Simulation, SimulationSettings, Site, SoftSim, When,
};

const PARAMS: ConnectParams =
    ConnectParams { responder_resources: 1, initiator_depth: 1, retry_count: 7, rnr_retry_count: 7 };

/// A fabric without random delays, on which only the test decides.
fn settings() -> SimulationSettings {
    SimulationSettings {
        parameters: Parameters { latency: Duration::from_micros(5), ..Parameters::default() },
        jitter: Duration::ZERO,
        cm_jitter: Duration::ZERO,
        pauses: 0,
        ..SimulationSettings::default()
    }
}

fn ip(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

/// One end of a connection. Fields drop in this order.
struct End {
    pair: QueuePair,
    completions: CompletionQueue,
    region: Region,
    _domain: Domain,
    id: Identifier,
    events: EventChannel,
}

/// A simulation with a connection on it, the passive side's host first.
struct World {
    sim: Simulation,
    passive: End,
    active: End,
}

fn end(id: Identifier, events: EventChannel) -> End {
    let domain = id.create_domain().unwrap();
    let region = domain.register(4096, Access::REMOTE_WRITE).unwrap();
    let completions = id.create_completion_queue(64, 0).unwrap();
    let limits = QueuePairLimits { send_depth: 16, recv_depth: 16, inline: 0 };
    let pair = id.create_queue_pair(&domain, &completions, limits).unwrap();
    let end = End { pair, completions, region, _domain: domain, id, events };
    for slot in 0..16 {
        let local = Slice { region: &end.region, offset: 2048 + slot as usize * 32, len: 32 };
        end.pair.post_recv(&[RecvRequest { id: slot, local }]).unwrap();
    }
    end
}

impl World {
    fn new(seed: u64, device_kind: DeviceKind, settings: SimulationSettings, plan: FaultPlan) -> Self {
        let sim = Simulation::new(seed, device_kind, settings, plan);
        let host = |last| sim.host(&[ip(last)], Limits::default());
        let (server, client) = (host(1), host(2));
        let address = SocketAddr::new(ip(1), 6379);
        let listening = server.event_channel().unwrap();
        let _listener = listening.listen(address, 0).unwrap();
        let events = client.event_channel().unwrap();
        let id = events.create_id().unwrap();
        id.resolve_address(None, address, Duration::from_secs(1)).unwrap();
        assert!(matches!(next(&sim, &events), CmEventKind::AddressResolved));
        id.resolve_route(Duration::from_secs(1)).unwrap();
        assert!(matches!(next(&sim, &events), CmEventKind::RouteResolved));
        let active = end(id, events);
        active.id.connect(&PARAMS, &[]).unwrap();
        let CmEventKind::ConnectRequest { id, .. } = next(&sim, &listening) else { panic!("a request") };
        let own = server.event_channel().unwrap();
        id.migrate(&own).unwrap();
        let passive = end(id, own);
        passive.id.accept(&PARAMS, &[]).unwrap();
        assert!(matches!(next(&sim, &active.events), CmEventKind::Established { .. }));
        assert!(matches!(next(&sim, &passive.events), CmEventKind::Established { .. }));
        Self { sim, passive, active }
    }

    /// The active side writes its first bytes into the passive side's region, with an immediate.
    fn write(&self, bytes: &[u8]) {
        assert!(self.active.region.memory().write(0, bytes));
        let to = RemoteAddress { address: self.passive.region.address(), rkey: self.passive.region.rkey() };
        let op = SendOp::WriteImmediate(to, Immediate(bytes.len() as u32));
        let local = Slice { region: &self.active.region, offset: 0, len: bytes.len() };
        let request = SendRequest { id: 7, op, local, signaled: true, inline: false };
        self.active.pair.post_send(&[request]).unwrap();
    }

    /// Executes everything that happens by itself.
    fn settle(&self) {
        while self.sim.step() {}
    }
}

/// Lets time pass until there is an event.
fn next(sim: &Simulation, events: &EventChannel) -> CmEventKind<SoftSim> {
    loop {
        if let Some(event) = events.next_event().unwrap() {
            return event.kind;
        }
        assert!(sim.step(), "nothing will ever happen");
    }
}

fn poll(queue: &CompletionQueue) -> Vec<Completion> {
    let mut completions = [Completion::EMPTY; 64];
    let count = queue.poll(&mut completions).unwrap();
    completions[..count].to_vec()
}

/// Returns whether a descriptor is readable.
#[cfg(not(miri))]
fn readable(source: &impl std::os::fd::AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    let mut polled = [PollFd::new(source, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).unwrap() > 0
}

/// More arrives while a program takes what waits. Its descriptor is readable exactly while
/// something waits.
#[test]
#[cfg(not(miri))]
fn a_descriptor_is_readable_while_something_waits_and_only_then() {
    let busy = SimulationSettings { pauses: 128, pause: Duration::from_micros(20), ..settings() };
    for seed in 0..100 {
        let world = World::new(seed, DeviceKind::HostileButLegal, busy, FaultPlan::new());
        let ends = [&world.active, &world.passive];
        for round in 0.. {
            match round {
                0..10 => world.write(b"bytes"),
                10 => world.passive.id.disconnect().unwrap(),
                20 => world.active.id.disconnect().unwrap(),
                _ => {}
            }
            for end in ends {
                end.completions.arm().unwrap();
                end.completions.take_events().unwrap();
                while !poll(&end.completions).is_empty() {}
                while end.events.next_event().unwrap().is_some() {}
            }
            for end in ends {
                assert_eq!(readable(&end.completions), end.completions.is_readable(), "seed {seed}");
                assert_eq!(readable(&end.events), end.events.is_readable(), "seed {seed}");
            }
            if !world.sim.step() && round > 20 {
                break;
            }
        }
    }
}

#[test]
fn time_passes_by_events_and_by_nothing_else() {
    let world = World::new(1, DeviceKind::Ibta, settings(), FaultPlan::new());
    let before = world.sim.now();
    world.write(b"bytes");
    assert_eq!(world.sim.now(), before, "a call takes no time");
    assert_eq!(world.sim.deadline(), Some(before.after(Duration::from_micros(5))));
    assert!(world.sim.step());
    assert_eq!(world.sim.now(), before.after(Duration::from_micros(5)));
    let later = Instant::from_start(Duration::from_secs(60));
    world.sim.advance(later);
    assert_eq!(world.sim.now(), later);
    assert!(!world.sim.step(), "nothing is left to happen");
}

#[test]
fn a_seed_is_one_simulation() {
    let hash = |seed| {
        let world =
            World::new(seed, DeviceKind::HostileButLegal, SimulationSettings::default(), FaultPlan::new());
        for _ in 0..4 {
            world.write(b"the same calls");
        }
        world.settle();
        poll(&world.active.completions);
        world.sim.hash()
    };
    assert_eq!(hash(3), hash(3));
    assert_ne!(hash(3), hash(4));
}

#[test]
fn without_a_descriptor_one_can_still_ask() {
    let world = World::new(1, DeviceKind::Ibta, settings(), FaultPlan::new());
    let queue = &world.passive.completions;
    queue.arm().unwrap();
    assert!(!queue.is_readable());
    world.write(b"bytes");
    world.settle();
    assert!(queue.is_readable() && world.sim.has_woken());
    assert_eq!(queue.take_events(), Ok(1));
    assert!(!queue.is_readable());
}

#[test]
fn bytes_may_land_as_late_as_their_completion_is_polled_and_no_later() {
    let mut late = 0;
    for seed in 0..20 {
        let world = World::new(seed, DeviceKind::Mlx5, settings(), FaultPlan::new());
        let bytes: Vec<u8> = (1..=200).collect();
        world.write(&bytes);
        world.settle();
        let mut found = vec![0; 200];
        assert!(world.passive.region.memory().read(0, &mut found));
        late += u32::from(found != bytes);
        let received = poll(&world.passive.completions);
        assert!(matches!(received[0].result, Ok(Completed::RecvWrite { immediate: Immediate(200) })));
        assert!(world.passive.region.memory().read(0, &mut found));
        assert_eq!(found, bytes);
    }
    assert!(late > 10, "late in {late} of 20");
}

#[test]
fn a_send_buffer_that_is_touched_too_early_is_noticed() {
    for (early, noticed) in [(true, 1), (false, 0)] {
        let world = World::new(1, DeviceKind::Ibta, settings(), FaultPlan::new());
        world.write(b"bytes");
        world.settle();
        if early {
            assert!(world.active.region.memory().write(0, b"other"));
        }
        poll(&world.active.completions);
        assert!(world.active.region.memory().write(0, b"third"));
        let tampered = |what: &EntryKind| matches!(what, EntryKind::Tampered { id: 7, .. });
        let found = world.sim.take_trace().iter().filter(|entry| tampered(&entry.what)).count();
        assert_eq!(found, noticed);
    }
}

#[test]
fn a_fault_strikes_once_at_the_first_thing_it_can_strike() {
    let plan = vec![Injection { when: When::Pass(Site::Arrive, 2), host: 0, fault: Fault::KeyRefused }];
    let world = World::new(1, DeviceKind::Ibta, settings(), plan);
    world.write(b"first");
    world.settle();
    assert!(poll(&world.active.completions)[0].result.is_ok());
    assert_eq!(world.sim.remaining_faults().len(), 1);
    world.write(b"second");
    world.settle();
    let failure = poll(&world.active.completions)[0].result.unwrap_err();
    assert_eq!(failure.status, CompletionStatus::REM_ACCESS_ERR);
    assert!(world.sim.remaining_faults().is_empty());
}

/// Its receive fails on every device, so that the receiver notices.
#[test]
fn memory_that_is_gone_waits_for_a_receive_that_wants_it() {
    let plan = vec![Injection { when: When::Pass(Site::Arrive, 16), host: 0, fault: Fault::ReceiveGone }];
    let world = World::new(1, DeviceKind::Rxe, settings(), plan);
    for _ in 0..16 {
        world.write(b"bytes");
        world.settle();
        assert_eq!((poll(&world.active.completions).len(), poll(&world.passive.completions).len()), (1, 1));
    }
    let local = Slice { region: &world.active.region, offset: 0, len: 5 };
    let request = SendRequest { id: 7, op: SendOp::Send, local, signaled: true, inline: false };
    world.active.pair.post_send(&[request]).unwrap();
    for _ in 0..10 {
        assert!(world.sim.step());
    }
    assert_eq!(world.sim.remaining_faults().len(), 1);
    let local = Slice { region: &world.passive.region, offset: 2048, len: 32 };
    world.passive.pair.post_recv(&[RecvRequest { id: 3, local }]).unwrap();
    world.settle();
    let failure = |completions| poll(completions)[0].result.unwrap_err().status;
    assert_eq!(failure(&world.passive.completions), CompletionStatus::LOC_PROT_ERR);
    assert_eq!(failure(&world.active.completions), CompletionStatus::REM_OP_ERR);
}

#[test]
fn personalities_differ_in_when_they_flush() {
    let flushed = |device_kind| {
        let plan = vec![Injection { when: When::Event(0), host: 0, fault: Fault::KeyRefused }];
        let world = World::new(1, device_kind, settings(), plan);
        world.write(b"bytes");
        world.settle();
        poll(&world.passive.completions).len()
    };
    assert_eq!(flushed(DeviceKind::Ibta), 16, "every receive, at once");
    assert_eq!(flushed(DeviceKind::Mlx5), 16, "every receive, later");
    assert_eq!(flushed(DeviceKind::Rxe), 0, "not before the queue pair is destroyed");
}

#[test]
fn a_lost_answer_makes_the_message_come_twice_and_count_once() {
    let plan = vec![Injection { when: When::Pass(Site::Answer, 0), host: 1, fault: Fault::LoseAnswer }];
    let world = World::new(1, DeviceKind::Ibta, settings(), plan);
    world.write(b"bytes");
    world.settle();
    assert_eq!(poll(&world.passive.completions).len(), 1);
    assert_eq!(poll(&world.active.completions).len(), 1);
    let observed = world.sim.failure_counts().observed(FailureClass::PacketLoss);
    assert_eq!(observed, 1, "the duplicate was seen");
}

#[test]
fn what_a_host_holds_is_counted_here_too() {
    let world = World::new(1, DeviceKind::Rxe, settings(), FaultPlan::new());
    let World { sim, passive, active } = world;
    drop((passive, active));
    while sim.step() {}
    assert_eq!(sim.fabric().resources(ip(1)), rdma_softsim::Resources::default());
    assert_eq!(sim.fabric().resources(ip(2)), rdma_softsim::Resources::default());
}
