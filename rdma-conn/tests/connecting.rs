//! How connections come about, over the embedded fabric.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::Duration;

use rdma_conn::{Connect, Listener, Options, Stream};
use rdma_softsim::{Fabric, Limits, SoftSim};

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
        let how = Connect { local: Some(SocketAddr::new(local, 0)), ..Connect::default() };
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
