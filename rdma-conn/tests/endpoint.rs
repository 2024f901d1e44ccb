//! Many connections on one thread.

use std::collections::HashMap;
use std::io::{IoSlice, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rdma_conn::{ConnectionId, Endpoint, Error, Event, Limits, Options, Stream, Usage};
use rdma_softsim::{Fabric, Resources, SoftSim};

use crate::world::{pattern, small};

const LONG: Duration = Duration::from_secs(20);
const SERVER: [u8; 4] = [192, 0, 2, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 2];

fn echo(endpoint: &mut Endpoint<SoftSim>, over: &AtomicBool) {
    let mut owed: HashMap<ConnectionId, Vec<u8>> = HashMap::new();
    while !over.load(Ordering::Relaxed) {
        endpoint.wait(Some(Duration::from_millis(20))).expect("the fabric stays");
        while let Some(event) = endpoint.next_event() {
            match event {
                Event::Opened { .. } => {}
                Event::Readable(id) | Event::Writable(id) => {
                    let owed = owed.entry(id).or_default();
                    let mut bytes = [0; 4096];
                    // Read no further than it can answer.
                    while flush(endpoint, id, owed) {
                        match endpoint.read(id, &mut bytes) {
                            Ok(Some(read)) if read > 0 => owed.extend(&bytes[..read]),
                            _ => break,
                        }
                    }
                }
                Event::Ended(id) => endpoint.abort(id),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Returns whether all received bytes were answered.
fn flush(endpoint: &mut Endpoint<SoftSim>, id: ConnectionId, owed: &mut Vec<u8>) -> bool {
    while !owed.is_empty() {
        match endpoint.write(id, &[IoSlice::new(owed)]) {
            Ok(Some(written)) => drop(owed.drain(..written)),
            Ok(None) => return false,
            Err(_) => owed.clear(),
        }
    }
    true
}

fn listening() -> (Fabric, Endpoint<SoftSim>, SocketAddr, SoftSim) {
    let fabric = Fabric::new();
    let mut server = Endpoint::new(&fabric.host(&[SERVER.into()]), Limits::default()).expect("a device");
    let listener = server.listen((SERVER, 6379).into(), small()).expect("a free address");
    let address = server.local_addr(listener).expect("it listens");
    let client = fabric.host(&[CLIENT.into()]);
    (fabric, server, address, client)
}

/// Runs `body` beside an endpoint that echoes. Returns that endpoint's usage at the end.
fn beside_echo(limits: Limits, body: impl FnOnce(&Fabric, &SoftSim, SocketAddr)) -> Usage {
    let fabric = Fabric::new();
    let mut endpoint = Endpoint::new(&fabric.host(&[SERVER.into()]), limits).expect("a device");
    let listener = endpoint.listen((SERVER, 6379).into(), small()).expect("a free address");
    let address = endpoint.local_addr(listener).expect("it listens");
    let client = fabric.host(&[CLIENT.into()]);
    let over = AtomicBool::new(false);
    let usage = thread::scope(|scope| {
        let server = scope.spawn(|| {
            echo(&mut endpoint, &over);
            endpoint.usage()
        });
        // Stop it even if `body` panics, so that the panic shows and the test ends.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let stop = Stop(&over);
        body(&fabric, &client, address);
        drop(stop);
        server.join().expect("does not panic")
    });
    drop(endpoint);
    assert_eq!(fabric.resources(SERVER.into()), Resources::default(), "VR-RES-001: nothing is left");
    usage
}

fn next(endpoint: &mut Endpoint<SoftSim>) -> Event {
    let deadline = std::time::Instant::now() + LONG;
    loop {
        if let Some(event) = endpoint.next_event() {
            return event;
        }
        assert!(std::time::Instant::now() < deadline, "nothing happens");
        endpoint.wait(Some(LONG)).expect("the fabric stays");
    }
}

#[test]
fn streams_talk_to_an_endpoint() {
    let usage = beside_echo(Limits::default(), |_, client, address| {
        thread::scope(|scope| {
            for seed in 0..4 {
                scope.spawn(move || {
                    let mut stream = Stream::connect(client, address).expect("connects");
                    // Longer than all windows and buffers together.
                    let bytes: Vec<u8> = pattern(700_000).iter().map(|byte| byte ^ seed).collect();
                    let mut answer = vec![0; bytes.len()];
                    for (from, into) in bytes.chunks(50_000).zip(answer.chunks_mut(50_000)) {
                        stream.write_all(from).expect("written");
                        stream.read_exact(into).expect("answered");
                    }
                    assert!(answer == bytes);
                });
            }
        });
    });
    assert_eq!((usage.accepted, usage.rejected), (4, 0));
}

/// Idle connections register at most 256 KiB each, and share completion queues.
#[test]
fn idle_connections_are_small_and_share_queues() {
    const MANY: usize = 200;
    let (fabric, mut server, address, client) = listening();
    let mut client = Endpoint::new(&client, Limits::default()).expect("a device");
    let ids: Vec<_> =
        (0..MANY).map(|_| client.connect(address, None, LONG, small()).expect("begins")).collect();
    let mut opened = [0, 0];
    while opened != [MANY, MANY] {
        for (endpoint, opened) in [&mut server, &mut client].into_iter().zip(&mut opened) {
            endpoint.wait(Some(Duration::ZERO)).expect("the fabric stays");
            while let Some(event) = endpoint.next_event() {
                assert!(matches!(event, Event::Opened { .. }), "{event:?}");
                *opened += 1;
            }
        }
    }
    for usage in [server.usage(), client.usage()] {
        assert_eq!(usage.connections, MANY);
        assert!(usage.registered_bytes <= MANY as u64 * (256 << 10), "{usage:?}");
        // A first one for four, and one for each 64.
        assert_eq!(usage.completion_queues, 1 + (MANY - 4).div_ceil(64), "{usage:?}");
    }
    assert_eq!(fabric.resources(SERVER.into()).event_channels, 1);
    // A request looks at no queue of others.
    let (queues, before) = (server.usage().completion_queues as u64, server.usage().polls);
    assert_eq!(client.write(ids[0], &[IoSlice::new(b"?")]).expect("is open"), Some(1));
    assert!(matches!(next(&mut server), Event::Readable(_)));
    let polls = server.usage().polls - before;
    assert!(polls < queues, "{polls} polls of {queues} queues");
}

#[test]
fn a_refused_connection_says_so() {
    let fabric = Fabric::new();
    let _without_a_listener = fabric.host(&[SERVER.into()]);
    let mut endpoint = Endpoint::new(&fabric.host(&[CLIENT.into()]), Limits::default()).expect("a device");
    let id = endpoint.connect((SERVER, 6379).into(), None, LONG, Options::default()).expect("begins");
    assert_eq!(next(&mut endpoint), Event::Ended(id));
    let error = endpoint.check(id).expect_err("it was refused");
    assert!(error.to_string().contains("nothing listens there for RDMA"), "{error}");
    endpoint.abort(id);
    assert!(matches!(endpoint.check(id), Err(Error::NoSuchConnection)));
    drop(endpoint);
    assert_eq!(fabric.resources(CLIENT.into()), Resources::default());
}

#[test]
fn a_connection_that_takes_too_long_ends() {
    let fabric = Fabric::new();
    let server = fabric.host(&[SERVER.into()]);
    let _unanswered =
        rdma_conn::Listener::bind_with(&server, SocketAddr::from((SERVER, 6379)), small(), Limits::default())
            .expect("a free address");
    let mut endpoint = Endpoint::new(&fabric.host(&[CLIENT.into()]), Limits::default()).expect("a device");
    let timeout = Duration::from_millis(20);
    let id = endpoint.connect((SERVER, 6379).into(), None, timeout, Options::default()).expect("begins");
    assert_eq!(next(&mut endpoint), Event::Ended(id));
    let error = endpoint.check(id).expect_err("there was no answer");
    assert_eq!(error.to_string(), "timed out after 20ms connecting (192.0.2.1:6379)");
}

/// VR-RES-006: a surplus connection is rejected at once, and the others continue.
#[test]
fn one_connection_too_many_is_rejected() {
    let usage = beside_echo(Limits::default().connections(1), |_, client, address| {
        let mut first = Stream::connect(client, address).expect("connects");
        let error = Stream::connect(client, address).expect_err("one too many");
        assert!(matches!(error, Error::Rejected { .. }), "{error}");
        let mut answer = [0; 5];
        first.write_all(b"hello").and_then(|()| first.read_exact(&mut answer)).expect("answered");
        first.close(LONG).expect("in order");
        // There is room again once the server has seen the end.
        let deadline = std::time::Instant::now() + LONG;
        while let Err(error) = Stream::connect(client, address) {
            assert!(
                matches!(error, Error::Rejected { .. }) && std::time::Instant::now() < deadline,
                "{error}"
            );
        }
    });
    assert!(usage.accepted == 2 && usage.rejected >= 1, "{usage:?}");
}

#[test]
fn registered_memory_is_limited() {
    let one = u64::from(small().protocol.window) + 32 * 1280 + 4096;
    let limits = Limits::default().registered_bytes(2 * one + 100);
    let usage = beside_echo(limits, |_, client, address| {
        let _two = [(); 2].map(|()| Stream::connect(client, address).expect("connects"));
        let error = Stream::connect(client, address).expect_err("it does not fit");
        assert!(matches!(error, Error::Rejected { .. }), "{error}");
    });
    assert!(usage.registered_bytes <= 2 * one && usage.rejected == 1, "{usage:?}");
}

#[test]
fn a_client_that_does_not_read_costs_no_turns() {
    let (_fabric, mut server, address, client) = listening();
    let mut client = Endpoint::new(&client, Limits::default()).expect("a device");
    client.connect(address, None, LONG, small()).expect("begins");
    let id = loop {
        client.wait(Some(Duration::ZERO)).expect("the fabric stays");
        server.wait(Some(Duration::ZERO)).expect("the fabric stays");
        match (server.next_event(), client.next_event()) {
            (Some(Event::Opened { id, .. }), _) => break id,
            (None, _) => {}
            other => panic!("{other:?}"),
        }
    };
    let bytes = vec![7; 1 << 20];
    while server.write(id, &[IoSlice::new(&bytes)]).expect("open").is_some() || client.next_event().is_none()
    {
        client.wait(Some(Duration::ZERO)).expect("the fabric stays");
        server.wait(Some(Duration::ZERO)).expect("the fabric stays");
    }
    // Both sides are up to date. From here only time passes, with keepalives every 3 s.
    let settle = |endpoint: &mut Endpoint<SoftSim>| while endpoint.next_event().is_some() {};
    for _ in 0..10 {
        client.wait(Some(Duration::from_millis(5))).expect("the fabric stays");
        server.wait(Some(Duration::from_millis(5))).expect("the fabric stays");
        settle(&mut client);
        settle(&mut server);
    }
    let before = server.usage().turns;
    server.wait(Some(Duration::from_millis(200))).expect("the fabric stays");
    assert_eq!((server.usage().turns, server.next_event()), (before + 1, None), "it slept");
}

/// VR-CLOSE-001: written bytes arrive before the end, and the connection forgets itself.
#[test]
fn closing_delivers_the_last_bytes() {
    let (_fabric, mut server, address, client) = listening();
    let bytes = pattern(60_000);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut stream = Stream::connect(&client, address).expect("connects");
            let mut read = Vec::new();
            stream.read_to_end(&mut read).map(|_| read)
        });
        let Event::Opened { id, listener: Some(by) } = next(&mut server) else { panic!("it opens first") };
        assert_eq!(server.local_addr(by), Some(address));
        assert_eq!(server.write(id, &[IoSlice::new(&bytes)]).expect("open"), Some(bytes.len()));
        server.abandon(id, LONG).expect("it is there");
        while server.usage().connections > 0 {
            server.wait(Some(LONG)).expect("the fabric stays");
            assert_eq!(server.next_event(), None, "it is abandoned");
        }
        assert!(reader.join().expect("does not panic").expect("in order") == bytes);
    });
    assert_eq!(server.usage().completion_queues, 0);
}

#[test]
fn bytes_are_read_in_place() {
    let (_fabric, mut server, address, client) = listening();
    let window = small().protocol.window as usize;
    let bytes = pattern(window + 1000);
    thread::scope(|scope| {
        let sent = &bytes;
        let writer = scope.spawn(move || {
            let mut stream = Stream::connect(&client, address).expect("connects");
            stream.write_all(sent).expect("written");
            stream.close(LONG).expect("in order");
        });
        let Event::Opened { id, .. } = next(&mut server) else { panic!("it opens first") };
        while server.connection(id).is_some_and(|connection| connection.unread() < bytes.len() as u64) {
            assert!(matches!(next(&mut server), Event::Readable(_)));
        }
        let connection = server.connection(id).expect("it is there");
        let parts: Vec<_> = connection.arrived().collect();
        assert_eq!(parts.iter().map(rdma_conn::Arrived::len).collect::<Vec<_>>(), [window, 1000]);
        let mut copy = vec![0; window];
        assert!(parts[0].copy(0, &mut copy) && copy == bytes[..window]);
        assert!(!parts[1].copy(1, &mut [0; 1000]), "beyond the end");
        let wanted = bytes[700];
        let first = bytes[100..].iter().position(|byte| *byte == wanted).map(|place| place + 100);
        assert_eq!(parts[0].find(wanted, 100), first);
        assert!(server.consume(id, bytes.len() + 1).is_err(), "more than there is");
        server.consume(id, window + 10).expect("there are as many");
        let rest: Vec<_> = server.connection(id).expect("it is there").arrived().collect();
        let mut copy = vec![0; 990];
        assert!(rest.len() == 1 && rest[0].copy(0, &mut copy) && copy == bytes[window + 10..]);
        server.consume(id, 990).expect("the rest");
        writer.join().expect("does not panic");
    });
}

#[test]
fn an_endpoint_lends() {
    let usage = beside_echo(Limits::default(), |_, client, address| {
        let mut endpoint = Endpoint::new(client, Limits::default()).expect("a device");
        let id = endpoint.connect(address, None, LONG, small()).expect("begins");
        assert!(matches!(next(&mut endpoint), Event::Opened { .. }));
        let bytes = pattern(1 << 20);
        let mut buffer =
            endpoint.connection(id).expect("is there").register_buffer(bytes.len()).expect("registered");
        assert!(buffer.write(0, &bytes));
        let buffer = Arc::new(buffer);
        let (mut first, mut second, mut back) = (0, 0, 0);
        let mut got: Vec<u8> = Vec::new();
        while got.len() < 2 * bytes.len() || Arc::strong_count(&buffer) > 1 {
            // The second round waits until the first is posted.
            for sent in [&mut first, &mut second] {
                while *sent < bytes.len() {
                    match endpoint.lend(id, &buffer, *sent..bytes.len()).expect("the server is there") {
                        Some(lent) => *sent += lent,
                        None => break,
                    }
                }
            }
            match next(&mut endpoint) {
                Event::Readable(_) => {
                    let mut some = [0; 8192];
                    while let Some(read) = endpoint.read(id, &mut some).expect("the server is there") {
                        got.extend(&some[..read]);
                    }
                }
                Event::Writable(_) => {}
                Event::Returned(_) => back += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(got[..bytes.len()] == bytes && got[bytes.len()..] == bytes);
        let work = endpoint.connection(id).expect("is there").work();
        assert_eq!((work.lent, work.returned), (2 << 20, 2));
        assert!((1..=2).contains(&back), "{back} events for two returns");
        assert!(work.stalls < 1000, "it was woken for nothing: {work:?}");
    });
    assert_eq!(usage.accepted, 1);
}

#[test]
fn memory_is_registered_beside_the_endpoint_and_after_the_connection() {
    beside_echo(Limits::default(), |_, client, address| {
        let mut endpoint = Endpoint::new(client, Limits::default()).expect("a device");
        let id = endpoint.connect(address, None, LONG, small()).expect("begins");
        assert!(matches!(next(&mut endpoint), Event::Opened { .. }));
        let connection = endpoint.connection(id).expect("is there");
        let (registrar, before) = (connection.registrar(), connection.registered_bytes());
        let made = std::thread::scope(|scope| {
            let made = scope.spawn(|| registrar.register_buffer(4096));
            endpoint.progress().expect("the fabric stays");
            made.join().expect("does not panic")
        });
        let buffer = Arc::new(made.expect("registered"));
        let connection = endpoint.connection(id).expect("is there");
        assert_eq!(connection.registered_bytes(), before + 4096);
        assert_eq!(endpoint.lend(id, &buffer, 0..10).expect("it is of this connection"), Some(10));
        drop(buffer);
        endpoint.abort(id);
        assert_eq!(endpoint.usage().registered_bytes, 0);
        let later = registrar.register_landing(8192).expect("the domain is there");
        assert_eq!(endpoint.usage().registered_bytes, 8192);
        drop(later);
        assert_eq!(endpoint.usage().registered_bytes, 0);
    });
}
