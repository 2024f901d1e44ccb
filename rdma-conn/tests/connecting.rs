//! Making connections, over the embedded fabric.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use rdma_backend::ErrorKind;
use rdma_conn::{
    Connect, ConnectionId, Endpoint, Error, Event, Events, Listener, Options, Stream, leads_back,
};
use rdma_softsim::{DeviceKind, Fabric, FaultPlan, Limits, Simulation, SimulationSettings, SoftSim};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::world::dialed;

const LONG: Duration = Duration::from_secs(20);
const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

fn talk(from: &mut Stream<SoftSim>, to: &mut Stream<SoftSim>) {
    from.write_all(b"here").expect("written");
    let mut bytes = [0; 4];
    to.read_exact(&mut bytes).expect("read");
    assert_eq!(&bytes, b"here");
}

/// VR-CONN-011.
#[test]
fn a_client_connects_from_the_address_it_is_given() {
    let fabric = Fabric::new();
    let other = IpAddr::from([192, 0, 2, 3]);
    let host = fabric.host(&[CLIENT, other]);
    let server = fabric.host(&[SERVER]);
    for (port, local) in [(6379, CLIENT), (6380, other)] {
        let listener = Listener::bind(&server, SocketAddr::new(SERVER, port)).expect("a free address");
        let how = Connect::default().local(Some(SocketAddr::new(local, 0)));
        let (client, _server, peer) = dialed(&host, &listener, &how);
        assert_eq!((peer.ip(), client.local_addr()), (local, Some(peer)));
        assert_eq!(Some(client.peer_addr()), listener.local_addr());
    }
}

/// VR-CONN-014: a connection outlives its listener, and another listener can be bound.
#[test]
fn connections_outlive_their_listener() {
    let fabric = Fabric::new();
    let (host, server) = (fabric.host(&[CLIENT]), fabric.host(&[SERVER]));
    let listen = |port| Listener::bind(&server, SocketAddr::new(SERVER, port)).expect("free");
    let first = listen(6379);
    let (mut client, mut accepted, _) = dialed(&host, &first, &Connect::default());
    drop(first);
    talk(&mut client, &mut accepted);
    let second = listen(6380);
    let (mut newcomer, mut peer, _) = dialed(&host, &second, &Connect::default());
    talk(&mut accepted, &mut client);
    talk(&mut newcomer, &mut peer);
    let gone = Stream::connect_with(&host, SocketAddr::new(SERVER, 6379), &Connect::default());
    assert!(gone.is_err(), "nothing listens where the first one did");
}

/// VR-RES-009: a device with short queues gets short queues.
#[test]
fn queues_are_as_deep_as_the_device_allows() {
    let fabric = Fabric::new();
    let limits = Limits { max_queue_depth: 64, max_completions: 128, ..Limits::default() };
    let (host, server) = (fabric.host_with(&[CLIENT], limits), fabric.host_with(&[SERVER], limits));
    let address = SocketAddr::new(SERVER, 6379);
    let listener = Listener::bind(&server, address).expect("a free address");
    let (mut client, mut accepted, _) = dialed(&host, &listener, &Connect::default());
    // More notifications than a queue has places, one at a time.
    for _ in 0..100 {
        talk(&mut client, &mut accepted);
        talk(&mut accepted, &mut client);
    }
}

#[test]
fn a_withdrawn_request_does_not_concern_the_listener() {
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
    let [server, fickle, honest] =
        [SERVER, CLIENT, IpAddr::from([192, 0, 2, 3])].map(|address| sim.host(&[address], Limits::default()));
    let address = SocketAddr::new(SERVER, 6379);
    let listener = Listener::bind(&server, address).expect("a free address");
    let settle = |endpoints: &mut [&mut Endpoint<SoftSim>]| {
        for _ in 0..100 {
            for endpoint in &mut *endpoints {
                endpoint.progress().expect("the fabric stays");
            }
            sim.step();
        }
    };
    let mut fickle = Endpoint::new(&fickle, rdma_conn::Limits::default()).expect("a device");
    for _ in 0..5 {
        let id = fickle.connect(address, None, LONG, Options::default()).expect("begins");
        settle(&mut [&mut fickle]);
        fickle.abort(id);
    }
    let mut honest = Endpoint::new(&honest, rdma_conn::Limits::default()).expect("a device");
    honest.connect(address, None, LONG, Options::default()).expect("begins");
    settle(&mut [&mut fickle, &mut honest]);
    let (endpoint, id) = listener.try_accept().expect("the listener is well").expect("one is still there");
    assert_eq!(endpoint.peer_addr(id).map(|peer| peer.ip()), Some(IpAddr::from([192, 0, 2, 3])));
}

