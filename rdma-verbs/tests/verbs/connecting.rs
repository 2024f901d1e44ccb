use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_backend::{
    Backend as _, CmEventKind, CompletionStatus, ConnectParams, ErrorKind, EventChannel as _, Failure as _,
    Identifier as _, QueuePair as _, RnrTimer, reject,
};

use crate::harness::{
    End, Lab, PARAMS, PATIENCE, Pair, Shape, event, expect, lab, lab_at, request, resolved,
};

#[test]
fn connects_and_both_ends_agree_on_addresses_and_parameters() {
    let Some(lab) = lab() else { return };
    connect(&lab);
}

#[test]
fn connects_over_ipv6() {
    let Some(lab) = lab_at("LAB_IP6") else { return };
    assert!(lab.ip.is_ipv6());
    connect(&lab);
}

fn connect(lab: &Lab) {
    let servers = lab.verbs.event_channel().unwrap();
    let clients = lab.verbs.event_channel().unwrap();
    assert!(servers.next_event().unwrap().is_none());

    let listener = servers.listen(lab.address(), 8).unwrap();
    let address = listener.local_addr().unwrap();
    assert_eq!(address.ip(), lab.ip);
    assert_ne!(address.port(), 0);
    assert!(listener.capabilities().is_ok());

    let id = resolved(&clients, None, address);
    assert_eq!(id.peer_addr(), Some(address));
    assert_eq!(id.local_addr().map(|local| local.ip()), Some(lab.ip));
    let caps = id.capabilities().unwrap();
    println!("{caps:?}");
    assert!(caps.max_queue_depth >= 1024 && caps.max_completions >= 2048 && caps.max_read_depth > 0);
    let client = End::new(id, Shape::default());
    client.id.connect(&PARAMS, &[7; 56]).unwrap();

    let (id, offered) = request(&servers, &listener);
    assert_ne!(id.key(), listener.key());
    assert_eq!(id.local_addr(), Some(address));
    assert_eq!(id.peer_addr(), client.id.local_addr());
    assert_eq!((offered.retry_count, offered.rnr_retry_count), (6, 7));
    // Seen from here: what the peer may have outstanding towards us is its initiator depth.
    assert_eq!((offered.responder_resources, offered.initiator_depth), (3, 4));
    let server = End::new(id, Shape::default());
    let answer = ConnectParams { rnr_retry_count: 5, ..PARAMS };
    server.id.accept(&answer, &[8; 196]).unwrap();

    let told = event(&clients);
    assert_eq!(told.id, client.id.key());
    let CmEventKind::Established { peer } = told.kind else { panic!("{:?}", told.kind) };
    assert_eq!(peer.rnr_retry_count, 5);
    let told = event(&servers);
    assert_eq!(told.id, server.id.key());
    let CmEventKind::Established { peer } = told.kind else { panic!("{:?}", told.kind) };
    assert_eq!(peer, offered);
}

/// VR-CONN-009: ports of RDMA are not those of TCP.
#[test]
fn a_port_serves_tcp_as_well() {
    let Some(lab) = lab() else { return };
    let tcp = std::net::TcpListener::bind(lab.address()).unwrap();
    let address = tcp.local_addr().unwrap();
    let channel = lab.verbs.event_channel().unwrap();
    let listener = channel.listen(address, 0).unwrap();
    assert_eq!(listener.local_addr(), Some(address));
}

#[test]
fn the_local_address_can_be_chosen() {
    let Some(lab) = lab() else { return };
    let channel = lab.verbs.event_channel().unwrap();
    let listener = channel.listen(lab.address(), 0).unwrap();
    let local = SocketAddr::new(lab.ip, 0);
    let id = resolved(&channel, Some(local), listener.local_addr().unwrap());
    assert_eq!(id.local_addr().map(|address| address.ip()), Some(lab.ip));
    assert_ne!(id.local_addr().map(|address| address.port()), Some(0));

    let other = channel.create_id().unwrap();
    let error = other
        .resolve_address(Some("[::1]:0".parse().unwrap()), listener.local_addr().unwrap(), PATIENCE)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Argument);
}

