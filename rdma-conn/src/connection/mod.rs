//! One connection without waiting: a queue pair, its memory, and the machine that rules them.
//!
//! This is where a byte passes from the application to a work request and back:
//!
//! ```text
//! write    ─ copy ─▶ send buffer ─ Machine::poll_action ─▶ post ─ QueuePair::post_send ─▶ the peer's window
//! try_read ◀─ copy ─ our window  ◀─ Machine::handle_immediates ◀── completions, from an Endpoint
//! ```
//!
//! Most reads need less: `read_at_once` does in one step what `try_read` does, and nothing where that is not all.

mod bytes;
mod driver;

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use rdma_backend::memory::CallerMemory;
use rdma_backend::time::Instant;
use rdma_backend::{
    Access, Backend, CompletionError, ConnectParams, Identifier, Pages, QueuePair, QueuePairLimits,
    RNR_RETRY_INFINITE,
};
use rdma_proto::{ApiMisuse, Counters, Machine, Role, State, TransportError};

use crate::budget::Budget;
use crate::domain::ProtectionDomain;
use crate::error::Error;
use crate::lend::RegisteredBuffer;
use crate::memory::{Memory, Registrar};
use crate::options::Options;

/// Work requests per doorbell and completions per poll.
pub(crate) const BATCH: usize = 16;

/// The parameters that both sides pass to `rdma_connect` and `rdma_accept`: no READs beyond what the C implementations allow (VR-CONN-005),
/// no private data (VR-CONN-016), and none is looked at (VR-CONN-002); endless RNR retries for the peer, so that it waits for our
/// receives instead of failing (VR-CONN-004, VR-CONN-017). Six retries where nothing answers, since soft-RoCE takes seven for endless there as
/// well, and would never find a peer gone (VR-KEEP-006).
pub(crate) const CONNECT_PARAMS: ConnectParams = ConnectParams {
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 6,
    rnr_retry_count: RNR_RETRY_INFINITE,
};

/// One connection: its queue pair, its memory and its machine. Nothing here blocks.
///
/// It does not wait for anything either: an [`Endpoint`](crate::Endpoint) owns its completion queue and event channel, and
/// brings it what has come.
///
/// The fields are in the order in which they must go (VR-RES-001); backends keep what a handle needs alive, so this is
/// only the shortest way.
pub struct Connection<B: Backend> {
    pair: B::QueuePair,
    /// [`QueuePair::max_inline`], which stays.
    max_inline: usize,
    /// The slot of the receive that is posted next. A queue pair consumes them in the order in which they were posted.
    next_receive: u16,
    id: B::Identifier,
    pub(crate) memory: Memory<B>,
    backend: B,
    pub(crate) machine: Machine,
    pub(crate) work: Work,
    cause: Cause,
    options: Options,
    peer: SocketAddr,
    /// When memory that only a busy connection needs was last known to be needed, ...
    busy: Instant,
    /// ... and whether it was needed since.
    used: bool,
    /// Whether [`Connection::next_timeout`] has come nearer: the machine's, or by memory that is
    /// given back later.
    sooner: bool,
    /// Whether the latest write left no room, so that the next one waits.
    pub(crate) lacks_room: bool,
    /// Whether a call has done more than to post one WRITE since that was asked last.
    more: bool,
}

/// The reason why a connection ended.
enum Cause {
    /// The reason that its machine gives, if the connection has ended.
    Machine,
    /// A failure that says no more than that the peer is gone: an event that nobody has read yet may tell why.
    Suspect(CompletionError),
    /// An event, or a call that was refused.
    Known(Error),
}

/// Counts of what a connection has asked of the device, and of how often it had to wait.
///
/// [`Counters`](crate::Counters) has those of what it has said to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Work {
    /// Chains of send requests posted: each costs one write to the device, however long it is.
    pub doorbells: u64,
    /// Send requests in them.
    pub requests: u64,
    /// Chains of receives posted.
    pub receive_doorbells: u64,
    /// Completions taken, of sends and of receives.
    pub completions: u64,
    /// Writes that found no room at all, and buffers that could not be lent.
    pub stalls: u64,
    /// Bytes sent from where the application had them.
    pub lent: u64,
    /// Times that a lent part of a buffer came back.
    pub returned: u64,
}

