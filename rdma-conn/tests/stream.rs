//! Streams over the embedded fabric: what a user of `TcpStream` would expect, and what RDMA adds.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rdma_conn::{Connect, Error, Keepalive, Listener, Options, Role, Stream};
use rdma_softsim::{Connections, Fabric, Fault, SoftSim, When};

use crate::world::{dialed, pattern, streams};

const LONG: Duration = Duration::from_secs(20);

struct TestBed {
    fabric: Fabric,
    client: SoftSim,
    listener: Listener<SoftSim>,
    address: SocketAddr,
}

fn test_bed(options: Options) -> TestBed {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener =
        Listener::bind_with(&fabric.host(&[address.ip()]), address, options, rdma_conn::Limits::default())
            .expect("a free address");
    TestBed { client: fabric.host(&[[192, 0, 2, 2].into()]), fabric, listener, address }
}

fn pair() -> (Stream<SoftSim>, Stream<SoftSim>) {
    streams(Options::default(), Options::default())
}

fn read_all(stream: &mut Stream<SoftSim>, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).expect("all bytes");
    bytes
}

/// VR-CLOSE-003: a device that refuses a write ends the connection, and the peer learns of it.
#[test]
fn a_write_that_is_refused_ends_both_sides() {
    // Without keepalives, which would reveal it in the end.
    let mut options = Options::default();
    options.protocol.keepalive = Some(Keepalive::NONE);
    let test_bed = test_bed(options);
    let how = Connect::default().options(options);
    let (mut client, mut server, _) = dialed(&test_bed.client, &test_bed.listener, &how);
    // The first write registers the send buffer. The next one takes the fast path.
    client.write_all(b"first").expect("written");
    assert_eq!(read_all(&mut server, 5), b"first");
    let now = Ok(When::Event(0));
    assert!(test_bed.fabric.inject([192, 0, 2, 2].into(), Connections::All, Fault::QueueFull, now));
    _ = client.write(b"second");
    client.write(b"third").expect_err("the device has refused");
    server.set_read_timeout(Some(LONG));
    let heard = server.read(&mut [0; 6]);
    assert!(matches!(heard, Ok(0)), "{heard:?}");
}

/// VR-FLOW-006: one notification, however many pieces.
#[test]
fn a_vectored_write_is_one_notification() {
    let (mut client, mut server) = pair();
    let (before, work) = (client.counters().data_notifications_sent, client.work());
    let slices = [b"one ".as_slice(), b"", b"two ", b"three"].map(IoSlice::new);
    assert_eq!(client.write_vectored(&slices).expect("written"), 13);
    assert_eq!(client.counters().data_notifications_sent, before + 1);
    assert_eq!((client.work().doorbells, client.work().requests), (work.doorbells + 1, work.requests + 1));
    assert_eq!(read_all(&mut server, 13), b"one two three");
}

/// VR-FLOW-001, VR-MEM-003: many windows both ways at once, with settings from roomy to absurd.
#[test]
fn long_transfers_arrive_whole_whatever_the_settings() {
    let roomy = (Options::default(), Options::default(), 16 << 20);
    let mut tiny = roomy;
    for options in [&mut tiny.0, &mut tiny.1] {
        options.protocol.window = 3;
        options.protocol.send_buffer = 5;
        options.protocol.send_depth = 1;
        options.protocol.peer_receives = 2;
        options.receives = 2;
        options.inline = 0;
    }
    tiny.2 = 2000;
    let mut odd = roomy;
    (odd.0.protocol.window, odd.0.protocol.windows) = (65_537, 1);
    (odd.1.protocol.window, odd.1.protocol.send_buffer) = (40_961, 10_007);
    for (client, server, len) in [roomy, tiny, odd] {
        let (client, server) = streams(client, server);
        let sent = pattern(len);
        thread::scope(|scope| {
            for mut stream in [client, server] {
                let sent = &sent;
                scope.spawn(move || {
                    // Half at a time: neither side waits for ever for the other to read.
                    let mut received = Vec::new();
                    for half in sent.chunks(len.div_ceil(1 << 10)) {
                        stream.write_all(half).expect("written");
                        received.extend(read_all(&mut stream, half.len()));
                    }
                    assert!(received == *sent, "{len} bytes differ");
                });
            }
        });
    }
}

