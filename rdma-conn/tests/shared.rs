//! Endpoints that share an event channel, and are woken by descriptors of their own.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use rdma_conn::{ConnectionId, Endpoint, Error, Event, Limits, Listener, Options, SharedEvents, Waker};
use rdma_softsim::{Fabric, SoftSim};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::world::pattern;

const LONG: Duration = Duration::from_secs(100);
const SERVER: [u8; 4] = [192, 0, 2, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 2];

fn waker() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor")
}

struct Client {
    endpoint: Endpoint<SoftSim>,
    id: ConnectionId,
    opened: bool,
    ended: bool,
    read: Vec<u8>,
}

impl Client {
    fn new(events: &Arc<SharedEvents<SoftSim>>, address: SocketAddr) -> Self {
        let mut endpoint = Endpoint::with_events(events, Limits::default(), waker()).expect("a descriptor");
        let id = endpoint.connect(address, None, LONG, Options::default()).expect("begins");
        Self { endpoint, id, opened: false, ended: false, read: Vec::new() }
    }

    /// Sleeps until one of its own two descriptors is readable.
    fn sleep(&self) {
        let mut polled = vec![PollFd::new(&self.endpoint, PollFlags::IN)];
        let completions = self.endpoint.completions_fd(self.id);
        polled.extend(completions.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let limit = Timespec { tv_sec: if self.is_due() { 0 } else { 100 }, tv_nsec: 0 };
        assert!(poll(&mut polled, Some(&limit)).expect("poll") > 0 || self.is_due(), "no wake-up came");
    }

    fn is_due(&self) -> bool {
        self.endpoint.next_timeout().is_some_and(|at| at <= self.endpoint.now())
    }

    /// Makes a turn if one of its own two descriptors is readable: nothing else wakes it.
    fn turn(&mut self) {
        let mut polled = vec![PollFd::new(&self.endpoint, PollFlags::IN)];
        let completions = self.endpoint.completions_fd(self.id);
        polled.extend(completions.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        poll(&mut polled, Some(&Default::default())).expect("poll");
        if !self.is_due() && polled.iter().all(|one| one.revents().is_empty()) {
            return;
        }
        _ = rustix::io::read(self.endpoint.as_fd(), &mut [0; 8]);
        self.endpoint.progress().expect("the fabric stays");
        while let Some(event) = self.endpoint.next_event() {
            match event {
                Event::Opened { .. } => self.opened = true,
                Event::Readable(id) => {
                    let mut bytes = [0; 4096];
                    while let Ok(Some(read)) = self.endpoint.read(id, &mut bytes) {
                        self.read.extend(&bytes[..read]);
                        if read == 0 {
                            break;
                        }
                    }
                }
                Event::Ended(_) => self.ended = true,
                _ => {}
            }
        }
    }
}

/// Sleeps until one of the descriptors of all is readable.
fn sleep(server: &Endpoint<SoftSim>, events: &SharedEvents<SoftSim>, clients: &[Client]) {
    let completions: Vec<_> =
        clients.iter().filter_map(|client| client.endpoint.completions_fd(client.id)).collect();
    let mut polled = vec![PollFd::new(server, PollFlags::IN), PollFd::new(events, PollFlags::IN)];
    polled.extend(clients.iter().map(|client| PollFd::new(&client.endpoint, PollFlags::IN)));
    polled.extend(completions.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
    let due =
        server.next_timeout().is_some_and(|at| at <= server.now()) || clients.iter().any(Client::is_due);
    let limit = Timespec { tv_sec: if due { 0 } else { 100 }, tv_nsec: 0 };
    assert!(poll(&mut polled, Some(&limit)).expect("poll") > 0 || due, "no thread was woken");
}

#[test]
fn each_endpoint_hears_of_its_own_connection() {
    let fabric = Fabric::new();
    let mut server = Endpoint::new(&fabric.host(&[SERVER.into()]), Limits::default()).expect("a device");
    let listener = server.listen((SERVER, 6379).into(), Options::default()).expect("a free address");
    let address = server.local_addr(listener).expect("it listens");
    let events = SharedEvents::new(&fabric.host(&[CLIENT.into()])).expect("a device");
    let mut clients: Vec<_> = (0..5)
        .map(|_| {
            let client = Client::new(&events, address);
            assert!(client.endpoint.completions_fd(client.id).is_none(), "the route is not known yet");
            client
        })
        .collect();
    let mut accepted = Vec::new();
    let bytes = pattern(3000);
    // The last client is told of the end by its event, and of nothing else.
    while !clients.iter().all(|client| client.ended) {
        sleep(&server, &events, &clients);
        events.dispatch().expect("the fabric stays");
        clients.iter_mut().for_each(Client::turn);
        server.progress().expect("the fabric stays");
        while let Some(event) = server.next_event() {
            if let Event::Opened { id, .. } = event {
                let number = accepted.len() as u8;
                accepted.push(id);
                server.write(id, &[IoSlice::new(&[number]), IoSlice::new(&bytes)]).expect("it is open");
            }
        }
        if clients.iter().all(|client| client.read.len() > bytes.len()) {
            accepted.drain(..).for_each(|id| server.abort(id));
        }
    }
    let mut numbers: Vec<_> = clients.iter().map(|client| client.read[0]).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1, 2, 3, 4]);
    for client in &clients {
        assert!(client.opened && client.read[1..] == bytes);
    }
    let Client { mut endpoint, id, .. } = clients.pop().expect("a client");
    endpoint.abort(id);
    assert!(format!("{events:?}").contains("identifiers: 4"), "{events:?}");
    drop(clients);
    assert!(format!("{events:?}").contains("identifiers: 0"), "{events:?}");
}

/// Each endpoint is used by a thread of its own, and another one hands events out.
#[test]
fn threads_share_events() {
    const THREADS: usize = 4;
    const CONNECTIONS: usize = 20;
    let fabric = Fabric::new();
    let mut server = Endpoint::new(&fabric.host(&[SERVER.into()]), Limits::default()).expect("a device");
    let listener = server.listen((SERVER, 6379).into(), Options::default()).expect("a free address");
    let address = server.local_addr(listener).expect("it listens");
    let events = SharedEvents::new(&fabric.host(&[CLIENT.into()])).expect("a device");
    let (serving, handing_out) = (server.waker().expect("a waker"), Waker::new().expect("a waker"));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                server.wait(None).expect("the fabric stays");
                while let Some(event) = server.next_event() {
                    match event {
                        Event::Opened { id, .. } => {
                            server.write(id, &[IoSlice::new(b"hello")]).expect("it is open");
                        }
                        Event::Ended(id) => server.abort(id),
                        _ => {}
                    }
                }
            }
        });
        scope.spawn(|| {
            while !done.load(Relaxed) {
                let mut polled =
                    [PollFd::new(&*events, PollFlags::IN), PollFd::new(&handing_out, PollFlags::IN)];
                poll(&mut polled, None).expect("poll");
                events.dispatch().expect("the fabric stays");
            }
        });
        let clients: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..CONNECTIONS {
                        let mut client = Client::new(&events, address);
                        while client.read != b"hello" {
                            client.sleep();
                            client.turn();
                        }
                    }
                })
            })
            .collect();
        let ends: Vec<_> = clients.into_iter().map(thread::ScopedJoinHandle::join).collect();
        done.store(true, Relaxed);
        serving.wake();
        handing_out.wake();
        assert!(ends.iter().all(Result::is_ok), "a thread has failed");
    });
}

