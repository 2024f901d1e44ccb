//! A server's and a client's host, on a simulated fabric or in real time.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::Duration;

use rdma_conn::{Connect, ConnectionId, Endpoint, Event, Limits as Share, Listener, Options, Stream};
use rdma_softsim::{DeviceKind, Fabric, FaultPlan, Limits, Simulation, SimulationSettings, SoftSim};

pub(crate) type End = (Endpoint<SoftSim>, ConnectionId);

pub(crate) fn simulation() -> Simulation {
    Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new())
}

/// Returns the hosts of a server and a client, and where the server listens.
pub(crate) fn hosts(sim: &Simulation) -> (SoftSim, SoftSim, SocketAddr) {
    let [server, client] = [1, 2].map(|last| sim.host(&[IpAddr::from([192, 0, 2, last])], Limits::default()));
    (server, client, SocketAddr::from(([192, 0, 2, 1], 6379)))
}

pub(crate) fn pass(sim: &Simulation, time: Duration) {
    sim.advance(sim.now().after(time));
}

pub(crate) fn asking(client: &SoftSim, address: SocketAddr, options: Options) -> End {
    let mut endpoint = Endpoint::new(client, Share::default()).expect("a device");
    let id = endpoint.connect(address, None, Duration::from_secs(10), options).expect("begins");
    (endpoint, id)
}

/// Two endpoints of one connection, the client's first.
pub(crate) fn connected(sim: &Simulation, ours: Options, theirs: Options) -> (End, End) {
    let (server, client, address) = hosts(sim);
    let mut server = Endpoint::new(&server, Share::default()).expect("a device");
    server.listen(address, theirs).expect("a free address");
    let (mut client, own) = asking(&client, address, ours);
    let (mut accepted, mut turns) = (None, 0);
    while accepted.is_none() || !client.is_open(own) {
        // Nothing may be on its way yet: an endpoint that busy-polls has turns without effect.
        sim.step();
        turns += 1;
        assert!(turns < 100_000, "no connection");
        client.progress().expect("the fabric stays");
        server.progress().expect("the fabric stays");
        while let Some(event) = server.next_event() {
            if let Event::Opened { id, .. } = event {
                accepted = Some(id);
            }
        }
    }
    ((client, own), (server, accepted.expect("was opened")))
}

/// Two streams of one connection, the client's first, and the client's address.
pub(crate) fn dialed(
    client: &SoftSim,
    listener: &Listener<SoftSim>,
    how: &Connect,
) -> (Stream<SoftSim>, Stream<SoftSim>, SocketAddr) {
    let address = listener.local_addr().expect("it listens");
    thread::scope(|scope| {
        let dial = scope.spawn(|| Stream::connect_with(client, address, how).expect("connects"));
        let (mut server, peer) = listener.accept_timeout(Duration::from_secs(20)).expect("accepts");
        // The client waits for the server's window, which the server's first call announces.
        server.flush().expect("is established");
        (dial.join().expect("does not panic"), server, peer)
    })
}

/// As [`dialed`], on a fabric of their own.
pub(crate) fn streams(client: Options, server: Options) -> (Stream<SoftSim>, Stream<SoftSim>) {
    let fabric = Fabric::new();
    let [server_host, client_host] = [1, 2].map(|last| fabric.host(&[IpAddr::from([192, 0, 2, last])]));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind_with(&server_host, address, server, Share::default());
    let how = Connect::default().options(client);
    let (client, server, _) = dialed(&client_host, &listener.expect("a free address"), &how);
    (client, server)
}

/// Drives an accepted connection, or accepts it.
pub(crate) fn serve(listener: &Listener<SoftSim>, accepted: &mut Option<End>) {
    match accepted {
        Some((server, _)) => server.progress().expect("the fabric stays"),
        None => *accepted = listener.try_accept().expect("accepts"),
    }
}

/// Bytes in which neighbouring kilobytes differ.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index ^ (index >> 8) ^ (index >> 16)) as u8).collect()
}

/// Returns the options for idle connections.
pub(crate) fn small() -> Options {
    let mut options = Options::default();
    options.protocol.window = 64 << 10;
    options.protocol.send_buffer = 64 << 10;
    options
}
