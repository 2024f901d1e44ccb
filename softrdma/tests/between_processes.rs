//! Programs of verbs, through the C ABI, between processes. They need nothing installed.
//!
//! A program here is this test itself, which `softrdma` runs again in a role.

mod common;
mod echo;

use common::{Home, SERVER};
use echo::{client, server};
use rustix::process::{Pid, Signal, kill_process};
use softrdma_wire::Socket;

#[test]
fn bytes_go_there_and_back() {
    let home = Home::new("echo");
    let (server, address, _pid) = server(&home);
    let (done, text) = client(&home, &address, 16).finish();
    assert!(done && text.contains("all came back"), "{text}");
    let (done, text) = server.finish();
    assert!(done && text.contains("the client closed"), "{text}");
    home.is_left();
}

/// A killed process is a vanished peer: its connection ends with an error, and nothing of it stays.
#[test]
fn a_killed_server_ends_its_client() {
    let home = Home::new("kill");
    let (server, address, pid) = server(&home);
    let mut client = client(&home, &address, usize::MAX);
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
    let mut client = client(&home, &address, usize::MAX);
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