#[test]
fn listening_where_it_is_impossible_is_an_address_error() {
    let Some(lab) = lab() else { return };
    let channel = lab.verbs.event_channel().unwrap();
    let listener = channel.listen(lab.address(), 8).unwrap();
    let taken = channel.listen(listener.local_addr().unwrap(), 8).unwrap_err();
    println!("{taken}");
    assert_eq!(taken.kind(), ErrorKind::Address);
    let foreign = channel.listen("203.0.113.7:0".parse().unwrap(), 8).unwrap_err();
    println!("{foreign}");
    assert_eq!(foreign.kind(), ErrorKind::Address);

    // A wildcard has no device, and an IPv6 one leaves the port to IPv4.
    let any = channel.listen("0.0.0.0:0".parse().unwrap(), 8).unwrap();
    assert_eq!(any.capabilities().unwrap_err().kind(), ErrorKind::State);
    let port = any.local_addr().unwrap().port();
    assert_ne!(port, 0);
    let both = channel.listen(SocketAddr::new(IpAddr::from([0_u16; 8]), port), 8).unwrap();
    assert_eq!(both.local_addr().unwrap().port(), port);
}

#[test]
fn calls_out_of_order_are_state_errors() {
    let Some(lab) = lab() else { return };
    let channel = lab.verbs.event_channel().unwrap();
    let listener = channel.listen(lab.address(), 8).unwrap();
    let id = channel.create_id().unwrap();
    assert_eq!((id.local_addr(), id.peer_addr()), (None, None));
    let state = |result: Result<(), rdma_verbs::Error>| {
        let error = result.unwrap_err();
        println!("{error}");
        assert_eq!(error.kind(), ErrorKind::State);
    };
    state(id.capabilities().map(drop));
    state(id.create_domain().map(drop));
    state(id.resolve_route(PATIENCE));
    state(id.connect(&PARAMS, &[]));
    state(id.accept(&PARAMS, &[]));
    state(id.reject(&[]));
    state(id.disconnect());
    drop(id);

    let id = resolved(&channel, None, listener.local_addr().unwrap());
    state(id.connect(&PARAMS, &[]));
    let end = End::new(id, Shape::default());
    state(end.id.create_queue_pair(&end.domain, &end.cq, Shape::default().limits).map(drop));
    state(end.id.accept(&PARAMS, &[]));
    state(end.qp.set_min_rnr_timer(RnrTimer::MICROS_640));
    let error = end.id.connect(&PARAMS, &[0; 57]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Argument);
}

fn asking(lab: &Lab, remote: SocketAddr) -> (rdma_verbs::EventChannel, End) {
    let clients = lab.verbs.event_channel().unwrap();
    let client = End::new(resolved(&clients, None, remote), Shape::default());
    client.id.connect(&PARAMS, &[]).unwrap();
    (clients, client)
}

fn refused(clients: &rdma_verbs::EventChannel, client: &End, expected: i32) {
    let told = event(clients);
    assert_eq!(told.id, client.id.key());
    let CmEventKind::Rejected { reason } = told.kind else { panic!("{:?}", told.kind) };
    assert_eq!(reason, expected);
}

#[test]
fn a_refusal_arrives() {
    let Some(lab) = lab() else { return };
    let servers = lab.verbs.event_channel().unwrap();
    let listener = servers.listen(lab.address(), 8).unwrap();
    let (clients, client) = asking(&lab, listener.local_addr().unwrap());
    let (id, _) = request(&servers, &listener);
    id.reject(b"no").unwrap();
    refused(&clients, &client, reject::CONSUMER_DEFINED);
}

#[test]
fn an_unanswered_request_is_refused_when_it_is_dropped() {
    let Some(lab) = lab() else { return };
    let servers = lab.verbs.event_channel().unwrap();
    let listener = servers.listen(lab.address(), 8).unwrap();
    let (clients, client) = asking(&lab, listener.local_addr().unwrap());
    drop(request(&servers, &listener));
    refused(&clients, &client, reject::CONSUMER_DEFINED);

    // The same when the event was not taken and the listener is dropped.
    let (clients, client) = asking(&lab, listener.local_addr().unwrap());
    assert!(crate::harness::readable(&servers, PATIENCE));
    drop(listener);
    refused(&clients, &client, reject::CONSUMER_DEFINED);
    assert!(servers.next_event().unwrap().is_none());
}

