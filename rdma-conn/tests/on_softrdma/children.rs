//! A parent that dies before its child. `trust/forks` has what children do.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;

use rdma_conn::{Listener, Stream};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::echo::{self, LONG, patient, verbs};
use crate::fabric::{CLIENT, Home, await_some, role};

/// A program with a stream, a listener and a child that lives on.
#[test]
fn has_a_child() {
    let Some(address) = role("children::has_a_child") else { return };
    let mut stream = Stream::connect_with(&verbs(), &*address, &patient()).expect("a server");
    stream.write_all(b"first").expect("written");
    stream.read_exact(&mut [0; 5]).expect("read");
    let listener = Listener::bind(&verbs(), (CLIENT, 0)).expect("a listener");
    // SAFETY: fork(2): the child sleeps and ends, and does nothing else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::thread::sleep(LONG);
        // SAFETY: _exit(2) has no preconditions.
        unsafe { libc::_exit(0) };
    }
    println!("child {child}");
    println!("listens on {}", listener.local_addr().expect("it listens"));
    println!("process {}", std::process::id());
    std::thread::sleep(LONG);
}

/// A program that listens where another one did.
#[test]
fn listens_again() {
    let Some(address) = role("children::listens_again") else { return };
    Listener::bind(&verbs(), &*address).expect("the address is free");
    println!("done");
}

/// A process that a program has named, killed with the test.
struct Named(OwnedFd);

impl Named {
    fn new(number: &str) -> Self {
        let process = number.parse().ok().and_then(Pid::from_raw).expect("a process");
        Self(pidfd_open(process, PidfdFlags::empty()).expect("it runs"))
    }

    fn kill(&self) {
        pidfd_send_signal(&self.0, Signal::KILL).expect("it runs");
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ended = pidfd_send_signal(&self.0, Signal::KILL);
    }
}

/// What the kernel keeps while a descriptor is open ends with the parent, however long a child
/// lives.
#[test]
fn a_child_holds_nothing_of_a_dead_parent() {
    let Some(home) = Home::new("children") else { return };
    let (mut server, address) = echo::server(&home);
    let mut parent = home.program(CLIENT, "children::has_a_child", &address);
    let child = Named::new(&parent.line("child "));
    let listened = parent.line("listens on ");
    Named::new(&parent.line("process ")).kill();
    server.line("ended");
    let again = || home.program(CLIENT, "children::listens_again", &listened).finish().0;
    await_some("the address", || again().then_some(()));
    child.kill();
    drop(parent);
    drop(server);
    home.is_left();
}
