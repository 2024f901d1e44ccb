//! What strangers can do to a listener for RDMA.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_conn::types::{Address, Rdma, State};
use rdma_softsim::{Fabric, SoftSim};

use crate::harness::{Loop, accept, new_loop, on_connected, settle};

const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

/// A loop that listens on a host of `fabric`.
fn listening(fabric: &Fabric) -> (Loop, Address) {
    let mut events = new_loop();
    let at: Address = SocketAddr::from((SERVER, 6379)).into();
    events.listen(&Rdma::new(fabric.host(&[SERVER])), &at, accept).expect("a free address");
    (events, at)
}

/// Takes turns of `clients` until as many requests wait at the server.
fn until_asked(fabric: &Fabric, clients: &mut Loop, requests: usize) {
    // One identifier is the listener's.
    while fabric.resources(SERVER).identifiers < requests + 1 {
        settle(clients);
    }
}

fn connected(events: &Loop) -> usize {
    events.connections().filter(|(_, connection)| connection.state() == State::Connected).count()
}

/// VR-SEC-004, VR-RES-006: requests that were withdrawn are their senders' concern, and the next client waits for none of them.
#[test]
fn a_withdrawn_request_does_not_close_the_door() {
    const WITHDRAWN: usize = 30;
    /// The withdrawn requests take two, what an honest client does takes a few.
    const TURNS: usize = 20;
    let fabric = Fabric::new();
    let (mut events, at) = listening(&fabric);
    let client: Rdma<SoftSim> = Rdma::new(fabric.host(&[CLIENT]));
    let mut rude = new_loop();
    for _ in 0..WITHDRAWN {
        rude.connect(&client, &at, None, on_connected).expect("begins to connect");
    }
    until_asked(&fabric, &mut rude, WITHDRAWN);
    drop(rude);
    let mut honest = new_loop();
    honest.connect(&client, &at, None, on_connected).expect("begins to connect");
    // Messages arrive in the order in which they were sent: what withdraws the others has arrived by then.
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