/// VR-SEC-007: the memory of all accepted connections together is bounded, authenticated or not.
#[test]
fn the_connections_of_a_listener_share_a_budget() {
    let fabric = Fabric::new();
    let (host, server) = (fabric.host(&[CLIENT]), fabric.host(&[SERVER]));
    let address = SocketAddr::new(SERVER, 6379);
    let mut options = Options::default();
    options.protocol.window = 64 << 10;
    let one = u64::from(options.protocol.window) + 32 * 1280 + 4096;
    for limits in [
        rdma_conn::Limits::default().registered_bytes(2 * one + 100),
        rdma_conn::Limits::default().connections(2),
    ] {
        let listener = Listener::bind_with(&server, address, options, limits).expect("a free address");
        let (first, _server, _) = dialed(&host, &listener, &Connect::default());
        let (_second, other, _) = dialed(&host, &listener, &Connect::default());
        let held = fabric.resources(SERVER);
        let third = thread::scope(|scope| {
            let dial = scope.spawn(|| Stream::connect(&host, address));
            // The surplus connection is refused inside, whenever it comes.
            while !dial.is_finished() {
                let waited =
                    listener.accept_timeout(Duration::from_millis(20)).expect_err("it is one too many");
                assert!(matches!(waited, rdma_conn::Error::TimedOut { .. }), "{waited}");
            }
            dial.join().expect("does not panic")
        });
        assert!(matches!(third, Err(rdma_conn::Error::Rejected { .. })), "{third:?}");
        assert_eq!(fabric.resources(SERVER), held, "nothing was allocated for it");
        drop((first, other));
        // Its own end too, when it has seen the peer's end.
        drop(dialed(&host, &listener, &Connect::default()));
    }
}

#[test]
fn a_listener_says_that_descriptors_are_lacking() {
    // In a process of its own, because the limit is per process.
    let own = std::env::current_exe().expect("this test");
    let mut command = std::process::Command::new(own);
    let run = command.args(["--exact", "--ignored", "connecting::accepting_with_few_descriptors"]).output();
    let run = run.expect("starts");
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("1 passed"), "{said}\n{run:?}");
}

/// Calls `act` with room for exactly this many more descriptors.
fn with_spare<T>(spare: u64, act: impl FnOnce() -> T) -> T {
    // Take the lowest free descriptors, so that those behind them are free too.
    let held: Vec<_> = (0..64).map(|_| eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor")).collect();
    let last = held.iter().map(AsRawFd::as_raw_fd).max().expect("some");
    let before = getrlimit(Resource::Nofile);
    let limit = u64::try_from(last).expect("a descriptor") + 1 + spare;
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), ..before }).expect("a lower limit");
    let done = act();
    setrlimit(Resource::Nofile, before).expect("the limit as it was");
    done
}

/// A client that has requested a connection, and whether it was rejected.
fn asked(sim: &Simulation, client: &SoftSim, address: SocketAddr) -> (Endpoint<SoftSim>, ConnectionId) {
    let mut endpoint = Endpoint::new(client, rdma_conn::Limits::default()).expect("a device");
    let id = endpoint.connect(address, None, LONG, Options::default()).expect("begins");
    settle(sim, &mut endpoint);
    (endpoint, id)
}

