//! One port for TCP and RDMA, and addresses that change under load.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rdma_server::{Address, EventLoop, ListenerLost, Server, Tcp};
use rdma_softsim::{Connections, Fault, When};

use crate::harness::{Client, Echo, HOST, PATIENCE, TestBed, open, test_bed, while_serving};

#[test]
fn tcp_and_rdma_share_a_port() {
    let TestBed { mut server, tcp, rdma, remote, .. } = test_bed(open());
    let [address] = server.local_addrs(tcp).try_into().expect("one address");
    assert_eq!(server.local_addrs(rdma), server.local_addrs(tcp));
    while_serving(&mut server, |ask| {
        let mut clients = [Client::new(&Tcp::new(), &address), Client::new(&remote, &address)];
        for client in &mut clients {
            client.echo(b"hello");
        }
        let kinds = clients.map(|mut client| client.connection().kind().to_string());
        assert_eq!(kinds, ["tcp", "rdma"]);
        ask.until(|server| server.client_count() == 0);
    });
}

#[test]
fn bind_and_port_move_under_load() {
    const MOVES: u16 = 12;
    let TestBed { mut server, tcp, rdma, remote, .. } = test_bed(open());
    let stop = AtomicBool::new(false);
    let echoed: [AtomicU64; 4] = Default::default();
    while_serving(&mut server, |ask| {
        thread::scope(|scope| {
            let _stop = StopWhenDropped(&stop);
            let address = ask.server(move |server| server.local_addrs(tcp)).remove(0);
            for (index, echoed) in echoed.iter().enumerate() {
                let (address, remote, stop) = (address.clone(), &remote, &stop);
                scope.spawn(move || {
                    let mut client = Client::over(index % 2 == 1, remote, &address);
                    for round in 0.. {
                        let len = 1 + (round * 7919 + index * 104_729) % 200_000;
                        let bytes: Vec<u8> =
                            (0..len).map(|at| b'a' + ((at * 31 + round + index) % 26) as u8).collect();
                        client.echo(&bytes);
                        echoed.fetch_add(1, Ordering::Relaxed);
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                });
            }
            wait_for_rounds(&echoed, [0; 4], "at the beginning");
            let mut old = address;
            for number in 0..MOVES {
                // TCP takes a free port, RDMA the same. Every third time both use all addresses.
                let ip = if number % 3 == 2 { IpAddr::from([0, 0, 0, 0]) } else { HOST };
                let new = ask.server(move |server| {
                    server.rebind(tcp, &[SocketAddr::from((ip, 0)).into()]).expect("a free port");
                    let port = server.local_addrs(tcp)[0].ip().expect("an IP address").port();
                    let new: Address = SocketAddr::from((HOST, port)).into();
                    server.rebind(rdma, std::slice::from_ref(&new)).expect("the same port");
                    new
                });
                let before = echoed.each_ref().map(|echoed| echoed.load(Ordering::Relaxed));
                wait_for_rounds(&echoed, before, &format!("after move {number}"));
                Client::new(&Tcp::new(), &new).echo(b"new here");
                Client::new(&remote, &new).echo(b"new here");
                let mut events = EventLoop::new(()).expect("a loop");
                for refused in [
                    events.blocking_connect(&Tcp::new(), &old, None, PATIENCE),
                    events.blocking_connect(&remote, &old, None, PATIENCE),
                ] {
                    let error = refused
                        .map(|id| format!("{:?}", events.get(id)))
                        .expect_err("nothing listens there any more");
                    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
                }
                old = new;
            }
        });
    });
    println!("{MOVES} moves; rounds of each client: {echoed:?}");
}

/// Waits until each client has ended two more rounds, the second of which began after this call.
fn wait_for_rounds(echoed: &[AtomicU64; 4], before: [u64; 4], when: &str) {
    let begun = Instant::now();
    for (echoed, before) in echoed.iter().zip(before) {
        while echoed.load(Ordering::Relaxed) < before + 2 {
            assert!(begun.elapsed() < PATIENCE, "a client hangs {when}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Bounds the time of a failing test.
struct StopWhenDropped<'a>(&'a AtomicBool);

impl Drop for StopWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_move_that_fails_changes_nothing() {
    let TestBed { mut server, tcp, rdma, remote, .. } = test_bed(open());
    let before = server.local_addrs(tcp);
    let mut other = Server::new(Echo, open()).expect("a loop");
    let others = other.bind(Tcp::new(), &[SocketAddr::from((HOST, 0)).into()]).expect("a free port");
    let taken = other.local_addrs(others).remove(0);
    let free = SocketAddr::from((HOST, 0)).into();
    let error = server.rebind(tcp, &[free, taken.clone()]).expect_err("one of them is taken");
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    assert!(error.to_string().contains(&taken.to_string()), "{error}");
    assert_eq!(server.local_addrs(tcp), before);
    let elsewhere = SocketAddr::from(([198, 51, 100, 1], 6379)).into();
    server.rebind(rdma, &[elsewhere]).expect_err("not an address of this host");
    while_serving(&mut server, |_| {
        Client::new(&Tcp::new(), &before[0]).echo(b"still here");
        Client::new(&remote, &before[0]).echo(b"still here");
    });
}

/// The old address is in the way of the new one, both ways.
#[test]
fn one_address_can_become_all_addresses() {
    let TestBed { mut server, tcp, .. } = test_bed(open());
    let one = server.local_addrs(tcp).remove(0);
    let port = one.ip().expect("an IP address").port();
    let all: Address = SocketAddr::from(([0, 0, 0, 0], port)).into();
    for next in [&all, &one, &all] {
        server.rebind(tcp, std::slice::from_ref(next)).expect("only the old one was in the way");
        assert_eq!(server.local_addrs(tcp), std::slice::from_ref(next));
    }
    while_serving(&mut server, |_| Client::new(&Tcp::new(), &one).echo(b"hello"));
}

#[test]
fn a_listener_that_lost_its_device_is_told() {
    for fault in [Fault::DeviceRemoval, Fault::DeviceFatal] {
        let TestBed { mut server, tcp, rdma, fabric, remote, .. } = test_bed(open());
        let addresses = server.local_addrs(rdma);
        let address = addresses[0].clone();
        assert!(fabric.inject(HOST, Connections::All, fault, Ok(When::Event(0))));
        // Everything that follows happens to a removed device.
        let mut events = EventLoop::new(()).expect("a loop");
        events.connect(&remote, &address, None, |_, _| ()).expect("begins to connect");
        let begun = Instant::now();
        let error = loop {
            assert!(begun.elapsed() < PATIENCE, "nothing is told");
            events.turn(Some(Duration::from_millis(1))).expect("a turn");
            if let Err(error) = server.turn(Some(Duration::from_millis(1))) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{error}");
        let lost = error.get_ref().and_then(|inner| inner.downcast_ref::<ListenerLost>()).expect("why");
        assert_eq!(lost.address.as_ref(), Some(&address));
        assert_eq!((server.local_addrs(rdma), server.local_addrs(tcp)), (vec![], addresses.clone()));
        while_serving(&mut server, |ask| {
            Client::new(&Tcp::new(), &address).echo(b"the others go on");
            ask.server(move |server| server.rebind(rdma, &addresses)).expect("it comes back");
            Client::new(&remote, &address).echo(b"and so does it");
        });
        server.finish().expect("a turn");
    }
}
