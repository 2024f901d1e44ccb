use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma_conn::{Endpoint, Event, Limits, Options};
use rdma_server::{
    Address, ConnectionType, EventLoop, Rdma, RdmaSettings, Server, ServerSettings, SocketSettings, Tcp,
};
use rdma_softsim::Fabric;

use crate::harness::{
    Client, Echo, HOST, MEBIBYTE, PATIENCE, REMOTE, TestBed, open, test_bed, while_serving,
};

/// VR-SEC-008.
#[test]
fn protected_mode_lets_in_this_machine_only() {
    let TestBed { mut server, tcp, remote, local, .. } = test_bed(ServerSettings::default());
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let said = Client::new(&remote, &address).last_words();
        assert!(said.starts_with("-DENIED ") && said.contains("protected mode"), "{said}");
        Client::new(&local, &address).echo(b"neighbour");
        Client::new(&Tcp::new(), &address).echo(b"neighbour");
        ask.server(|server| server.configure(server.settings().protected(false)).expect("settings"));
        Client::new(&remote, &address).echo(b"welcome");
        let counters = ask.server(|server| server.counters());
        assert_eq!((counters.refused_protected, counters.admitted), (1, 3));
    });
}

/// VR-SEC-008: a client elsewhere claims the server's own address.
#[test]
fn protected_mode_goes_by_the_path_and_not_by_what_a_request_says() {
    let fabric = Fabric::new();
    let at = SocketAddr::from((HOST, 6379));
    // The address is an impostor's when it prepares its request, the server's when that arrives.
    let mut impostor = Endpoint::new(&fabric.host(&[HOST]), Limits::default()).expect("an endpoint");
    let id = impostor.connect(at, Some((HOST, 0).into()), PATIENCE, Options::default()).expect("begins");
    let local = Rdma::new(fabric.host(&[HOST]));
    let mut server = Server::new(Echo, ServerSettings::default()).expect("a loop");
    server.bind(local.clone(), &[at.into()]).expect("a free port");
    while_serving(&mut server, |ask| {
        let mut heard = Vec::new();
        let mut told = false;
        let begun = Instant::now();
        while !told {
            assert!(begun.elapsed() < PATIENCE, "the impostor is kept waiting");
            impostor.wait(Some(Duration::from_millis(10))).expect("progress");
            while let Some(event) = impostor.next_event() {
                match event {
                    Event::Opened { .. } => {
                        let hello = [std::io::IoSlice::new(b"hello")];
                        // The server may have closed already.
                        let _ = impostor.write(id, &hello);
                    }
                    Event::Readable(_) => {
                        let mut chunk = [0; 1000];
                        if let Ok(Some(read)) = impostor.read(id, &mut chunk) {
                            heard.extend_from_slice(&chunk[..read]);
                        }
                    }
                    Event::Ended(_) => told = true,
                    _ => {}
                }
            }
            told |= heard == b"hello";
        }
        assert_ne!(heard, b"hello", "the impostor was served");
        Client::new(&local, &at.into()).echo(b"who is local is served");
        let counters = ask.server(|server| server.counters());
        assert_eq!((counters.refused_protected, counters.admitted), (1, 1));
    });
}

#[test]
fn one_client_too_many_is_told_so() {
    let TestBed { mut server, tcp, remote, .. } = test_bed(open().max_clients(2));
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let mut clients = Client::both(&remote, &address);
        clients.iter_mut().for_each(|client| client.echo(b"in"));
        for _ in 0..3 {
            for client in &mut Client::both(&remote, &address) {
                assert_eq!(client.last_words(), "-ERR max number of clients reached");
            }
        }
        // Unread bytes of a client that speaks first must not turn the close into a reset.
        let released = ask.hold();
        let mut hasty = Client::new(&Tcp::new(), &address);
        hasty.connection().sync_write(b"PING\r\n", PATIENCE).expect("written");
        drop(released);
        assert_eq!(hasty.last_words(), "-ERR max number of clients reached");
        clients.iter_mut().for_each(|client| client.echo(b"still in"));
        let [first, _second] = clients;
        drop(first);
        ask.until(|server| server.client_count() == 1);
        Client::new(&remote, &address).echo(b"in its place");
        assert_eq!(ask.server(|server| server.counters().refused_full), 7);
    });
}

/// VR-SEC-007: the memory of all clients together is bounded. One that does not fit is rejected.
#[test]
fn the_memory_that_clients_register_is_bounded() {
    let defaults = RdmaSettings::default();
    assert!(defaults.limits.registered_bytes < u64::MAX);
    assert_eq!(defaults.server.protocol.stall_limit, Some(Duration::from_secs(60)), "VR-RES-004");
    let fabric = Fabric::new();
    let rdma = Rdma::new(fabric.host(&[HOST]));
    // Two clients with their windows of 1 MiB fit, and the full send buffer of none.
    let limits = defaults.limits.registered_bytes(5 << 19);
    rdma.configure(defaults.limits(limits)).expect("settings");
    let mut server = Server::new(Echo, open()).expect("a loop");
    let binding = server.bind(rdma, &[SocketAddr::from((HOST, 0)).into()]).expect("a free port");
    let address = server.local_addrs(binding).remove(0);
    let remote = Rdma::new(fabric.host(&[REMOTE.into()]));
    while_serving(&mut server, |ask| {
        let mut clients = [Client::new(&remote, &address), Client::new(&remote, &address)];
        clients[0].echo(b"in");
        let mut events = EventLoop::new(()).expect("a loop");
        let error = events.blocking_connect(&remote, &address, None, PATIENCE).expect_err("no memory left");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
        clients[0].echo(b"still in");
        let [_first, second] = clients;
        drop(second);
        ask.until(|server| server.client_count() == 1);
        while events.blocking_connect(&remote, &address, None, PATIENCE).is_err() {}
        let held = fabric.resources(HOST).registered_bytes;
        assert!(held <= limits.registered_bytes, "{held} bytes are registered");
    });
}