fn settle(sim: &Simulation, endpoint: &mut Endpoint<SoftSim>) {
    for _ in 0..5 {
        sim.advance(sim.now().after(Duration::from_millis(1)));
        endpoint.progress().expect("the fabric stays");
    }
}

#[test]
#[ignore = "lowers the limit of its process: `a_listener_says_that_descriptors_are_lacking` runs it"]
fn accepting_with_few_descriptors() {
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
    let [server, client] = [SERVER, CLIENT].map(|address| sim.host(&[address], Limits::default()));
    let address = SocketAddr::new(SERVER, 6379);
    let listener = Listener::bind(&server, address).expect("a free address");
    let is_rejected = |(mut client, id): (Endpoint<SoftSim>, ConnectionId)| {
        settle(&sim, &mut client);
        matches!(client.check(id), Err(Error::Rejected { .. }))
    };
    let lacks = |error: &Error| matches!(error, Error::Backend { kind: ErrorKind::Descriptors, .. });
    // One each for the event channel, the epoll instance, and the completion queue.
    for spare in 0..3 {
        let client = asked(&sim, &client, address);
        let accepted = with_spare(spare, || listener.try_accept().map(drop));
        let error = accepted.expect_err("there are too few");
        assert!(if spare == 1 { matches!(error, Error::Wait(_)) } else { lacks(&error) }, "{spare}: {error}");
        assert!(is_rejected(client), "{spare}");
    }
    let _client = asked(&sim, &client, address);
    with_spare(3, || listener.try_accept()).expect("the listener is well").expect("accepts");

    let mut endpoint = Endpoint::new(&server, rdma_conn::Limits::default()).expect("a device");
    let address = SocketAddr::new(SERVER, 6380);
    let id = endpoint.listen(address, Options::default()).expect("a free address");
    let client = asked(&sim, &client, address);
    with_spare(0, || endpoint.progress()).expect("the fabric stays");
    let told = endpoint.next_events().expect("it has failed");
    assert_eq!((told.kinds, told.id, told.listener), (Events::ACCEPT_FAILED, None, Some(id)));
    let error = endpoint.take_accept_error(id).expect("there are too few");
    assert!(lacks(&error), "{error}");
    assert!(is_rejected(client));
}

/// VR-SEC-008: what a client is told before it connects is what a server finds, however the
/// address is written.
#[test]
fn the_path_to_an_address_of_this_machine_leads_back() {
    let fabric = Fabric::new();
    let own =
        ["192.0.2.1", "2001:db8::1", "fe80::1", "127.0.0.1", "::1"].map(|ip| ip.parse().expect("an address"));
    let other = fabric.host(&[CLIENT, "2001:db8::2".parse().expect("an address")]);
    let machine = fabric.host(&own);
    let mut server = Endpoint::new(&machine, rdma_conn::Limits::default()).expect("a device");
    let mut at = Vec::new();
    for ip in own {
        let listener = server.listen((ip, 0).into(), Options::default()).expect("a free address");
        at.push(server.local_addr(listener).expect("it listens"));
    }
    let mut local_of = |client: &SoftSim, peer: SocketAddr| {
        let mut client = Endpoint::new(client, rdma_conn::Limits::default()).expect("a device");
        client.connect(peer, None, LONG, Options::default()).expect("begins");
        loop {
            client.progress().expect("the fabric stays");
            server.wait(Some(Duration::from_millis(1))).expect("the fabric stays");
            while let Some(event) = server.next_event() {
                if let Event::Opened { id, .. } = event {
                    return server.connection(id).expect("is open").is_local();
                }
            }
        }
    };
    for at in at {
        for (client, local) in [(&machine, true), (&other, false)] {
            let told = leads_back(client, at, LONG).expect("an address of the fabric");
            assert_eq!((told, local_of(client, at)), (local, local), "{at}");
        }
    }
    let nowhere = leads_back(&machine, ([192, 0, 2, 9], 1).into(), Duration::from_millis(1));
    assert!(matches!(nowhere, Err(Error::Unreachable { .. } | Error::TimedOut { .. })), "{nowhere:?}");
}
