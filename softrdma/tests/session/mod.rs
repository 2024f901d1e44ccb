//! Opens sessions with a fabric in the process of the test.
#![allow(dead_code, reason = "each test uses what it needs")]

#[path = "../shown/mod.rs"]
mod shown;

use std::fs::DirBuilder;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use shown::shown;
use softrdma::fabric::Fabric;
use softrdma_wire::{Listener, Reply, Request, Socket, VERSION};

/// Makes a fabric that other processes find at this path.
pub(crate) fn listening(path: &Path) -> Arc<Fabric> {
    let directory = path.parent().expect("a folder");
    DirBuilder::new().recursive(true).mode(0o700).create(directory).expect("a folder");
    let (fabric, listener) = (Fabric::new().expect("a fabric"), Listener::bind(path).expect("a socket"));
    let serving = Arc::clone(&fabric);
    std::thread::spawn(move || serving.serve(&listener));
    fabric
}

/// Connects to the fabric. [`raw`] returns the descriptor, for tests that send raw bytes.
pub(crate) fn come(fabric: &Arc<Fabric>) -> Socket {
    Socket::new(raw(fabric))
}

pub(crate) fn raw(fabric: &Arc<Fabric>) -> OwnedFd {
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("sockets");
    fabric.admit(Socket::new(theirs));
    ours
}

pub(crate) fn ask(socket: &mut Socket, request: &Request<'_>) -> Reply {
    socket.send(request, None).expect("the fabric listens");
    socket.receive().expect("the fabric answers").0
}

pub(crate) fn address(last: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, last])
}

pub(crate) fn open(fabric: &Arc<Fabric>, last: u8) -> Socket {
    open_on(come(fabric), last)
}

/// Opens the session of a program that has connected.
pub(crate) fn open_on(socket: Socket, last: u8) -> Socket {
    let mut socket = greet(socket, last);
    assert_eq!(ask(&mut socket, &shown()), Reply::Done);
    socket
}

/// Opens a session without showing the memory.
pub(crate) fn unshown(fabric: &Arc<Fabric>, last: u8) -> Socket {
    greet(come(fabric), last)
}

/// Opens a session of a program that has connected, without showing its memory.
pub(crate) fn greet(mut socket: Socket, last: u8) -> Socket {
    let devices = vec![vec![address(last)]];
    let hello = Request::Hello { version: VERSION, program: "test".into(), devices, above: 0 };
    assert!(matches!(ask(&mut socket, &hello), Reply::Welcome { .. }));
    socket
}

/// Checks that an honest program is served.
pub(crate) fn serves(fabric: &Arc<Fabric>) {
    let mut socket = open(fabric, 250);
    assert!(matches!(ask(&mut socket, &Request::AllocateDomain(0)), Reply::Made(_)));
}
