//! Zero-copy receiving over the embedded fabric.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rdma_conn::{
    ConnectionId, Endpoint, Error, Limits, Listener, Options, Receiving, RegisteredBuffer, Stream,
};
use rdma_softsim::{Fabric, SoftSim};

use crate::world::{pattern, streams};

const LONG: Duration = Duration::from_secs(20);
const WINDOW: usize = 10_000;

fn pair(windows: u8) -> (Stream<SoftSim>, Stream<SoftSim>) {
    let mut options = Options::default();
    (options.protocol.window, options.protocol.windows) = (WINDOW as u32, windows);
    streams(options, Options::default())
}

fn bytes_of(buffer: &RegisteredBuffer<SoftSim>, range: std::ops::Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    assert!(buffer.read(range.start, &mut bytes), "not inside");
    bytes
}

/// A header of 5 bytes, a value and a trailer, as a server sends them. Every window that lies
/// wholly in the value lands in its final place, and the buffer comes back.
fn receives(windows: u8, len: usize) {
    let (mut client, mut server) = pair(windows);
    let value = pattern(len);
    let sender = thread::spawn({
        let value = value.clone();
        move || {
            for _round in 0..2 {
                server.write_all(b"head\n").expect("written");
                server.write_all(&value).expect("written");
                server.write_all(b"tail\n").expect("written");
            }
            server.flush().expect("the client reads");
            server
        }
    });
    let mut buffer = Arc::new(client.register_landing(len + 20).expect("registered"));
    for _round in 0..2 {
        let mut line = [0; 5];
        client.read_exact(&mut line).expect("the header");
        assert_eq!(&line, b"head\n");
        let received = client.receive(&buffer, 7..7 + len).expect("the value");
        assert_eq!(received.landed + received.copied, len as u64, "{len}");
        assert!(bytes_of(&buffer, 7..7 + len) == value, "{len} bytes with {windows} windows");
        let beside = [bytes_of(&buffer, 0..7), bytes_of(&buffer, 7 + len..len + 20)].concat();
        assert!(beside.iter().all(|byte| *byte == 0), "it wrote outside of the range");
        client.read_exact(&mut line).expect("the trailer");
        assert_eq!(&line, b"tail\n");
        // Two windows were announced before the header was read: they and the rest are copied.
        let at_least = len.saturating_sub(3 * WINDOW) as u64;
        assert!(received.landed >= at_least && received.landed % WINDOW as u64 == 0, "{len}: {received:?}");
    }
    assert!(Arc::get_mut(&mut buffer).is_some(), "it was not given back");
    // Both ends must be driven: an end whose peer is idle waits for the background thread.
    let server = sender.join().expect("does not panic");
    thread::scope(|scope| {
        scope.spawn(|| drop(server));
        drop(client);
    });
}

#[test]
fn values_of_all_lengths_land() {
    for windows in [1, 2] {
        for len in
            [0, 1, WINDOW - 5, WINDOW, 2 * WINDOW, 10 * WINDOW - 5, 10 * WINDOW, 10 * WINDOW + 1, 123_456]
        {
            receives(windows, len);
        }
    }
}

fn endpoint_and_stream() -> (Endpoint<SoftSim>, ConnectionId, Stream<SoftSim>) {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("is free");
    let client = fabric.host(&[[192, 0, 2, 2].into()]);
    let mut endpoint = Endpoint::new(&client, Limits::NONE).expect("a device");
    let mut options = Options::default();
    options.protocol.window = WINDOW as u32;
    let id = endpoint.connect(address, None, LONG, options).expect("begins");
    let server = thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let (mut server, _) = listener.accept_timeout(LONG).expect("accepts");
            server.flush().expect("is established");
            server
        });
        while !endpoint.is_open(id) || !endpoint.connection(id).expect("is there").has_peer_window() {
            endpoint.wait(Some(LONG)).expect("the fabric stays");
        }
        accepted.join().expect("does not panic")
    });
    (endpoint, id, server)
}

fn until<T>(
    endpoint: &mut Endpoint<SoftSim>,
    mut step: impl FnMut(&mut Endpoint<SoftSim>) -> Option<T>,
) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        while endpoint.next_event().is_some() {}
        if let Some(done) = step(endpoint) {
            return done;
        }
        assert!(Instant::now() < deadline, "nothing comes");
        endpoint.wait(Some(LONG)).expect("the fabric stays");
    }
}