/// VR-SEC-007: refused strangers who stay cost a bounded number of pages.
#[test]
fn a_crowd_of_strangers_pins_little() {
    strangers_pin_little(RdmaSettings::default());
}

#[test]
fn a_crowd_of_strangers_pins_nothing_to_grow_in() {
    strangers_pin_little(growing());
}

/// Settings of a server whose windows grow, up to 16 MiB.
fn growing() -> RdmaSettings {
    let settings = RdmaSettings::default();
    let protocol = settings.server.protocol.windows(1).grow_to(Some(16 << 20));
    settings.server(settings.server.protocol(protocol))
}

fn strangers_pin_little(settings: RdmaSettings) {
    const STRANGERS: usize = 300;
    let fabric = Fabric::new();
    let mut server = Server::new(Echo, ServerSettings::default()).expect("a loop");
    server.timeouts().linger = PATIENCE;
    let at: Address = SocketAddr::from((HOST, 6379)).into();
    let rdma = Rdma::new(fabric.host(&[HOST]));
    rdma.configure(settings).expect("settings");
    server.bind(rdma, std::slice::from_ref(&at)).expect("a free port");
    let remote = Rdma::new(fabric.host(&[REMOTE.into()]));
    let mut strangers = EventLoop::new(0).expect("a loop");
    for _ in 0..STRANGERS {
        strangers
            .connect(&remote, &at, None, |strangers, _| strangers.state += 1)
            .expect("begins to connect");
    }
    let mut most = 0;
    while strangers.state < STRANGERS {
        server.turn(Some(Duration::from_millis(1))).expect("a turn");
        most = most.max(fabric.resources(HOST).registered_bytes);
        strangers.turn(Some(Duration::from_millis(1))).expect("a turn");
    }
    assert_eq!(server.counters().refused_protected, STRANGERS as u64);
    assert!(most <= 128 * 4 * 4096, "{most} bytes were registered for strangers");
    println!("{STRANGERS} strangers: at most {} KiB at once", most >> 10);
}

/// VR-MEM-020.
#[test]
fn a_client_has_a_window_that_grows() {
    let fabric = Fabric::new();
    let rdma = Rdma::new(fabric.host(&[HOST]));
    rdma.configure(growing()).expect("settings");
    let mut server = Server::new(Echo, open()).expect("a loop");
    let binding = server.bind(rdma, &[SocketAddr::from((HOST, 0)).into()]).expect("a free port");
    let address = server.local_addrs(binding).remove(0);
    let remote = Rdma::new(fabric.host(&[REMOTE.into()]));
    while_serving(&mut server, |_| {
        let mut client = Client::new(&remote, &address);
        for _ in 0..8 {
            client.echo(&[b'g'; MEBIBYTE]);
        }
        let held = fabric.resources(HOST).registered_bytes;
        assert!(held >= 16 << 20, "{held} bytes are registered");
    });
}

#[test]
fn a_client_on_its_way_out_has_its_place_still() {
    let TestBed { mut server, tcp, remote, .. } = test_bed(open().max_clients(1));
    server.timeouts().linger = PATIENCE;
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let mut first = Client::new(&Tcp::new(), &address);
        first.echo(b"in");
        ask.server(|server| {
            let id = server.clients().next().expect("it is there").0;
            server.close(id);
        });
        assert_eq!(ask.server(|server| (server.client_count(), server.connection_count())), (0, 1));
        assert_eq!(Client::new(&remote, &address).last_words(), "-ERR max number of clients reached");
        // It is gone once it has ended its own direction.
        drop(first);
        ask.until(|server| server.connection_count() == 0);
        Client::new(&remote, &address).echo(b"in its place");
    });
}

#[test]
fn settings_out_of_bounds_are_refused_and_change_nothing() {
    let refused = |result: std::io::Result<()>, field: &str| {
        let error = result.expect_err(field);
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains(field), "{error}");
    };
    let usual = RdmaSettings::default();
    let rdma = Rdma::new(rdma_softsim::Fabric::new().host(&[HOST]));
    refused(rdma.configure(usual.server(Options::default().receives(0))), "receives");
    refused(rdma.configure(usual.client(Options::default().keep_memory(Duration::ZERO))), "keep_memory");
    let sockets = SocketSettings::default();
    refused(Tcp::new().configure(sockets.backlog(0)), "backlog");
    refused(Tcp::new().configure(sockets.keepalive(Some(Duration::from_millis(999)))), "keepalive");
    refused(Server::new(Echo, open().reply_budget(0)).map(drop), "reply_budget");
    let mut server = Server::new(Echo, open()).expect("a loop");
    refused(server.configure(open().reply_budget(0)), "reply_budget");
    assert_eq!(*server.settings(), open());
}
