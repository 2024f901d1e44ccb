//! One non-blocking connection: a queue pair, its memory, and its protocol machine.
//!
//! A byte passes from the application to a work request and back here:
//!
//! ```text
//! write    ─ copy ─▶ send buffer ─ Machine::poll_action ─▶ post ─ QueuePair::post_send ─▶ the peer's window
//! try_read ◀─ copy ─ our window  ◀─ Machine::handle_immediates ◀── completions, from an Endpoint
//! ```

mod bytes;
mod driver;
mod run;

use std::io::IoSlice;
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

pub(crate) use run::Run;

/// Work requests per doorbell and completions per poll.
pub(crate) const BATCH: usize = 16;

/// What both sides pass to `rdma_connect` and `rdma_accept`.
///
/// No more READs than the C implementations allow (VR-CONN-005), and no private data (VR-CONN-016);
/// the peer's is ignored (VR-CONN-002). Endless RNR retries for the peer, so that it waits for our
/// receives instead of failing (VR-CONN-004, VR-CONN-017). Six retries without acknowledgement:
/// soft-RoCE takes seven as endless there too, and would never detect a lost peer (VR-KEEP-006).
pub(crate) const CONNECT_PARAMS: ConnectParams = ConnectParams {
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 6,
    rnr_retry_count: RNR_RETRY_INFINITE,
};

/// One connection: its queue pair, its memory and its machine. It never blocks.
///
/// An [`Endpoint`](crate::Endpoint) drives it, and owns the completion queue and event channel.
// Fields are in drop order (VR-RES-001), although a backend keeps alive what a handle needs.
pub struct Connection<B: Backend> {
    pair: B::QueuePair,
    /// [`QueuePair::max_inline`], which never changes.
    max_inline: usize,
    /// Slot of the next receive to post. A queue pair consumes receives in posting order.
    next_receive: u16,
    id: B::Identifier,
    pub(crate) memory: Memory<B>,
    backend: B,
    pub(crate) machine: Machine,
    pub(crate) work: Work,
    cause: Cause,
    options: Options,
    peer: SocketAddr,
    /// When memory that only a busy connection needs was last known to be in use.
    busy: Instant,
    /// Whether it was used since `busy`.
    used: bool,
    /// Earliest time to request the full send buffer again, after a refusal.
    grows_at: Instant,
    /// Whether [`Connection::next_timeout`] has moved nearer.
    sooner: bool,
    /// Whether the last write left no room, so that the next one waits.
    pub(crate) lacks_room: bool,
    /// Whether a call did more than post one WRITE since this was last read.
    more: bool,
}

enum Cause {
    /// The reason recorded by the machine, if the connection has ended.
    Machine,
    /// A failure that only says that the peer is gone. An unread event may tell why.
    Suspect(CompletionError),
    Known(Error),
}

/// Counts of a connection's requests to the device and of its waits.
///
/// [`Counters`] counts its messages to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Work {
    /// Chains of send requests posted. Each costs one doorbell, whatever its length.
    pub doorbells: u64,
    /// Send requests posted.
    pub requests: u64,
    /// Chains of receives posted.
    pub receive_doorbells: u64,
    /// Completions taken, of sends and of receives.
    pub completions: u64,
    /// Writes that found no room at all, and buffers that could not be lent.
    pub stalls: u64,
    /// Bytes sent without a copy.
    pub lent: u64,
    /// Lent parts of buffers that came back.
    pub returned: u64,
}

