//! A parent that dies before its child.

use rdma_conn::{Listener, Stream};
use rustix::process::{Pid, Signal, kill_process};

use super::streams;
use crate::echo::{self, patient, verbs};
use crate::fabric::{CLIENT, Home, await_some, role};

/// A program with a stream, a listener and a child that lives on.
#[test]
fn has_a_child() {
    let Some(address) = role("children::dead::has_a_child") else { return };
    let mut stream = Stream::connect_with(&verbs(), &*address, &patient()).expect("a server");
    streams::echo(&mut stream, b"first");
    let listener = Listener::bind(&verbs(), (CLIENT, 0)).expect("a listener");
    // SAFETY: fork(2): the child sleeps, and does nothing else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            std::thread::park();
        }
    }
    println!("child {child}");
    println!("listens on {}", listener.local_addr().expect("it listens"));
    println!("process {}", std::process::id());
    loop {
        std::thread::park();
    }
}

/// A program that listens where another one did.
#[test]
fn listens_again() {
    let Some(address) = role("children::dead::listens_again") else { return };
    Listener::bind(&verbs(), &*address).expect("the address is free");
    println!("done");
}

/// What the kernel keeps while a descriptor is open ends with the parent, however long a child
/// lives.
#[test]
fn a_child_holds_nothing_of_a_dead_parent() {
    let Some(home) = Home::new("children-dead") else { return };
    let (mut server, address) = echo::server(&home);
    let mut parent = home.program(CLIENT, "children::dead::has_a_child", &address);
    let child = Pid::from_raw(parent.line("child ").parse().expect("a number")).expect("a process");
    let listened = parent.line("listens on ");
    let pid = Pid::from_raw(parent.line("process ").parse().expect("a number")).expect("a process");
    kill_process(pid, Signal::KILL).expect("it runs");
    server.line("ended");
    let again = || home.program(CLIENT, "children::dead::listens_again", &listened).finish().0;
    await_some("the address", || again().then_some(()));
    kill_process(child, Signal::KILL).expect("it lives");
    drop(parent);
    drop(server);
    home.is_left();
}
