//! Programs that look late, in virtual time.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_conn::{ConnectionId, Dial, Endpoint, Error, Event, Limits as Share, Link, Listener, Options};
use rdma_proto::backend::{
    Backend, CmEventKind, ConnectParams, EventChannel, Identifier, QueuePairLimits, RNR_RETRY_INFINITE,
};
use rdma_proto::{State, TransportError, UNACKNOWLEDGED};
use rdma_softsim::{FaultPlan, Knobs, Limits, Link as Wire, Personality, Simulation, SoftSim};

/// Longer than any device goes on asking a peer that does not answer.
const LATE: Duration = Duration::from_secs(10);

/// A client and a server, connected, with their simulation.
fn connected() -> (Simulation, Link<SoftSim>, Link<SoftSim>) {
    let sim = Simulation::new(1, Personality::Ibta, Knobs::default(), FaultPlan::new());
    let [server, client] = [1, 2].map(|last| sim.host(&[IpAddr::from([192, 0, 2, last])], Limits::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&server, address, Options::server()).expect("a free address");
    let mut dial = Dial::new(&client, address, None, LATE, Options::client()).expect("begins");
    let (mut dialed, mut accepted) = (None, None::<Link<SoftSim>>);
    while dialed.is_none() || accepted.as_ref().is_none_or(|link| link.state() == State::Connecting) {
        sim.step();
        if dialed.is_none() {
            dialed = dial.progress().expect("connects");
        }
        match &mut accepted {
            Some(link) => _ = link.take_events() | link.progress(),
            None => accepted = listener.try_accept().expect("accepts"),
        }
    }
    let (Some(dialed), Some(accepted)) = (dialed, accepted) else { unreachable!("both are there") };
    (sim, dialed, accepted)
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
    let (sim, mut client, mut server) = connected();
    client.try_write(&[IoSlice::new(b"last words")]).expect("is open");
    client.close(LATE);
    while client.state() != State::Closed {
        sim.step();
        client.progress();
    }
    // On its way when the client's queue pair is gone.
    server.try_write(&[IoSlice::new(b"unheard")]).expect("has heard of nothing");
    drop(client);
    pass(&sim, LATE);

    server.progress();
    let mut bytes = [0; 20];
    assert_eq!(server.try_read(&mut bytes).expect("what came before"), Some(10));
    assert_eq!(server.try_read(&mut bytes).expect("no error"), Some(0), "{server:?}");
}

/// A peer that vanished leaves no event: then the device's word counts.
#[test]
fn a_peer_that_vanished_is_an_error() {
    let (sim, client, mut server) = connected();
    let address = client.local_addr().expect("is connected").ip();
    sim.fabric().set_link(address, Wire::Down);
    server.try_write(&[IoSlice::new(b"unheard")]).expect("has heard of nothing");
    pass(&sim, LATE);
    server.progress();
    let error = server.check().expect_err("nobody is there");
    assert!(matches!(error, Error::Protocol(rdma_proto::Error::Transport(_))), "{error}");
}

/// A client of an endpoint, and what the endpoint calls the connection.
fn joined(
    sim: &Simulation,
    client: &SoftSim,
    endpoint: &mut Endpoint<SoftSim>,
    address: SocketAddr,
) -> (Link<SoftSim>, ConnectionId) {
    let mut dial = Dial::new(client, address, None, LATE, Options::client()).expect("begins");
    let (mut link, mut id) = (None, None);
    while link.is_none() || id.is_none() {
        sim.step();
        if link.is_none() {
            link = dial.progress().expect("connects");
        }
        endpoint.progress().expect("the fabric stays");
        while let Some(event) = endpoint.next_event() {
            if let Event::Opened { id: opened, .. } = event {
                id = Some(opened);
            }
        }
    }
    let (Some(link), Some(id)) = (link, id) else { unreachable!("both are there") };
    (link, id)
}

/// Completions of a queue pair that is gone may still lie in the queue when the next one gets its number: they are nobody's.
#[test]
fn a_number_that_is_given_again_inherits_nothing() {
    let sim = Simulation::new(1, Personality::Ibta, Knobs::default(), FaultPlan::new());
    let [server, client] = [1, 2].map(|last| sim.host(&[IpAddr::from([192, 0, 2, last])], Limits::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let mut endpoint = Endpoint::new(&server, Share::default()).expect("a device");
    endpoint.listen(address, Options::server()).expect("a free address");
    // Keeps the queue.
    let (_stays, stays) = joined(&sim, &client, &mut endpoint, address);
    let (mut leaves, left) = joined(&sim, &client, &mut endpoint, address);
    // More than one batch, and none of it looked at.
    for _ in 0..40 {
        leaves.try_write(&[IoSlice::new(b"unheard")]).expect("there is room");
        pass(&sim, Duration::from_millis(1));
        leaves.progress();
    }
    let number = endpoint.connection(left).expect("is there").queue_pair_number();
    let mut dial = Dial::new(&client, address, None, LATE, Options::client()).expect("begins");
    for _ in 0..3 {
        pass(&sim, Duration::from_millis(1));
        assert!(dial.progress().expect("goes on").is_none());
    }
    endpoint.remove(left);
    let id = loop {
        endpoint.progress().expect("the fabric stays");
        if let Some(Event::Opened { id, .. }) = endpoint.next_event() {
            break id;
        }
        assert!(sim.now().since_start() < LATE, "nobody is accepted");
        assert!(dial.progress().is_ok());
        pass(&sim, Duration::from_millis(1));
    };
    assert_eq!(endpoint.connection(id).expect("is there").queue_pair_number(), number);
    assert_eq!(endpoint.connection(id).expect("is there").counters().bytes_received, 0);
    assert!(endpoint.check(id).is_ok(), "{:?}", endpoint.check(id));
    assert!(endpoint.check(stays).is_ok());
}

/// VR-KEEP-006: the client's request says how often *our* device repeats what nobody acknowledges, and soft-RoCE takes seven
/// for endless: a client that asked for that and vanished is found out all the same.
#[test]
fn a_client_that_asked_for_endless_retries_and_vanished_is_gone() {
    let sim = Simulation::new(1, Personality::Rxe, Knobs::default(), FaultPlan::new());
    let [server, client] = [1, 2].map(|last| sim.host(&[IpAddr::from([192, 0, 2, last])], Limits::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&server, address, Options::server()).expect("a free address");
    let events = client.event_channel().expect("a device");
    let id = events.create_id().expect("an identifier");
    id.resolve_address(None, address, LATE).expect("begins");
    let mut pair = None;
    let mut accepted = None::<Link<SoftSim>>;
    while accepted.as_ref().is_none_or(|link| link.state() == State::Connecting) {
        assert!(sim.now().since_start() < LATE, "the connection does not come about");
        pass(&sim, Duration::from_millis(1));
        match events.next_event().expect("the fabric stays").map(|event| event.kind) {
            Some(CmEventKind::AddressResolved) => id.resolve_route(LATE).expect("goes on"),
            Some(CmEventKind::RouteResolved) => {
                let domain = id.create_domain().expect("a domain");
                let queue = id.create_completion_queue(16, 0).expect("a queue");
                let limits = QueuePairLimits { send_depth: 4, recv_depth: 4, inline: 0 };
                pair = Some(id.create_queue_pair(&domain, &queue, limits).expect("a queue pair"));
                let params = ConnectParams {
                    responder_resources: 1,
                    initiator_depth: 1,
                    retry_count: 7,
                    rnr_retry_count: RNR_RETRY_INFINITE,
                };
                id.connect(&params, &[]).expect("asks");
            }
            _ => {}
        }
        match &mut accepted {
            Some(link) => _ = link.take_events() | link.progress(),
            None => accepted = listener.try_accept().expect("accepts"),
        }
    }
    let mut link = accepted.expect("is accepted");
    sim.fabric().set_link(IpAddr::from([192, 0, 2, 2]), Wire::Down);
    for _ in 0..UNACKNOWLEDGED.as_secs() + 10 {
        pass(&sim, Duration::from_secs(1));
        link.progress();
    }
    let error = link.check().expect_err("nobody is there");
    let waited = UNACKNOWLEDGED;
    let expected = rdma_proto::Error::Transport(TransportError::Unacknowledged { waited });
    assert!(matches!(error, Error::Protocol(error) if error == expected), "{error}");
    drop(pair);
}
