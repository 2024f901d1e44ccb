//! Machines with several devices.

use super::*;

/// A machine with a device on each of two networks, and another machine on the second.
fn machines() -> (Model, [HostId; 2], HostId) {
    let mut model = Model::new(Parameters::default());
    let first = model.add_host(&[ip(1)], Limits::default());
    let second = model.add_device(first, &[other(1)], Limits::default());
    let peer = model.add_host(&[other(2)], Limits::default());
    (model, [first, second], peer)
}

/// An address on the second network.
fn other(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 1, last])
}

fn at(ip: IpAddr) -> SocketAddr {
    SocketAddr::new(ip, PORT)
}

#[test]
fn an_identifier_goes_to_the_device_of_its_address() {
    let (mut model, [first, second], peer) = machines();
    let channel = model.create_channel(first).unwrap();
    let device = |model: &Model, id| model.manager.get(id).unwrap().host;
    let (bound, _) = model.create_identifier(channel).unwrap();
    model.bind(bound, at(other(1))).unwrap();
    assert_eq!(device(&model, bound), second);
    // By the network of the peer, whichever device the event channel was made on.
    let resolved = resolved(&mut model, channel, other(2));
    assert_eq!((device(&model, resolved), model.local_addr(resolved).unwrap().ip()), (second, other(1)));
    // By the source that its owner names.
    let (named, _) = model.create_identifier(channel).unwrap();
    let source = Some(SocketAddr::new(ip(1), 0));
    model.resolve_address(named, source, at(other(2)), millis(1)).unwrap();
    assert_eq!(device(&model, named), first);
    let (foreign, _) = model.create_identifier(channel).unwrap();
    assert_eq!(model.bind(foreign, at(other(2))), Err(Error::NotLocal(other(2))));
    // To another channel of its machine, but to none of another machine's.
    let (channel, foreign) = (model.create_channel(first).unwrap(), model.create_channel(peer).unwrap());
    model.migrate(bound, channel).unwrap();
    assert!(matches!(model.migrate(bound, foreign), Err(Error::Argument(_))));
}

#[test]
fn what_listens_everywhere_listens_on_all_devices() {
    let (mut model, [first, second], peer) = machines();
    let listening = model.create_channel(first).unwrap();
    let everywhere: SocketAddr = SocketAddr::from(([0; 4], PORT));
    let (listener, _) = model.listen(listening, everywhere, 1).unwrap();
    for ip in [ip(1), other(1)] {
        assert_eq!(model.listen(listening, at(ip), 1), Err(Error::AddressInUse(at(ip))));
    }
    let channel = model.create_channel(peer).unwrap();
    for (to, device) in [(ip(1), first), (other(1), second)] {
        let id = resolved(&mut model, channel, to);
        equip(&mut model, peer, channel, id, &Setup::default());
        model.connect(id, &PARAMS, &[]).unwrap();
        pass(&mut model, Duration::ZERO);
        let Some(NoticeKind::ConnectRequest { id: child, .. }) = notice(&mut model, listening) else {
            panic!("no request");
        };
        assert_eq!(model.manager.get(child).unwrap().host, device);
        // Memory and queues count on the requested device, and on no other.
        let side = equip(&mut model, device, listening, child, &Setup::default());
        assert_eq!(model.pairs.get(side.pair).unwrap().host, device);
    }
    model.destroy_identifier(listener);
    for ip in [ip(1), other(1)] {
        model.listen(listening, at(ip), 1).unwrap();
    }
    assert!(matches!(model.listen(listening, everywhere, 1), Err(Error::AddressInUse(_))));
}

#[test]
fn what_listens_everywhere_listens_on_a_device_that_comes_later() {
    let mut model = Model::new(Parameters::default());
    let first = model.add_host(&[ip(1)], Limits::default());
    let channel = model.create_channel(first).unwrap();
    let everywhere: SocketAddr = SocketAddr::from(([0; 4], PORT));
    let (listener, _) = model.listen(channel, everywhere, 1).unwrap();
    let (elsewhere, _) = model.listen(channel, SocketAddr::new(ip(1), PORT + 1), 1).unwrap();
    let second = model.add_device(first, &[other(1)], Limits::default());
    let listeners = |model: &Model| model.hosts.get(second).unwrap().listeners.list();
    assert_eq!(listeners(&model), [(everywhere, listener)]);
    model.destroy_identifier(listener);
    assert!(listeners(&model).is_empty());
    model.destroy_identifier(elsewhere);
}

#[test]
fn objects_belong_to_one_device_and_all_end_with_the_process() {
    let (mut model, [first, second], peer) = machines();
    let [one, two] = [first, second].map(|host| model.open(host).unwrap());
    let (domain, foreign) = (model.create_domain_in(one).unwrap(), model.create_domain_in(two).unwrap());
    let queue = model.create_queue_in(one, 1, 4).unwrap();
    let limits = Setup::default().limits;
    let attributes = |domain| PairAttributes {
        domain,
        send_queue: queue,
        receive_queue: queue,
        shared: None,
        service: crate::Service::Connected,
        limits,
    };
    assert!(matches!(model.create_pair_in(one, 2, &attributes(foreign)), Err(Error::Argument(_))));
    let (pair, ..) = model.create_pair_in(one, 2, &attributes(domain)).unwrap();
    model.initialise(pair).unwrap();
    let channel = model.create_channel(first).unwrap();
    let id = resolved(&mut model, channel, other(2));
    // The way to the peer begins at the other device.
    assert!(matches!(model.lend_pair(id, pair), Err(Error::State(_))));
    model.kill_host(second);
    assert!(matches!(model.open(first), Err(Error::Gone(_))));
    assert!(matches!(model.open(second), Err(Error::Gone(_))));
    assert!(model.open(peer).is_ok());
    assert_eq!(model.resources(first), Resources::default());
}
