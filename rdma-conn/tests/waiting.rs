//! Counts of an endpoint's requests to its device and the kernel while it waits.

use std::io::IoSlice;
use std::time::Duration;

use rdma_conn::{ConnectionId, Endpoint, Event, Limits, Options, Usage};
use rdma_softsim::{DeviceKind, FaultPlan, Simulation, SimulationSettings, SoftSim};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::world::{connected, pass};

const SERVER: [u8; 4] = [192, 0, 2, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 2];
const ROUNDS: u64 = 50;

/// Two connected endpoints on a fabric whose time passes only in [`Pair::settle`].
struct Pair {
    sim: Simulation,
    server: Endpoint<SoftSim>,
    client: Endpoint<SoftSim>,
    at_server: ConnectionId,
    at_client: ConnectionId,
}

impl Pair {
    fn new(spin: Duration) -> Self {
        Self::with(spin, SimulationSettings::default())
    }

    fn with(spin: Duration, settings: SimulationSettings) -> Self {
        let sim = Simulation::new(1, DeviceKind::Ibta, settings, FaultPlan::new());
        let options = Options::default().spin(spin);
        let ((mut client, at_client), (mut server, at_server)) = connected(&sim, options, options);
        settle(&sim);
        for endpoint in [&mut client, &mut server] {
            endpoint.progress().expect("the fabric stays");
            while endpoint.next_event().is_some() {}
        }
        Self { sim, server, client, at_server, at_client }
    }

    /// The client asks and the server answers. Each looks before and after something has arrived.
    fn round(&mut self) {
        let Self { sim, server, client, at_server, at_client } = self;
        assert_eq!(client.write(*at_client, &[IoSlice::new(b"ping")]).expect("open"), Some(4));
        for (endpoint, id, answer) in [(&mut *server, *at_server, true), (client, *at_client, false)] {
            endpoint.progress().expect("the fabric stays");
            settle(sim);
            endpoint.progress().expect("the fabric stays");
            while endpoint.next_event().is_some() {}
            let mut bytes = [0; 8];
            assert_eq!(endpoint.read(id, &mut bytes).expect("open"), Some(4));
            if answer {
                assert_eq!(endpoint.write(id, &[IoSlice::new(&bytes[..4])]).expect("open"), Some(4));
            }
        }
    }

    fn rounds(&mut self) -> (u64, u64) {
        let Usage { arms, polls, .. } = self.server.usage();
        for _ in 0..ROUNDS {
            self.round();
        }
        let usage = self.server.usage();
        (usage.arms - arms, usage.polls - polls)
    }
}

fn settle(sim: &Simulation) {
    pass(sim, Duration::from_micros(200));
}

fn spins() -> bool {
    let spins = std::thread::available_parallelism().map_or(1, usize::from) > 1;
    if !spins {
        println!("skipped: with one processor no program spins");
    }
    spins
}

/// A queue is armed once for each awaited wake-up, and polled once, after arming.
#[test]
fn each_wake_up_is_asked_for_once() {
    let mut pair = Pair::new(Duration::ZERO);
    pair.rounds();
    let (arms, polls) = pair.rounds();
    // Some writes are signalled, which causes a wake-up too.
    assert!((ROUNDS..=ROUNDS + 1).contains(&arms), "{arms} of {ROUNDS}");
    assert_eq!(polls, arms);
}

/// A busy-polling endpoint requests no wake-up while data arrives in time.
#[test]
fn no_queue_is_armed_while_its_endpoint_spins() {
    if !spins() {
        return;
    }
    let mut pair = Pair::new(Duration::from_secs(3600));
    pair.rounds();
    assert_eq!(pair.rounds(), (0, 2 * ROUNDS));
    assert_eq!(pair.server.next_timeout(), Some(pair.server.now()));
}

#[test]
fn a_spin_ends_and_the_queue_is_armed() {
    if !spins() {
        return;
    }
    let mut pair = Pair::new(Duration::from_millis(1));
    pair.rounds();
    let before = pair.server.usage();
    let limit = pair.server.now().after(Duration::from_secs(1));
    while pair.server.next_timeout().is_some_and(|at| at <= pair.server.now()) {
        pair.server.progress().expect("the fabric stays");
        assert!(pair.server.now() < limit, "it spins for ever");
        pair.sim.advance(pair.sim.now().after(Duration::from_micros(100)));
    }
    assert_eq!(pair.server.usage().arms - before.arms, 1);
}

/// A waker ends a wait without a limit, called before or during it. Several calls end it once.
#[test]
fn a_waker_ends_a_wait() {
    let fabric = rdma_softsim::Fabric::new();
    let mut endpoint = Endpoint::new(&fabric.host(&[SERVER.into()]), Limits::default()).expect("a device");
    let waker = endpoint.waker().expect("a descriptor");
    waker.wake();
    endpoint.waker().expect("the same").wake();
    endpoint.wait(None).expect("the fabric stays");
    let thread = std::thread::spawn(move || waker.wake());
    endpoint.wait(None).expect("the fabric stays");
    thread.join().expect("no panic");
    let before = endpoint.now();
    endpoint.wait(Some(Duration::from_millis(20))).expect("the fabric stays");
    assert!(endpoint.now().since(before) >= Duration::from_millis(20), "a call ended two waits");
}