/// A write to a pipe without a reader ends a program. `rdma-ffi/tests/c/shared.c` shows that one to
/// a socket does not: programs in Rust ignore the signal.
#[test]
fn a_pipe_is_no_waker() {
    let fabric = Fabric::new();
    let events = SharedEvents::new(&fabric.host(&[CLIENT.into()])).expect("a device");
    let (_reader, writer) = rustix::pipe::pipe().expect("descriptors");
    let refused = Endpoint::with_events(&events, Limits::default(), writer);
    assert!(matches!(refused, Err(Error::PipeWaker)), "{refused:?}");
}

#[test]
fn it_connects_only() {
    let fabric = Fabric::new();
    let host = fabric.host(&[CLIENT.into()]);
    let events = SharedEvents::new(&host).expect("a device");
    let mut endpoint = Endpoint::with_events(&events, Limits::default(), waker()).expect("a descriptor");
    let address = SocketAddr::from((CLIENT, 6379));
    let listens = endpoint.listen(address, Options::default());
    assert!(matches!(listens, Err(Error::Listening)));
    // Nor does it accept what another listener was asked for.
    let listener = Listener::bind(&host, address).expect("a free address");
    let mut client = Endpoint::new(&host, Limits::default()).expect("a device");
    client.connect(address, None, LONG, Options::default()).expect("begins");
    let request = loop {
        client.progress().expect("the fabric stays");
        if let Some(request) = listener.try_request().expect("listens") {
            break request;
        }
    };
    let accepted = endpoint.accept_request(request, Options::default());
    assert!(matches!(accepted, Err(Error::Listening)), "{accepted:?}");
}
