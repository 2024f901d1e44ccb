//! Whole measurements, with servers that answer, reject, lose requests and stay silent.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use kv_store::{Server, Store};
use rdma_bench::{Load, Outcome, Test, run};
use rdma_conn::{Endpoint, Limits, Options};
use rdma_server::{Address, Rdma, Tcp, Unix};
use rdma_softsim::{Fabric, SoftSim};

fn load() -> Load {
    Load {
        requests: 1001,
        clients: 5,
        threads: 1,
        pipeline: 1,
        size: 3,
        keys: 1,
        rate: None,
        timeout: Duration::from_secs(30),
        login: rdma_bench::Login::default(),
    }
}

fn over_rdma() -> (impl Fn() -> Rdma<SoftSim>, Address) {
    let fabric = Fabric::new();
    let [server, client] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(|address| fabric.host(&[address.into()]));
    let mut endpoint = Endpoint::new(&server, Limits::default()).expect("a device");
    let address: SocketAddr = ([192, 0, 2, 1], 6379).into();
    endpoint.listen(address, Options::default()).expect("a port");
    thread::spawn(move || {
        let store = Store::default();
        let mut server = Server::new(endpoint, &store);
        loop {
            server.turn().expect("serves");
            server.endpoint.wait(None).expect("waits");
        }
    });
    (move || Rdma::new(client.clone()), address.into())
}

fn over_tcp(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let serve = Arc::clone(&serve);
            thread::spawn(move || serve(client));
        }
    });
    address.into()
}

fn plausible(outcome: &Outcome, requests: u64) {
    let latency = outcome.latency;
    assert_eq!(outcome.requests, requests, "{outcome:?}");
    assert!(outcome.seconds > 0.0 && outcome.rate > 0.0, "{outcome:?}");
    assert!(latency.min > 0.0 && latency.min <= latency.p50, "{outcome:?}");
    // The histogram keeps three digits.
    assert!(latency.p50 <= latency.p99 && latency.p9999 <= latency.max * 1.001, "{outcome:?}");
}

#[test]
fn every_request_is_counted_once() {
    let (with, target) = over_rdma();
    for (test, load) in [
        (Test::Ping, load()),
        (Test::Set, Load { size: 100_000, ..load() }),
        (Test::Get, Load { pipeline: 16, keys: 500, ..load() }),
        (Test::Mixed, Load { threads: 2, pipeline: 7, keys: 20, ..load() }),
        (Test::Get, Load { requests: 3, ..load() }),
    ] {
        let mut last = 0;
        let outcome = run(test, &load, &with, &target, |done| last = done).expect("measured");
        plausible(&outcome, load.requests);
        assert!(last <= load.requests);
    }
}

#[test]
fn an_open_loop_sends_at_its_rate() {
    let (with, target) = over_rdma();
    let open = Load { requests: 300, rate: Some(1000.0), threads: 2, ..load() };
    let outcome = run(Test::Ping, &open, with, &target, |_| {}).expect("measured");
    plausible(&outcome, 300);
    // The last request is not due before that. The delay of its reply depends on the machine.
    assert!(outcome.seconds >= 0.297, "{outcome:?}");
}

/// If values are longer than a window, each connection has filled one before the clock runs.
#[test]
fn connections_are_busy_ones_before_the_clock_runs() {
    let heard = Arc::new(AtomicU64::new(0));
    let store = Store::default();
    let counted = Arc::clone(&heard);
    let target = over_tcp(move |client| {
        let _left = store.serve(Counting(client, &counted));
    });
    // No request of these tests is as long as a window; one value is.
    for (requests, asked) in [(50, 0), (60, 5)] {
        heard.store(0, Ordering::Relaxed);
        let outcome = run(Test::Get, &Load { requests, size: 100_000, ..load() }, Tcp::new, &target, |_| {});
        plausible(&outcome.expect("measured"), requests);
        assert_eq!(heard.load(Ordering::Relaxed) >> 20, asked, "{requests} requests");
    }
}

struct Counting<'a>(TcpStream, &'a AtomicU64);

impl Read for Counting<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.0.read(into)?;
        self.1.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl Write for Counting<'_> {
    fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
        self.0.write(from)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

fn failure(serve: impl Fn(TcpStream) + Send + Sync + 'static, test: Test) -> String {
    let short = Load { timeout: Duration::from_millis(200), requests: 10, threads: 2, ..load() };
    run(test, &short, Tcp::new, &over_tcp(serve), |_| {}).expect_err("no measurement").to_string()
}