/// A steady flow of completions does not hide a connection request from a wait.
#[test]
fn a_wait_sees_more_than_completions() {
    let Pair { sim, mut server, mut client, at_server, at_client } = Pair::new(Duration::ZERO);
    let host = sim.host(&[[192, 0, 2, 3].into()], rdma_softsim::Limits::default());
    let mut other = Endpoint::new(&host, Limits::default()).expect("a device");
    other.connect((SERVER, 6379).into(), None, Duration::from_secs(5), Options::default()).expect("begins");
    let mut opened = false;
    for _ in 0..200 {
        assert_eq!(client.write(at_client, &[IoSlice::new(b"ping")]).expect("open"), Some(4));
        for endpoint in [&mut client, &mut other] {
            endpoint.progress().expect("the fabric stays");
        }
        settle(&sim);
        server.wait(Some(Duration::ZERO)).expect("the fabric stays");
        while let Some(event) = server.next_event() {
            opened |= matches!(event, Event::Opened { .. });
        }
        assert_eq!(server.read(at_server, &mut [0; 8]).expect("open"), Some(4));
    }
    assert!(opened);
}

#[test]
fn a_send_buffer_is_registered_early() {
    let registered = |eager: bool| {
        let fabric = rdma_softsim::Fabric::new();
        let host = |address: [u8; 4]| fabric.host(&[address.into()]);
        let listener = rdma_conn::Listener::bind_with(
            &host(SERVER),
            std::net::SocketAddr::from((SERVER, 6379)),
            Options::default().eager_send_buffer(eager),
            Limits::default(),
        );
        let listener = listener.expect("a free address");
        let client = std::thread::spawn({
            let host = host(CLIENT);
            move || rdma_conn::Stream::connect(&host, std::net::SocketAddr::from((SERVER, 6379)))
        });
        let served = listener.accept().expect("a client").0;
        client.join().expect("no panic").expect("connected");
        served.registered_bytes()
    };
    let buffer = Options::default().protocol.send_buffer as usize;
    assert_eq!(registered(true), registered(false) + buffer);
}

/// A waker ends the next wait, even of an endpoint that has found something at once many times.
#[test]
fn a_waker_ends_a_wait_of_a_busy_endpoint() {
    let mut pair = Pair::new(Duration::ZERO);
    let waker = pair.server.waker().expect("a descriptor");
    for busy in 0..20 {
        for _ in 0..busy {
            pair.client.write(pair.at_client, &[IoSlice::new(b"ping")]).expect("open");
            settle(&pair.sim);
            pair.client.progress().expect("the fabric stays");
            pair.server.wait(None).expect("the fabric stays");
        }
        waker.wake();
        let before = pair.server.usage().sleeps;
        pair.server.wait(Some(Duration::from_millis(20))).expect("the fabric stays");
        assert_eq!(pair.server.usage().sleeps - before, 1, "it slept on after {busy} waits");
    }
}

#[test]
fn an_event_that_comes_during_a_spin_is_seen_when_that_ends() {
    if !spins() {
        return;
    }
    for rounds in 1..20 {
        let mut pair = Pair::new(Duration::from_millis(1));
        (0..rounds).for_each(|_| pair.round());
        pair.client.abort(pair.at_client);
        settle(&pair.sim);
        pair.sim.advance(pair.sim.now().after(Duration::from_millis(2)));
        let mut told = Vec::new();
        while pair.server.next_timeout().is_some_and(|at| at <= pair.server.now()) {
            pair.server.progress().expect("the fabric stays");
            told.extend(std::iter::from_fn(|| pair.server.next_event()));
            pair.sim.advance(pair.sim.now().after(Duration::from_micros(100)));
        }
        assert!(told.contains(&Event::Ended(pair.at_server)), "after {rounds} rounds: {told:?}");
    }
}

/// A dropped queue with a pending wake-up wakes nothing, even if a child holds its descriptor.
#[test]
fn a_queue_that_is_gone_wakes_nothing() {
    let settings = SimulationSettings { held_descriptors: true, ..SimulationSettings::default() };
    let Pair { sim, mut server, mut client, at_server, at_client } = Pair::with(Duration::ZERO, settings);
    for _ in 0..4 {
        client.progress().expect("the fabric stays");
        server.progress().expect("the fabric stays");
        settle(&sim);
    }
    assert!(!is_readable(&client), "all is taken");
    server.write(at_server, &[IoSlice::new(b"unheard")]).expect("open");
    settle(&sim);
    assert!(is_readable(&client), "something has come");
    client.abort(at_client);
    assert_eq!(client.usage().completion_queues, 0);
    settle(&sim);
    client.progress().expect("the fabric stays");
    assert!(!is_readable(&client), "of a queue that is gone");
    let before = client.usage().sleeps;
    client.wait(Some(Duration::from_millis(20))).expect("the fabric stays");
    assert_eq!(client.usage().sleeps, before + 1);
}

fn is_readable(endpoint: &Endpoint<SoftSim>) -> bool {
    let mut polled = [PollFd::new(endpoint, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

#[test]
fn a_write_that_leaves_no_room_is_told_of_room() {
    for beyond in [1, 0] {
        let Pair { sim, mut server, mut client, at_server, at_client } = Pair::new(Duration::ZERO);
        let room = Options::default().protocol.send_buffer as usize;
        let bytes = vec![7; room + beyond];
        while client.next_event().is_some() {}
        assert_eq!(client.write(at_client, &[IoSlice::new(&bytes)]).expect("open"), Some(room));
        assert!(client.connection(at_client).is_some_and(|connection| !connection.has_room()));
        assert_eq!(client.next_event(), None, "there is none");
        let (mut read, mut told) = (0, Vec::new());
        for _ in 0..20 {
            settle(&sim);
            server.progress().expect("the fabric stays");
            while let Some(some) = server.read(at_server, &mut [0; 4096]).expect("open") {
                read += some;
            }
            client.progress().expect("the fabric stays");
            told.extend(std::iter::from_fn(|| client.next_event()));
        }
        assert_eq!(read, room);
        assert_eq!(told, [Event::Writable(at_client)], "a write of {beyond} bytes more than there is room");
    }
}