impl<B: Backend> Connection<B> {
    /// Makes a connection on `id`, whose device is known, with all receives posted, so that the peer's
    /// first message finds one (VR-CONN-003). `options` fit the device, and `completions` has room for
    /// [`Options::completions`].
    pub(crate) fn new(
        backend: B,
        id: B::Identifier,
        completions: &B::CompletionQueue,
        (peer, role): (SocketAddr, Role),
        mut options: Options,
        domain: Option<ProtectionDomain<B>>,
        budget: Arc<Budget>,
    ) -> Result<Self, Error> {
        // Whoever dials is the client, whatever the settings were made for.
        options.protocol.role = role;
        let domain = match domain {
            Some(domain) => {
                domain.check(&id)?;
                domain
            }
            // Its own, so that its keys open nothing to anybody else (VR-SEC-002).
            None => ProtectionDomain::create(&id)?,
        };
        let depth = QueuePairLimits {
            send_depth: options.protocol.send_depth.into(),
            recv_depth: options.receives.into(),
            inline: options.inline,
        };
        let pair = id
            .create_queue_pair(domain.lower(), completions, depth)
            .map_err(Error::backend("creating a queue pair"))?;
        let mut memory = Memory::register(domain, &options, budget)?;
        if options.eager_send_buffer {
            memory.add_send_buffer()?;
        }
        // A second window comes when it is needed.
        let begin = options.protocol.windows(1);
        let machine = Machine::new(begin, [memory.first_window(), Default::default()])?;
        let busy = backend.now();
        let mut connection = Self {
            max_inline: pair.max_inline(),
            next_receive: 0,
            pair,
            id,
            memory,
            backend,
            machine,
            work: Work::default(),
            cause: Cause::Machine,
            options,
            peer,
            busy,
            used: false,
            sooner: false,
            lacks_room: false,
            more: false,
        };
        for posted in (0..usize::from(options.receives)).step_by(BATCH) {
            connection.post_receives(BATCH.min(usize::from(options.receives) - posted));
        }
        connection.check()?;
        Ok(connection)
    }

    pub(crate) fn connect(&self) -> Result<(), Error> {
        self.id.connect(&CONNECT_PARAMS, &[]).map_err(Error::backend("connecting"))
    }

    pub(crate) fn accept(&self) -> Result<(), Error> {
        self.id.accept(&CONNECT_PARAMS, &[]).map_err(Error::backend("accepting"))
    }

    /// Returns the state of the connection.
    pub fn state(&self) -> State {
        self.machine.state()
    }

    /// Returns whether it has ended, in order or by an error.
    #[inline]
    pub(crate) const fn has_ended(&self) -> bool {
        self.machine.has_ended()
    }

    /// Returns whether the peer has given a window, so that bytes can leave.
    pub fn has_peer_window(&self) -> bool {
        self.machine.has_peer_window()
    }