fn replying(reply: &'static [u8]) -> impl Fn(TcpStream) + Send + Sync {
    move |mut client| {
        let mut chunk = [0; 4096];
        while client.read(&mut chunk).is_ok_and(|read| read > 0) && client.write_all(reply).is_ok() {}
    }
}

#[test]
fn what_is_no_measurement_is_an_error() {
    assert_eq!(failure(replying(b"-ERR no\r\n"), Test::Ping), r#"the server replied "ERR no""#);
    assert_eq!(failure(replying(b"-ERR no\r\n"), Test::Get), r#"the server replied "ERR no""#);
    assert_eq!(failure(replying(b"$-1\r\n"), Test::Get), r#"the server replied "$-1" to SET"#);
    assert_eq!(failure(replying(b""), Test::Get), "no reply for 200ms");
    assert_eq!(failure(replying(b"+OK\r\n$-1\r\n"), Test::Ping), "a key that was stored is missing");
    assert_eq!(failure(replying(b"+OK\r\n+OK\r\n"), Test::Ping), "a reply to no request");
    assert_eq!(failure(replying(b""), Test::Ping), "no reply for 200ms");
    let ending = |mut client: TcpStream| drop(client.read(&mut [0; 64]));
    assert_eq!(failure(ending, Test::Ping), "the server ended a connection");
    assert_eq!(failure(ending, Test::Get), "the server ended a connection");
}

#[test]
fn the_reason_of_a_server_that_denies_all_is_told() {
    let denying = |mut client: TcpStream| drop(client.write_all(b"-DENIED no strangers\r\n"));
    for test in [Test::Ping, Test::Get] {
        assert_eq!(failure(denying, test), r#"the server replied "DENIED no strangers""#);
    }
}

#[test]
fn the_last_words_of_a_server_are_told() {
    let path = std::env::temp_dir().join(format!("rdma-bench-words-{}", std::process::id()));
    let _left_by_another = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).expect("a socket");
    let server = thread::spawn(move || {
        let [mut first, mut second] = [(); 2].map(|()| listener.accept().expect("a client").0);
        assert!(first.read(&mut [0; 64]).expect("a PING") > 0);
        first.write_all(b"$0\r\n\r\n-ERR enough\r\n").expect("there is room");
        drop(first);
        // The clock runs once this client has its reply, too.
        assert!(second.read(&mut [0; 64]).expect("a PING") > 0);
        second.write_all(b"$0\r\n\r\n").expect("there is room");
        second
    });
    let load = Load { clients: 2, ..load() };
    let error = run(Test::Ping, &load, Unix::new, &path.clone().into(), |_| {}).expect_err("no measurement");
    assert_eq!(error.to_string(), r#"the server replied "ERR enough""#);
    server.join().expect("served");
    std::fs::remove_file(path).expect("it is there");
}

#[test]
fn an_error_in_one_thread_ends_the_others() {
    let served = AtomicU64::new(0);
    let target = over_tcp(move |mut client| {
        let first = served.fetch_add(1, Ordering::Relaxed) == 0;
        let mut chunk = [0; 64];
        assert!(client.read(&mut chunk).expect("a PING") > 0);
        client.write_all(b"$0\r\n\r\n").expect("there is room");
        while client.read(&mut chunk).is_ok_and(|read| read > 0) {
            if first {
                client.write_all(b"-ERR no\r\n").expect("there is room");
            }
        }
    });
    let (told, error) = mpsc::channel();
    thread::spawn(move || {
        let load = Load { clients: 2, threads: 2, timeout: Duration::from_secs(3600), ..load() };
        told.send(run(Test::Ping, &load, Tcp::new, &target, |_| {}))
    });
    let error = error.recv_timeout(Duration::from_secs(60)).expect("it is told").expect_err("no measurement");
    assert_eq!(error.to_string(), r#"the server replied "ERR no""#);
}

#[test]
fn a_measurement_without_a_server_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address: Address = listener.local_addr().expect("bound").into();
    drop(listener);
    let error = run(Test::Ping, &load(), Tcp::new, &address, |_| {}).expect_err("refused");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    assert!(error.to_string().starts_with(&format!("no connection to {address}: ")), "{error}");
    let stored = run(Test::Get, &load(), Tcp::new, &address, |_| {}).expect_err("refused");
    assert_eq!(stored.to_string(), error.to_string());
}
