//! Our own programs, through the C ABI, between processes. They need nothing installed.
//!
//! A program here is this test itself, which `softrdma` runs again in a role.

mod common;

use std::io::{Read as _, Write as _};
use std::time::Duration;

use common::{CLIENT, Home, Running, SERVER, program, role};
use rdma_conn::{Listener, Stream};
use rdma_verbs::Verbs;
use rustix::process::{Pid, Signal, kill_process};
use softrdma_wire::Socket;

/// How many bytes the client has echoed: several windows.
const BYTES: usize = 5 << 20;

fn server(home: &Home) -> (Running, String, Pid) {
    let mut server = Running::start(&mut program(home, SERVER, "echoes", ""));
    let pid = server.line("process ").parse().ok().and_then(Pid::from_raw).expect("a process");
    let address = server.line("listens on ");
    (server, address, pid)
}

/// A program that echoes the bytes of one client.
#[test]
fn echoes() {
    let Some(_) = role("echoes") else { return };
    let verbs = Verbs::load().expect("the libraries of softrdma");
    let listener = Listener::bind(&verbs, (SERVER, 0)).expect("a listener");
    println!("process {}", std::process::id());
    println!("listens on {}", listener.local_addr().expect("it listens"));
    let (mut stream, _peer) = listener.accept().expect("a client");
    let mut bytes = vec![0; 64 * 1024];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return println!("the client closed"),
            Ok(count) => {
                if let Err(error) = stream.write_all(&bytes[..count]).and_then(|()| stream.flush()) {
                    return println!("ended: {error}");
                }
            }
            Err(error) => return println!("ended: {error}"),
        }
    }
}

/// A program that has `BYTES` echoed, and closes.
#[test]
fn sends_much() {
    let Some(address) = role("sends_much") else { return };
    let verbs = Verbs::load().expect("the libraries of softrdma");
    let mut stream = Stream::connect(&verbs, address).expect("a server");
    let sent: Vec<u8> = (0..BYTES).map(|place| (place ^ place >> 8 ^ place >> 16) as u8).collect();
    let mut back = vec![0; 64 * 1024];
    for part in sent.chunks(back.len()) {
        stream.write_all(part).and_then(|()| stream.flush()).expect("written");
        let back = &mut back[..part.len()];
        stream.read_exact(back).expect("read");
        assert!(back == part, "the bytes that were sent");
    }
    stream.close(Duration::from_secs(20)).expect("closes");
    println!("done");
}

/// A program that has bytes echoed until the connection ends.
#[test]
fn sends_for_ever() {
    let Some(address) = role("sends_for_ever") else { return };
    let verbs = Verbs::load().expect("the libraries of softrdma");
    let mut stream = Stream::connect(&verbs, address).expect("a server");
    let mut bytes = vec![7; 64 * 1024];
    for round in 0.. {
        let result = stream
            .write_all(&bytes)
            .and_then(|()| stream.flush())
            .and_then(|()| stream.read_exact(&mut bytes));
        match result {
            Ok(()) if round == 3 => println!("under way"),
            Ok(()) => {}
            Err(error) => return println!("ended: {error}"),
        }
    }
}

#[test]
fn bytes_go_there_and_back() {
    let home = Home::new("echo");
    let (server, address, _pid) = server(&home);
    let (done, text) = Running::start(&mut program(&home, CLIENT, "sends_much", &address)).finish();
    assert!(done && text.contains("done"), "{text}");
    let (done, text) = server.finish();
    assert!(done && text.contains("the client closed"), "{text}");
    home.is_left();
}

/// A killed process is a vanished peer: its connection ends with an error, and nothing of it stays.
#[test]
fn a_killed_server_ends_its_client() {
    let home = Home::new("kill");
    let (server, address, pid) = server(&home);
    let mut client = Running::start(&mut program(&home, CLIENT, "sends_for_ever", &address));
    client.line("under way");
    kill_process(pid, Signal::KILL).expect("it runs");
    let (done, text) = client.finish();
    assert!(done && text.contains("ended: "), "{text}");
    let (done, _text) = server.finish();
    assert!(!done, "it was killed");
    home.is_left();
}

/// A killed fabric is a removed device: every call fails, and none waits without limit.
#[test]
fn a_killed_fabric_ends_its_programs() {
    let home = Home::new("fabric");
    let (server, address, _pid) = server(&home);
    let mut client = Running::start(&mut program(&home, CLIENT, "sends_for_ever", &address));
    client.line("under way");
    let (fabric, _user) = Socket::connect(&home.socket()).expect("it is there").peer().expect("a process");
    let fabric = i32::try_from(fabric).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(fabric, Signal::KILL).expect("it runs");
    for program in [client, server] {
        let (done, text) = program.finish();
        assert!(done && text.contains("ended: "), "{text}");
    }
}

#[test]
fn status_shows_who_is_there() {
    let home = Home::new("status");
    let text = |home: &Home| common::succeeded(&home.softrdma(&["status"]).output().expect("runs"));
    let none = home.softrdma(&["status", "--fabric", "none"]).output().expect("runs");
    let said = String::from_utf8_lossy(&none.stderr);
    assert!(none.status.code() == Some(1) && said.contains("no fabric `none`"), "{said}");
    assert!(!home.path().join("softrdma").exists(), "it leaves no folder");
    let (server, _address, pid) = server(&home);
    let shown = text(&home);
    assert!(shown.contains(SERVER) && shown.contains(&pid.as_raw_nonzero().to_string()), "{shown}");
    // `softrdma run` becomes the program, so a signal to one is a signal to the other.
    drop(server);
    home.is_left();
}
