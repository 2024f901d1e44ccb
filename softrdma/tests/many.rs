//! Many connections in one process, by each kind of stream. What a process has once must not be
//! multiplied by them. An epoll instance of 101 endpoints met a limit of Linux before, and so did
//! the 501st blocking stream.

mod common;

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::time::Duration;

use common::{CLIENT, Home, Running, SERVER, program, role};
use rdma_backend::time::Instant;
use rdma_conn::{AsyncStream, Connect, Endpoint, Event, Keepalive, Limits, Options, Stream};
use rdma_verbs::Verbs;
use rustix::event::{Timespec, epoll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// More than the 100 paths on which one descriptor may wake epoll instances that others watch.
const MANY: usize = 128;

/// More than the 500 paths through epoll instances that no other watches.
const BLOCKING: usize = 520;

/// Longer than a machine may stand still.
const LONG: Duration = Duration::from_secs(600);

fn patient() -> Connect {
    let mut options = Options::default().handshake_timeout(LONG);
    options.protocol.keepalive = Some(Keepalive::NONE);
    options.protocol.window = 4096;
    Connect::default().timeout(LONG).options(options)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

fn verbs() -> Verbs {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).expect("as many as allowed");
    Verbs::load().expect("the libraries of softrdma")
}

/// A program that echoes what its clients send.
#[test]
fn echoes() {
    let Some(_) = role("echoes") else { return };
    let mut endpoint = Endpoint::new(&verbs(), Limits::default()).expect("an endpoint");
    let address = SocketAddr::new(SERVER.parse().expect("an address"), 0);
    let listener = endpoint.listen(address, patient().options).expect("a listener");
    println!("listens on {}", endpoint.local_addr(listener).expect("it listens"));
    let mut bytes = [0; 64];
    loop {
        endpoint.wait(None).expect("waits");
        while let Some(event) = endpoint.next_event() {
            match event {
                Event::Readable(id) => {
                    while let Ok(Some(count @ 1..)) = endpoint.read(id, &mut bytes) {
                        endpoint.write(id, &[std::io::IoSlice::new(&bytes[..count])]).expect("writes");
                    }
                }
                Event::Ended(id) => endpoint.abort(id),
                Event::AcceptFailed(listener) => {
                    panic!("{}", endpoint.take_accept_error(listener).expect("an error"));
                }
                _ => {}
            }
        }
    }
}

/// A program with many streams, on each of which a message is echoed.
#[test]
fn streams() {
    let Some(address) = role("streams") else { return };
    let (verbs, before) = (verbs(), descriptors());
    let connect = |nth| {
        Stream::connect_with(&verbs, &*address, &patient()).unwrap_or_else(|error| panic!("{nth}: {error}"))
    };
    let mut streams: Vec<_> = (0..BLOCKING).map(connect).collect();
    println!("descriptors {:.1}", (descriptors() - before) as f64 / BLOCKING as f64);
    for stream in &mut streams {
        stream.write_all(b"hello").expect("written");
    }
    for stream in &mut streams {
        let mut back = [0; 5];
        stream.read_exact(&mut back).expect("read");
        assert_eq!(&back, b"hello");
    }
    println!("done");
}

/// A program whose event loop has an epoll instance over many endpoints, as libvalkey's users have.
#[test]
fn endpoints() {
    let Some(address) = role("endpoints") else { return };
    let (verbs, before) = (verbs(), descriptors());
    let address = address.parse().expect("an address");
    let watch = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll instance");
    let mut endpoints = Vec::new();
    for nth in 0..MANY {
        let mut endpoint = Endpoint::new(&verbs, Limits::default()).expect("an endpoint");
        let data = epoll::EventData::new_u64(nth as u64);
        epoll::add(&watch, endpoint.as_fd(), data, epoll::EventFlags::IN)
            .unwrap_or_else(|error| panic!("{nth}: {error}"));
        endpoint.connect(address, None, LONG, patient().options).expect("connects");
        endpoints.push(endpoint);
    }
    let (mut echoed, mut events) = (0, Vec::with_capacity(MANY));
    while echoed < MANY {
        let limit = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        epoll::wait(&watch, rustix::buffer::spare_capacity(&mut events), Some(&limit)).expect("waits");
        let due = endpoints
            .iter()
            .enumerate()
            .filter(|(_, endpoint)| endpoint.next_timeout().is_some_and(|at: Instant| at <= endpoint.now()));
        let mut due: Vec<_> = due.map(|(nth, _)| nth).collect();
        due.extend(events.drain(..).map(|event| event.data.u64() as usize));
        for nth in due {
            let endpoint = &mut endpoints[nth];
            endpoint.progress().expect("progress");
            while let Some(event) = endpoint.next_event() {
                match event {
                    Event::Opened { id, .. } => {
                        endpoint.write(id, &[std::io::IoSlice::new(b"hello")]).expect("written");
                    }
                    Event::Readable(id) => {
                        assert_eq!(endpoint.read(id, &mut [0; 64]).expect("read"), Some(5));
                        echoed += 1;
                    }
                    Event::Ended(id) => panic!("{nth}: {:?}", endpoint.check(id)),
                    _ => {}
                }
            }
        }
    }
    println!("descriptors {:.1}", (descriptors() - before) as f64 / MANY as f64);
    println!("done");
}

/// A program with many asynchronous streams, each on an endpoint of its own.
#[test]
fn tasks() {
    let Some(address) = role("tasks") else { return };
    let (verbs, before) = (verbs(), descriptors());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut streams = Vec::new();
        for nth in 0..MANY {
            let stream = AsyncStream::connect_with(&verbs, &*address, &patient()).await;
            streams.push(stream.unwrap_or_else(|error| panic!("{nth}: {error}")));
        }
        println!("descriptors {:.1}", (descriptors() - before) as f64 / MANY as f64);
        for stream in &mut streams {
            stream.write_all(b"hello").await.expect("written");
            let mut back = [0; 5];
            stream.read_exact(&mut back).await.expect("read");
            assert_eq!(&back, b"hello");
        }
    });
    println!("done");
}

fn connect_many(kind: &str) {
    let home = Home::new(kind);
    let mut server = Running::start(&mut program(&home, SERVER, "echoes", ""));
    let address = server.line("listens on ");
    let mut client = Running::start(&mut program(&home, CLIENT, kind, &address));
    println!("{kind}: {} descriptors for each", client.line("descriptors "));
    let (done, text) = client.finish();
    assert!(done && text.contains("done"), "{text}");
    drop(server);
    home.is_left();
}

#[test]
fn a_process_has_many_blocking_streams() {
    connect_many("streams");
}

#[test]
fn an_event_loop_watches_many_endpoints() {
    connect_many("endpoints");
}

#[test]
fn a_runtime_has_many_asynchronous_streams() {
    connect_many("tasks");
}