    /// Checks whether an error ended the connection.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<(), Error> {
        if self.is_sound() {
            return Ok(());
        }
        match (&self.cause, self.machine.state()) {
            (Cause::Known(failure), _) => Err(failure.clone()),
            (_, State::Failed(error)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Returns whether no error has ended the connection, without making one.
    #[inline]
    const fn is_sound(&self) -> bool {
        !matches!(self.cause, Cause::Known(_)) && self.machine.failure().is_none()
    }

    /// Returns whether the peer is on this side's device: whether the path of the queue pair leads back to the address it leaves
    /// from. False as long as there is no path. Addresses prove nothing, since a request carries what its sender wrote
    /// (VR-SEC-008).
    pub fn is_local(&self) -> bool {
        matches!(self.pair.is_loopback(), Ok(true))
    }

    /// Returns the peer's address. That of an accepted connection is what the peer's request said.
    pub const fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Returns this side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local_addr()
    }

    /// Returns the number of its queue pair, by which devices, traces and logs know this connection.
    pub fn queue_pair_number(&self) -> u32 {
        self.pair.number()
    }

    /// Returns the settings, as the device allows them.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// Returns what the pages of its window are: what came of [`Options::huge_pages`].
    pub fn pages(&self) -> Pages {
        self.memory.pages()
    }

    /// Returns the protocol's counts of the connection.
    pub fn counters(&self) -> Counters {
        self.machine.counters()
    }

    /// Returns the number of bytes that have arrived.
    #[inline]
    pub(crate) const fn bytes_received(&self) -> u64 {
        self.machine.bytes_received()
    }

    /// Returns the number of parts of buffers that have come back.
    #[inline]
    pub(crate) const fn returned_parts(&self) -> u64 {
        self.work.returned
    }

    /// Returns the counts of what the connection has asked of the device.
    pub const fn work(&self) -> Work {
        Work { requests: self.machine.requests(), ..self.work }
    }

    /// Returns the bytes of memory registered for this connection, buffers to lend included.
    pub fn registered_bytes(&self) -> usize {
        self.memory.registered_bytes()
    }

    /// Returns the number of bytes taken for sending that are not known to have arrived.
    pub const fn unconfirmed(&self) -> u64 {
        self.machine.unconfirmed()
    }

    /// Returns whether the connection is established and everything taken for sending was handed to the device.
    pub const fn is_flushed(&self) -> bool {
        self.machine.unposted() == 0 && !matches!(self.machine.state(), State::Connecting)
    }

    /// Returns whether a write finds room.
    pub const fn has_room(&self) -> bool {
        self.machine.has_space()
    }

    /// Returns the number of received bytes that were not read.
    pub const fn unread(&self) -> u64 {
        self.machine.unread()
    }

    /// Returns whether a read has an answer now: bytes, the end, or what ended the connection.
    #[inline]
    pub const fn is_readable(&self) -> bool {
        self.machine.unread() > 0 || self.machine.has_ended()
    }

    /// Returns whether a write has an answer now: it would take a byte, or fail.
    pub const fn is_writable(&self) -> bool {
        !self.machine.takes_bytes() || self.has_room()
    }

    /// Returns the time by the backend's clock.
    pub fn now(&self) -> Instant {
        self.backend.now()
    }

    /// Returns the time by which its endpoint must handle it again.
    pub fn next_timeout(&self) -> Option<Instant> {
        let ample = self.memory.send_buffer().is_some()
            || self.memory.has_both_windows() && !self.machine.announces_ahead();
        let ample = ample && self.machine.state() == State::Open;
        let release = ample.then(|| self.busy.after(self.options.keep_memory));
        match (release, self.machine.next_timeout()) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    /// Returns whether a call may have made bytes wait, or times come nearer, since this was asked
    /// last: [`Connection::take_sooner`] and [`Connection::is_flushed`] say more.
    #[inline]
    pub(crate) fn take_more(&mut self) -> bool {
        self.more && std::mem::take(&mut self.more)
    }

    /// Returns whether [`Connection::next_timeout`] may have come nearer since this was asked last.
    #[inline]
    pub(crate) fn take_sooner(&mut self) -> bool {
        std::mem::take(&mut self.sooner)
    }

    /// Begins a graceful end: what was written is delivered first, for at most `linger`, also where
    /// the connection is not established yet.
    pub(crate) fn close(&mut self, linger: Duration) {
        let now = self.now();
        self.machine.close(now, linger);
        self.post(Some(now));
    }

    /// Returns whether the connection is established and everything taken for sending was handed to the device; `None` while some
    /// of it waits for the peer's window, or for its receives.
    ///
    /// # Errors
    /// The connection has ended before that (VR-CLOSE-003).
    pub fn flushed(&self) -> Result<Option<()>, Error> {
        self.check()?;
        match self.state() {
            State::Closed if self.machine.unposted() > 0 => Err(self.end()),
            State::Connecting => Ok(None),
            _ => Ok((self.machine.unposted() == 0).then_some(())),
        }
    }

    /// Returns whether the peer has all that was lent of `buffer`; `None` while some of it is on its way.
    ///
    /// # Errors
    /// The connection has ended before that.
    pub fn returned(&self, buffer: &RegisteredBuffer<B>) -> Result<Option<()>, Error> {
        match self.is_lent(buffer) {
            false => Ok(Some(())),
            true if matches!(self.state(), State::Closed | State::Failed(_)) => Err(self.end()),
            true => Ok(None),
        }
    }

    /// Registers `len` bytes to send from without a copy, all zero at first. Registering takes much longer than copying
    /// a few kilobytes, so keep what it returns and use it again.
    ///
    /// # Errors
    /// `len` is zero, or no memory can be registered.
    pub fn register_buffer(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.memory.registrar().buffer(len, Access::NONE)
    }

    /// Registers memory that the application has, to send from without a copy, and with [`Access::REMOTE_WRITE`] also to receive into. The
    /// connection keeps `memory` until it is deregistered, which dropping what this returns does, once nothing is lent of it and no
    /// window lies in it. [`CallerMemory`] says who may write to it until then.
    ///
    /// # Errors
    /// `memory` has no bytes, or cannot be registered; it is dropped.
    pub fn register_memory(
        &self,
        memory: impl CallerMemory,
        access: Access,
    ) -> Result<RegisteredBuffer<B>, Error> {
        self.memory.registrar().register_memory(memory, access)
    }

    /// Returns what registers memory for this connection, for a face whose lock others wait for.
    pub(crate) fn registrar(&self) -> Registrar<B> {
        self.memory.registrar().clone()
    }

    /// Returns the protection domain of this connection, in which further connections to the same server may be made.
    pub const fn domain(&self) -> &ProtectionDomain<B> {
        self.memory.domain()
    }

    /// Sends as many bytes of `buffer`, from the beginning of `range`, as can be lent now; `None` if none can, because some
    /// that were lent before wait for the peer's window. They come behind all that was written before.
    ///
    /// # Errors
    /// The error that ended the connection; or `range` is not inside of the buffer; or the buffer belongs to another protection domain.
    pub(crate) fn try_lend(
        &mut self,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        self.check()?;
        self.machine.lend(0)?;
        if buffer.domain() != self.memory.domain() {
            return Err(Error::ForeignBuffer);
        }
        let wanted = match range.end.checked_sub(range.start) {
            Some(len) if range.end <= buffer.len() => len,
            _ => return Err(ApiMisuse::LendBeyondLimit { bytes: range.end, lendable: buffer.len() }.into()),
        };
        let bytes = wanted.min(self.machine.lendable() as usize);
        if bytes == 0 && wanted > 0 {
            self.work.stalls += 1;
            return Ok(None);
        }
        self.machine.lend(bytes)?;
        if bytes > 0 {
            let until = self.machine.confirmed() + self.machine.unconfirmed();
            self.memory.lendings.add(Arc::clone(buffer), range.start, until);
            self.work.lent += bytes as u64;
            self.went_on();
        }
        Ok(Some(bytes))
    }

    /// Returns whether the peer may still miss some of what was lent of `buffer`.
    pub fn is_lent(&self, buffer: &RegisteredBuffer<B>) -> bool {
        self.memory.lendings.contain(buffer)
    }

    /// Returns whether [`Connection::try_lend`] has an answer now: it would take a byte, or fail.
    pub(crate) const fn can_lend(&self) -> bool {
        self.machine.lendable() > 0
    }

    /// Returns whether a connection that was closed has ended in order; `None` while its last bytes are on their way.
    ///
    /// # Errors
    /// Not everything arrived.
    pub fn closed(&self) -> Result<Option<()>, Error> {
        self.check()?;
        match self.state() {
            State::Closed if self.unconfirmed() > 0 => Err(self.end()),
            State::Closed => Ok(Some(())),
            _ => Ok(None),
        }
    }

    /// Why nothing more will ever arrive, for whoever was promised more.
    pub(crate) fn end(&self) -> Error {
        self.check().err().unwrap_or_else(|| Error::Protocol(TransportError::Disconnected.into()))
    }
}

impl<B: Backend> std::fmt::Debug for Connection<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.peer)
            .field("machine", &self.machine)
            .finish_non_exhaustive()
    }
}