#[test]
fn a_read_times_out() {
    let (mut client, _server) = pair();
    client.set_read_timeout(Some(Duration::from_millis(20)));
    let error = client.read(&mut [0; 1]).expect_err("there is nothing to read");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("20ms reading"), "{error}");
}

#[test]
fn a_write_times_out() {
    let (mut client, _server) = pair();
    client.set_write_timeout(Some(Duration::from_millis(50)));
    let error = loop {
        if let Err(error) = client.write(&[0; 1 << 20]) {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

/// VR-CLOSE-001, VR-CLOSE-002: bytes written before the end are read before the end.
#[test]
fn the_last_bytes_arrive_before_the_end() {
    for shut in [true, false] {
        let (mut client, mut server) = pair();
        let last = pattern(3 << 20);
        thread::scope(|scope| {
            scope.spawn(|| {
                client.write_all(&last).expect("written");
                if shut {
                    client.close(LONG).expect("delivered");
                }
                drop(client);
            });
            let mut received = Vec::new();
            server.read_to_end(&mut received).expect("ends in order");
            assert!(received == last, "{} of {} bytes", received.len(), last.len());
        });
    }
}

#[test]
fn after_the_end_reads_return_nothing_and_writes_fail() {
    let (client, mut server) = pair();
    drop(client);
    assert_eq!(server.read(&mut [0; 1]).expect("the end"), 0);
    assert_eq!(server.read(&mut [0; 1]).expect("still the end"), 0);
    assert_eq!(server.write(b"late").expect_err("the peer has left").kind(), ErrorKind::BrokenPipe);
}

/// VR-CLOSE-003: a call that waits for bytes to leave fails if the peer ends without taking them.
#[test]
fn a_flush_ends_when_the_peer_does() {
    let (mut client, server) = pair();
    // What the server's windows do not hold stays here, because nothing reads.
    client.set_write_timeout(Some(Duration::from_millis(50)));
    while client.write(&[0; 1 << 20]).is_ok() {}
    client.set_write_timeout(Some(LONG));
    drop(server);
    let error = client.flush().expect_err("the rest is not taken");
    assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
}

#[test]
fn a_shutdown_that_times_out_says_so() {
    let (mut client, _server) = pair();
    client.set_write_timeout(Some(Duration::from_millis(50)));
    while client.write(&[0; 1 << 20]).is_ok() {}
    let error = client.close(Duration::from_millis(50)).expect_err("the server does not read");
    assert!(error.to_string().contains("bytes not yet confirmed"), "{error}");
}

/// VR-RES-003: a program that is busy elsewhere does not starve its peer of receives.
#[test]
fn an_idle_stream_posts_its_receives_again() {
    let mut server = Options::default();
    server.protocol.keepalive = Some(Keepalive::NONE.every(Some(Duration::from_millis(1))));
    let mut client = Options::default();
    client.receives = 4;
    let (mut client, server) = streams(client, server);
    let patience = std::time::Instant::now();
    while client.counters().keepalives_received < 6 {
        assert!(patience.elapsed() < LONG, "{:?}", client.counters());
        // Neither side is called; only the background thread drives them.
        thread::sleep(Duration::from_millis(10));
    }
    drop(server);
    assert_eq!(client.read(&mut [0; 1]).expect("the end"), 0);
}

/// VR-RES-001.
#[test]
fn nothing_is_left_of_a_connection() {
    let test_bed = test_bed(Options::default());
    let before = test_bed.fabric.resources(test_bed.address.ip());
    for _ in 0..3 {
        let (client, ..) = dialed(&test_bed.client, &test_bed.listener, &Connect::default());
        drop(client);
    }
    assert_eq!(test_bed.fabric.resources(test_bed.address.ip()), before);
    assert_eq!(test_bed.fabric.resources([192, 0, 2, 2].into()), Default::default());
}

#[test]
fn memory_comes_with_work_and_goes_with_it() {
    let mut options = Options::default();
    options.keep_memory = Duration::from_millis(1);
    options.protocol.window = 64 << 10;
    options.protocol.send_buffer = 128 << 10;
    let slots = usize::from(options.protocol.send_depth) + usize::from(options.receives);
    let idle = (64 << 10) + 32 * slots + 4096;
    let (mut client, mut server) = streams(Options::default(), options);
    assert_eq!(server.registered_bytes(), idle);
    let bytes = pattern(96 << 10);
    client.write_all(&bytes).expect("written");
    let mut first = [0; 1];
    server.read_exact(&mut first).expect("a byte");
    await_registered(&server, idle + (64 << 10), "the peer goes on in a second window");
    assert!(first[0] == bytes[0] && read_all(&mut server, bytes.len() - 1) == bytes[1..]);
    server.write_all(&bytes).expect("written");
    assert!(read_all(&mut client, bytes.len()) == bytes);
    await_registered(&server, idle, "nothing happens any more");
    // Released memory is registered again when it is needed.
    server.write_all(&bytes).expect("written");
    assert!(read_all(&mut client, bytes.len()) == bytes);
    client.write_all(&bytes).expect("written");
    assert!(read_all(&mut server, bytes.len()) == bytes);
}

fn await_registered(stream: &Stream<SoftSim>, bytes: usize, why: &str) {
    let deadline = std::time::Instant::now() + LONG;
    while stream.registered_bytes() != bytes {
        assert!(
            std::time::Instant::now() < deadline,
            "{why}: {} bytes, not {bytes}",
            stream.registered_bytes()
        );
        thread::yield_now();
    }
}

/// The last request of a few bytes asks for no completion, and who is heard is not probed.
#[test]
fn the_send_buffer_goes_though_the_peer_is_heard() {
    let mut client = Options::default();
    client.keep_memory = Duration::from_millis(1);
    client.protocol.send_buffer = 128 << 10;
    client.protocol.keepalive = Some(Keepalive::NONE);
    let (mut client, mut server) = streams(client, Options::default());
    let before = client.registered_bytes();
    client.write_all(&pattern(96 << 10)).expect("written");
    client.write_all(b"the last").expect("written");
    assert!(read_all(&mut server, (96 << 10) + 8).ends_with(b"the last"));
    await_registered(&client, before, "nothing happens any more");
}

/// Lent and written bytes arrive in order. Only then can the buffer be changed.
#[test]
fn lent_memory_arrives_and_comes_back() {
    let mut server = Options::default();
    server.protocol.window = 10_000;
    let (mut client, mut server) = streams(Options::default(), server);
    let bytes = pattern(100_000);
    let mut buffer = Arc::new(client.register_buffer(bytes.len()).expect("registered"));
    assert!(Arc::get_mut(&mut buffer).expect("it is held once").write(0, &bytes));

    client.write_all(b"head").expect("written");
    assert_eq!(client.lend(&buffer, 0..bytes.len()).expect("lent"), bytes.len());
    assert!(Arc::get_mut(&mut buffer).is_none(), "it can be changed while the device reads it");
    let tail = thread::spawn({
        let buffer = buffer.clone();
        move || {
            // Waits until the first part is posted, for which the peer has to read.
            assert_eq!(client.lend(&buffer, 1..3).expect("lent"), 2);
            client.write_all(b"tail").expect("written");
            client.returned(&buffer).expect("all of it arrives");
            client
        }
    });
    let got = read_all(&mut server, bytes.len() + 10);
    assert_eq!(
        (&got[..4], &got[4..100_004], &got[100_004..]),
        (&b"head"[..], &bytes[..], &b"\x01\x02tail"[..])
    );
    let client = tail.join().expect("does not panic");
    assert!(Arc::get_mut(&mut buffer).is_some(), "it was not given back");
    assert_eq!((client.work().lent, client.work().returned), (100_002, 2));
}

#[test]
fn memory_is_lent_to_its_own_connection_only_and_within_its_bounds() {
    let ((mut one, _far), (two, _away)) = (pair(), pair());
    let foreign = Arc::new(two.register_buffer(10).expect("registered"));
    let refused = one.lend(&foreign, 0..10).expect_err("another connection's");
    assert!(matches!(refused, Error::ForeignBuffer), "{refused}");
    let before = one.registered_bytes();
    let own = Arc::new(one.register_buffer(10).expect("registered"));
    assert_eq!(one.registered_bytes(), before + 10);
    #[expect(clippy::reversed_empty_ranges, reason = "it must be refused")]
    for range in [0..11, 11..12, 5..4] {
        let refused = one.lend(&own, range.clone()).expect_err("not inside");
        assert_eq!(refused.io_kind(), ErrorKind::InvalidInput, "{range:?}: {refused}");
    }
    assert_eq!(one.lend(&own, 10..10).expect("nothing is lent"), 0);
    assert!(one.register_buffer(0).is_err(), "no memory at all is registered");
    drop(own);
    assert_eq!(one.registered_bytes(), before);
}

#[test]
fn lent_memory_survives_the_end() {
    let (mut client, server) = pair();
    let buffer = Arc::new(client.register_buffer(4 << 20).expect("registered"));
    // More than both of the server's windows, which nothing reads.
    assert_eq!(client.lend(&buffer, 0..4 << 20).expect("lent"), 4 << 20);
    drop(server);
    let lost = client.returned(&buffer).expect_err("the server left with half of it");
    assert_eq!(lost.io_kind(), ErrorKind::BrokenPipe, "{lost}");
    drop(client);
    let mut byte = [1];
    assert!(buffer.read((4 << 20) - 1, &mut byte) && byte == [0]);
}

/// A stream that is not read is established at once, before the background thread's round.
#[test]
fn an_accepted_stream_comes_about_by_itself() {
    // Less than the thread's interval. A busy machine may take longer, but not always.
    let how = Connect::default().timeout(Duration::from_millis(400));
    let comes_about = || {
        let test_bed = test_bed(Options::default());
        // So that it is not established when the thread first visits it.
        test_bed.fabric.set_latency(Duration::from_millis(20));
        thread::scope(|scope| {
            let dial = scope.spawn(|| Stream::connect_with(&test_bed.client, test_bed.address, &how));
            // A client that has given up before cannot be accepted.
            let server = test_bed.listener.accept_timeout(how.timeout);
            dial.join().expect("does not panic").is_ok() && server.is_ok()
        })
    };
    assert!((0..5).any(|_| comes_about()), "is not connected where the server's program does nothing");
}

/// The dialing side is the client and the other the server, whatever role their settings name.
#[test]
fn settings_do_not_decide_who_is_who() {
    let mut asks = Options::default();
    asks.protocol.negotiate = true;
    let [mut client, mut server] = [asks; 2];
    (client.protocol.role, server.protocol.role) = (Role::Server, Role::Client);
    let (mut client, mut server) = streams(client, server);
    client.write_all(b"question").expect("written");
    assert_eq!(read_all(&mut server, 8), b"question");
    server.write_all(b"answer").expect("written");
    assert_eq!(read_all(&mut client, 6), b"answer");
    // Only a client asks for features, and only a server answers.
    assert!(client.counters().messages_sent >= 3 && server.counters().messages_sent >= 2);
}

#[test]
fn settings_out_of_bounds_are_refused() {
    let test_bed = test_bed(Options::default());
    for options in [Options::default().receives(0), Options::default().keep_memory(Duration::ZERO)] {
        let how = Connect::default().options(options);
        let error =
            Stream::connect_with(&test_bed.client, test_bed.address, &how).expect_err("out of bounds");
        assert!(matches!(error, Error::Options { .. }), "{error}");
    }
}
