//! Making connections, or failing to.

use super::*;

#[test]
fn a_connection_is_made_in_three_messages() {
    let parameters = Parameters { latency: millis(1), ..Parameters::default() };
    let connect = ConnectParams { initiator_depth: 3, ..PARAMS };
    let accept = ConnectParams { responder_resources: 2, rnr_retry_count: 0, ..PARAMS };
    let setup = Setup { parameters, connect, accept, ..Setup::default() };
    let mut w = World::half_open(&setup);
    w.model.accept(w.b.id, &accept, &[]).unwrap();
    w.pass(millis(1));
    // The passive side is connected when the active one has read its event.
    w.pass(Duration::from_secs(5));
    assert_eq!(notice(&mut w.model, w.b.channel), None);
    assert_eq!(notice(&mut w.model, w.a.channel), Some(NoticeKind::Established(as_received(accept))));
    w.pass(millis(1));
    assert_eq!(notice(&mut w.model, w.b.channel), Some(NoticeKind::Established(as_received(connect))));
    let (a, b) = (w.model.local_addr(w.a.id).unwrap(), w.model.peer_addr(w.a.id).unwrap());
    assert_eq!((a.ip(), b), (ip(1), SocketAddr::new(ip(2), PORT)));
    assert_eq!((w.model.local_addr(w.b.id), w.model.peer_addr(w.b.id)), (Some(b), Some(a)));
    w.end();
}

#[test]
fn what_is_sent_before_the_active_side_is_ready_waits_for_the_ack_timer() {
    let mut w = World::half_open(&Setup::default());
    w.a.receive(&mut w.model, 9, 0, 64).unwrap();
    w.model.accept(w.b.id, &PARAMS, &[]).unwrap();
    w.b.post(&mut w.model, 1, SendOp::Send, 4).unwrap();
    assert!(matches!(notice(&mut w.model, w.a.channel), Some(NoticeKind::Established(_))));
    assert_eq!(w.a.completions(&mut w.model), []);
    // It arrived while the active side was in INIT, where a device is silent.
    w.pass(Parameters::default().ack_timeout);
    assert_eq!(w.a.completions(&mut w.model), [(9, Ok(recv(4)))]);
    w.end();
}

#[test]
fn an_accept_can_be_taken_back_until_it_is_read() {
    let mut w = World::half_open(&Setup::default());
    w.model.accept(w.b.id, &PARAMS, &[]).unwrap();
    w.pass(Duration::ZERO);
    w.model.destroy_pair(w.b.pair);
    w.model.destroy_identifier(w.b.id);
    w.pass(Duration::ZERO);
    // 28 is “consumer defined”, with which the kernel takes an accept back (`cm_destroy_id`).
    assert_eq!(notice(&mut w.model, w.a.channel), Some(NoticeKind::Rejected(28)));
    assert_eq!(notice(&mut w.model, w.a.channel), None);
    w.end();
}

#[test]
fn a_request_whose_sender_is_gone_cannot_be_accepted() {
    let mut w = World::half_open(&Setup::default());
    w.model.destroy_pair(w.a.pair);
    w.model.destroy_identifier(w.a.id);
    w.pass(Duration::ZERO);
    assert!(matches!(w.model.accept(w.b.id, &PARAMS, &[]), Err(Error::State(_))));
    w.end();
}

/// The kernel ignores what happens to a request before that is accepted (`ucma_event_handler`). So
/// when its listener moves to another channel, nothing of an unread request stays on the old one.
#[test]
fn a_request_has_no_events_before_it_is_accepted() {
    let (mut model, a, b) = hosts(Parameters::default());
    let [first, second] = [(); 2].map(|()| model.create_channel(b).unwrap());
    let (listener, _) = model.listen(first, SocketAddr::new(ip(2), PORT), 0).unwrap();
    let channel = model.create_channel(a).unwrap();
    let id = resolved(&mut model, channel, ip(2));
    let own = equip(&mut model, a, channel, id, &Setup::default());
    model.connect(id, &PARAMS, &[]).unwrap();
    pass(&mut model, Duration::ZERO);
    model.tell_all(b, NoticeKind::AddressChange);
    model.migrate(listener, second).unwrap();
    assert_eq!(notice(&mut model, first), None);
    let Some(NoticeKind::ConnectRequest { id: child, .. }) = notice(&mut model, second) else {
        panic!("no request")
    };
    assert_eq!(notice(&mut model, second), Some(NoticeKind::AddressChange), "of the listener");
    // It has given up, and only the accept will tell.
    model.destroy_pair(own.pair);
    model.destroy_identifier(id);
    pass(&mut model, Duration::ZERO);
    assert_eq!(notice(&mut model, second), None);
    // Once it is read, its owner learns what concerns the device, where it was read.
    model.tell_all(b, NoticeKind::AddressChange);
    assert_eq!([(); 3].map(|()| notice(&mut model, second).is_some()), [true, true, false]);
    assert_eq!(notice(&mut model, first), None);
    assert!(matches!(model.reject(child, &[]), Err(Error::State(_))));
}

