//! Delivery of replies: the last ones, unread ones, and their completion vector.

use std::thread;
use std::time::{Duration, Instant};

use rdma_server::{ConnectionType, EventLoop, RdmaSettings, SendError, Server, Tcp, Vector};

use crate::harness::{Client, Echo, MEBIBYTE, PATIENCE, TestBed, open, test_bed, while_serving};

#[test]
fn a_turn_that_waits_can_be_ended_from_another_thread() {
    let mut server = Server::new(Echo, open()).expect("a loop");
    let waker = server.waker();
    thread::scope(|scope| {
        scope.spawn(|| waker.wake());
        server.turn(None).expect("a turn");
    });
    // One that comes before the turn counts as well.
    waker.wake();
    server.turn(None).expect("a turn");
}

#[test]
fn a_server_that_ends_gracefully_serves_those_who_are_there() {
    let TestBed { mut server, tcp, remote, .. } = test_bed(open());
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let mut clients = Client::both(&remote, &address);
        clients.iter_mut().for_each(|client| client.echo(b"in"));
        ask.server(|server| server.close_listeners());
        let mut events = EventLoop::new(()).expect("a loop");
        events.blocking_connect(&Tcp::new(), &address, None, PATIENCE).expect_err("nothing listens");
        events.blocking_connect(&remote, &address, None, PATIENCE).expect_err("nothing listens");
        clients.iter_mut().for_each(|client| client.echo(b"to the end"));
        drop(clients);
        ask.until(|server| server.client_count() == 0);
    });
    server.finish().expect("a turn");
}

#[test]
fn a_message_may_come_before_the_handshake_is_over() {
    let TestBed { mut server, tcp, remote, .. } = test_bed(open());
    let address = server.local_addrs(tcp).remove(0);
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
fn commands_behind_a_reply_that_waited_are_served() {
    let TestBed { mut server, tcp, remote, .. } = test_bed(open());
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |ask| {
        for mut client in Client::both(&remote, &address) {
            client.connection().sync_write(b"Wab", PATIENCE).expect("written");
            ask.until(|server| server.clients().any(|(_, served)| *served == 1));
            ask.server(|server| {
                let waits = server.clients().find(|(_, served)| **served == 1).expect("it is there").0;
                server.send(waits, b"w").expect("room");
            });
            let mut all = [0; 3];
            client.connection().sync_read(&mut all, PATIENCE).expect("all replies");
            assert_eq!(&all, b"wab");
        }
    });
}

#[test]
fn a_client_that_leaves_gets_its_last_reply() {
    let TestBed { mut server, tcp, remote, .. } = test_bed(open());
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |_| {
        for mut client in Client::both(&remote, &address) {
            client.connection().sync_write(b"goodbye Q\n", PATIENCE).expect("written");
            assert_eq!(client.last_words(), "goodbye Q");
        }
    });
}

/// VR-RES-008: the server keeps to its budget, sleeps, and serves others.
#[test]
fn clients_that_do_not_read_cost_nothing() {
    const MANY: usize = 4;
    /// Mebibytes requested: far more than any system buffers for a client that does not read.
    const MUCH: usize = 48;
    let TestBed { mut server, tcp, remote, .. } = test_bed(open());
    let budget = server.settings().reply_budget;
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |ask| {
        let mut clients: Vec<_> =
            (0..MANY).map(|index| Client::over(index % 2 == 1, &remote, &address)).collect();
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
        // A growing buffer is at most twice as long as its content.
        assert!(held <= MANY * 2 * (budget + MEBIBYTE), "{held} bytes are held");
        assert!(ask.server(|server| server.clients().all(|(_, served)| *served < MUCH as u64)));
        // They start reading, and the service's pending commands were not forgotten.
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
    let TestBed { mut server, tcp, remote, .. } = test_bed(open());
    let budget = server.settings().reply_budget;
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |ask| {
        for over_rdma in [false, true] {
            let mut client = Client::over(over_rdma, &remote, &address);
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

/// VR-RES-008: for a client that reads, only the few replies still outstanding are kept.
#[test]
fn replies_that_were_written_are_not_kept() {
    /// Mebibytes that the client waits for at any time, and replies altogether.
    const AHEAD: usize = 8;
    const ALL: usize = 64;
    let TestBed { mut server, tcp, remote, .. } = test_bed(open());
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |ask| {
        for mut client in Client::both(&remote, &address) {
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
    let TestBed { mut server, tcp, remote, local, .. } = test_bed(open());
    let address = server.local_addrs(tcp).remove(0);
    for vector in [Vector::Fixed(1), Vector::Fixed(1_000_000), Vector::Random] {
        local.configure(RdmaSettings::default().vector(vector)).expect("settings");
        while_serving(&mut server, |_| Client::new(&remote, &address).echo(b"hello"));
    }
}
