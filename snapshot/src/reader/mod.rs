//! The reader: a control stream, a queue pair of its own for READs, and the memory in which they
//! land.
//!
//! Only [`Reader::wait`] blocks, so this runs in real and in virtual time.

mod data;
pub(crate) mod machine;
mod table;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_backend::{Access, CmEventKind, DeviceKey, EventChannel, Identifier, Region};
use rdma_conn::{Descriptors, Endpoint, Waker};

use crate::channel::{self, Channel};
use crate::digest;
use crate::error::Error;
use crate::wait::sleep;
use crate::wire::{Digest, Frame};
use data::{Data, Flight, What};
use machine::{Machine, Order};

pub use machine::{Config, Offer, Position};
pub use table::{AREA, Chunk, Have, Limits};

/// How long a publisher whose connection for READs has failed may take to give the reason.
const LAST_WORD: Duration = Duration::from_secs(1);

/// A verified chunk.
pub struct Landed<B: Descriptors> {
    /// The chunk.
    pub chunk: Chunk,
    /// A copy of its bytes.
    pub bytes: Vec<u8>,
    /// Their digest.
    pub digest: Digest,
    /// The memory that they were read into. [`Reader::recycle`] takes it back; a replica that
    /// publishes keeps it.
    pub region: B::Region,
}

/// The protection domain of a replica that publishes, for the memory that it reads into.
pub struct Shared<B: Descriptors> {
    pub(crate) domain: Arc<B::Domain>,
    pub(crate) device: DeviceKey,
}

impl<B: Descriptors> Clone for Shared<B> {
    fn clone(&self) -> Self {
        Self { domain: Arc::clone(&self.domain), device: self.device }
    }
}

/// Counts of a reader's requests to its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// READs of chunks.
    pub reads: u64,
    /// The most READs in flight at the same time.
    pub most_in_flight: usize,
}

/// Reads a snapshot from a publisher.
///
/// Fields are dropped in this order: the queue pair before the memory that its READs land in.
pub struct Reader<B: Descriptors> {
    data: Option<Data<B>>,
    flights: VecDeque<Flight<B>>,
    pool: Vec<B::Region>,
    /// Buffers to copy chunks into.
    spare: Vec<Vec<u8>>,
    landed: VecDeque<Landed<B>>,
    /// The resolved route to the publisher's memory, before there is a queue pair.
    way: Option<B::Identifier>,
    events: B::EventChannel,
    /// The domain of a replica that publishes, for its memory.
    domain: Option<Shared<B>>,
    channel: Channel,
    endpoint: Endpoint<B>,
    machine: Machine,
    publisher: SocketAddr,
    depth: u8,
    handshake: Duration,
    /// Whether the caller took less than there is.
    held: bool,
    counters: Counters,
    /// Whether everything was read, and the publisher knows or does not listen.
    over: bool,
    /// What ended the connection for READs, and until when the publisher may explain it.
    failed: Option<(Error, Instant)>,
    backend: B,
}

impl<B: Descriptors> Reader<B> {
    /// Begins to read from `publisher` what follows `have`. With a `domain`, the chunks can be
    /// handed on: the memory is in that domain, and readers of it may read it.
    ///
    /// # Errors
    /// There is no RDMA device, or no entropy.
    pub fn connect(
        backend: &B,
        publisher: SocketAddr,
        config: Config,
        have: Have,
        domain: Option<Shared<B>>,
    ) -> Result<Self, Error> {
        let nonce = crate::random()?;
        let mut endpoint = Endpoint::new(backend, channel::limits(1))?;
        let id = endpoint.connect(publisher, None, config.handshake, channel::options())?;
        let events = backend.event_channel().map_err(Error::backend("opening RDMA"))?;
        let now = backend.now();
        Ok(Self {
            data: None,
            flights: VecDeque::new(),
            pool: Vec::new(),
            spare: Vec::new(),
            landed: VecDeque::new(),
            way: None,
            events,
            domain,
            channel: Channel::new(id),
            endpoint,
            depth: config.depth,
            handshake: config.handshake,
            machine: Machine::new(config, have, nonce, now),
            publisher,
            held: false,
            counters: Counters::default(),
            over: false,
            failed: None,
            backend: backend.clone(),
        })
    }

    /// Returns what the reader has, for another attempt after an error. A chunk counts from the
    /// moment [`Reader::poll`] can return it.
    pub const fn have(&self) -> Have {
        self.machine.have()
    }

    /// Returns the offer, once the publisher has sent it.
    pub const fn offer(&self) -> Option<Offer> {
        self.machine.offer()
    }

    /// Returns whether everything was read and the publisher knows.
    pub fn is_done(&self) -> bool {
        self.over && self.landed.is_empty()
    }

    /// Returns the counts so far. READs of chunks that it does not have are the waste of a lost
    /// connection (VS-READ-003).
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the next chunk, in order.
    pub fn poll(&mut self) -> Option<Landed<B>> {
        self.landed.pop_front()
    }

    /// Takes memory back, for another chunk.
    pub fn recycle(&mut self, region: B::Region) {
        self.pool.push(region);
    }

