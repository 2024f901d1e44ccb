//! Endpoints that share an event channel, and are woken by descriptors of their own.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rdma_conn::{ConnectionId, Endpoint, Error, Event, Limits, Options, SharedEvents};
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
    assert!(poll(&mut polled, Some(&limit)).expect("poll") > 0 || due, "nobody is woken");
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
            let mut endpoint =
                Endpoint::with_events(&events, Limits::default(), waker()).expect("a descriptor");
            let id = endpoint.connect(address, None, LONG, Options::default()).expect("begins");
            assert!(endpoint.completions_fd(id).is_none(), "the route is not known yet");
            Client { endpoint, id, opened: false, ended: false, read: Vec::new() }
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

#[test]
fn it_connects_only() {
    let fabric = Fabric::new();
    let events = SharedEvents::new(&fabric.host(&[CLIENT.into()])).expect("a device");
    let mut endpoint = Endpoint::with_events(&events, Limits::default(), waker()).expect("a descriptor");
    let listens = endpoint.listen((CLIENT, 6379).into(), Options::default());
    assert!(matches!(listens, Err(Error::Listening)));
}