#[test]
fn an_unknown_address_fails_after_the_timeout_and_another_family_at_once() {
    let (mut model, host, _) = hosts(Parameters::default());
    let channel = model.create_channel(host).unwrap();
    let (id, _) = model.create_identifier(channel).unwrap();
    model.resolve_address(id, None, SocketAddr::new(ip(9), PORT), millis(100)).unwrap();
    assert!(matches!(model.resolve_route(id), Err(Error::State(_))));
    pass(&mut model, millis(99));
    assert_eq!(notice(&mut model, channel), None);
    pass(&mut model, millis(1));
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::AddressError(-110)));
    assert!(matches!(model.capabilities(id), Err(Error::State(_))));
    // The same identifier may try again.
    let v6 = SocketAddr::new(IpAddr::from([0u16, 0, 0, 0, 0, 0, 0, 1]), PORT);
    model.resolve_address(id, None, v6, millis(100)).unwrap();
    pass(&mut model, Duration::ZERO);
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::AddressError(-101)));
    let foreign = Some(SocketAddr::new(ip(2), 0));
    let refused = model.resolve_address(id, foreign, SocketAddr::new(ip(2), PORT), millis(100));
    assert_eq!(refused, Err(Error::NotLocal(ip(2))));
    let own = SocketAddr::new(ip(1), 4000);
    model.resolve_address(id, Some(own), SocketAddr::new(ip(2), PORT), millis(100)).unwrap();
    pass(&mut model, Duration::ZERO);
    assert_eq!(model.local_addr(id), Some(own));
}

/// Returns an identifier that resolves an address, for 100 ms, without the need of a host there.
fn seeking(model: &mut Model, channel: ChannelId, last: u8) -> IdentifierId {
    let (id, _) = model.create_identifier(channel).unwrap();
    model.resolve_address(id, None, SocketAddr::new(ip(last), PORT), millis(100)).unwrap();
    id
}

#[test]
fn an_unknown_address_is_resolved_when_its_host_joins() {
    let (mut model, host, _) = hosts(Parameters { latency: millis(1), ..Parameters::default() });
    let channel = model.create_channel(host).unwrap();
    let (found, gone) = (seeking(&mut model, channel, 9), seeking(&mut model, channel, 9));
    pass(&mut model, millis(50));
    model.destroy_identifier(gone);
    assert!(matches!(model.capabilities(found), Err(Error::State(_))));
    model.add_host(&[ip(7)], Limits::default());
    pass(&mut model, millis(1));
    assert_eq!(notice(&mut model, channel), None, "a host with another address");
    model.add_host(&[ip(8), ip(9)], Limits::default());
    assert_eq!(notice(&mut model, channel), None);
    pass(&mut model, millis(1));
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::AddressResolved));
    // The time-out no longer counts.
    pass(&mut model, millis(100));
    assert_eq!(notice(&mut model, channel), None);
    model.resolve_route(found).unwrap();
}

#[test]
fn a_host_that_joins_at_the_timeout_resolves_nothing() {
    let (mut model, host, _) = hosts(Parameters { latency: millis(1), ..Parameters::default() });
    let channel = model.create_channel(host).unwrap();
    let id = seeking(&mut model, channel, 9);
    pass(&mut model, millis(99) + Duration::from_micros(500));
    model.add_host(&[ip(9)], Limits::default());
    pass(&mut model, millis(10));
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::AddressError(-110)));
    assert_eq!(notice(&mut model, channel), None);
    assert!(matches!(model.resolve_route(id), Err(Error::State(_))));
}

