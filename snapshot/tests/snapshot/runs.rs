//! Publishers and pulls on softsim, each on a host and a thread of its own, with sources and sinks.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc;
use std::thread::JoinHandle;

use rdma_snapshot::reader::Position;
use rdma_snapshot::run::{Progress, Publish, Pull, publish, pull};
use rdma_snapshot::wire::Content;
use rdma_snapshot::{Again, Error, Piece, Sink, Source};
use rdma_softsim::Fabric;

pub(crate) type Running = JoinHandle<Result<Progress, Error>>;

pub(crate) fn address(host: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, host])
}

/// Publishes `source` on this host. Returns the publisher's address.
pub(crate) fn publishing(
    fabric: &Fabric,
    host: u8,
    source: impl Source + 'static,
    how: Publish,
) -> (SocketAddr, Running) {
    reporting(fabric, host, source, how, |_| {})
}

/// The same, with reports of its progress.
pub(crate) fn reporting(
    fabric: &Fabric,
    host: u8,
    source: impl Source + 'static,
    how: Publish,
    mut told: impl FnMut(&Progress) + Send + 'static,
) -> (SocketAddr, Running) {
    let backend = fabric.host(&[address(host)]);
    let (sender, bound) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let bound = |at| sender.send(at).expect("a test");
        publish(&backend, (address(host), 0).into(), source, &how, bound, &mut told)
    });
    (bound.recv().expect("a publisher"), thread)
}

/// Pulls into `sink` on this host.
pub(crate) fn pulling(
    fabric: &Fabric,
    host: u8,
    from: impl Into<Vec<SocketAddr>>,
    sink: impl Sink + 'static,
    how: Pull,
) -> Running {
    let (backend, from) = (fabric.host(&[address(host)]), from.into());
    std::thread::spawn(move || pull(&backend, &from, sink, &how, &mut |_| {}))
}

/// Waits for its successful end.
pub(crate) fn ended(running: Running) -> Progress {
    running.join().expect("no panic").expect("it ends well")
}

/// A source of unknown length that reads by a closure.
pub(crate) struct Reading<F> {
    pub(crate) read: F,
    /// Where it is in its history, if it has one.
    pub(crate) offset: Option<u64>,
    pub(crate) again: Option<Again>,
}

impl<F: FnMut(&mut [u8]) -> io::Result<Piece> + Send> Source for Reading<F> {
    fn content(&self) -> Content {
        Content::Bytes
    }
    fn position(&self) -> Option<Position> {
        self.offset.map(|offset| Position { history: [b'a'; 40], offset })
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        (self.read)(into)
    }
    fn again(&self) -> Option<Again> {
        self.again.clone()
    }
    fn offset(&self) -> Option<u64> {
        self.offset
    }
}

/// A sink that sends what it gets, and takes the next chunk only when allowed.
pub(crate) struct Paced {
    pub(crate) allowed: mpsc::Receiver<()>,
    pub(crate) taken: mpsc::Sender<Vec<u8>>,
}

impl Sink for Paced {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.taken.send(bytes.to_vec()).expect("a test");
        // When the sender is gone, all may come.
        let _all = self.allowed.recv();
        Ok(())
    }
}
