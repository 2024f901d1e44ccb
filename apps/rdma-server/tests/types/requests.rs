//! Properties of RDMA alone: requests that cost nothing, and room that returns without `POLLOUT`.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_server::{Address, Barrier, Rdma, SessionId, SessionState};
use rdma_softsim::{Fabric, SoftSim};

use crate::harness::{Loop, accept, new_loop, on_connected, on_readable, on_writable, pair, run, settle};
use crate::listening::leave_waiting;
use crate::test_beds::{RdmaBed, TestBed};

const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

fn listening(fabric: &Fabric, arrives: fn(&mut Loop, SessionId)) -> (Loop, Address) {
    let mut events = new_loop();
    let at: Address = SocketAddr::from((SERVER, 6379)).into();
    events.listen(&Rdma::new(fabric.host(&[SERVER])), &at, arrives).expect("a free address");
    (events, at)
}

fn until_asked(fabric: &Fabric, clients: &mut Loop, requests: usize) {
    // One identifier is the listener's.
    while fabric.resources(SERVER).identifiers < requests + 1 {
        settle(clients);
    }
}

fn connected(events: &Loop) -> usize {
    events.connections().filter(|(_, connection)| connection.state() == SessionState::Connected).count()
}

/// VR-SEC-004, VR-RES-006: withdrawn requests do not delay the next client.
#[test]
fn a_withdrawn_request_does_not_close_the_door() {
    const WITHDRAWN: usize = 30;
    /// The withdrawn requests take two, and the honest client's work a few.
    const TURNS: usize = 20;
    let fabric = Fabric::new();
    let (mut events, at) = listening(&fabric, accept);
    let client: Rdma<SoftSim> = Rdma::new(fabric.host(&[CLIENT]));
    let mut rude = new_loop();
    for _ in 0..WITHDRAWN {
        rude.connect(&client, &at, None, on_connected).expect("begins to connect");
    }
    until_asked(&fabric, &mut rude, WITHDRAWN);
    drop(rude);
    let mut honest = new_loop();
    honest.connect(&client, &at, None, on_connected).expect("begins to connect");
    // Messages arrive in the order in which they were sent, so the withdrawals are there by then.
    until_asked(&fabric, &mut honest, WITHDRAWN + 1);
    let mut turns = 0;
    while connected(&events) == 0 {
        turns += 1;
        assert!(turns <= TURNS, "the honest client waits for others");
        events.turn(Some(Duration::from_millis(100))).expect("a turn");
        honest.turn(Some(Duration::ZERO)).expect("a turn");
    }
    println!("the honest client was in after {turns} turns");
}

/// VR-SEC-007: nothing is allocated for a peer before it is admitted or refused.
#[test]
fn a_request_that_is_not_accepted_costs_nothing() {
    const REQUESTS: usize = 10;
    let fabric = Fabric::new();
    let (mut events, at) = listening(&fabric, leave_waiting);
    let mut clients = new_loop();
    let client: Rdma<SoftSim> = Rdma::new(fabric.host(&[CLIENT]));
    for _ in 0..REQUESTS {
        clients.connect(&client, &at, None, on_connected).expect("begins to connect");
    }
    until_asked(&fabric, &mut clients, REQUESTS);
    while events.state.arrived.len() < REQUESTS {
        events.turn(Some(Duration::from_millis(10))).expect("a turn");
    }
    let held = fabric.resources(SERVER);
    assert_eq!((held.queue_pairs, held.domains, held.regions, held.registered_bytes), (0, 0, 0, 0));
    // A closed one was rejected.
    for id in events.state.arrived.clone() {
        let request = events.get(id).expect("is there");
        assert!(!request.is_local());
        let from = request.peer_addr().and_then(|at| at.ip().ok()).map(|at| at.ip());
        assert_eq!(from, Some(CLIENT));
        events.close(id);
    }
    run(&mut clients, |clients| clients.state.connected.len() == REQUESTS);
    assert!(clients.state.connected.iter().all(|(_, state)| *state == SessionState::Error));
}

#[test]
fn a_refusal_costs_little() {
    fn refuse(events: &mut Loop, id: SessionId) {
        events.state.arrived.push(id);
        events.refuse(id, b"-ERR not you\r\n").expect("waits to be accepted");
    }
    let fabric = Fabric::new();
    let (mut events, at) = listening(&fabric, refuse);
    let mut client = new_loop();
    let id = client.connect(&Rdma::new(fabric.host(&[CLIENT])), &at, None, on_connected).expect("begins");
    let mut most = 0;
    while client.state.connected.is_empty() || !client.state.ended {
        events.turn(Some(Duration::from_millis(1))).expect("a turn");
        most = most.max(fabric.resources(SERVER).registered_bytes);
        client.turn(Some(Duration::from_millis(1))).expect("a turn");
        if let Some(client) = client.get_mut(id).filter(|client| client.state() == SessionState::Connected) {
            client.set_read_handler(Some(on_readable));
        }
    }
    assert_eq!(client.state.read, b"-ERR not you\r\n");
    assert!((1..=4 * 4096).contains(&most), "{most} bytes registered for a refusal");
    run(&mut events, |events| events.is_empty());
    assert_eq!(events.refusing(), 0);
}

#[test]
fn room_that_was_filled_to_the_last_byte_comes_back() {
    let test_bed = RdmaBed::new().expect("needs no device");
    let mut pair = pair(&test_bed);
    let mut written = 0;
    let client = pair.at(pair.client);
    // The send buffer is 1 MiB, and so is one window. Both are full then.
    for _ in 0..64 {
        match client.write(&vec![0; 1 << 20]) {
            Ok(len) => written += len,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        if written == 1 << 20 {
            break;
        }
    }
    assert_eq!(written, 1 << 20, "one write fills the buffer");
    pair.events.state.to_write = b"more".to_vec();
    pair.at(pair.client).set_write_handler(Some(on_writable), Barrier::ReadFirst);
    run(&mut pair.events, |events| events.state.to_write.is_empty());
}
