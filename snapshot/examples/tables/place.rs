//! Places where RDMA programs run, and a publisher with its pulls.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_snapshot::reader::Position;
use rdma_snapshot::run::{Publish, Pull, Republish, publish, pull};
use rdma_snapshot::wire::{Content, Layout};
use rdma_snapshot::{Piece, Sink, Source, publisher};
use rdma_softsim::{Fabric, SoftSim};
use rdma_verbs::Verbs;
use rustix::time::ClockId;

use crate::{Failure, Kind, Link, all, spent};

/// How long a replica may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// A place for programs by number: the publisher is 0, the replicas follow.
pub(crate) trait Place {
    type Backend: Descriptors;
    /// Returns the program's backend.
    fn backend(&self, number: usize) -> Self::Backend;
    /// Returns the program's address to listen on.
    fn address(&self, number: usize) -> SocketAddr;
}

/// Every program on a host of its own.
impl Place for Fabric {
    type Backend = SoftSim;
    fn backend(&self, number: usize) -> SoftSim {
        self.host(&[self.address(number).ip()])
    }
    fn address(&self, number: usize) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, number as u8 + 1], 7000))
    }
}

/// All programs on one device.
pub(crate) struct OnDevice {
    verbs: Verbs,
    address: IpAddr,
}

impl OnDevice {
    pub(crate) const fn new(verbs: Verbs, address: IpAddr) -> Self {
        Self { verbs, address }
    }
}

impl Place for OnDevice {
    type Backend = Verbs;
    fn backend(&self, _number: usize) -> Verbs {
        self.verbs.clone()
    }
    fn address(&self, number: usize) -> SocketAddr {
        SocketAddr::new(self.address, 7000 + number as u16)
    }
}

/// A source that measures its thread's processor time.
pub(crate) struct Metered<S> {
    inner: S,
    spent: Arc<AtomicU64>,
}

impl<S: Source> Source for Metered<S> {
    fn content(&self) -> Content {
        self.inner.content()
    }
    fn total(&self) -> Option<u64> {
        self.inner.total()
    }
    fn position(&self) -> Option<Position> {
        self.inner.position()
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<Piece> {
        let piece = self.inner.read(into);
        self.spent.store((spent(ClockId::ThreadCPUTime) * 1e6) as u64, Ordering::Relaxed);
        piece
    }
    fn stop(&mut self) -> io::Result<()> {
        self.inner.stop()
    }
}

/// A running publisher.
pub(crate) struct Publishing {
    thread: JoinHandle<Result<f64, Failure>>,
    source: Arc<AtomicU64>,
}

impl Publishing {
    /// Begins to publish `source` in the way of `kind`, to a number of replicas.
    pub(crate) fn begin<P: Place>(
        place: &P,
        kind: Kind,
        source: impl Source + 'static,
        replicas: usize,
        link: Link,
    ) -> Result<Self, Failure> {
        let layout = if kind == Kind::Rcp { Layout::Rcp } else { Layout::Chunks };
        let readers = if kind == Kind::Chain { 1 } else { replicas };
        let rate = link.rate(readers);
        let how = Publish { layout, rate, readers: Some(readers), ..Publish::default() };
        let (backend, address) = (place.backend(0), place.address(0));
        let (sender, bound) = mpsc::channel();
        let metered = Metered { inner: source, spent: Arc::default() };
        let source = Arc::clone(&metered.spent);
        let thread = std::thread::spawn(move || -> Result<f64, Failure> {
            publish(&backend, address, metered, &how, |at| sender.send(at).unwrap_or(()), &mut |_| {})?;
            Ok(spent(ClockId::ThreadCPUTime))
        });
        let _failed = bound.recv();
        Ok(Self { thread, source })
    }

    /// Waits for its end. Returns the processor time of the publisher and its source.
    pub(crate) fn end(self) -> Result<f64, Failure> {
        let publisher: f64 = all(vec![self.thread])?.iter().sum();
        Ok(publisher + self.source.load(Ordering::Relaxed) as f64 / 1e6)
    }
}

/// Pulls into every sink in the way of `kind`, one after the other with a delay, and waits for all
/// of them.
pub(crate) fn pull_all<P: Place>(
    place: &P,
    kind: Kind,
    sinks: Vec<impl Sink + 'static>,
    apart: Duration,
) -> Result<(), Failure> {
    let (count, chain) = (sinks.len(), kind == Kind::Chain);
    let pulls = sinks.into_iter().enumerate().map(|(replica, sink)| {
        let number = replica + 1;
        let backend = place.backend(number);
        let from = place.address(if chain { replica } else { 0 });
        let republish = (chain && number < count).then(|| Republish {
            address: place.address(number),
            config: publisher::Config::default(),
            readers: 1,
            keep: PATIENCE,
        });
        let how = Pull { republish, attempts: 100, ..Pull::default() };
        let late = apart * u32::try_from(replica).unwrap_or(u32::MAX);
        std::thread::spawn(move || -> Result<(), Failure> {
            std::thread::sleep(late);
            pull(&backend, &[from], sink, &how, &mut |_| {})?;
            Ok(())
        })
    });
    all(pulls.collect()).map(drop)
}
