//! What children and executed programs do with what they inherit.

mod common;

use std::io::Write as _;
use std::process::Stdio;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use common::{Home, Running, SERVER, await_some, compiled, succeeded};
use softrdma_wire::{Reply, Request, Socket};

fn fabric_of(home: &Home) -> Pid {
    let (fabric, _user) = Socket::connect(&home.socket()).and_then(|socket| socket.peer()).expect("it runs");
    i32::try_from(fabric).ok().and_then(Pid::from_raw).expect("a process")
}

fn has_no_session(fabric: &mut Socket) -> Option<()> {
    fabric.send(&Request::Status, None).expect("the fabric listens");
    let (Reply::Status { sessions, .. }, _) = fabric.receive().expect("an answer") else { return None };
    sessions.is_empty().then_some(())
}

#[test]
fn children_change_nothing_for_their_parent() {
    let home = Home::new("forks");
    let Some(program) = compiled(&home, "forks") else { return };
    let output = home.run(SERVER, &[&program]).output().expect("runs");
    assert_eq!(succeeded(&output), "done\n", "{}", String::from_utf8_lossy(&output.stderr));
    home.is_left();
}

/// A program goes on as another process image, or as a child, and has no session meanwhile.
fn comes_back(way: &str) {
    let home = Home::new(way);
    let Some(program) = compiled(&home, "forks") else { return };
    let mut running = Running::start(home.run(SERVER, &[&program, way]).stdin(Stdio::piped()));
    running.line("is another");
    let mut fabric = Socket::connect(&home.socket()).expect("a fabric");
    await_some("the session's end", || has_no_session(&mut fabric));
    let process = pidfd_open(fabric_of(&home), PidfdFlags::empty()).expect("a process");
    drop(fabric);
    // It would end at once.
    let moment = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
    assert_eq!(poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&moment)), Ok(0), "it ended");
    running.input().write_all(b"\n").expect("it listens");
    let (done, said) = running.finish();
    assert!(done && said.contains("done"), "{said}");
    home.is_left();
}

#[test]
fn a_program_executes_itself_and_comes_back() {
    comes_back("again");
}

#[test]
fn a_daemon_comes_back() {
    comes_back("daemon");
}

/// A program that executes another one has left the fabric, though its child lives.
#[test]
fn a_session_ends_when_its_program_executes_another() {
    let home = Home::new("execute");
    let Some(program) = compiled(&home, "forks") else { return };
    let mut running = Running::start(home.run(SERVER, &[&program, "executes"]).stdin(Stdio::piped()));
    running.line("is another");
    let mut fabric = Socket::connect(&home.socket()).expect("a fabric");
    await_some("the session's end", || has_no_session(&mut fabric));
    // Both end with their input.
    drop((running.input(), fabric));
    running.ended();
    home.is_left();
}