impl<B: Backend> Connection<B> {
    /// Makes a connection with all receives posted, for the peer's first message (VR-CONN-003), and
    /// without a window. `options` fit the device, and `completions` has room for
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
        // The side that dials is the client, whatever role the settings name.
        options.protocol.role = role;
        let domain = match domain {
            Some(domain) => {
                domain.check(&id)?;
                domain
            }
            // A domain of its own, so that its keys open nothing to other peers (VR-SEC-002).
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
        let memory = Memory::register(domain, &options, budget)?;
        // The second window and the full send buffer come with work (docs/decisions.md, 10).
        let begin = options.protocol.windows(1).send_buffer(Memory::<B>::small(&options));
        let mut machine = Machine::new(begin, Default::default())?;
        // Callers open it: that of a listener's connection once the program has it (VR-SEC-007).
        machine.withhold_window();
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
            grows_at: Instant::default(),
            sooner: false,
            lacks_room: false,
            more: false,
        };
        // A receive that is refused ends the connection, which `check` finds.
        for posted in (0..usize::from(options.receives)).step_by(BATCH) {
            connection.post_receives(BATCH.min(usize::from(options.receives) - posted));
        }
        connection.check()?;
        Ok(connection)
    }

    /// Registers what a connection has that the program uses: its first window and, if the options
    /// say so, its send buffer. A stranger costs neither.
    pub(crate) fn admit(&mut self) -> Result<(), Error> {
        self.open_window()?;
        let length = self.options.protocol.send_buffer;
        if self.options.eager_send_buffer && self.machine.can_replace_send_buffer(length) {
            let length = self.memory.add_send_buffer()?;
            self.machine.replace_send_buffer(length);
        }
        Ok(())
    }

    /// Registers the first window, unless there is one, and announces it once established.
    fn open_window(&mut self) -> Result<(), Error> {
        if !self.memory.has_window() && !self.has_ended() {
            let address = self.memory.add_window(0)?;
            let (length, region) = self.memory.window();
            self.machine.open_window(address, length, region);
            self.post(None);
        }
        Ok(())
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

    #[inline]
    pub(crate) const fn has_ended(&self) -> bool {
        self.machine.has_ended()
    }

    /// Returns whether the peer has announced a window, so that bytes can leave.
    pub fn has_peer_window(&self) -> bool {
        self.machine.has_peer_window()
    }

    /// Checks whether an error ended the connection.
    ///
    /// # Errors
    /// Returns that error.
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

    /// Like `check`, without creating the error.
    #[inline]
    const fn is_sound(&self) -> bool {
        !matches!(self.cause, Cause::Known(_)) && self.machine.failure().is_none()
    }

    /// Returns whether the peer is on this side's device.
    ///
    /// True if the queue pair's path leads back to where it begins, and false if there is no path.
    /// The peer's address is no evidence: a request can carry any address (VR-SEC-008).
    pub fn is_local(&self) -> bool {
        matches!(self.pair.is_loopback(), Ok(true))
    }

    /// Returns the peer's address. A server has it from the peer's request, unchecked.
    pub const fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Returns this side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local_addr()
    }

    /// Returns the queue pair number, by which devices, traces and logs name this connection.
    pub fn queue_pair_number(&self) -> u32 {
        self.pair.number()
    }

    /// Returns the settings, as far as the device allows them.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// Returns the kind of pages of its window: the effect of [`Options::huge_pages`].
    pub fn pages(&self) -> Pages {
        self.memory.pages()
    }

    /// Returns the protocol counters of the connection.
    pub fn counters(&self) -> Counters {
        self.machine.counters()
    }

    #[inline]
    pub(crate) const fn bytes_received(&self) -> u64 {
        self.machine.bytes_received()
    }

    #[inline]
    pub(crate) const fn returned_parts(&self) -> u64 {
        self.work.returned
    }

    /// Returns counts of the work requested from the device.
    pub const fn work(&self) -> Work {
        Work { requests: self.machine.requests(), ..self.work }
    }

    /// Returns the bytes of memory registered for this connection, including buffers to lend.
    pub fn registered_bytes(&self) -> usize {
        self.memory.registered_bytes()
    }

    /// Returns the number of written or lent bytes that are not known to have arrived at the peer.
    pub const fn unconfirmed(&self) -> u64 {
        self.machine.unconfirmed()
    }

    /// Returns whether the connection is established and the device has all written and lent bytes.
    pub const fn is_flushed(&self) -> bool {
        self.machine.unposted() == 0 && !matches!(self.machine.state(), State::Connecting)
    }

    /// Returns whether a write would find room.
    pub const fn has_room(&self) -> bool {
        self.machine.has_space()
    }

    /// Returns the number of received bytes that were not read.
    pub const fn unread(&self) -> u64 {
        self.machine.unread()
    }

    /// Returns whether a read can be answered now, with bytes, the end, or the connection's error.
    #[inline]
    pub const fn is_readable(&self) -> bool {
        self.machine.unread() > 0 || self.machine.has_ended()
    }

    /// Returns whether a write can be answered now: it would take a byte, or fail.
    pub const fn is_writable(&self) -> bool {
        !self.machine.takes_bytes() || self.has_room()
    }

    /// Returns the time by the backend's clock.
    pub fn now(&self) -> Instant {
        self.backend.now()
    }

    /// Returns when the endpoint must handle the connection next.
    pub fn next_timeout(&self) -> Option<Instant> {
        // With windows announced ahead, the peer may write to both, and neither is released.
        let ample = self.memory.has_full_send_buffer()
            || self.memory.has_both_windows() && !self.machine.announces_ahead();
        let ample = ample && self.machine.state() == State::Open;
        let release = ample.then(|| self.busy.after(self.options.keep_memory));
        match (release, self.machine.next_timeout()) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        }
    }

    /// Returns whether, since the last call, bytes may have begun to wait or times come nearer: ask
    /// [`Connection::take_sooner`] and [`Connection::is_flushed`].
    #[inline]
    pub(crate) fn take_more(&mut self) -> bool {
        self.more && std::mem::take(&mut self.more)
    }

    /// Returns whether [`Connection::next_timeout`] may have come nearer since the last call.
    #[inline]
    pub(crate) fn take_sooner(&mut self) -> bool {
        std::mem::take(&mut self.sooner)
    }

    /// See [`Endpoint::close`](crate::Endpoint::close). Also works before it is established.
    pub(crate) fn close(&mut self, linger: Duration) {
        // A refused peer may send a request before it reads why, and needs no more room than that.
        // Without it, the peer may miss the reason.
        if self.machine.unconfirmed() > 0 && !self.memory.has_window() {
            self.memory.be_brief();
            if let Err(error) = self.open_window() {
                tracing::debug!(peer = %self.peer, %error, "no window for a refused peer");
            }
        }
        let now = self.now();
        self.machine.close(now, linger);
        self.post(Some(now));
    }

    /// Returns `Some` once the connection is established and the device has all written and lent
    /// bytes.
    ///
    /// `None` means that bytes may wait for the peer's window, or for a receive there.
    ///
    /// # Errors
    /// Returns the error that ended the connection. Also returns an error if the connection ended
    /// before the device had all bytes (VR-CLOSE-003).
    pub fn flushed(&self) -> Result<Option<()>, Error> {
        self.check()?;
        match self.state() {
            State::Closed if self.machine.unposted() > 0 => Err(self.end()),
            State::Connecting => Ok(None),
            _ => Ok((self.machine.unposted() == 0).then_some(())),
        }
    }

    /// Returns `Some` once the peer has everything lent from `buffer`, and `None` before.
    ///
    /// # Errors
    /// Returns an error if the connection ended first.
    pub fn returned(&self, buffer: &RegisteredBuffer<B>) -> Result<Option<()>, Error> {
        match self.is_lent(buffer) {
            false => Ok(Some(())),
            true if matches!(self.state(), State::Closed | State::Failed(_)) => Err(self.end()),
            true => Ok(None),
        }
    }

    /// Registers `len` bytes for zero-copy sending, all zero at first.
    ///
    /// Registering takes much longer than copying a few kilobytes, so keep the buffer and reuse it.
    ///
    /// # Errors
    /// Returns an error if `len` is zero or the memory cannot be registered.
    pub fn register_buffer(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.memory.registrar().register_buffer(len)
    }

    /// Registers application memory to lend. With [`Access::REMOTE_WRITE`] it can also receive.
    ///
    /// `memory` stays registered until you drop the buffer, and longer while a part of it is lent
    /// or a window lies in it. [`CallerMemory`] says who may write to it until then.
    ///
    /// # Errors
    /// Returns an error, and drops `memory`, if it is empty or cannot be registered.
    pub fn register_memory(
        &self,
        memory: impl CallerMemory,
        access: Access,
    ) -> Result<RegisteredBuffer<B>, Error> {
        self.memory.registrar().register_memory(memory, access)
    }

    /// Returns what registers memory for this connection, for use without a lock on its endpoint.
    pub fn registrar(&self) -> Registrar<B> {
        self.memory.registrar().clone()
    }

    /// Returns the protection domain, which further connections to the same server may share.
    pub const fn domain(&self) -> &ProtectionDomain<B> {
        self.memory.domain()
    }

    /// See [`Endpoint::lend_framed`](crate::Endpoint::lend_framed). Also returns whether an earlier
    /// loan must come back before more can be lent.
    pub(crate) fn try_lend(
        &mut self,
        before: &[IoSlice<'_>],
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
        after: &[IoSlice<'_>],
    ) -> Result<(Option<usize>, bool), Error> {
        self.check()?;
        // For its error only: after a close, or an end in order, `check` finds none.
        self.machine.lend(0)?;
        if buffer.domain() != self.memory.domain() {
            return Err(Error::ForeignBuffer);
        }
        let wanted = match range.end.checked_sub(range.start) {
            Some(len) if range.end <= buffer.len() => len,
            _ => return Err(ApiMisuse::LendBeyondLimit { bytes: range.end, lendable: buffer.len() }.into()),
        };
        // All is taken before any of it is posted: it leaves by one doorbell.
        let mut taken = 0;
        let mut whole = self.take_bytes(before, &mut taken);
        let mut waits = false;
        if whole {
            let bytes = wanted.min(self.machine.lendable() as usize);
            self.machine.lend(bytes)?;
            if bytes > 0 {
                // The position behind everything taken so far, which ends with these bytes.
                let until = self.machine.confirmed() + self.machine.unconfirmed();
                self.memory.lendings.add(Arc::clone(buffer), range.start, until);
                self.work.lent += bytes as u64;
                taken += bytes;
            }
            waits = bytes < wanted;
            whole = !waits && self.take_bytes(after, &mut taken);
        }
        if taken == 0 && !whole {
            self.work.stalls += 1;
            return Ok((None, waits));
        }
        self.went_on();
        Ok((Some(taken), waits))
    }

    /// Returns whether the peer may still lack bytes lent from `buffer`.
    pub fn is_lent(&self, buffer: &RegisteredBuffer<B>) -> bool {
        self.memory.lendings.contain(buffer)
    }

    /// Returns whether [`Connection::try_lend`] would now take a byte, or fail.
    pub(crate) const fn can_lend(&self) -> bool {
        self.machine.lendable() > 0
    }

    /// Returns `Some` once a closed connection has delivered all bytes and ended. `None` before.
    ///
    /// # Errors
    /// Returns the error that ended the connection, or an error if some bytes did not arrive.
    pub fn closed(&self) -> Result<Option<()>, Error> {
        self.check()?;
        match self.state() {
            State::Closed if self.unconfirmed() > 0 => Err(self.end()),
            State::Closed => Ok(Some(())),
            _ => Ok(None),
        }
    }

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
