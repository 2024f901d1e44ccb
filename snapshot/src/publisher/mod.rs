//! The publisher: control streams of readers, a queue pair for each reader that has proven the
//! secret, and the memory that they read. READs use none of its processor time.
//!
//! Only [`Publisher::wait`] blocks, so this runs in real and in virtual time.

mod data;
pub(crate) mod filler;
mod older;
mod serving;
pub(crate) mod session;
mod store;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_backend::{EventChannel, Identifier};
use rdma_conn::{Descriptors, Endpoint, Event, Waker};

use crate::auth::Secret;
use crate::channel::{self, Channel};
use crate::error::Error;
use crate::reader::{Landed, Offer, Shared};
use crate::wait::{Stop, TICK, sleep};
use crate::wire::{Mark, Reason, SnapshotId};
use data::Data;
pub use filler::{Filled, Filler};
use older::Older;
use serving::{End, Tables, serve_one};
use session::{Session, Terms, refused};
pub(crate) use store::Store;

/// Settings of a publisher.
#[derive(Clone, Debug)]
pub struct Config {
    /// The secret that readers must prove.
    pub secret: Secret,
    /// The most readers at the same time.
    pub readers: usize,
    /// The most READs in flight of each reader. Both devices' limits apply too.
    pub depth: u8,
    /// The most bytes of memory for tables: whole pages of each region, and entries of chunks.
    pub memory: u64,
    /// How long a reader may be silent before it loses access to the memory.
    pub lease: Duration,
    /// How long each step of the handshake may take, up to the first chunk.
    pub handshake: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            secret: Secret::default(),
            readers: 64,
            depth: 16,
            memory: 1 << 40,
            lease: Duration::from_secs(20),
            handshake: Duration::from_secs(10),
        }
    }
}

/// How long the last message may take to reach a reader that does not read.
const LINGER: Duration = Duration::from_secs(2);

struct Member<B: Descriptors> {
    data: Option<Data<B>>,
    session: Session,
    channel: Channel,
}

/// Counts of a publisher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Readers that are reading now.
    pub reading: usize,
    /// Readers that have received everything.
    pub done: usize,
    /// Chunks of the slowest present reader.
    pub slowest: u64,
    /// Bytes in the table.
    pub bytes: u64,
}

/// Publishes a snapshot to readers.
///
/// Fields are dropped in this order: queue pairs before the memory that they may read.
pub struct Publisher<B: Descriptors> {
    members: Vec<Member<B>>,
    pub(crate) store: Store<B>,
    /// Snapshots that were replaced, and the bytes of the newest one from which its chunks are also
    /// theirs.
    older: Vec<Older<B>>,
    shared_from: u64,
    /// What memory that only older snapshots keep takes of the limit.
    beside: u64,
    /// Never has a completion: nothing is posted to a queue pair that only serves READs.
    queue: B::CompletionQueue,
    pub(crate) data_listener: B::Identifier,
    events: B::EventChannel,
    endpoint: Endpoint<B>,
    address: SocketAddr,
    config: Config,
    /// `None` until there is something to read.
    terms: Option<Terms>,
    done: usize,
    backend: B,
}

impl<B: Descriptors> Publisher<B> {
    /// Listens on `address`, whose IP must be one of an RDMA device. Readers wait until
    /// [`Publisher::offer`].
    ///
    /// # Errors
    /// There is no RDMA device, no device has that address, or the address is in use.
    pub fn bind(backend: &B, address: SocketAddr, config: Config) -> Result<Self, Error> {
        if address.ip().is_unspecified() {
            return Err(Error::Address(address));
        }
        // One more than may read, so that it can be told so.
        let mut endpoint = Endpoint::new(backend, channel::limits(config.readers.saturating_add(1)))?;
        let listener = endpoint.listen(address, channel::options())?;
        let address = endpoint.local_addr(listener).unwrap_or(address);
        let events = backend.event_channel().map_err(Error::backend("opening RDMA"))?;
        let data_listener = events
            .listen(SocketAddr::new(address.ip(), 0), 0)
            .map_err(Error::backend("listening for connections that read"))?;
        let domain = data_listener.create_domain().map_err(Error::backend("creating a protection domain"))?;
        let queue = data_listener
            .create_completion_queue(1, 0)
            .map_err(Error::backend("creating a completion queue"))?;
        Ok(Self {
            members: Vec::new(),
            store: Store::new(Arc::new(domain), config.memory),
            older: Vec::new(),
            shared_from: 0,
            beside: 0,
            queue,
            data_listener,
            events,
            endpoint,
            address,
            config,
            terms: None,
            done: 0,
            backend: backend.clone(),
        })
    }

    /// The address that readers connect to.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the protection domain of the published memory, for a reader whose chunks are handed
    /// on.
    ///
    /// # Errors
    /// The backend's: the device may be gone.
    pub fn domain(&self) -> Result<Shared<B>, Error> {
        let device = self.data_listener.device().map_err(Error::backend("looking at the device"))?;
        Ok(Shared { domain: Arc::clone(self.store.domain()), device })
    }

