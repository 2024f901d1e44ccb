//! Programs that look late, in virtual time.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_conn::{ConnectionId, Endpoint, Error, Listener, Options};
use rdma_proto::State;
use rdma_softsim::{FaultPlan, Knobs, Limits, Link as Wire, Personality, Simulation, SoftSim};

/// Longer than any device goes on asking a peer that does not answer.
const LATE: Duration = Duration::from_secs(10);

/// An endpoint and its one connection.
type End = (Endpoint<SoftSim>, ConnectionId);

/// A client and a server, connected, with their simulation.
fn connected() -> (Simulation, End, End) {
    let sim = Simulation::new(1, Personality::Ibta, Knobs::default(), FaultPlan::new());
    let [server, client] = [1, 2].map(|last| sim.host(&[IpAddr::from([192, 0, 2, last])], Limits::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&server, address, Options::server()).expect("a free address");
    let mut client = Endpoint::new(&client, rdma_conn::Limits::default()).expect("a device");
    let id = client.connect(address, None, LATE, Options::client()).expect("begins");
    let mut accepted: Option<End> = None;
    while !client.is_open(id) || accepted.as_ref().is_none_or(|(server, id)| !server.is_open(*id)) {
        sim.step();
        client.progress().expect("the fabric stays");
        match &mut accepted {
            Some((server, _)) => server.progress().expect("the fabric stays"),
            None => accepted = listener.try_accept().expect("accepts"),
        }
    }
    (sim, (client, id), accepted.expect("both are there"))
}

/// Lets everything happen that happens of itself until then.
fn pass(sim: &Simulation, time: Duration) {
    let until = sim.now().after(time);
    while sim.deadline().is_some_and(|at| at <= until) {
        sim.step();
    }
    sim.advance(until);
}

/// VR-CLOSE-005: the peer has left in order, and what this side sent then was never answered. Whoever looks only after that finds
/// both, and the end is the cause.
#[test]
fn the_end_comes_before_its_consequences() {
    let (sim, (mut client, own), (mut server, id)) = connected();
    client.write(own, &[IoSlice::new(b"last words")]).expect("is open");
    client.close(own, LATE).expect("is there");
    while client.connection(own).is_some_and(|connection| connection.state() != State::Closed) {
        sim.step();
        client.progress().expect("the fabric stays");
    }
    // On its way when the client's queue pair is gone.
    server.write(id, &[IoSlice::new(b"unheard")]).expect("has heard of nothing");
    drop(client);
    pass(&sim, LATE);

    server.progress().expect("the fabric stays");
    let mut bytes = [0; 20];
    assert_eq!(server.read(id, &mut bytes).expect("what came before"), Some(10));
    assert_eq!(server.read(id, &mut bytes).expect("no error"), Some(0), "{server:?}");
}

/// A peer that vanished leaves no event: then the device's word counts.
#[test]
fn a_peer_that_vanished_is_an_error() {
    let (sim, (client, own), (mut server, id)) = connected();
    let address =
        client.connection(own).and_then(|connection| connection.local_addr()).expect("is connected");
    sim.fabric().set_link(address.ip(), Wire::Down);
    server.write(id, &[IoSlice::new(b"unheard")]).expect("has heard of nothing");
    pass(&sim, LATE);
    server.progress().expect("the fabric stays");
    let error = server.check(id).expect_err("nobody is there");
    assert!(matches!(error, Error::Protocol(rdma_proto::Error::Transport(_))), "{error}");
}