#[test]
fn a_resolution_ends_once_and_no_other_with_it() {
    let (mut model, host, _) = hosts(Parameters { latency: millis(1), ..Parameters::default() });
    let channel = model.create_channel(host).unwrap();
    // The host joins just before the time-out, which then comes while the route is resolved.
    let id = seeking(&mut model, channel, 9);
    pass(&mut model, Duration::from_micros(98_500));
    model.add_host(&[ip(9)], Limits::default());
    pass(&mut model, millis(1));
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::AddressResolved));
    model.resolve_route(id).unwrap();
    pass(&mut model, millis(1));
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::RouteResolved));
    assert_eq!(notice(&mut model, channel), None);
    // It joins so late that the time-out comes first. A second attempt is not resolved by it.
    let id = seeking(&mut model, channel, 10);
    pass(&mut model, Duration::from_micros(99_500));
    model.add_host(&[ip(10)], Limits::default());
    pass(&mut model, Duration::from_micros(500));
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::AddressError(-110)));
    model.resolve_address(id, None, SocketAddr::new(ip(11), PORT), millis(100)).unwrap();
    pass(&mut model, millis(99));
    assert_eq!(notice(&mut model, channel), None, "no host has the address");
    pass(&mut model, millis(1));
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::AddressError(-110)));
}

#[test]
fn listening_addresses() {
    let mut model = Model::new(Parameters::default());
    let v6 = IpAddr::from([0xfd00u16, 0, 0, 0, 0, 0, 0, 1]);
    let host = model.add_host(&[ip(1), ip(3), v6], Limits::default());
    let channel = model.create_channel(host).unwrap();
    let mut listen = |address: &str| model.listen(channel, address.parse().unwrap(), 0).map(|(id, _)| id);
    let one = listen("10.0.0.1:70").unwrap();
    assert_eq!(listen("10.0.0.1:70"), Err(Error::AddressInUse("10.0.0.1:70".parse().unwrap())));
    assert!(matches!(listen("0.0.0.0:70"), Err(Error::AddressInUse(_))));
    assert_eq!(listen("10.0.0.2:70"), Err(Error::NotLocal(ip(2))));
    let all = listen("0.0.0.0:71").unwrap();
    assert!(matches!(listen("10.0.0.3:71"), Err(Error::AddressInUse(_))));
    let six = listen("[::]:71").unwrap();
    let only_six = listen("[::]:72").unwrap();
    let any = listen("10.0.0.1:0").unwrap();
    let other = listen("10.0.0.1:0").unwrap();
    let port = |id| model.local_addr(id).unwrap().port();
    assert!(port(any) != 0 && port(other) != 0 && port(any) != port(other));
    let found = |address: &str| model.hosts.get(host).unwrap().listeners.at(address.parse().unwrap());
    assert_eq!((found("10.0.0.1:70"), found("10.0.0.3:70")), (Some(one), None));
    assert_eq!((found("10.0.0.3:71"), found("[fd00::1]:71")), (Some(all), Some(six)));
    assert_eq!((found("10.0.0.3:72"), found("[fd00::1]:72")), (None, Some(only_six)));
    // A wildcard is not on a device; a closed one leaves its address free.
    assert!(matches!(model.create_domain(all), Err(Error::State(_))));
    model.destroy_identifier(one);
    model.listen(channel, "0.0.0.0:70".parse().unwrap(), 0).unwrap();
}

#[test]
fn the_backlog_is_of_unread_requests() {
    let (mut model, a, b) = hosts(Parameters::default());
    let listening = model.create_channel(b).unwrap();
    let (listener, _) = model.listen(listening, SocketAddr::new(ip(2), PORT), 2).unwrap();
    let channel = model.create_channel(a).unwrap();
    let connect = |model: &mut Model| {
        let id = resolved(model, channel, ip(2));
        equip(model, a, channel, id, &Setup::default());
        model.connect(id, &PARAMS, &[]).unwrap();
        pass(model, Duration::ZERO);
    };
    connect(&mut model);
    connect(&mut model);
    assert_eq!(notice(&mut model, channel), None);
    connect(&mut model);
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::Rejected(28)));
    assert!(matches!(notice(&mut model, listening), Some(NoticeKind::ConnectRequest { .. })));
    connect(&mut model);
    // The listener is dropped: unread requests are rejected, read ones are not.
    model.destroy_identifier(listener);
    pass(&mut model, Duration::ZERO);
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::Rejected(28)));
    assert_eq!(notice(&mut model, channel), Some(NoticeKind::Rejected(28)));
    assert_eq!(notice(&mut model, channel), None);
    assert_eq!(model.resources(b).identifiers, 1);
}

