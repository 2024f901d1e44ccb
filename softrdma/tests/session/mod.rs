//! Opens sessions with a fabric in the process of the test.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use softrdma::fabric::Fabric;
use softrdma_wire::{Reply, Request, Socket, VERSION};

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
    let mut socket = come(fabric);
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