/// Begins to receive into `range`, and gives up when the connection has received this many bytes.
fn give_up(
    endpoint: &mut Endpoint<SoftSim>,
    id: ConnectionId,
    buffer: &Arc<RegisteredBuffer<SoftSim>>,
    range: Range<usize>,
    after: usize,
) {
    let mut receiving = Receiving::new(Arc::clone(buffer), range);
    until(endpoint, |endpoint| {
        assert_eq!(endpoint.receive(id, &mut receiving).expect("the server is there"), None);
        let got = endpoint.connection(id).expect("is there").counters().bytes_received;
        (got == after as u64).then_some(())
    });
    endpoint.stop_landing(id).expect("is there");
}

fn registered(endpoint: &Endpoint<SoftSim>, id: ConnectionId, len: usize) -> Arc<RegisteredBuffer<SoftSim>> {
    Arc::new(endpoint.connection(id).expect("is there").register_landing(len).expect("registered"))
}

/// A reader that gives up leaves the missing bytes to the next read, wherever they arrive.
#[test]
fn a_reader_may_give_up() {
    let (mut endpoint, id, mut server) = endpoint_and_stream();
    let value = pattern(8 * WINDOW);
    let (first, second) = value.split_at(3 * WINDOW + 17);
    let mut buffer = registered(&endpoint, id, value.len());
    server.write_all(first).expect("written");
    give_up(&mut endpoint, id, &buffer, 0..value.len(), first.len());
    assert!(bytes_of(&buffer, 0..first.len()) == first);
    assert!(Arc::get_mut(&mut buffer).is_none(), "a window lies in it");

    server.write_all(second).expect("written");
    let mut rest = Vec::<u8>::new();
    until(&mut endpoint, |endpoint| {
        let mut some = [0; 777];
        while let Some(read) = endpoint.read(id, &mut some).expect("the server is there") {
            rest.extend(&some[..read]);
        }
        (rest.len() == second.len()).then_some(())
    });
    assert!(rest == second);
    assert!(Arc::get_mut(&mut buffer).is_some(), "it was not given back");
}

/// A receive after a given up one fills its own place, although windows lie in the old buffer.
#[test]
fn what_was_given_up_does_not_confuse_the_next() {
    let (mut endpoint, id, mut server) = endpoint_and_stream();
    let value = pattern(12 * WINDOW);
    let (first, second) = value.split_at(3 * WINDOW + 17);
    let given_up = registered(&endpoint, id, value.len());
    server.write_all(first).expect("written");
    give_up(&mut endpoint, id, &given_up, 0..value.len(), first.len());

    let buffer = registered(&endpoint, id, second.len());
    server.write_all(second).expect("written");
    let mut receiving = Receiving::new(Arc::clone(&buffer), 0..second.len());
    until(&mut endpoint, |endpoint| endpoint.receive(id, &mut receiving).expect("the server is there"));
    assert!(bytes_of(&buffer, 0..second.len()) == second);
}

/// Sends `bytes` on a thread: behind a full window they would wait for the background thread.
fn while_sent(server: &mut Stream<SoftSim>, bytes: &[u8], act: impl FnOnce()) {
    thread::scope(|scope| {
        scope.spawn(|| {
            server.write_all(bytes).expect("written");
            server.flush().expect("the client reads");
        });
        act();
    });
}

#[test]
fn what_was_given_up_may_be_received_into_the_same_buffer() {
    for shift in [0_usize, 83, 500] {
        let (mut endpoint, id, mut server) = endpoint_and_stream();
        let value = pattern(12 * WINDOW);
        let (first, second) = value.split_at(3 * WINDOW + 17);
        let buffer = registered(&endpoint, id, value.len() + 500);
        while_sent(&mut server, first, || {
            give_up(&mut endpoint, id, &buffer, 0..value.len(), first.len());
        });
        // The rest of the window lands where it was announced, and belongs elsewhere.
        let at = first.len() + shift;
        while_sent(&mut server, second, || {
            until(&mut endpoint, |endpoint| {
                let unread = endpoint.connection(id).expect("is there").unread();
                (unread >= (WINDOW - 17) as u64).then_some(())
            });
            let mut receiving = Receiving::new(Arc::clone(&buffer), at..at + second.len());
            until(&mut endpoint, |endpoint| {
                endpoint.receive(id, &mut receiving).expect("the server is there")
            });
        });
        assert!(bytes_of(&buffer, at..at + second.len()) == second, "up by {shift}");
    }
}