#[test]
fn a_wake_is_taken_back_even_if_the_event_was() {
    let (mut model, host, _) = hosts(Parameters::default());
    let channel = model.create_channel(host).unwrap();
    let (id, _) = model.create_identifier(channel).unwrap();
    model.resolve_address(id, None, SocketAddr::new(ip(2), PORT), millis(100)).unwrap();
    pass(&mut model, Duration::ZERO);
    assert_eq!(model.wakes().collect::<Vec<_>>(), [Wake::Events(channel)]);
    model.destroy_identifier(id);
    let taken = model.take_notice(channel).unwrap();
    assert!(taken.notice.is_none() && taken.emptied);
    assert!(!model.take_notice(channel).unwrap().emptied);
}

/// `rdma_accept(3)` ignores its own `retry_count`, before and after the connection is established.
#[test]
fn the_request_says_how_often_both_sides_retry() {
    let setup = Setup {
        connect: ConnectParams { retry_count: 3, ..PARAMS },
        accept: ConnectParams { retry_count: 1, ..PARAMS },
        ..Setup::default()
    };
    let w = World::half_open(&setup);
    assert_eq!(w.model.offered(w.b.id).unwrap().retry, 3);
    let w = World::new(&setup);
    assert_eq!([w.a.id, w.b.id].map(|id| w.model.offered(id).unwrap().retry), [3, 3]);
}

#[test]
fn calls_out_of_order_are_errors() {
    let mut w = World::half_open(&Setup::default());
    let refused = |result: Result<(), Error>| assert!(matches!(result, Err(Error::State(_))), "{result:?}");
    let (id, _) = w.model.create_identifier(w.a.channel).unwrap();
    refused(w.model.capabilities(id).map(|_| ()));
    refused(w.model.create_domain(id).map(|_| ()));
    refused(w.model.create_queue(id, 1).map(|_| ()));
    refused(w.model.resolve_route(id));
    refused(w.model.connect(id, &PARAMS, &[]));
    refused(w.model.accept(id, &PARAMS, &[]));
    refused(w.model.reject(id, &[]));
    refused(w.model.disconnect(id));
    refused(w.model.connect(w.a.id, &PARAMS, &[]));
    refused(w.model.accept(w.a.id, &PARAMS, &[]));
    refused(w.model.disconnect(w.b.id));
    w.model.destroy_identifier(id);
    let id = resolved(&mut w.model, w.a.channel, ip(2));
    refused(w.model.connect(id, &PARAMS, &[]));
    w.model.destroy_identifier(id);
    let argument =
        |result: Result<(), Error>| assert!(matches!(result, Err(Error::Argument(_))), "{result:?}");
    argument(w.model.accept(w.b.id, &PARAMS, &[0; 197]));
    argument(w.model.reject(w.b.id, &[0; 149]));
    argument(w.model.accept(w.b.id, &ConnectParams { initiator_depth: 17, ..PARAMS }, &[]));
    w.model.accept(w.b.id, &PARAMS, &[0; 196]).unwrap();
    refused(w.model.accept(w.b.id, &PARAMS, &[]));
    refused(w.model.reject(w.b.id, &[]));
    w.end();
}

/// A port without a listener is found wherever it is, and one that is free again is given out.
#[cfg(not(miri))]
#[test]
fn the_last_free_port_is_found() {
    let (mut model, host, _) = hosts(Parameters::default());
    let channel = model.create_channel(host).unwrap();
    let listen = |model: &mut Model, port| model.listen(channel, SocketAddr::new(ip(1), port), 0);
    let listeners: Vec<_> = (49152..=65535)
        .map(|port| {
            let (id, _) = listen(&mut model, 0).unwrap();
            assert_eq!(model.local_addr(id).unwrap().port(), port);
            id
        })
        .collect();
    assert_eq!(listen(&mut model, 0), Err(Error::NoFreePort));
    for place in [0, 7000, listeners.len() - 1] {
        let (id, port) = (listeners[place], 49152 + place as u16);
        assert!(matches!(listen(&mut model, port), Err(Error::AddressInUse(_))));
        model.destroy_identifier(id);
        // Connections leave their port to others.
        for _ in 0..2 {
            let (bound, _) = model.create_identifier(channel).unwrap();
            model.bind(bound, SocketAddr::new(ip(1), 0)).unwrap();
            assert_eq!(model.local_addr(bound).unwrap().port(), port);
        }
        let (id, _) = listen(&mut model, 0).unwrap();
        assert_eq!(model.local_addr(id).unwrap().port(), port);
    }
}
