use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_backend::{
    Backend as _, CmEventKind, Completed, ErrorKind, EventChannel as _, Failure as _, Identifier as _,
    Immediate, SendOp,
};

use crate::harness::{End, PARAMS, PATIENCE, Pair, event, lab, lab_at, readable, resolved};

/// Requests of every kind, both ways: the lab also runs this on the bindings of `rdma-sys`.
#[test]
fn a_connection_over_ipv6_carries_requests_of_every_kind() {
    let Some(lab) = lab_at("LAB_IP6") else { return };
    assert!(lab.ip.is_ipv6());
    let Pair { server, client, .. } = &lab.pair();
    assert_eq!(server.id.peer_addr(), client.id.local_addr());
    let immediate = Immediate(0x0102_0304);
    for (from, to) in [(client, server), (server, client)] {
        for (op, did, received) in [
            (SendOp::Read(to.remote(300)), Completed::Read, None),
            (SendOp::Send, Completed::Send, Some(Completed::Recv { len: 32, immediate: None })),
            (
                SendOp::SendImmediate(immediate),
                Completed::Send,
                Some(Completed::Recv { len: 32, immediate: Some(immediate) }),
            ),
            (SendOp::Write(to.remote(100)), Completed::Write, None),
            (
                SendOp::WriteImmediate(to.remote(200), immediate),
                Completed::Write,
                Some(Completed::RecvWrite { immediate }),
            ),
        ] {
            from.post(op, 0, 32);
            assert_eq!(from.completed(), did);
            if let Some(received) = received {
                assert_eq!(to.completed(), received);
            }
        }
        assert_eq!([to.bytes(100), to.bytes(200), from.bytes(0)], [to.bytes(300); 3]);
    }
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

/// The connection manager repeats its request 15 times, 4.3 s apart.
#[test]
#[ignore = "takes more than a minute; LAB_LONG=1 lab/run test verbs runs it, and so does .ci/nightly"]
fn a_peer_that_never_answers_is_unreachable() {
    let Some(lab) = lab() else { return };
    let IpAddr::V4(ip) = lab.ip else { return };
    let absent = IpAddr::from((u32::from(ip) + 98).to_be_bytes());
    let clients = lab.verbs.event_channel().unwrap();
    let client = End::new(resolved(&clients, None, SocketAddr::new(absent, 6379)));
    client.id.connect(&PARAMS, &[]).unwrap();
    assert!(readable(&clients, Duration::from_secs(180)));
    let told = event(&clients);
    assert_eq!(told.id, client.id.key());
    let CmEventKind::Unreachable { status } = told.kind else { panic!("{:?}", told.kind) };
    assert_eq!(status, -libc::ETIMEDOUT);
}
