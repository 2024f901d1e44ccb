//! Peers that ask for a connection, and never complete it.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::Duration;

use raw_peer::Step;
use rdma_backend::{Immediate, RemoteAddress, SendOp};
use rdma_conn::{ConnectionId, Endpoint, Error, Event, Limits, Listener, Options};
use rdma_softsim::SoftSim;

use super::{
    ADDRESS, Client, IDLE, LONG, NEWCOMER, SERVER, STRANGERS, Stranger, WAYS, Way, World, strangers,
};
use crate::world::{is_readable, pass, simulation};

/// Has them ask, and nothing more.
fn ask(world: &mut World, strangers: &mut [Stranger]) {
    world.until("they ask", LONG, |_| {
        strangers.iter_mut().for_each(|stranger| stranger.turn(false));
        strangers.iter().all(Stranger::has_asked)
    });
}

/// 300 requests that are never completed.
#[test]
fn requests_that_are_never_completed_cost_little_and_keep_no_client_out() {
    for way in WAYS {
        let mut world = World::new(way, Limits::NONE.backlog(32), 10, rdma_softsim::Limits::default());
        let mut first = Client::new(&world.host(2));
        first.opens(&mut world, LONG);
        let mut strangers = strangers(&world);
        ask(&mut world, &mut strangers);
        first.is_served(&mut world);
        // It waits for those before it, for a tenth of a second for each 32.
        let mut second = Client::new(&world.host(3));
        second.opens(&mut world, Duration::from_millis(1500));
        second.is_served(&mut world);
        first.is_served(&mut world);
        assert!(world.most <= 2 * IDLE + 32 * NEWCOMER, "{way:?}: {} bytes were registered", world.most);
    }
}

/// They hold no place of the connections, which are for those that the program has.
#[test]
fn requests_that_are_never_completed_hold_no_place_of_the_connections() {
    const CONNECTIONS: u8 = 10;
    for way in WAYS {
        let limits = Limits::NONE.connections(CONNECTIONS.into()).backlog(256);
        let mut world = World::new(way, limits, 100, rdma_softsim::Limits::default());
        let mut strangers = strangers(&world);
        ask(&mut world, &mut strangers);
        let mut clients: Vec<_> = (2..2 + CONNECTIONS).map(|last| Client::new(&world.host(last))).collect();
        clients.iter_mut().for_each(|client| client.opens(&mut world, LONG));
        clients.iter_mut().for_each(|client| client.is_served(&mut world));
        let mut late = Client::new(&world.host(77));
        world.until("one more is rejected", LONG, |_| {
            late.turn();
            matches!(late.endpoint.check(late.id), Err(Error::Rejected { .. }))
        });
        clients.iter_mut().for_each(|client| client.is_served(&mut world));
    }
}

/// Two handshakes for one place: the program hears of one connection.
#[test]
fn one_of_two_that_are_established_together_gets_the_last_place() {
    for way in WAYS {
        let mut world = World::new(way, Limits::NONE.connections(1), 100, rdma_softsim::Limits::default());
        let mut clients = [2, 3].map(|last| Client::new(&world.host(last)));
        world.until("one opens, and one is ended", LONG, |_| {
            clients.iter_mut().for_each(Client::turn);
            clients.iter().any(|client| client.endpoint.is_open(client.id))
                && clients.iter().any(|client| client.endpoint.check(client.id).is_err())
        });
        assert_eq!((world.clients.len(), world.server.usage().connections), (1, 1), "{way:?}");
        assert_eq!(world.server.usage().rejected, 1, "{way:?}");
        let gets = clients.iter_mut().find(|client| client.endpoint.is_open(client.id)).expect("one");
        gets.is_served(&mut world);
    }
}

/// A request without a place in the backlog waits. The program may forget it.
#[test]
fn a_request_that_waits_is_rejected_once_it_is_forgotten() {
    let mut world = World::new(Way::Handed, Limits::NONE.backlog(0), 1, rdma_softsim::Limits::default());
    let mut client = Client::new(&world.host(2));
    let listener = world.listener.take().expect("it listens");
    let mut waits = None;
    world.until("it asks", LONG, |world| {
        client.turn();
        let request = listener.try_request().expect("the fabric stays");
        waits = request.map(|request| world.server.accept_request(request, world.options));
        waits.is_some()
    });
    let id = waits.and_then(Result::ok).expect("it waits");
    for _ in 0..1000 {
        client.turn();
        world.turn();
        world.server.check(id).expect("it still waits");
        assert_eq!(world.server.usage().registered_bytes, 0);
    }
    world.server.abort(id);
    world.until("it is rejected", LONG, |_| {
        client.turn();
        matches!(client.endpoint.check(client.id), Err(Error::Rejected { .. }))
    });
}

