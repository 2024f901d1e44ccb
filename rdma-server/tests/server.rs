//! The server: one port for TCP and RDMA, addresses that change under load, and who is let in.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rdma_conn::{Endpoint, Event, Limits, Options};
use rdma_server::{
    Address, Connection, ConnectionId, ConnectionState, ConnectionType, EventLoop, Rdma, RdmaSettings, Tcp,
    Vector,
};
use rdma_server::{BindingId, Flow, Replies, SendError, Server, ServerSettings, Service};
use rdma_softsim::{Fabric, SoftSim};

const MEBIBYTE: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(30);
const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
const REMOTE: [u8; 4] = [192, 0, 2, 2];

/// Sends back what it gets. A client that sends `Q` leaves; to one that sends `M`, a mebibyte for every one of them.
struct Echo;

impl Service for Echo {
    type Client = u64;

    fn serve(
        &mut self,
        _: ConnectionId,
        served: &mut u64,
        input: &mut BytesMut,
        replies: &mut Replies,
    ) -> Flow {
        while let Some(first) = input.first().copied() {
            if replies.is_full() {
                return Flow::Again;
            }
            let len = if first == b'M' {
                replies.extend_from_slice(&[b'm'; MEBIBYTE]);
                1
            } else {
                let len = input.iter().position(|byte| *byte == b'M').unwrap_or(input.len());
                replies.extend_from_slice(&input[..len]);
                len
            };
            *served += len as u64;
            if input.split_to(len).contains(&b'Q') {
                return Flow::Leave;
            }
        }
        Flow::Stay
    }
}

/// A fabric whose server has the address of the loopback interface, so that TCP and RDMA can share it.
struct Bed {
    server: Server<Echo>,
    tcp: BindingId,
    rdma: BindingId,
    remote: Rdma<SoftSim>,
    local: Rdma<SoftSim>,
}

fn bed(settings: ServerSettings) -> Bed {
    let fabric = Fabric::new();
    let local = Rdma::new(fabric.host(&[HOST]));
    let mut server = Server::new(Echo, settings).expect("a loop");
    let tcp = server.bind(Tcp::new(), &[SocketAddr::from((HOST, 0)).into()]).expect("a free port");
    let same = server.addresses(tcp);
    let rdma = server.bind(local.clone(), &same).expect("the same port");
    Bed { server, tcp, rdma, remote: Rdma::new(fabric.host(&[REMOTE.into()])), local }
}

fn open() -> ServerSettings {
    ServerSettings { protected: false, ..ServerSettings::default() }
}

/// A client with a loop of its own.
struct Client {
    events: EventLoop<()>,
    id: ConnectionId,
}

impl Client {
    fn new(with: &impl ConnectionType, to: &Address) -> Self {
        let mut events = EventLoop::new(()).expect("a loop");
        let id = events.blocking_connect(with, to, None, PATIENCE).expect("connects");
        Self { events, id }
    }

    fn connection(&mut self) -> &mut Connection<()> {
        self.events.get_mut(self.id).expect("is there")
    }

    /// Sends bytes and reads them back.
    fn echo(&mut self, bytes: &[u8]) {
        self.connection().sync_write(bytes, PATIENCE).expect("written");
        let mut echo = vec![0; bytes.len()];
        self.connection().sync_read(&mut echo, PATIENCE).expect("answered");
        assert!(echo == bytes, "the bytes differ");
    }

    /// What the server says before it closes.
    fn last_words(&mut self) -> String {
        let line = self.connection().sync_read_line(1000, PATIENCE).expect("a line before the end");
        let end = self.connection().sync_read(&mut [0; 1], PATIENCE).expect_err("the end");
        assert_eq!(end.kind(), std::io::ErrorKind::UnexpectedEof);
        assert_eq!(self.connection().state(), ConnectionState::Closed);
        String::from_utf8(line).expect("text")
    }
}

