//! Many connections in one process, by each kind of stream. What a process has once must not be
//! multiplied by them. An epoll instance of 101 endpoints met a limit of Linux before, and so did
//! the 501st blocking stream.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;

use rdma_backend::time::Instant;
use rdma_conn::{AsyncStream, Endpoint, Event, Limits, Stream};
use rustix::event::{Timespec, epoll};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::echo::{self, LONG, patient, verbs};
use crate::fabric::{CLIENT, Home, role};

/// More than the 100 paths on which one descriptor may wake epoll instances that others watch.
const MANY: usize = 128;

/// More than the 500 paths through epoll instances that no other watches.
const BLOCKING: usize = 520;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

/// A program with many streams, on each of which a message is echoed.
#[test]
fn streams() {
    let Some(address) = role("many::streams") else { return };
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
    let Some(address) = role("many::endpoints") else { return };
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
    let Some(address) = role("many::tasks") else { return };
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

fn connect_many(role: &str) {
    let Some(home) = Home::new(&role.replace("::", "-")) else { return };
    let (server, address) = echo::server(&home);
    let mut client = home.program(CLIENT, role, &address);
    println!("{role}: {} descriptors for each", client.line("descriptors "));
    let (done, text) = client.finish();
    assert!(done && text.contains("done"), "{text}");
    drop(server);
    home.is_left();
}

#[test]
fn a_process_has_many_blocking_streams() {
    connect_many("many::streams");
}

#[test]
fn an_event_loop_watches_many_endpoints() {
    connect_many("many::endpoints");
}

#[test]
fn a_runtime_has_many_asynchronous_streams() {
    connect_many("many::tasks");
}
