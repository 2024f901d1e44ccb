use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use allocation_counter::measure;

use crate::harness::{Client, HOST, MEBIBYTE, PATIENCE, TestBed, open, test_bed, while_serving};

/// What a client may keep besides its registered memory.
const BESIDE: i64 = 64 << 10;
const LIMIT: usize = 1 << 20;

/// VR-RES-008: idle clients that exchanged much have no buffers. Counts bytes that are not freed.
#[test]
fn idle_clients_keep_nothing_of_what_they_exchanged() {
    const CLIENTS: usize = 4;
    const MUCH: usize = 8 * MEBIBYTE;
    for over_rdma in [false, true] {
        let TestBed { mut server, tcp, fabric, remote, .. } = test_bed(open());
        let address = server.local_addrs(tcp).remove(0);
        let (tell, told) = mpsc::channel();
        let mut kept = 0;
        thread::scope(|scope| {
            scope.spawn(move || {
                let connect = |_| Client::over(over_rdma, &remote, &address);
                let mut clients: Vec<_> = (0..CLIENTS).map(connect).collect();
                let bytes: Vec<u8> = (0..MUCH).map(|index| (index % 61) as u8).collect();
                for client in &mut clients {
                    // The server receives much while the client reads, and sends much when not.
                    for piece in bytes.chunks(LIMIT) {
                        client.echo(piece);
                    }
                    client.connection().sync_write(&[b'M'; MUCH / MEBIBYTE], PATIENCE).expect("written");
                    client.connection().sync_read(&mut vec![0; MUCH], PATIENCE).expect("all of it");
                    // A part of a long request comes first, and the service waits for the rest.
                    client.echo(b"to the end");
                }
                tell.send(clients).expect("a server");
            });
            let clients = loop {
                let turn = measure(|| server.turn(Some(Duration::from_millis(2))).expect("a turn"));
                kept += turn.bytes_current;
                if let Ok(clients) = told.try_recv() {
                    break clients;
                }
            };
            while server.has_pending() {
                kept += measure(|| server.turn(Some(Duration::ZERO)).expect("a turn")).bytes_current;
            }
            assert_eq!(server.waiting_bytes(), 0);
            let registered = fabric.resources(HOST).registered_bytes as i64;
            println!("{kept} bytes for {CLIENTS} clients, {registered} of them registered");
            assert!(kept <= registered + (CLIENTS as i64 + 4) * BESIDE, "{kept}, {registered}");
            drop(clients);
        });
    }
}

/// VR-RES-008: an endless request costs at most twice the limit, and then an error and the end.
#[test]
fn a_request_that_is_too_long_is_refused() {
    let TestBed { mut server, tcp, remote, .. } = test_bed(open());
    let address = server.local_addrs(tcp).remove(0);
    while_serving(&mut server, |ask| {
        for mut client in Client::both(&remote, &address) {
            client.connection().sync_write(&vec![b'L'; LIMIT - 1], PATIENCE).expect("written");
            ask.until(|server| server.waiting_bytes() >= LIMIT - 1);
            assert!(ask.server(|server| server.waiting_bytes()) <= 2 * LIMIT + (128 << 10));
            client.connection().sync_write(b"L", PATIENCE).expect("written");
            let told = client.last_words();
            assert!(told.starts_with("-ERR Protocol error") && told.contains("1048576 bytes"), "{told}");
            ask.until(|server| server.waiting_bytes() == 0);
        }
    });
}

/// VR-RES-008: a client with a full budget of replies is not read.
#[test]
fn nothing_is_read_from_a_client_with_full_replies() {
    const MUCH: usize = 48;
    let TestBed { mut server, tcp, remote, .. } = test_bed(open().reply_budget(1));
    let address = server.local_addrs(tcp).remove(0);
    let serve = |server: &mut rdma_server::Server<_>| {
        for _ in 0..20 {
            server.turn(Some(Duration::from_millis(2))).expect("a turn");
        }
    };
    let (tell, told) = mpsc::channel();
    let mut client = thread::scope(|scope| {
        scope.spawn(move || tell.send(Client::new(&remote, &address)).expect("a server"));
        loop {
            server.turn(Some(Duration::from_millis(2))).expect("a turn");
            if let Ok(client) = told.try_recv() {
                break client;
            }
        }
    });
    // One at a time, so that the service has answered everything each time, and nothing waits.
    let mut full = 0;
    for _ in 0..MUCH {
        client.connection().sync_write(b"M", PATIENCE).expect("written");
        serve(&mut server);
        full = server.waiting_bytes();
        if full > 0 {
            break;
        }
    }
    assert!(full > 0, "it has room for all");
    client.connection().sync_write(&[b'x'; 100], PATIENCE).expect("written");
    serve(&mut server);
    assert!(server.waiting_bytes() <= full, "more was read: {} bytes, not {full}", server.waiting_bytes());
}