/// Runs the server in this thread until `clients`, in another one, is done; it may have the server do things.
fn while_serving<T: Send>(server: &mut Server<Echo>, clients: impl FnOnce(&Ask) -> T + Send) -> T {
    thread::scope(|scope| {
        let (ask, asked) = mpsc::channel::<Request>();
        let clients = scope.spawn(move || clients(&Ask(ask)));
        loop {
            match asked.try_recv() {
                Ok(request) => request(server),
                Err(mpsc::TryRecvError::Empty) => {
                    server.turn(Some(Duration::from_millis(2))).expect("a turn");
                }
                Err(mpsc::TryRecvError::Disconnected) => break,
            }
        }
        clients.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

type Request = Box<dyn FnOnce(&mut Server<Echo>) + Send>;

struct Ask(mpsc::Sender<Request>);

impl Ask {
    /// Has the server's thread do something between two turns.
    fn server<T: Send + 'static>(&self, what: impl FnOnce(&mut Server<Echo>) -> T + Send + 'static) -> T {
        let (tell, told) = mpsc::channel();
        let request: Request = Box::new(move |server| drop(tell.send(what(server))));
        self.0.send(request).expect("a server");
        told.recv().expect("an answer")
    }

    /// Stops the server's thread until what is returned is dropped.
    fn hold(&self) -> mpsc::Sender<()> {
        let (held, holding) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        let request: Request = Box::new(move |_| {
            held.send(()).expect("who asked");
            // An error is the drop that was waited for.
            let _ = released.recv();
        });
        self.0.send(request).expect("a server");
        holding.recv().expect("a server");
        release
    }

    /// Waits until something is true of the server.
    fn until(&self, what: impl Fn(&mut Server<Echo>) -> bool + Send + Copy + 'static) {
        let begun = Instant::now();
        while !self.server(what) {
            assert!(begun.elapsed() < PATIENCE, "it does not happen");
        }
    }
}

#[test]
fn tcp_and_rdma_share_a_port() {
    let Bed { mut server, tcp, rdma, remote, .. } = bed(open());
    let [address] = server.addresses(tcp).try_into().expect("one address");
    assert_eq!(server.addresses(rdma), server.addresses(tcp));
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

/// Clients that are there go on through many moves and lose no byte; each move is waited out by all of them.
#[test]
fn bind_and_port_move_under_load() {
    const MOVES: u16 = 12;
    let Bed { mut server, tcp, rdma, remote, .. } = bed(open());
    let stop = AtomicBool::new(false);
    let echoed: [AtomicU64; 4] = Default::default();
    while_serving(&mut server, |ask| {
        thread::scope(|scope| {
            let _stop = StopWhenDropped(&stop);
            let address = ask.server(move |server| server.addresses(tcp)).remove(0);
            for (index, echoed) in echoed.iter().enumerate() {
                let (address, remote, stop) = (address.clone(), &remote, &stop);
                scope.spawn(move || {
                    let mut client = match index % 2 {
                        0 => Client::new(&Tcp::new(), &address),
                        _ => Client::new(remote, &address),
                    };
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
                // TCP takes a free port, RDMA goes to the same; every third time both go to all addresses of the host.
                let ip = if number % 3 == 2 { IpAddr::from([0, 0, 0, 0]) } else { HOST };
                let new = ask.server(move |server| {
                    server.rebind(tcp, &[SocketAddr::from((ip, 0)).into()]).expect("a free port");
                    let port = server.addresses(tcp)[0].ip().expect("an IP address").port();
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
                        .expect_err("nobody is there any more");
                    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
                }
                old = new;
            }
        });
    });
    println!("{MOVES} moves; rounds of each client: {echoed:?}");
}

/// Waits until each client has ended two more rounds, the second of which has begun after this call.
fn wait_for_rounds(echoed: &[AtomicU64; 4], before: [u64; 4], when: &str) {
    let begun = Instant::now();
    for (echoed, before) in echoed.iter().zip(before) {
        while echoed.load(Ordering::Relaxed) < before + 2 {
            assert!(begun.elapsed() < PATIENCE, "a client hangs {when}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// So that a test that fails ends.
struct StopWhenDropped<'a>(&'a AtomicBool);

impl Drop for StopWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_move_that_fails_changes_nothing() {
    let Bed { mut server, tcp, rdma, remote, .. } = bed(open());
    let before = server.addresses(tcp);
    let mut other = Server::new(Echo, open()).expect("a loop");
    let others = other.bind(Tcp::new(), &[SocketAddr::from((HOST, 0)).into()]).expect("a free port");
    let taken = other.addresses(others).remove(0);
    let free = SocketAddr::from((HOST, 0)).into();
    let error = server.rebind(tcp, &[free, taken.clone()]).expect_err("one of them is taken");
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    assert!(error.to_string().contains(&taken.to_string()), "{error}");
    assert_eq!(server.addresses(tcp), before);
    let elsewhere = SocketAddr::from(([198, 51, 100, 1], 6379)).into();
    server.rebind(rdma, &[elsewhere]).expect_err("not an address of this host");
    while_serving(&mut server, |_| {
        Client::new(&Tcp::new(), &before[0]).echo(b"still here");
        Client::new(&remote, &before[0]).echo(b"still here");
    });
}

/// The old address is what is in the way of the new one, both ways.
#[test]
fn one_address_can_become_all_addresses() {
    let Bed { mut server, tcp, .. } = bed(open());
    let one = server.addresses(tcp).remove(0);
    let port = one.ip().expect("an IP address").port();
    let all: Address = SocketAddr::from(([0, 0, 0, 0], port)).into();
    for next in [&all, &one, &all] {
        server.rebind(tcp, std::slice::from_ref(next)).expect("only the old one was in the way");
        assert_eq!(server.addresses(tcp), std::slice::from_ref(next));
    }
    while_serving(&mut server, |_| Client::new(&Tcp::new(), &one).echo(b"hello"));
}

/// VR-SEC-008.
#[test]
fn protected_mode_lets_in_this_machine_only() {
    let Bed { mut server, tcp, remote, local, .. } = bed(ServerSettings::default());
    let address = server.addresses(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let said = Client::new(&remote, &address).last_words();
        assert!(said.starts_with("-DENIED ") && said.contains("protected mode"), "{said}");
        Client::new(&local, &address).echo(b"neighbour");
        Client::new(&Tcp::new(), &address).echo(b"neighbour");
        ask.server(|server| server.settings().protected = false);
        Client::new(&remote, &address).echo(b"welcome");
        let counters = ask.server(|server| server.counters());
        assert_eq!((counters.refused_protected, counters.admitted), (1, 3));
    });
}

/// VR-SEC-008: a client elsewhere asks with the server's own address as its own.
#[test]
fn protected_mode_goes_by_the_path_and_not_by_what_a_request_says() {
    let fabric = Fabric::new();
    let at = SocketAddr::from((HOST, 6379));
    // The address is an impostor's when it prepares its request, and the server's when that arrives.
    let mut impostor = Endpoint::new(&fabric.host(&[HOST]), Limits::default()).expect("an endpoint");
    let id = impostor.connect(at, Some((HOST, 0).into()), PATIENCE, Options::client()).expect("begins");
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
    let Bed { mut server, tcp, remote, .. } = bed(ServerSettings { max_clients: 2, ..open() });
    let address = server.addresses(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let mut clients = [Client::new(&Tcp::new(), &address), Client::new(&remote, &address)];
        for client in &mut clients {
            client.echo(b"in");
        }
        for _ in 0..3 {
            let mut excess = [Client::new(&Tcp::new(), &address), Client::new(&remote, &address)];
            for client in &mut excess {
                assert_eq!(client.last_words(), "-ERR max number of clients reached");
            }
        }
        // Who speaks first is told all the same: unread bytes must not turn the close into a reset.
        let released = ask.hold();
        let mut hasty = Client::new(&Tcp::new(), &address);
        hasty.connection().sync_write(b"PING\r\n", PATIENCE).expect("written");
        drop(released);
        assert_eq!(hasty.last_words(), "-ERR max number of clients reached");
        // Who is in is not disturbed, and leaves a place.
        for client in &mut clients {
            client.echo(b"still in");
        }
        let [first, _second] = clients;
        drop(first);
        ask.until(|server| server.client_count() == 1);
        Client::new(&remote, &address).echo(b"in its place");
        assert_eq!(ask.server(|server| server.counters().refused_full), 7);
    });
}

/// VR-SEC-007: what all clients together may register is bounded, and who does not fit is rejected; the others go on.
#[test]
fn the_memory_that_clients_register_is_bounded() {
    let defaults = RdmaSettings::default();
    assert!(defaults.limits.registered_bytes < u64::MAX);
    assert_eq!(defaults.server.protocol.stall_limit, Some(Duration::from_secs(60)), "VR-RES-004");
    let fabric = Fabric::new();
    let rdma = Rdma::new(fabric.host(&[HOST]));
    // Two idle clients with their windows of 1 MiB fit, and the send buffer of one.
    let limits = Limits { registered_bytes: 7 << 19, ..defaults.limits };
    rdma.configure(RdmaSettings { limits, ..defaults }).expect("settings");
    let mut server = Server::new(Echo, open()).expect("a loop");
    let binding = server.bind(rdma, &[SocketAddr::from((HOST, 0)).into()]).expect("a free port");
    let address = server.addresses(binding).remove(0);
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

/// VR-SEC-007: strangers who are refused and stay cost a bounded number of pages.
#[test]
fn a_crowd_of_strangers_pins_little() {
    const STRANGERS: usize = 300;
    let fabric = Fabric::new();
    let mut server = Server::new(Echo, ServerSettings::default()).expect("a loop");
    server.timeouts().linger = PATIENCE;
    let at: Address = SocketAddr::from((HOST, 6379)).into();
    server.bind(Rdma::new(fabric.host(&[HOST])), std::slice::from_ref(&at)).expect("a free port");
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

/// Clients that are on their way to their end still cost something, and count.
#[test]
fn a_client_on_its_way_out_has_its_place_still() {
    let Bed { mut server, tcp, remote, .. } = bed(ServerSettings { max_clients: 1, ..open() });
    server.timeouts().linger = PATIENCE;
    let address = server.addresses(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let mut first = Client::new(&remote, &address);
        first.connection().sync_write(&[b'M'; 8], PATIENCE).expect("written");
        // One reply is in its window, and one waits for it in the send buffer.
        ask.until(|server| server.clients().any(|(_, served)| *served >= 2));
        ask.server(|server| {
            let id = server.clients().next().expect("it is there").0;
            server.close(id);
        });
        assert_eq!(ask.server(|server| server.client_count()), 0);
        assert_eq!(Client::new(&remote, &address).last_words(), "-ERR max number of clients reached");
        // It has gone once it has read what was on its way.
        while first.connection().sync_read(&mut [0; 1], PATIENCE).is_ok() {}
        ask.until(|server| server.connection_count() == 0);
        Client::new(&remote, &address).echo(b"in its place");
    });
}

#[test]
fn a_turn_that_waits_can_be_ended_from_another_thread() {
    let mut server = Server::new(Echo, open()).expect("a loop");
    let waker = server.waker();
    thread::scope(|scope| {
        scope.spawn(|| waker.wake().expect("a wake-up"));
        server.turn(None).expect("a turn");
    });
    // One that comes before the turn counts as well.
    waker.wake().expect("a wake-up");
    server.turn(None).expect("a turn");
}

#[test]
fn a_server_that_ends_gracefully_serves_those_who_are_there() {
    let Bed { mut server, tcp, remote, .. } = bed(open());
    let address = server.addresses(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let mut clients = [Client::new(&Tcp::new(), &address), Client::new(&remote, &address)];
        clients.iter_mut().for_each(|client| client.echo(b"in"));
        ask.server(|server| server.close_listeners());
        let mut events = EventLoop::new(()).expect("a loop");
        events.blocking_connect(&Tcp::new(), &address, None, PATIENCE).expect_err("nobody listens");
        events.blocking_connect(&remote, &address, None, PATIENCE).expect_err("nobody listens");
        clients.iter_mut().for_each(|client| client.echo(b"to the end"));
        drop(clients);
        ask.until(|server| server.client_count() == 0);
    });
    server.finish().expect("a turn");
}

/// A message to a client whose handshake is under way waits until that is over.
#[test]
fn a_message_may_come_before_the_handshake_is_over() {
    let Bed { mut server, tcp, remote, .. } = bed(open());
    let address = server.addresses(tcp).remove(0);
    let mut events = EventLoop::new(false).expect("a loop");
    let id = events.connect(&remote, &address, None, |events, _| events.state = true).expect("begins");
    let begun = Instant::now();
    while server.client_count() == 0 {
        assert!(begun.elapsed() < PATIENCE, "no request arrives");
        events.turn(Some(Duration::from_millis(1))).expect("a turn");
        server.turn(Some(Duration::ZERO)).expect("a turn");
    }
    // The client has not read yet that it was accepted.
    assert_eq!(server.counters().admitted, 0);
    let client = server.clients().next().expect("it is there").0;
    server.send(client, b"welcome").expect("it waits");
    while !events.state {
        assert!(begun.elapsed() < PATIENCE, "the handshake does not end");
        events.turn(Some(Duration::from_millis(1))).expect("a turn");
        server.turn(Some(Duration::from_millis(1))).expect("a turn");
    }
    while server.counters().admitted == 0 {
        assert!(begun.elapsed() < PATIENCE, "the client is not let in");
        server.turn(Some(Duration::from_millis(1))).expect("a turn");
    }
    let mut message = [0; 7];
    let connection = events.get_mut(id).expect("is there");
    connection.sync_read(&mut message, PATIENCE).expect("the message");
    assert_eq!(&message, b"welcome");
}

#[test]
fn a_client_that_leaves_gets_its_last_reply() {
    let Bed { mut server, tcp, remote, .. } = bed(open());
    let address = server.addresses(tcp).remove(0);
    while_serving(&mut server, |_| {
        for mut client in [Client::new(&Tcp::new(), &address), Client::new(&remote, &address)] {
            client.connection().sync_write(b"goodbye Q\n", PATIENCE).expect("written");
            assert_eq!(client.last_words(), "goodbye Q");
        }
    });
}

/// VR-RES-008: clients that ask for much and read nothing make the server sleep, serve others, and hold no more than its budget.
#[test]
fn clients_that_do_not_read_cost_nothing() {
    const MANY: usize = 4;
    /// Mebibytes asked for: far more than any system takes for a reader that does not read.
    const MUCH: usize = 48;
    let Bed { mut server, tcp, remote, .. } = bed(open());
    let budget = server.settings().reply_budget;
    let address = server.addresses(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let mut clients: Vec<_> = (0..MANY)
            .map(|index| match index % 2 {
                0 => Client::new(&Tcp::new(), &address),
                _ => Client::new(&remote, &address),
            })
            .collect();
        for client in &mut clients {
            let mut asked = [b'M'; MUCH];
            asked[MUCH - 1] = b'.';
            client.connection().sync_write(&asked, PATIENCE).expect("written");
        }
        Client::new(&remote, &address).echo(b"others are served");
        ask.until(move |server| {
            !server.has_pending() && server.clients().filter(|(_, served)| **served > 0).count() == MANY
        });
        let held = ask.server(|server| server.waiting_bytes());
        // A buffer that grows is at most twice as long as what is in it.
        assert!(held <= MANY * 2 * (budget + MEBIBYTE), "{held} bytes are held");
        assert!(ask.server(|server| server.clients().all(|(_, served)| *served < MUCH as u64)));
        // They come back to their senses; what the service had left was not forgotten.
        for client in &mut clients {
            let mut replies = vec![0; (MUCH - 1) * MEBIBYTE];
            client.connection().sync_read(&mut replies, PATIENCE).expect("all of them");
            assert!(replies.iter().all(|byte| *byte == b'm'));
            let mut last = [0; 1];
            client.connection().sync_read(&mut last, PATIENCE).expect("the last reply");
            assert_eq!(last, *b".");
        }
    });
}

/// VR-RES-008.
#[test]
fn messages_to_a_client_that_does_not_read_are_refused_in_time() {
    let Bed { mut server, tcp, remote, .. } = bed(open());
    let budget = server.settings().reply_budget;
    let address = server.addresses(tcp).remove(0);
    while_serving(&mut server, |ask| {
        for over_rdma in [false, true] {
            let mut client = match over_rdma {
                false => Client::new(&Tcp::new(), &address),
                true => Client::new(&remote, &address),
            };
            ask.until(|server| server.client_count() == 1);
            let (sent, refused) = ask.server(move |server| {
                let id = server.clients().next().expect("it is there").0;
                let mut sent = 0;
                loop {
                    match server.send(id, &[b'x'; 100_000]) {
                        Ok(()) => sent += 100_000,
                        Err(refused) => return (sent, refused),
                    }
                    server.turn(Some(Duration::ZERO)).expect("a turn");
                }
            });
            assert!(matches!(refused, SendError::Full { waiting, .. } if waiting <= budget), "{refused:?}");
            assert!(refused.to_string().contains("reads too slowly"), "{refused}");
            let mut all = vec![0; sent];
            client.connection().sync_read(&mut all, PATIENCE).expect("what was taken arrives");
            let gone = ask.server(|server| server.clients().next().expect("it is there").0);
            drop(client);
            ask.until(|server| server.client_count() == 0);
            assert_eq!(ask.server(move |server| server.send(gone, b"x")), Err(SendError::NoSuchClient));
        }
    });
}

/// VR-RES-008: a client that always has a few replies outstanding, and reads all of them, makes the server keep those few.
#[test]
fn replies_that_were_written_are_not_kept() {
    /// Mebibytes that the client waits for at any time; and replies altogether.
    const AHEAD: usize = 8;
    const ALL: usize = 64;
    let Bed { mut server, tcp, remote, .. } = bed(open());
    let address = server.addresses(tcp).remove(0);
    while_serving(&mut server, |ask| {
        for mut client in [Client::new(&Tcp::new(), &address), Client::new(&remote, &address)] {
            client.connection().sync_write(&[b'M'; AHEAD], PATIENCE).expect("written");
            let mut reply = vec![0; MEBIBYTE];
            for round in 0..ALL {
                client.connection().sync_read(&mut reply, PATIENCE).expect("a reply");
                client.connection().sync_write(b"M", PATIENCE).expect("written");
                let held = ask.server(|server| server.waiting_bytes());
                assert!(held <= 2 * AHEAD * MEBIBYTE, "{held} bytes after {round} replies");
            }
        }
    });
}

#[test]
fn completion_vectors_are_fixed_or_random() {
    let Bed { mut server, tcp, remote, local, .. } = bed(open());
    let address = server.addresses(tcp).remove(0);
    for vector in [Vector::Fixed(1), Vector::Fixed(1_000_000), Vector::Random] {
        local.configure(RdmaSettings { vector, ..RdmaSettings::default() }).expect("settings");
        while_serving(&mut server, |_| Client::new(&remote, &address).echo(b"hello"));
    }
}
