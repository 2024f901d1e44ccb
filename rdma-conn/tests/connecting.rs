//! How connections come about, over the embedded fabric.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::Duration;

use rdma_conn::{Connect, Endpoint, Listener, Options, Stream};
use rdma_softsim::{DeviceKind, Fabric, FaultPlan, Limits, Simulation, SimulationSettings, SoftSim};

const LONG: Duration = Duration::from_secs(20);
const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

/// A client's stream and a server's, connected.
fn connected(
    client: &SoftSim,
    listener: &Listener<SoftSim>,
    how: &Connect,
) -> (Stream<SoftSim>, Stream<SoftSim>, SocketAddr) {
    let address = listener.local_addr().expect("it listens");
    thread::scope(|scope| {
        let dial = scope.spawn(|| Stream::connect_with(client, address, how).expect("connects"));
        let (mut server, peer) = listener.accept_timeout(LONG).expect("accepts");
        server.flush().expect("is established");
        (dial.join().expect("does not panic"), server, peer)
    })
}

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
        let listener = Listener::bind(&server, SocketAddr::new(SERVER, port), Options::server())
            .expect("a free address");
        let how = Connect::default().local(Some(SocketAddr::new(local, 0)));
        let (client, _server, peer) = connected(&host, &listener, &how);
        assert_eq!((peer.ip(), client.local_addr()), (local, Some(peer)));
    }
}

/// VR-CONN-014: the listener goes, another comes, and the connection stays.
#[test]
fn connections_outlive_their_listener() {
    let fabric = Fabric::new();
    let (host, server) = (fabric.host(&[CLIENT]), fabric.host(&[SERVER]));
    let listen =
        |port| Listener::bind(&server, SocketAddr::new(SERVER, port), Options::server()).expect("free");
    let first = listen(6379);
    let (mut client, mut accepted, _) = connected(&host, &first, &Connect::default());
    drop(first);
    talk(&mut client, &mut accepted);
    let second = listen(6380);
    let (mut newcomer, mut peer, _) = connected(&host, &second, &Connect::default());
    talk(&mut accepted, &mut client);
    talk(&mut newcomer, &mut peer);
    let gone = Stream::connect_with(&host, SocketAddr::new(SERVER, 6379), &Connect::default());
    assert!(gone.is_err(), "nobody listens where the first one did");
}

/// VR-RES-009: a device with short queues gets short queues.
#[test]
fn queues_are_as_deep_as_the_device_allows() {
    let fabric = Fabric::new();
    let limits = Limits { max_queue_depth: 64, max_completions: 128, ..Limits::default() };
    let (host, server) = (fabric.host_with(&[CLIENT], limits), fabric.host_with(&[SERVER], limits));
    let address = SocketAddr::new(SERVER, 6379);
    let listener = Listener::bind(&server, address, Options::server()).expect("a free address");
    let (mut client, mut accepted, _) = connected(&host, &listener, &Connect::default());
    // More notifications than a queue has places, one at a time.
    for _ in 0..100 {
        talk(&mut client, &mut accepted);
        talk(&mut accepted, &mut client);
    }
}

/// A request that is withdrawn before it is accepted is no error of the listener, and hides nobody behind it.
#[test]
fn a_withdrawn_request_does_not_concern_the_listener() {
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new());
    let [server, fickle, honest] =
        [SERVER, CLIENT, IpAddr::from([192, 0, 2, 3])].map(|address| sim.host(&[address], Limits::default()));
    let address = SocketAddr::new(SERVER, 6379);
    let listener = Listener::bind(&server, address, Options::server()).expect("a free address");
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
        let id = fickle.connect(address, None, LONG, Options::client()).expect("begins");
        settle(&mut [&mut fickle]);
        fickle.abort(id);
    }
    let mut honest = Endpoint::new(&honest, rdma_conn::Limits::default()).expect("a device");
    honest.connect(address, None, LONG, Options::client()).expect("begins");
    settle(&mut [&mut fickle, &mut honest]);
    let (endpoint, id) = listener.try_accept().expect("the listener is well").expect("one is still there");
    assert_eq!(endpoint.peer_addr(id).map(|peer| peer.ip()), Some(IpAddr::from([192, 0, 2, 3])));
}

/// VR-SEC-007: what all accepted connections have registered together is bounded, before anybody says who it is.
#[test]
fn the_connections_of_a_listener_share_a_budget() {
    let fabric = Fabric::new();
    let (host, server) = (fabric.host(&[CLIENT]), fabric.host(&[SERVER]));
    let address = SocketAddr::new(SERVER, 6379);
    let mut options = Options::server();
    options.protocol.window = 64 << 10;
    let one = u64::from(options.protocol.window) + 32 * 1280;
    for limits in [
        rdma_conn::Limits::default().registered_bytes(2 * one + 100),
        rdma_conn::Limits::default().connections(2),
    ] {
        let listener = Listener::bind_with(&server, address, options, limits).expect("a free address");
        let (first, _server, _) = connected(&host, &listener, &Connect::default());
        let (_second, other, _) = connected(&host, &listener, &Connect::default());
        let held = fabric.resources(SERVER);
        let third = thread::scope(|scope| {
            let dial = scope.spawn(|| Stream::connect(&host, address));
            // The one too many is refused inside, whenever it comes.
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
        // Its own end too, when it has seen the peer's.
        drop(connected(&host, &listener, &Connect::default()));
    }
}