/// At a listener whose connections have an endpoint each, which is called when its descriptor or
/// its time says so.
#[test]
fn requests_at_a_listener_cost_little_and_keep_no_client_out() {
    let sim = simulation();
    let [server, host, near] =
        [1, 66, 2].map(|last| sim.host(&[[192, 0, 2, last].into()], rdma_softsim::Limits::default()));
    let limits = Limits::NONE.connections(1).backlog(32);
    let address = SocketAddr::from(ADDRESS);
    let listener = Listener::bind_with(&server, address, Options::default(), limits).expect("a free address");
    let mut strangers: Vec<_> = (0..STRANGERS).map(|_| Stranger::new(&host)).collect();
    let mut client = None::<Client>;
    let mut accepted = None::<(Endpoint<SoftSim>, ConnectionId)>;
    let by = sim.now().after(LONG);
    let mut most = 0;
    loop {
        assert!(sim.now() < by, "no client in {LONG:?}");
        strangers.iter_mut().for_each(|stranger| stranger.turn(false));
        if strangers.iter().all(Stranger::has_asked) {
            client.get_or_insert_with(|| Client::new(&near)).turn();
        }
        let due = listener.next_timeout().is_some_and(|at| at <= sim.now());
        if (due || is_readable(&listener))
            && let Some(one) = listener.try_accept().expect("the fabric stays")
        {
            assert!(accepted.replace(one).is_none(), "no stranger is accepted");
        }
        if let Some((endpoint, id)) = &mut accepted {
            endpoint.progress().expect("the fabric stays");
            assert!(endpoint.is_open(*id));
        }
        most = most.max(sim.fabric().resources(SERVER.into()).registered_bytes);
        if let Some(client) = &client {
            client.endpoint.check(client.id).expect("it is not refused");
            if client.endpoint.is_open(client.id) {
                break;
            }
        }
        pass(&sim, Duration::from_micros(200));
    }
    assert!(most <= IDLE + 32 * NEWCOMER, "{most} bytes were registered");
    // The connection goes on without its listener (VR-CONN-014).
    drop(listener);
    let ((mut server, id), mut client) = (accepted.expect("it is open"), client.expect("it is open"));
    assert_eq!(server.next_event(), Some(Event::Opened { id, listener: None }));
    let asked = client.endpoint.write(client.id, &[IoSlice::new(b"PING")]).expect("it is open");
    assert_eq!(asked, Some(4));
    let mut bytes = [0; 4];
    while server.read(id, &mut bytes).expect("it is open").is_none() {
        assert!(sim.now() < by, "it does not arrive");
        pass(&sim, Duration::from_micros(200));
        client.turn();
        server.progress().expect("the fabric stays");
    }
    assert_eq!((&bytes, server.next_event()), (b"PING", Some(Event::Readable(id))));
}

/// What a peer does once it is connected, before the program takes its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Breach {
    /// It sends no message of the protocol.
    Message,
    /// It announces bytes, for which it has no window.
    Bytes,
    /// It completes no handshake.
    Silence,
}

/// VR-CLOSE-003: the program of a listener gets a connection that has ended before it took it.
#[test]
fn a_listener_hands_over_what_ended_before_it_was_taken() {
    for breach in [Breach::Message, Breach::Bytes, Breach::Silence] {
        let sim = simulation();
        let [server, host] =
            [1, 66].map(|last| sim.host(&[[192, 0, 2, last].into()], rdma_softsim::Limits::default()));
        let options = Options::default().handshake_timeout(Duration::from_millis(300));
        let address = SocketAddr::from(ADDRESS);
        let listener = Listener::bind_with(&server, address, options, Limits::NONE).expect("a free address");
        let mut peer = Stranger::new(&host);
        let by = sim.now().after(LONG);
        let mut broke = false;
        let (mut endpoint, id) = loop {
            assert!(sim.now() < by, "{breach:?}: no connection in {LONG:?}");
            // The listener's turn begins the handshake. The peer then breaks the protocol first.
            if (breach == Breach::Silence || broke || !peer.has_asked())
                && let Some(accepted) = listener.try_accept().expect("the fabric stays")
            {
                break accepted;
            }
            peer.turn(breach != Breach::Silence);
            if let Stranger::Asked(_) = &peer
                && breach != Breach::Silence
            {
                // Until it is established, the listener goes on.
                assert!(listener.try_accept().expect("the fabric stays").is_none(), "{breach:?}: too early");
            }
            if let Stranger::Silent(session) = &mut peer
                && !std::mem::replace(&mut broke, true)
            {
                let nowhere = RemoteAddress { address: 0, rkey: 0 };
                let step = match breach {
                    Breach::Message => Step::Post(SendOp::Send, vec![0xff]),
                    _ => Step::Post(SendOp::WriteImmediate(nowhere, Immediate(5)), Vec::new()),
                };
                session.take(step).expect("posted");
                pass(&sim, Duration::from_millis(1));
            }
            pass(&sim, Duration::from_micros(200));
        };
        let error = endpoint.check(id).expect_err("it has ended").to_string();
        let expected = match breach {
            Breach::Message => "the peer sent an invalid control message",
            Breach::Bytes => "it notified 5 bytes before it was given a window",
            Breach::Silence => "timed out after 300ms waiting for the peer to complete the connection",
        };
        assert!(error.contains(expected), "{breach:?}: {error}");
        endpoint.progress().expect("the fabric stays");
        let most = sim.fabric().resources(SERVER.into()).registered_bytes;
        assert!(most <= NEWCOMER, "{breach:?}: {most} bytes are registered, as if it had a window");
        assert_eq!(endpoint.read(id, &mut [0]).expect_err("it has ended").to_string(), error);
    }
}