#[test]
fn where_nobody_listens_the_host_refuses() {
    let Some(lab) = lab() else { return };
    let (clients, client) = asking(&lab, SocketAddr::new(lab.ip, 9));
    refused(&clients, &client, reject::INVALID_SERVICE_ID);
}

#[test]
fn an_address_without_a_route_is_an_address_error() {
    let Some(lab) = lab() else { return };
    let channel = lab.verbs.event_channel().unwrap();
    let id = channel.create_id().unwrap();
    match id.resolve_address(None, "203.0.113.7:6379".parse().unwrap(), Duration::from_millis(500)) {
        Err(error) => {
            println!("{error}");
            assert_eq!(error.kind(), ErrorKind::Address);
        }
        Ok(()) => {
            let told = event(&channel);
            let CmEventKind::AddressError { status } = told.kind else { panic!("{:?}", told.kind) };
            println!("AddressError({status})");
            assert!(status < 0);
        }
    }
}

/// The connection manager repeats its request 15 times, 4.3 s apart.
#[test]
#[ignore = "takes more than a minute; LAB_LONG=1 lab/run test verbs runs it, and so does .ci/nightly"]
fn a_peer_that_never_answers_is_unreachable() {
    let Some(lab) = lab() else { return };
    let IpAddr::V4(ip) = lab.ip else { return };
    let absent = IpAddr::from((u32::from(ip) + 98).to_be_bytes());
    let (clients, client) = asking(&lab, SocketAddr::new(absent, 6379));
    assert!(crate::harness::readable(&clients, Duration::from_secs(180)));
    let told = event(&clients);
    assert_eq!(told.id, client.id.key());
    let CmEventKind::Unreachable { status } = told.kind else { panic!("{:?}", told.kind) };
    assert_eq!(status, -libc::ETIMEDOUT);
}

#[test]
fn a_disconnect_reaches_both_ends_and_flushes() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, servers, clients, listener } = lab.pair();
    client.id.disconnect().unwrap();
    expect(&servers, &server.id, |kind| matches!(kind, CmEventKind::Disconnected));
    server.id.disconnect().unwrap();
    expect(&clients, &client.id, |kind| matches!(kind, CmEventKind::Disconnected));
    for end in [&client, &server] {
        for _ in 0..Shape::default().receives {
            let error = end.completion().result.unwrap_err();
            assert_eq!(error.status, CompletionStatus::WR_FLUSH_ERR);
        }
        end.quiet();
    }
    client.post(rdma_backend::SendOp::Send, 0, 4);
    assert_eq!(client.completion().result.unwrap_err().status, CompletionStatus::WR_FLUSH_ERR);
    drop(listener);
}

#[test]
fn a_dropped_end_disconnects_the_other() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, servers, clients: _clients, listener: _listener } = lab.pair();
    drop(client);
    expect(&servers, &server.id, |kind| matches!(kind, CmEventKind::Disconnected));
}

#[test]
fn the_receiver_not_ready_timer_can_be_set_once_connected() {
    let Some(lab) = lab() else { return };
    let pair = lab.pair();
    for end in [&pair.client, &pair.server] {
        end.qp.set_min_rnr_timer(RnrTimer::MICROS_640).unwrap();
    }
}

#[test]
fn an_identifier_takes_its_events_along() {
    let Some(lab) = lab() else { return };
    let Pair { server, client, servers, clients, listener } = lab.pair();
    client.id.disconnect().unwrap();
    assert!(crate::harness::readable(&servers, PATIENCE));
    let own = lab.verbs.event_channel().unwrap();
    server.id.migrate(&own).unwrap();
    server.id.migrate(&own).unwrap();
    assert!(servers.next_event().unwrap().is_none());
    expect(&own, &server.id, |kind| matches!(kind, CmEventKind::Disconnected));

    listener.migrate(&own).unwrap();
    drop(servers);
    let (later, second) = asking(&lab, listener.local_addr().unwrap());
    let (id, _) = request(&own, &listener);
    let accepted = End::new(id, Shape::default());
    accepted.id.accept(&PARAMS, &[]).unwrap();
    expect(&later, &second.id, |kind| matches!(kind, CmEventKind::Established { .. }));
    expect(&own, &accepted.id, |kind| matches!(kind, CmEventKind::Established { .. }));
    drop(clients);
}