    /// Takes a buffer back, for another copy.
    pub fn reuse(&mut self, bytes: Vec<u8>) {
        self.spare.push(bytes);
    }

    /// Handles input and posts READs for at most `room` chunks, including those in flight.
    ///
    /// # Errors
    /// The session has ended. [`Error::may_resume`] says whether another may continue where it
    /// ended.
    pub fn progress(&mut self, room: usize) -> Result<(), Error> {
        if self.failed.is_none() {
            match self.work(room) {
                // The publisher knows that this side has everything, and disconnects.
                Err(Error::Control(_) | Error::Ended | Error::DataEnded(_)) if self.machine.is_done() => {
                    self.over = true;
                    return Ok(());
                }
                Ok(()) => {
                    self.over |= self.machine.is_over(self.backend.now());
                    return Ok(());
                }
                Err(error @ (Error::Read { .. } | Error::DataEnded(_))) => {
                    // Its further events are useless, and would wake a thread that waits for the
                    // publisher's message.
                    self.data = None;
                    self.flights.clear();
                    self.way = None;
                    self.failed = Some((error, self.backend.now().after(LAST_WORD)));
                }
                other => return other,
            }
        }
        self.last_word()
    }

    fn work(&mut self, room: usize) -> Result<(), Error> {
        loop {
            self.endpoint.progress()?;
            while self.endpoint.next_event().is_some() {}
            let mut moved = false;
            while self.machine.listens() {
                let Some(frame) = self.channel.receive(&mut self.endpoint)? else { break };
                self.machine.handle_frame(frame, self.backend.now())?;
                moved = true;
            }
            // Input from before the end of the connection was handled.
            self.endpoint.check(self.channel.id())?;
            while let Some(event) = self.events.next_event().map_err(Error::backend("taking events"))? {
                self.handle_event(event.kind)?;
                moved = true;
            }
            moved |= self.collect()?;
            moved |= self.post(room)?;
            self.machine.handle_timeout(self.held, self.backend.now())?;
            moved |= self.obey()?;
            moved |= self.channel.flush(&mut self.endpoint)?;
            if !moved {
                return Ok(());
            }
        }
    }

    /// Handles a failed connection for READs. A publisher that leaves says why, possibly after the
    /// failure, so its message is awaited for a short time.
    fn last_word(&mut self) -> Result<(), Error> {
        let Some((error, by)) = self.failed.clone() else { return Ok(()) };
        let listened = (|| {
            self.endpoint.progress()?;
            while self.endpoint.next_event().is_some() {}
            while self.events.next_event().map_err(Error::backend("taking events"))?.is_some() {}
            while let Some(frame) = self.channel.receive(&mut self.endpoint)? {
                if matches!(frame, Frame::Refused(_)) {
                    self.machine.handle_frame(frame, self.backend.now())?;
                }
            }
            self.endpoint.check(self.channel.id()).map_err(Error::from)
        })();
        match listened {
            Err(refused @ (Error::Refused(_) | Error::OtherSnapshot)) => Err(refused),
            Ok(()) if self.backend.now() < by => Ok(()),
            _ => Err(error),
        }
    }

    /// Performs the machine's actions. Returns true if there were any.
    fn obey(&mut self) -> Result<bool, Error> {
        let mut any = false;
        while let Some(order) = self.machine.poll_order() {
            any = true;
            match order {
                Order::Send(frame) => self.channel.send(&frame),
                Order::Resolve(port) => {
                    let id = self.events.create_id().map_err(Error::backend("creating an identifier"))?;
                    let peer = SocketAddr::new(self.publisher.ip(), port);
                    id.resolve_address(None, peer, self.handshake)
                        .map_err(Error::backend("resolving the address"))?;
                    self.way = Some(id);
                }
                Order::Connect => {
                    let Some(id) = self.way.take() else {
                        return Err(Error::DataEnded("there is no way to it"));
                    };
                    self.data = Some(Data::connect(id, self.domain.as_ref(), self.depth)?);
                }
                Order::ReadAddresses(remote, length) => {
                    let Some(data) = &self.data else { return Err(Error::DataEnded("it was not made")) };
                    let region = data.register(length as usize, Access::LOCAL_WRITE)?;
                    let flight = Flight { what: What::Addresses, length, remote, region };
                    data.read([&flight])?;
                    self.flights.push_back(flight);
                }
            }
        }
        Ok(any)
    }

