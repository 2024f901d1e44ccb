//! Several threads behind one port, on the embedded fabric.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kv_store::{FrameReader, Server, Store, Threads};
use rdma_conn::{Endpoint, Error, Keepalive, Limits, Options, Stream};
use rdma_softsim::{Connections, Fabric, Fault, SoftSim, When};

const SERVER: [u8; 4] = [192, 0, 2, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 2];
const THREADS: usize = 3;
const HOUR: Duration = Duration::from_secs(3600);

/// A server whose threads outlive the test, as in a program.
struct Serving {
    client: SoftSim,
    address: SocketAddr,
    accepted: Box<dyn Fn() -> Vec<u64>>,
}

impl Serving {
    fn start(limits: Limits) -> Self {
        let fabric = Fabric::new();
        let (backend, client) = (fabric.host(&[SERVER.into()]), fabric.host(&[CLIENT.into()]));
        let (address, store) = (SocketAddr::from((SERVER, 0)), Arc::new(Store::default()));
        // Only a wake-up ends the wait of an idle thread.
        let mut options = Options::default().keep_memory(HOUR).handshake_timeout(HOUR);
        options.protocol.keepalive = Some(Keepalive::NONE);
        let threads = Threads::start(&backend, address, options, limits, THREADS, &store)
            .expect("a device and threads");
        let address = threads.local_addr().expect("it listens");
        let counts = threads.accepted();
        std::thread::spawn(move || threads.run());
        let accepted = move || counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        Self { client, address, accepted: Box::new(accepted) }
    }

    fn connect(&self) -> FrameReader<Stream<SoftSim>> {
        let mut stream = Stream::connect(&self.client, self.address).expect("connects");
        stream.set_read_timeout(Some(Duration::from_secs(60)));
        FrameReader::new(stream)
    }
}

fn ask(client: &mut FrameReader<Stream<SoftSim>>, command: &str) -> String {
    client.stream().write_all(format!("{command}\r\n").as_bytes()).expect("written");
    last_word(client)
}

fn last_word(client: &mut FrameReader<Stream<SoftSim>>) -> String {
    let frame = client.frame().expect("a reply in time").expect("the server stays");
    let frame = frame.clone().into_array().ok().and_then(|mut words| words.pop()).unwrap_or(frame);
    frame.as_str().unwrap_or("no word").to_owned()
}

#[test]
fn connections_are_spread_over_all_threads_and_each_serves_the_one_store() {
    let serving = Serving::start(Limits::default());
    let mut clients: Vec<_> = (0..2 * THREADS).map(|_| serving.connect()).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        assert_eq!(ask(client, &format!("SET {number} of-{number}")), "OK");
    }
    assert_eq!((serving.accepted)(), [2; THREADS]);
    // A client on any thread finds what the others have stored.
    for client in &mut clients {
        for number in 0..2 * THREADS {
            assert_eq!(ask(client, &format!("GET {number}")), format!("of-{number}"));
        }
    }
}

#[test]
fn messages_reach_subscribers_on_other_threads() {
    let serving = Serving::start(Limits::default());
    let mut subscribers: Vec<_> = (0..THREADS).map(|_| serving.connect()).collect();
    for subscriber in &mut subscribers {
        ask(subscriber, "SUBSCRIBE news");
    }
    ask(&mut serving.connect(), "PUBLISH news hello");
    for subscriber in &mut subscribers {
        assert_eq!(last_word(subscriber), "hello");
    }
}

#[test]
fn all_threads_together_keep_to_the_limits() {
    let limit = THREADS + 1;
    let serving = Serving::start(Limits::default().connections(limit));
    let mut clients: Vec<_> = (0..limit).map(|_| serving.connect()).collect();
    for client in &mut clients {
        assert_eq!(ask(client, "PING"), "PONG");
    }
    for _ in 0..THREADS {
        let refused = Stream::connect(&serving.client, serving.address).expect_err("one too many");
        assert!(matches!(refused, Error::Rejected { .. }), "{refused}");
    }
    assert_eq!((serving.accepted)(), [2, 1, 1]);
}

#[test]
fn a_lost_device_is_told() {
    for fault in [Fault::DeviceRemoval, Fault::DeviceFatal] {
        let fabric = Fabric::new();
        let (backend, store) = (fabric.host(&[SERVER.into()]), Arc::new(Store::default()));
        let (options, limits) = (Options::default(), Limits::default());
        let at = SocketAddr::from((SERVER, 0));
        let threads = Threads::start(&backend, at, options, limits, THREADS, &store).expect("a device");
        let address = threads.local_addr().expect("it listens");
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || tell.send(threads.run().map(|never| match never {})));
        assert!(fabric.inject(SERVER.into(), Connections::All, fault, Ok(When::Event(0))));
        // Any next event occurs on a device that is gone.
        let client = fabric.host(&[CLIENT.into()]);
        std::thread::spawn(move || Stream::connect(&client, address).map(drop));
        let ended: io::Result<()> = told.recv_timeout(Duration::from_secs(60)).expect("it ends");
        let error = ended.expect_err("for that reason");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted, "{error}");
    }
}

#[test]
fn a_lost_device_is_told_by_an_endpoint() {
    for fault in [Fault::DeviceRemoval, Fault::DeviceFatal] {
        let fabric = Fabric::new();
        let (backend, store) = (fabric.host(&[SERVER.into()]), Store::default());
        let mut endpoint = Endpoint::new(&backend, Limits::default()).expect("a device");
        let address = SocketAddr::from((SERVER, 6379));
        endpoint.listen(address, Options::default()).expect("a free address");
        let mut server = Server::new(endpoint, &store);
        assert!(fabric.inject(SERVER.into(), Connections::All, fault, Ok(When::Event(0))));
        let client = fabric.host(&[CLIENT.into()]);
        std::thread::spawn(move || Stream::connect(&client, address).map(drop));
        let begun = Instant::now();
        let error = loop {
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing is told");
            if let Err(error) = server.wait(Some(Duration::from_millis(10))) {
                break error;
            }
        };
        assert!(matches!(error, Error::DeviceRemoved | Error::Device { .. }), "{error}");
    }
}

#[test]
fn an_endless_line_is_refused() {
    let serving = Serving::start(Limits::default());
    let mut client = serving.connect();
    client.stream().write_all(&[b'P'; 100_000]).expect("written");
    assert_eq!(last_word(&mut client), "ERR Protocol error: too big inline request");
    assert!(client.frame().expect("an orderly end").is_none());
}
