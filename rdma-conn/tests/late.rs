//! Programs that drive their endpoint late, in virtual time.

use std::io::{IoSlice, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_backend::{
    Backend, CmEventKind, ConnectParams, EventChannel, Identifier, QueuePairLimits, RNR_RETRY_INFINITE,
};
use rdma_conn::{ConnectionId, Endpoint, Error, Event, Limits as Share, Listener, Options, Stream};
use rdma_proto::{State, TransportError, UNACKNOWLEDGED};
use rdma_softsim::{DeviceKind, FaultPlan, Link as Wire, Simulation, SimulationSettings, SoftSim};

use crate::world::{End, asking as asking_with, hosts, pass, serve, simulation};

/// Longer than any device retries a peer that does not answer.
const LATE: Duration = Duration::from_secs(10);

fn asking(client: &SoftSim, address: SocketAddr) -> End {
    asking_with(client, address, Options::default())
}

fn connected() -> (Simulation, End, End) {
    let sim = simulation();
    let (server, client, address) = hosts(&sim);
    let listener = Listener::bind(&server, address).expect("a free address");
    let (mut client, id) = asking(&client, address);
    let mut accepted: Option<End> = None;
    while !client.is_open(id) || accepted.as_ref().is_none_or(|(server, id)| !server.is_open(*id)) {
        sim.step();
        client.progress().expect("the fabric stays");
        serve(&listener, &mut accepted);
    }
    (sim, (client, id), accepted.expect("both are there"))
}

/// VR-CLOSE-005: the peer has left in order, and this side's later requests were never
/// acknowledged. For a program that looks only then the disconnect is the cause.
#[test]
fn the_end_comes_before_its_consequences() {
    let (sim, (mut client, own), (mut server, id)) = connected();
    client.write(own, &[IoSlice::new(b"last words")]).expect("is open");
    client.close(own, LATE).expect("is there");
    while client.connection(own).is_some_and(|connection| connection.state() != State::Closed) {
        sim.step();
        client.progress().expect("the fabric stays");
    }
    // In flight when the client's queue pair is destroyed.
    server.write(id, &[IoSlice::new(b"unheard")]).expect("has heard of nothing");
    drop(client);
    pass(&sim, LATE);

    server.progress().expect("the fabric stays");
    let mut bytes = [0; 20];
    assert_eq!(server.read(id, &mut bytes).expect("what came before"), Some(10));
    assert_eq!(server.read(id, &mut bytes).expect("no error"), Some(0), "{server:?}");
}

/// VR-CONN-008: a server that was away for longer than a handshake may take reads what has come
/// meanwhile, a few events in a turn, before it gives a peer up.
#[test]
fn a_handshake_is_not_late_while_its_last_event_is_unread() {
    const OTHERS: usize = 100;
    let sim = simulation();
    let (server, client, address) = hosts(&sim);
    let mut server = Endpoint::new(&server, Share::default()).expect("a device");
    server.listen(address, Options::default()).expect("a free address");
    let (mut first, _) = asking(&client, address);
    while server.usage().accepted == 0 {
        sim.step();
        first.progress().expect("the fabric stays");
        server.progress().expect("the fabric stays");
    }
    let mut others: Vec<_> = (0..OTHERS).map(|_| asking(&client, address)).collect();
    for _ in 0..20 {
        for (other, _) in &mut others {
            other.progress().expect("the fabric stays");
        }
        pass(&sim, Duration::from_millis(1));
    }
    // The end of its handshake is behind all requests.
    first.progress().expect("the fabric stays");
    pass(&sim, Options::default().handshake_timeout + Duration::from_secs(1));
    let mut opened = None;
    for _ in 0..OTHERS {
        server.progress().expect("the fabric stays");
        opened = opened.or(server.next_event());
    }
    assert!(matches!(opened, Some(Event::Opened { .. })), "{opened:?}");
}

/// A peer that vanished leaves no event, so the device's error is the cause.
#[test]
fn a_peer_that_vanished_is_an_error() {
    let (sim, (client, own), (mut server, id)) = connected();
    let address =
        client.connection(own).and_then(|connection| connection.local_addr()).expect("is connected");
    sim.fabric().set_link(address.ip(), Wire::Down);
    server.write(id, &[IoSlice::new(b"unheard")]).expect("has heard of nothing");
    pass(&sim, LATE);
    server.progress().expect("the fabric stays");
    let error = server.check(id).expect_err("the peer is gone");
    assert!(matches!(error, Error::Protocol(rdma_proto::Error::Transport(_))), "{error}");
}

fn joined(
    sim: &Simulation,
    client: &SoftSim,
    endpoint: &mut Endpoint<SoftSim>,
    address: SocketAddr,
) -> (End, ConnectionId) {
    let (mut client, own) = asking(client, address);
    let mut id = None;
    while !client.is_open(own) || id.is_none() {
        sim.step();
        client.progress().expect("the fabric stays");
        endpoint.progress().expect("the fabric stays");
        while let Some(event) = endpoint.next_event() {
            if let Event::Opened { id: opened, .. } = event {
                id = Some(opened);
            }
        }
    }
    ((client, own), id.expect("both are there"))
}

/// Leftover completions of a destroyed queue pair belong to no successor, even with its number.
#[test]
fn a_number_that_is_given_again_inherits_nothing() {
    let sim = simulation();
    let (server, client, address) = hosts(&sim);
    let mut endpoint = Endpoint::new(&server, Share::default()).expect("a device");
    endpoint.listen(address, Options::default()).expect("a free address");
    // Keeps the queue.
    let (_stays, stays) = joined(&sim, &client, &mut endpoint, address);
    let ((mut leaves, own), left) = joined(&sim, &client, &mut endpoint, address);
    // More than one batch, all unpolled.
    for _ in 0..40 {
        leaves.write(own, &[IoSlice::new(b"unheard")]).expect("there is room");
        pass(&sim, Duration::from_millis(1));
        leaves.progress().expect("the fabric stays");
    }
    let number = endpoint.connection(left).expect("is there").queue_pair_number();
    let (mut next, _) = asking(&client, address);
    for _ in 0..3 {
        pass(&sim, Duration::from_millis(1));
        next.progress().expect("the fabric stays");
    }
    endpoint.abort(left);
    let id = loop {
        endpoint.progress().expect("the fabric stays");
        if let Some(Event::Opened { id, .. }) = endpoint.next_event() {
            break id;
        }
        assert!(sim.now().since_start() < LATE, "no peer is accepted");
        next.progress().expect("the fabric stays");
        pass(&sim, Duration::from_millis(1));
    };
    assert_eq!(endpoint.connection(id).expect("is there").queue_pair_number(), number);
    assert_eq!(endpoint.connection(id).expect("is there").counters().bytes_received, 0);
    assert!(endpoint.check(id).is_ok(), "{:?}", endpoint.check(id));
    assert!(endpoint.check(stays).is_ok());
}

/// VR-KEEP-006: the client's request sets how often our device retries. soft-RoCE takes seven as
/// endless, yet a client that asked for seven and vanished is detected.
#[test]
fn a_client_that_asked_for_endless_retries_and_vanished_is_gone() {
    let sim = Simulation::new(1, DeviceKind::Rxe, SimulationSettings::default(), FaultPlan::new());
    let (server, client, address) = hosts(&sim);
    let listener = Listener::bind(&server, address).expect("a free address");
    let events = client.event_channel().expect("a device");
    let id = events.create_id().expect("an identifier");
    id.resolve_address(None, address, LATE).expect("begins");
    let mut pair = None;
    let mut accepted = None::<End>;
    while accepted.as_ref().is_none_or(|(server, id)| !server.is_open(*id)) {
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
        serve(&listener, &mut accepted);
    }
    let (mut server, id) = accepted.expect("is accepted");
    sim.fabric().set_link(IpAddr::from([192, 0, 2, 2]), Wire::Down);
    for _ in 0..UNACKNOWLEDGED.as_secs() + 10 {
        pass(&sim, Duration::from_secs(1));
        server.progress().expect("the fabric stays");
    }
    let error = server.check(id).expect_err("the peer is gone");
    let waited = UNACKNOWLEDGED;
    let expected = rdma_proto::Error::Transport(TransportError::Unacknowledged { waited });
    assert!(matches!(error, Error::Protocol(error) if error == expected), "{error}");
    drop(pair);
}

/// VR-CLOSE-002: what a peer sent before it left counts, even behind many completions of others.
#[test]
fn last_words_are_heard_behind_a_long_queue() {
    const EACH: usize = 700;
    let sim = simulation();
    let (server, client, address) = hosts(&sim);
    let mut endpoint = Endpoint::new(&server, Share::default()).expect("a device");
    endpoint.listen(address, Options::default()).expect("a free address");
    let busy = [(); 2].map(|()| joined(&sim, &client, &mut endpoint, address).0);
    let ((mut leaves, own), left) = joined(&sim, &client, &mut endpoint, address);
    // The endpoint is not driven meanwhile.
    for (mut busy, own) in busy {
        for _ in 0..EACH {
            assert_eq!(busy.write(own, &[IoSlice::new(b"x")]).expect("is open"), Some(1));
            pass(&sim, Duration::from_micros(100));
            busy.progress().expect("the fabric stays");
        }
        std::mem::forget((busy, own));
    }
    leaves.write(own, &[IoSlice::new(b"last words")]).expect("is open");
    leaves.close(own, LATE).expect("is there");
    while leaves.connection(own).is_some_and(|connection| connection.state() != State::Closed) {
        sim.step();
        leaves.progress().expect("the fabric stays");
    }
    drop(leaves);
    pass(&sim, Duration::from_millis(1));

    endpoint.progress().expect("the fabric stays");
    let mut bytes = [0; 20];
    assert_eq!(endpoint.read(left, &mut bytes).expect("what came before"), Some(10));
}

/// Bytes written to a stream before it is established arrive, even if it is dropped at once.
#[test]
fn a_stream_that_is_dropped_before_it_is_established_delivers() {
    let sim = simulation();
    let ((endpoint, id), (mut client, own)) = accepted(&sim);
    let mut stream = Stream::from_endpoint(endpoint, id);
    assert_eq!(stream.write(b"last words").expect("there is room"), 10);
    let dropping = std::thread::spawn(move || drop(stream));
    // Nothing happens on the fabric meanwhile, so this only gives the drop time to go wrong.
    std::thread::sleep(Duration::from_millis(50));
    let mut bytes = [0; 20];
    let read = loop {
        pass(&sim, Duration::from_micros(100));
        client.progress().expect("the fabric stays");
        if let Some(read) = client.read(own, &mut bytes).expect("no error") {
            break read;
        }
        std::thread::yield_now();
    };
    assert_eq!(&bytes[..read], b"last words");
    // The client answers the disconnect.
    while !dropping.is_finished() {
        pass(&sim, Duration::from_micros(100));
        client.progress().expect("the fabric stays");
        std::thread::yield_now();
    }
    dropping.join().expect("does not panic");
}

/// A server's end of a connection that its client waits for: accepted, but not established yet.
fn accepted(sim: &Simulation) -> (End, End) {
    let (server, client, address) = hosts(sim);
    let listener = Listener::bind(&server, address).expect("a free address");
    let (mut client, own) = asking(&client, address);
    loop {
        sim.step();
        client.progress().expect("the fabric stays");
        if let Some((server, id)) = listener.try_accept().expect("accepts") {
            assert!(!server.is_open(id), "not yet");
            return ((server, id), (client, own));
        }
    }
}

/// VR-CLOSE-001: bytes written to an accepted connection before it is established arrive, even if
/// it is closed before, too, with or without events.
#[test]
fn a_connection_that_is_closed_before_it_is_established_delivers() {
    for abandons in [false, true] {
        let sim = simulation();
        let ((mut server, id), (mut client, own)) = accepted(&sim);
        assert_eq!(server.write(id, &[IoSlice::new(b"last words")]).expect("there is room"), Some(10));
        if abandons {
            server.abandon(id, LATE).expect("is there");
        } else {
            server.close(id, LATE).expect("is there");
            assert!(matches!(server.closed(id), Ok(None)), "it is on its way");
        }
        let mut bytes = [0; 20];
        let read = loop {
            assert!(sim.now().since_start() < LATE, "it never comes");
            pass(&sim, Duration::from_micros(100));
            server.progress().expect("the fabric stays");
            client.progress().expect("the fabric stays");
            match client.read(own, &mut bytes) {
                Ok(Some(read)) => break read,
                // Before there is a queue pair.
                Ok(None) | Err(Error::NoSuchConnection) => {}
                Err(error) => panic!("{error}"),
            }
        };
        assert_eq!(&bytes[..read], b"last words");
        pass(&sim, Duration::from_millis(1));
        client.progress().expect("the fabric stays");
        assert_eq!(client.read(own, &mut bytes).expect("an end in order"), Some(0));
        server.progress().expect("the fabric stays");
        if abandons {
            assert_eq!(server.usage().connections, 0, "it is forgotten");
        } else {
            assert_eq!(server.closed(id).expect("all has arrived"), Some(()));
            server.check(id).expect("all has arrived");
        }
    }
}

/// VR-CLOSE-004: a client that never completes the connection delays its end by a bounded time.
#[test]
fn a_close_before_the_connection_is_established_has_an_end() {
    let sim = simulation();
    let ((mut server, id), _silent) = accepted(&sim);
    server.write(id, &[IoSlice::new(b"last words")]).expect("there is room");
    let linger = Duration::from_secs(1);
    server.close(id, linger).expect("is there");
    sim.fabric().set_link([192, 0, 2, 2].into(), Wire::Down);
    let due = server.next_timeout().expect("it has an end");
    assert!(due <= sim.now().after(linger), "{due:?}");
    pass(&sim, linger);
    server.progress().expect("the fabric stays");
    let error = server.closed(id).expect_err("nothing has arrived");
    let expected = rdma_proto::Error::Transport(TransportError::CloseTimedOut { unconfirmed: 10 });
    assert!(matches!(error, Error::Protocol(error) if error == expected), "{error}");
}
