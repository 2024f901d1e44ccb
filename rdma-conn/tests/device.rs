//! Devices that fail without a completion: their asynchronous events end the right connections.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use rdma_backend::AsyncEvent;
use rdma_conn::{Endpoint, Error, Event, Keepalive, Limits as Share, Listener, Options};
use rdma_proto::PeerMisbehaved;
use rdma_softsim::{
    Connections, DeviceKind, Fabric, Fault, Injection, Limits, Simulation, SimulationSettings, Site, SoftSim,
    When,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::world::{End, asking, hosts, pass, serve, simulation};

const LONG: Duration = Duration::from_secs(10);
const MOMENT: Duration = Duration::from_millis(1);

/// Options of a side that sends no keepalives, so that it detects nothing by itself.
fn silent(mut options: Options) -> Options {
    options.protocol.keepalive = Some(Keepalive::NONE);
    options
}

/// A simulation that injects this event at the server, and its two hosts.
fn struck_at(
    device_kind: DeviceKind,
    when: When,
    fault: Fault,
) -> (Simulation, SoftSim, SoftSim, SocketAddr) {
    let plan = vec![Injection { when, host: 0, fault }];
    let sim = Simulation::new(1, device_kind, SimulationSettings::default(), plan);
    let (server, client, address) = hosts(&sim);
    (sim, server, client, address)
}

/// A listener, and a client that requests a connection from it, which send no keepalives.
fn silently(server: &SoftSim, client: &SoftSim, address: SocketAddr) -> (Listener<SoftSim>, End) {
    let listener = Listener::bind_with(server, address, silent(Options::default()), Share::default());
    (listener.expect("a free address"), asking(client, address, silent(Options::default())))
}

fn is_readable(descriptor: &impl AsFd) -> bool {
    let mut polled = [PollFd::new(descriptor, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

/// Both ends of a connection. The event hit the server while the client was writing.
fn struck(device_kind: DeviceKind, when: When, fault: Fault) -> (Simulation, End, End) {
    let (sim, server, client, address) = struck_at(device_kind, when, fault);
    let (listener, (mut client, own)) = silently(&server, &client, address);
    let mut accepted = None::<End>;
    while !sim.remaining_faults().is_empty() {
        assert!(sim.now().since_start() < LONG, "{:?}", sim.remaining_faults());
        pass(&sim, MOMENT);
        client.progress().expect("the fabric stays");
        if client.is_open(own) {
            _ = client.write(own, &[IoSlice::new(b"on and on")]);
        }
        serve(&listener, &mut accepted);
    }
    pass(&sim, MOMENT);
    (sim, (client, own), accepted.expect("struck too early"))
}

/// VR-CLOSE-008: the device flushes nothing, and reports only once.
#[test]
fn failures_without_a_completion_end_the_connection() {
    let late = When::Event(100);
    let table = [
        (DeviceKind::Rxe, late, Fault::PairFatal, AsyncEvent::QpFatal),
        (DeviceKind::Rxe, late, Fault::DeviceFatal, AsyncEvent::DeviceFatal),
        (DeviceKind::Mlx5, When::Pass(Site::Report, 40), Fault::QueueLost, AsyncEvent::CqErr),
        (DeviceKind::Ibta, late, Fault::RequestRefused, AsyncEvent::QpReqErr),
    ];
    for (device_kind, when, fault, expected) in table {
        let (_sim, _client, (mut server, id)) = struck(device_kind, when, fault);
        assert!(is_readable(&server) || server.check(id).is_err(), "{fault:?} wakes no thread");
        server.progress().expect("the fabric stays");
        let error = server.check(id).expect_err("it has failed");
        assert!(matches!(error, Error::Device { event } if event == expected), "{fault:?}: {error}");
    }
}

/// VR-SEC-011: a peer that accesses memory out of bounds is named, even if no receive reports it.
#[test]
fn a_peer_that_reaches_elsewhere_is_at_fault() {
    let (_sim, _client, (mut server, id)) = struck(DeviceKind::Ibta, When::Event(100), Fault::KeyRefused);
    server.progress().expect("the fabric stays");
    let error = server.check(id).expect_err("it has failed");
    let expected = rdma_proto::Error::PeerMisbehaved(PeerMisbehaved::ReachedOutside);
    assert!(matches!(error, Error::Protocol(error) if error == expected), "{error}");
}

#[test]
fn a_listener_ends_with_its_device() {
    for fault in [Fault::DeviceRemoval, Fault::DeviceFatal] {
        let (sim, server, client, address) = struck_at(DeviceKind::Ibta, When::Event(0), fault);
        let listener = Listener::bind(&server, address).expect("a free address");
        let mut endpoint = Endpoint::new(&server, Share::default()).expect("a device");
        let other = SocketAddr::new(address.ip(), 6380);
        let id = endpoint.listen(other, Options::default()).expect("a free address");
        let _asking = asking(&client, address, Options::default());
        pass(&sim, MOMENT);
        for _ in 0..2 {
            let error = listener.try_accept().map(drop).expect_err("the device is gone");
            assert!(matches!(error, Error::Device { .. } | Error::DeviceRemoved), "{error}");
            // Waiting threads must learn of it too.
            assert!(is_readable(&listener), "it sleeps on");
            let error = listener.accept().map(drop).expect_err("the device is gone");
            assert!(matches!(error, Error::Device { .. } | Error::DeviceRemoved), "{error}");
        }
        endpoint.progress().expect("the fabric stays");
        assert_eq!((endpoint.next_event(), endpoint.next_event()), (Some(Event::AcceptFailed(id)), None));
        for _ in 0..2 {
            let error = endpoint.take_accept_error(id).expect("the device is gone");
            assert!(matches!(error, Error::Device { .. } | Error::DeviceRemoved), "{error}");
        }
    }
}

/// VR-SEC-004: a failure to read events may be that of one request. Repeated ones end the listener.
#[test]
fn a_listener_whose_events_cannot_be_read_ends() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("a free address");
    fabric.kill_host(address.ip());
    assert!(is_readable(&listener), "no thread is told");
    for _ in 1..10 {
        listener.try_request().expect_err("it cannot be read");
        assert!(!listener.is_over());
    }
    listener.try_request().expect_err("it cannot be read");
    assert!(listener.is_over() && is_readable(&listener));
    listener.accept().map(drop).expect_err("so it stays");
}

/// VR-CONN-007: the peer's first message proves what its late `Established` would.
#[test]
fn a_first_message_establishes() {
    let late = Fault::SlowReady { micros: 5_000_000 };
    let (sim, server, client, address) = struck_at(DeviceKind::Ibta, When::Event(0), late);
    let (listener, (mut client, own)) = silently(&server, &client, address);
    let mut accepted = None::<End>;
    while !client.is_open(own) {
        assert!(sim.now().since_start() < Duration::from_secs(1), "the server waits for the word");
        pass(&sim, MOMENT);
        client.progress().expect("the fabric stays");
        serve(&listener, &mut accepted);
    }
}

/// The removal of a device is reported even if the error of an earlier accept was never taken.
#[test]
fn a_listener_that_ends_says_so_behind_what_has_passed() {
    let sim = simulation();
    let (server, client, address) = hosts(&sim);
    let mut endpoint = Endpoint::new(&server, Share::default()).expect("a device");
    let id = endpoint.listen(address, Options::default()).expect("a free address");
    let (mut client, _) = asking(&client, address, Options::default());
    let befalls = |fault| sim.fabric().inject(address.ip(), Connections::All, fault, Ok(When::Event(0)));
    assert!(befalls(Fault::Exhausted));
    while endpoint.next_event().is_none() {
        assert!(sim.now().since_start() < LONG, "{:?}", sim.remaining_faults());
        pass(&sim, MOMENT);
        client.progress().expect("the fabric stays");
        endpoint.progress().expect("the fabric stays");
    }
    assert!(befalls(Fault::DeviceRemoval));
    pass(&sim, MOMENT);
    endpoint.progress().expect("the fabric stays");
    assert_eq!((endpoint.next_event(), endpoint.next_event()), (Some(Event::AcceptFailed(id)), None));
    let error = endpoint.take_accept_error(id).expect("the device is gone");
    assert!(matches!(error, Error::Device { .. } | Error::DeviceRemoved), "{error}");
}

/// What a server with two clients on one queue reports of each, after a request of one was refused.
fn refused_one_of_two(seed: u64, unnamed_flushes: bool) -> [Option<String>; 2] {
    let settings = SimulationSettings { unnamed_flushes, ..SimulationSettings::default() };
    let sim = Simulation::new(seed, DeviceKind::HostileButLegal, settings, Vec::new());
    let hosts = [1, 2, 3].map(|last| sim.host(&[IpAddr::from([192, 0, 2, last])], Limits::default()));
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let mut server = Endpoint::new(&hosts[0], Share::default()).expect("a device");
    server.listen(address, silent(Options::default())).expect("a free address");
    let [mut first, mut second] =
        [1, 2].map(|host| asking(&hosts[host], address, silent(Options::default())));
    let mut opened = [None; 2];
    let mut wrote = false;
    while !wrote || opened.contains(&None) {
        assert!(sim.now().since_start() < LONG, "no connections");
        pass(&sim, MOMENT);
        for (client, _) in [&mut first, &mut second] {
            client.progress().expect("the fabric stays");
        }
        server.progress().expect("the fabric stays");
        while let Some(event) = server.next_event() {
            if let Event::Opened { id, .. } = event {
                let last = server.peer_addr(id).map(|peer| peer.ip());
                opened[usize::from(last == Some([192, 0, 2, 3].into()))] = Some(id);
            }
        }
        if !wrote && opened.iter().all(Option::is_some) && first.0.is_open(first.1) {
            let fault = Fault::RequestRefused;
            assert!(sim.fabric().inject(address.ip(), Connections::All, fault, Ok(When::Event(0))));
            wrote = first.0.write(first.1, &[IoSlice::new(b"refused")]).expect("is open").is_some();
        }
    }
    assert_eq!(server.usage().completion_queues, 1, "they share it");
    // The clients are not driven meanwhile, so their ends cannot reveal it.
    for _ in 0..1000 {
        pass(&sim, MOMENT);
        server.progress().expect("the fabric stays");
    }
    assert!(sim.remaining_faults().is_empty(), "it has struck");
    opened.map(|id| id.and_then(|id| server.check(id).err()).map(|error| error.to_string()))
}

/// VR-CLOSE-008: the failed connection is found even if a device does not name its queue pair.
#[test]
fn a_flush_without_a_name_ends_whom_it_concerns() {
    let mut by_flush = 0;
    for seed in 0..40 {
        let named = refused_one_of_two(seed, false);
        assert_eq!(named[1], None, "seed {seed}");
        assert_eq!(refused_one_of_two(seed, true), named, "seed {seed}");
        by_flush += u32::from(named[0].as_ref().is_some_and(|error| error.contains("WR_FLUSH_ERR")));
    }
    assert!(by_flush > 3, "of {by_flush} connections no event told");
}