    fn handle_event(&mut self, kind: CmEventKind<B>) -> Result<(), Error> {
        let now = self.backend.now();
        match kind {
            CmEventKind::AddressResolved => {
                if let Some(way) = &self.way {
                    way.resolve_route(self.handshake).map_err(Error::backend("resolving the route"))?;
                }
            }
            CmEventKind::RouteResolved => {
                let local = self.way.as_ref().and_then(Identifier::local_addr);
                let local = local.ok_or(Error::DataEnded("it has no local address"))?;
                self.machine.handle_resolved(local, now);
            }
            CmEventKind::Established { peer } => {
                let granted = self.data.as_ref().map_or(0, |data| data.depth.min(peer.initiator_depth));
                self.machine.handle_established(granted, now)?;
            }
            // Everything was read, so the end of the connection for READs does not matter.
            CmEventKind::Disconnected if self.machine.is_done() => {}
            CmEventKind::Disconnected => return Err(Error::DataEnded("the publisher ended it")),
            CmEventKind::Rejected { .. } => return Err(Error::DataEnded("the publisher rejected it")),
            CmEventKind::AddressError { .. } | CmEventKind::RouteError { .. } => {
                return Err(Error::DataEnded("no RDMA device has a way to the publisher"));
            }
            CmEventKind::Unreachable { .. } | CmEventKind::ConnectError { .. } => {
                return Err(Error::DataEnded("the publisher does not answer"));
            }
            CmEventKind::DeviceRemoval => return Err(Error::DataEnded("the device was removed")),
            CmEventKind::Async(event) if event.is_fatal() => return Err(Error::Device(event)),
            _ => {}
        }
        Ok(())
    }

    /// Takes answers to READs, in the order in which they were posted. Returns true if there were
    /// any.
    fn collect(&mut self) -> Result<bool, Error> {
        let Some(data) = &self.data else { return Ok(false) };
        let mut any = false;
        while let Some(result) = data.completed()? {
            any = true;
            let Some(flight) = self.flights.pop_front() else {
                return Err(Error::DataEnded("its device answered a READ that was not posted"));
            };
            let now = self.backend.now();
            let status = result.err();
            if let Some(status) = status {
                let chunk = if let What::Chunk(chunk) = flight.what { chunk.index } else { 0 };
                return Err(Error::Read { chunk, status });
            }
            let mut bytes = self.spare.pop().unwrap_or_default();
            bytes.resize(flight.length as usize, 0);
            if !flight.region.memory().read(0, &mut bytes) {
                return Err(Error::DataEnded("its memory is too short"));
            }
            match flight.what {
                What::Addresses => self.machine.handle_addresses(&bytes, now)?,
                What::Chunk(chunk) => {
                    let digest = digest::of(&bytes);
                    self.machine.handle_chunk(&chunk, &digest, now)?;
                    self.landed.push_back(Landed { chunk, bytes, digest, region: flight.region });
                }
            }
        }
        Ok(any)
    }

    /// Posts READs within the limits of both devices, the caller's room and the announcements
    /// (VS-READ-001), with one doorbell. Returns true if any was posted.
    fn post(&mut self, room: usize) -> Result<bool, Error> {
        let Some(data) = &self.data else { return Ok(false) };
        let begun = self.flights.len();
        while let Some(chunk) = self.machine.next_read() {
            if self.flights.len() + self.landed.len() >= room {
                break;
            }
            let region = match (&self.domain, self.pool.pop()) {
                (None, Some(region)) => region,
                // Memory that is handed on is a region of its own. A peer may read it, and only the
                // READ may write it.
                (Some(_), _) => {
                    data.register(chunk.length as usize, Access::LOCAL_WRITE.and(Access::REMOTE_READ))?
                }
                (None, None) => {
                    let size = self.machine.offer().map_or(chunk.length, |offer| offer.chunk_size);
                    data.register(size as usize, Access::LOCAL_WRITE)?
                }
            };
            let (length, remote) = (chunk.length, chunk.remote);
            self.flights.push_back(Flight { what: What::Chunk(chunk), length, remote, region });
            self.machine.posted(self.backend.now());
        }
        data.read(self.flights.range(begun..))?;
        let posted = self.flights.len() - begun;
        self.held = self.flights.len() + self.landed.len() >= room || self.machine.is_full();
        self.counters.reads += posted as u64;
        self.counters.most_in_flight = self.counters.most_in_flight.max(self.flights.len());
        Ok(posted > 0)
    }

    /// Returns when [`Reader::progress`] must be called at the latest.
    pub fn next_timeout(&self) -> Instant {
        let own = self.failed.as_ref().map_or_else(|| self.machine.next_timeout(), |(_, by)| *by);
        self.endpoint.next_timeout().map_or(own, |at| at.min(own))
    }

    pub(crate) fn sources(&self) -> Vec<BorrowedFd<'_>> {
        let data = self.data.as_ref().map(Data::as_fd);
        [self.endpoint.as_fd(), self.events.as_fd()].into_iter().chain(data).collect()
    }

    /// Sleeps until there is input, a call of `waker`, or a time-out.
    ///
    /// # Errors
    /// The system's, from waiting.
    pub fn wait(&self, waker: &Waker, also: &[BorrowedFd<'_>], until: Option<Instant>) -> Result<(), Error> {
        let mut sources = self.sources();
        sources.push(waker.as_fd());
        sources.extend_from_slice(also);
        let own = self.next_timeout();
        let at = until.map_or(own, |until| until.min(own));
        sleep(&sources, at.since(self.backend.now()))
    }

    /// Returns the number of regions to read into.
    #[cfg(test)]
    pub(crate) fn regions(&self) -> usize {
        self.pool.len() + self.flights.len() + self.landed.len()
    }
}