    /// Offers a snapshot to readers. `snapshot` names it, or a new name is drawn.
    ///
    /// # Errors
    /// There is no entropy, or no port for READs.
    pub fn offer(&mut self, snapshot: Option<SnapshotId>, offer: Offer) -> Result<(), Error> {
        self.terms = Some(self.terms(snapshot, offer)?);
        Ok(())
    }

    fn terms(&self, snapshot: Option<SnapshotId>, offer: Offer) -> Result<Terms, Error> {
        let snapshot = match snapshot {
            Some(snapshot) => snapshot,
            None => crate::random()?,
        };
        let data_port =
            self.data_listener.local_addr().ok_or(Error::DataEnded("its listener has no port"))?.port();
        Ok(Terms {
            secret: self.config.secret.clone(),
            snapshot,
            offer,
            data_port,
            lease: self.config.lease,
            handshake: self.config.handshake,
        })
    }

    /// Begins a table of the seed's layout, for `total` bytes in all. Readers can read it once it
    /// is marked.
    ///
    /// # Errors
    /// There is no memory for it, or the limit is lower.
    pub fn begin_mapping(&mut self, total: u64) -> Result<(), Error> {
        self.store.begin_mapping(total)
    }

    /// Publishes a chunk of these bytes, at least one and at most [`Offer::chunk_size`].
    ///
    /// # Errors
    /// There is no memory for it, or the limit is lower.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.add(|store| store.append(bytes))
    }

    /// Returns a filler for chunks of at most `chunk_size` bytes, on any thread, in memory that
    /// this publisher may publish. For a table of the seed's layout it fills the areas.
    pub fn filler(&mut self, chunk_size: u32) -> Filler<B> {
        self.store.filler(chunk_size.max(1) as usize)
    }

    /// Publishes a chunk of [`Publisher::filler`].
    ///
    /// # Errors
    /// The memory limit is lower.
    pub fn publish(&mut self, filled: Filled<B>) -> Result<(), Error> {
        self.add(|store| {
            store.publish(filled);
            Ok(())
        })
    }

    /// Adds a chunk to the newest table, and to the older ones where they share its history.
    fn add(&mut self, chunk: impl FnOnce(&mut Store<B>) -> Result<(), Error>) -> Result<(), Error> {
        let before = self.store.bytes();
        chunk(&mut self.store)?;
        if before >= self.shared_from {
            self.share();
        }
        self.fit(0)
    }

    /// Releases chunks of the newest snapshot that every reader has (VS-TABLE-008). At least
    /// `readers` must be there: one that was lost may come back for the rest. One that has come
    /// back before its last session has ended counts once. Returns whether there were any.
    pub(crate) fn release(&mut self, readers: usize) -> bool {
        let Some(terms) = &self.terms else { return false };
        let sessions = self.members.iter().map(|member| &member.session);
        let has = sessions.filter(|session| session.snapshot == Some(terms.snapshot) && session.is_proven());
        let there: BTreeSet<_> = has.clone().map(|session| session.reader).collect();
        if there.len() < readers {
            return false;
        }
        let has = has.map(|session| session.has).min();
        has.is_some_and(|has| self.store.release(has))
    }

    /// Publishes a chunk that a reader has read, whose memory is in [`Publisher::domain`].
    ///
    /// # Errors
    /// The memory limit is lower.
    pub fn hand_on(&mut self, landed: Landed<B>) -> Result<(), Error> {
        self.store.hand_on(landed);
        self.fit(0)
    }

    /// Marks the snapshot as complete. Later chunks follow it.
    ///
    /// # Errors
    /// A table of the seed's layout has fewer bytes than announced.
    pub fn mark(&mut self) -> Result<(), Error> {
        self.store.mark()
    }

    /// Marks a snapshot that is handed on as complete.
    pub fn hand_on_mark(&mut self, mark: Mark) {
        self.store.log.mark = Some(mark);
    }

    /// Ends the table.
    pub fn end(&mut self) {
        self.store.log.ended = true;
        self.older.iter_mut().for_each(|older| older.log.ended = true);
    }

    /// Withdraws the snapshot. Readers are told why, their queue pairs are destroyed, and the
    /// memory is no longer reachable (VS-LEASE-002).
    pub fn withdraw(&mut self, reason: Reason) {
        self.refuse(reason, |_| true);
        self.terms = None;
        self.older.clear();
        self.beside = 0;
    }

    /// Ends sessions, and tells their readers why.
    fn refuse(&mut self, reason: Reason, is_one: impl Fn(&Session) -> bool) {
        let ended: Vec<_> = self.members.extract_if(.., |member| is_one(&member.session)).collect();
        for mut member in ended {
            member.channel.send(&refused(reason));
            self.part(member);
        }
    }

    /// Ends a session: sends the last message, then closes the memory to the reader. A reader that
    /// sees the memory closed first waits for the message only a short time. Neither waits here.
    fn part(&mut self, mut member: Member<B>) {
        // It may already be gone, and is then not told.
        let _gone = member.channel.flush(&mut self.endpoint);
        let _gone = self.endpoint.abandon(member.channel.id(), LINGER);
        drop(member.data.take());
    }

    /// Returns the counts.
    pub fn counts(&self) -> Counts {
        let reading = self.members.iter().filter(|member| member.session.is_serving());
        Counts {
            reading: reading.clone().count(),
            done: self.done,
            slowest: reading.map(|member| member.session.has).min().unwrap_or(0),
            bytes: self.store.bytes(),
        }
    }

    /// Handles input of readers, and sends them news.
    ///
    /// # Errors
    /// The device is gone, or there is no entropy. A reader's mistake ends only its own session.
    pub fn progress(&mut self) -> Result<(), Error> {
        loop {
            self.endpoint.progress()?;
            let mut moved = false;
            while let Some(event) = self.endpoint.next_event() {
                self.handle_control(event)?;
                moved = true;
            }
            while let Some(event) = self.events.next_event().map_err(Error::backend("taking events"))? {
                self.handle_data(event)?;
                moved = true;
            }
            if self.terms.is_some() {
                moved |= self.serve()?;
            }
            if !moved {
                return Ok(());
            }
        }
    }

    fn handle_control(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::Opened { id, .. } => {
                let session = Session::new(self.config.handshake, self.backend.now());
                let mut member = Member { data: None, session, channel: Channel::new(id) };
                if self.members.len() >= self.config.readers {
                    member.channel.send(&refused(Reason::Full));
                    self.part(member);
                } else {
                    self.members.push(member);
                }
            }
            Event::AcceptFailed(listener) => {
                if let Some(error) = self.endpoint.take_accept_error(listener) {
                    tracing::warn!(%error, "a reader was not accepted");
                }
            }
            // The next pass finds the rest, including its end.
            _ => {}
        }
        Ok(())
    }

    /// Serves every session. Returns true if anything moved.
    fn serve(&mut self) -> Result<bool, Error> {
        let mut any = false;
        let mut at = 0;
        while let Some(member) = self.members.get_mut(at) {
            let Some(terms) = &self.terms else { return Ok(any) };
            let tables = Tables { newest: (terms, &self.store.log), older: &self.older };
            let outcome = serve_one(member, &mut self.endpoint, &tables, &self.backend);
            match outcome {
                Ok(moved) if !member.session.is_done() => {
                    any |= moved;
                    at += 1;
                }
                ended => {
                    any = true;
                    let mut member = self.members.swap_remove(at);
                    match ended {
                        Ok(_) => self.done += 1,
                        Err(End::Told(reason)) => member.channel.send(&refused(reason)),
                        Err(End::Gone(error)) => tracing::info!(%error, "a reader has left"),
                    }
                    self.part(member);
                }
            }
        }
        self.sweep();
        Ok(any)
    }

    /// Delivers the last messages to readers, for a limited time, which is shorter once `stop` asks
    /// for the end.
    ///
    /// # Errors
    /// Those of [`Publisher::progress`] and [`Publisher::wait`].
    pub fn drain(mut self, waker: &Waker, stop: &Stop) -> Result<(), Error> {
        let begun = self.backend.now();
        loop {
            let now = self.backend.now();
            let by = begun.after(if stop.is_stopped() { LINGER / 4 } else { LINGER });
            if self.endpoint.usage().connections == 0 || now >= by {
                return Ok(());
            }
            self.progress()?;
            self.wait(waker, Some(by.min(now.after(TICK))))?;
            waker.clear();
        }
    }

    /// Returns when [`Publisher::progress`] must be called at the latest.
    pub fn next_timeout(&self) -> Option<Instant> {
        let sessions = self.members.iter().map(|member| member.session.next_timeout());
        let sessions = if self.terms.is_some() { sessions.min() } else { None };
        sessions.into_iter().chain(self.endpoint.next_timeout()).min()
    }

    pub(crate) fn sources(&self) -> [BorrowedFd<'_>; 2] {
        [self.endpoint.as_fd(), self.events.as_fd()]
    }

    /// Sleeps until there is input, a call of `waker`, or a time-out, at most until `until`.
    ///
    /// # Errors
    /// The system's, from waiting.
    pub fn wait(&self, waker: &Waker, until: Option<Instant>) -> Result<(), Error> {
        let now = self.backend.now();
        let at = self.next_timeout().into_iter().chain(until).min();
        let limit = at.map_or(Duration::MAX, |at| at.since(now));
        let [endpoint, events] = self.sources();
        sleep(&[endpoint, events, waker.as_fd()], limit)
    }
}