#[test]
fn bytes_that_still_land_are_not_received_over() {
    let (mut endpoint, id, mut server) = endpoint_and_stream();
    let value = pattern(6 * WINDOW);
    let (first, second) = value.split_at(3 * WINDOW + 17);
    let buffer = registered(&endpoint, id, 2 * value.len());
    server.write_all(first).expect("written");
    give_up(&mut endpoint, id, &buffer, 0..value.len(), first.len());
    let refused = |endpoint: &mut Endpoint<SoftSim>, range| {
        let told = endpoint.receive(id, &mut Receiving::new(Arc::clone(&buffer), range));
        let told = told.expect_err("it would be written over").to_string();
        assert!(told.contains("landed"), "{told}");
    };
    // The window that the peer is filling is not full.
    let at = first.len();
    refused(&mut endpoint, at + 83..at + 83 + second.len());
    server.write_all(&second[..WINDOW]).expect("written");
    until(&mut endpoint, |endpoint| {
        let unread = endpoint.connection(id).expect("is there").unread();
        (unread == (WINDOW - 17) as u64).then_some(())
    });
    // Now it is, and part of it would overwrite the rest.
    refused(&mut endpoint, at + 83..at + 93);
    // Allowed: where nothing lands, in place, and all of it anywhere.
    for range in [value.len()..value.len() + 10, at + 10..at + 30, at + 33..at + 33 + WINDOW - 17 - 30] {
        let from = range.len();
        let mut receiving = Receiving::new(Arc::clone(&buffer), range.clone());
        until(&mut endpoint, |endpoint| endpoint.receive(id, &mut receiving).expect("the server is there"));
        let read = endpoint.connection(id).expect("is there").counters().bytes_received
            - endpoint.connection(id).expect("is there").unread();
        let read = read as usize;
        assert!(bytes_of(&buffer, range) == value[read - from..read]);
    }
}

#[test]
fn the_end_in_the_middle_is_an_error() {
    let (mut client, mut server) = pair(2);
    let value = pattern(5 * WINDOW + 3);
    let buffer = Arc::new(client.register_landing(2 * value.len()).expect("registered"));
    let ended = thread::scope(|scope| {
        scope.spawn(|| {
            server.write_all(&value).expect("written");
            server.close(LONG).expect("the client reads");
        });
        client.receive(&buffer, 0..2 * value.len()).expect_err("half of it is missing")
    });
    assert_eq!(ended.io_kind(), ErrorKind::BrokenPipe, "{ended}");
    assert!(bytes_of(&buffer, 0..value.len()) == value);
    drop(client);
    assert!(bytes_of(&buffer, 0..value.len()) == value, "the memory outlives the connection");
}

#[test]
fn memory_is_landed_in_by_its_own_connection_only_and_within_its_bounds() {
    let ((mut one, _far), (two, _away)) = (pair(2), pair(2));
    let before = one.registered_bytes();
    let foreign = Arc::new(two.register_landing(10).expect("registered"));
    assert!(matches!(one.receive(&foreign, 0..10), Err(Error::ForeignBuffer)));
    let own = Arc::new(one.register_landing(10).expect("registered"));
    assert_eq!(one.registered_bytes(), before + 10);
    #[expect(clippy::reversed_empty_ranges, reason = "it must be refused")]
    for range in [0..11, 11..12, 5..4] {
        let refused = one.receive(&own, range.clone()).expect_err("not inside");
        assert_eq!(refused.io_kind(), ErrorKind::InvalidInput, "{range:?}: {refused}");
    }
    assert_eq!(one.receive(&own, 10..10).expect("nothing is received"), Default::default());
    assert!(one.register_landing(0).is_err(), "no memory at all is registered");
    drop(own);
    assert_eq!(one.registered_bytes(), before);
}
