//! One connection without waiting: a queue pair, its memory, and the machine that rules them.
//!
//! This is where a byte passes from the application to a work request and back:
//!
//! ```text
//! try_write ─ copy ─▶ send buffer ─ Machine::poll_action ─▶ post ─ QueuePair::post_send ─▶ the peer's window
//! try_read  ◀─ copy ─ our window  ◀─ Machine::handle_immediate ── take ◀── completions, from a Link or an Endpoint
//! ```

use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rdma_proto::backend::{
    Backend, CmEventKind, Completed, Completion, CompletionError, CompletionStatus, ConnectParams,
    Identifier, QueuePair, QueuePairLimits, RNR_RETRY_INFINITE, RecvRequest,
};
use rdma_proto::time::Instant;
use rdma_proto::{ApiMisuse, Config, Connection as Machine, Counters, State, TransportError};

use crate::arrived::Arrived;
use crate::error::Error;
use crate::memory::{Budget, Memory, receive_slot};
use crate::options::Options;
use crate::work::Work;

/// Work requests per doorbell and completions per poll.
pub(crate) const BATCH: usize = 16;

/// What both sides pass to `rdma_connect` and `rdma_accept`: no READs beyond what the C implementations allow (VR-CONN-005),
/// no private data, and none is looked at (VR-CONN-002); endless RNR retries for the peer, so that it waits for our receives
/// instead of failing (VR-CONN-004). Six retries where nothing answers, since soft-RoCE takes seven for endless there as
/// well, and would never find a peer gone (VR-KEEP-006).
pub(crate) const CONNECT_PARAMS: ConnectParams = ConnectParams {
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 6,
    rnr_retry_count: RNR_RETRY_INFINITE,
};

/// One connection: its queue pair, its memory and its machine. Nothing here blocks.
///
/// It does not wait for anything either: whoever owns its completion queue and event channel, a
/// [`Link`](crate::Link) or an [`Endpoint`](crate::Endpoint), brings it what has come.
///
/// The fields are in the order in which they must go (VR-RES-001); backends keep what a handle needs alive, so this is
/// only the shortest way.
pub struct Connection<B: Backend> {
    pair: B::QueuePair,
    id: B::Identifier,
    pub(crate) memory: Memory<B>,
    backend: B,
    pub(crate) machine: Machine,
    pub(crate) work: Work,
    /// What ended the connection, where the machine does not know it: connection-manager events.
    failure: Option<Error>,
    /// A failure that says no more than that the peer is gone. Its cause may be an event that nobody has read yet.
    suspect: Option<CompletionError>,
    options: Options,
    peer: SocketAddr,
    /// When an accepted connection must be established.
    establish_by: Option<Instant>,
    /// When memory that only a busy connection needs was last needed.
    busy: Instant,
}

impl<B: Backend> Connection<B> {
    /// Makes a connection on `id`, whose device is known, with all receives posted, so that the peer's
    /// first message finds one (VR-CONN-003). `options` fit the device, and `completions` has room for
    /// [`Options::completions`].
    pub(crate) fn new(
        backend: B,
        id: B::Identifier,
        completions: &B::CompletionQueue,
        peer: SocketAddr,
        options: Options,
        budget: Arc<Budget>,
    ) -> Result<Self, Error> {
        options.protocol.check()?;
        // Its own, so that its keys open nothing to anybody else (VR-SEC-002).
        let domain = id.create_domain().map_err(Error::backend("allocating a protection domain"))?;
        let depth = QueuePairLimits {
            send_depth: options.protocol.send_depth.into(),
            recv_depth: options.receives.into(),
            inline: options.inline,
        };
        let pair = id
            .create_queue_pair(&domain, completions, depth)
            .map_err(Error::backend("creating a queue pair"))?;
        let memory = Memory::register(domain, &options.protocol, options.receives, budget)?;
        // A second window comes when it is needed.
        let begin = Config { windows: 1, ..options.protocol };
        let machine = Machine::new(begin, [memory.first_window(), Default::default()])?;
        let busy = backend.now();
        let mut connection = Self {
            pair,
            id,
            memory,
            backend,
            machine,
            work: Work::default(),
            failure: None,
            suspect: None,
            options,
            peer,
            establish_by: None,
            busy,
        };
        let receives: Vec<u16> = (0..options.receives).collect();
        for slots in receives.chunks(BATCH) {
            connection.post_receives(slots);
        }
        connection.check()?;
        Ok(connection)
    }

    pub(crate) fn connect(&self) -> Result<(), Error> {
        self.id.connect(&CONNECT_PARAMS, &[]).map_err(Error::backend("connecting"))
    }

    pub(crate) fn accept(&mut self) -> Result<(), Error> {
        self.establish_by = Some(self.now().after(self.options.handshake_timeout));
        self.id.accept(&CONNECT_PARAMS, &[]).map_err(Error::backend("accepting"))
    }

    pub(crate) const fn id(&self) -> &B::Identifier {
        &self.id
    }

    /// Where the connection stands.
    pub fn state(&self) -> State {
        self.machine.state()
    }

    /// Whether the peer has registered a window, so that bytes can leave.
    pub fn is_registered(&self) -> bool {
        self.machine.is_registered()
    }

    /// What ended the connection, if an error did.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<(), Error> {
        match (&self.failure, self.machine.state()) {
            (Some(failure), _) => Err(failure.clone()),
            (None, State::Failed(error)) => Err(error.into()),
            (None, _) => Ok(()),
        }
    }

    /// The peer's address. Equal to [`Connection::local_addr`] but for the port if the peer is local (VR-SEC-008).
    pub const fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// This side's address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local_addr()
    }

    /// The number of its queue pair, by which devices, traces and logs know this connection.
    pub fn queue_pair_number(&self) -> u32 {
        self.pair.number()
    }

    /// The settings, as the device allows them.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// What the connection has done so far.
    pub const fn counters(&self) -> Counters {
        self.machine.counters()
    }

    /// What it has asked of the device so far.
    pub const fn work(&self) -> Work {
        self.work
    }

    /// Bytes of memory registered for this connection.
    pub fn registered_bytes(&self) -> usize {
        self.memory.registered_bytes()
    }

    /// Bytes taken for sending that are not known to have arrived.
    pub const fn unconfirmed(&self) -> u64 {
        self.machine.unconfirmed()
    }

    /// Whether the connection is established and everything taken for sending was handed to the device.
    pub fn is_flushed(&self) -> bool {
        self.machine.state() != State::Connecting && self.machine.unposted() == 0
    }

    /// Whether a write finds room.
    pub const fn has_room(&self) -> bool {
        self.machine.space().len > 0
    }

    /// All received bytes that were not read.
    pub const fn unread(&self) -> u64 {
        self.machine.unread()
    }

    /// Whether [`Connection::try_read`] has an answer now: bytes, the end, or what ended the connection.
    pub const fn is_readable(&self) -> bool {
        self.machine.unread() > 0 || matches!(self.machine.state(), State::Closed | State::Failed(_))
    }

    /// Whether [`Connection::try_write`] has an answer now: it would take a byte, or fail.
    pub const fn is_writable(&self) -> bool {
        match self.machine.state() {
            State::Connecting | State::Open => self.has_room(),
            State::Closing | State::Closed | State::Failed(_) => true,
        }
    }

    /// The backend's clock.
    pub fn now(&self) -> Instant {
        self.backend.now()
    }

    /// When its owner must look after it at the latest, as with [`Link::progress`](crate::Link::progress).
    pub fn next_timeout(&self) -> Option<Instant> {
        let state = self.machine.state();
        let establish_by = self.establish_by.filter(|_| state == State::Connecting);
        let ample = state == State::Open && self.memory.is_ample();
        let release = ample.then(|| self.busy.after(self.options.keep_memory));
        establish_by.into_iter().chain(release).chain(self.machine.next_timeout()).min()
    }

    /// Reads what has arrived; `None` when there is nothing now, `Some(0)` at the end of the stream.
    ///
    /// # Errors
    /// What ended the connection, once all that arrived before is read.
    pub fn try_read(&mut self, mut into: &mut [u8]) -> Result<Option<usize>, Error> {
        let wanted = into.len();
        let mut read = 0;
        while !into.is_empty() {
            let Some(readable) = self.machine.readable() else { break };
            let copied = self.memory.read_window(readable, into);
            if copied == 0 {
                return Err(Error::Protocol(rdma_proto::Error::Unreachable(
                    "readable bytes outside their window",
                )));
            }
            self.machine.consume(copied)?;
            read += copied as usize;
            into = into.get_mut(copied as usize..).unwrap_or_default();
        }
        if read > 0 || wanted == 0 {
            // A window that was emptied is announced again at once.
            self.went_on();
            return Ok(Some(read));
        }
        self.check()?;
        Ok((self.machine.state() == State::Closed).then_some(0))
    }

    /// All that has arrived, in order, where the peer wrote it; [`Connection::consume`] what was used.
    pub fn arrived(&self) -> impl Iterator<Item = Arrived<'_>> {
        self.machine.all_readable().into_iter().flatten().filter_map(|part| self.memory.arrived(part))
    }

    /// Gives the first `bytes` of [`Connection::arrived`] back to the peer: their memory may be written again.
    ///
    /// # Errors
    /// More than have arrived; none is consumed then.
    pub fn consume(&mut self, bytes: usize) -> Result<(), Error> {
        let readable = usize::try_from(self.unread()).unwrap_or(usize::MAX);
        if bytes > readable {
            return Err(ApiMisuse::ConsumeBeyondReadable { bytes, readable }.into());
        }
        let mut left = bytes;
        while let Some(part) = self.machine.readable().filter(|_| left > 0) {
            // At most `part.len`, a u32.
            let now = left.min(part.len as usize);
            self.machine.consume(now as u32)?;
            left -= now;
        }
        self.went_on();
        Ok(())
    }

    /// Takes as many bytes as there is room for and sends them as one notification; `None` when there is no room now.
    ///
    /// # Errors
    /// What ended the connection; or no memory can be registered for the send buffer, which ends nothing: a later call may
    /// find some.
    pub fn try_write(&mut self, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        self.check()?;
        self.machine.commit(0)?;
        if from.iter().all(|slice| slice.is_empty()) {
            return Ok(Some(0));
        }
        if self.machine.space().len > 0 {
            self.memory.need_send_buffer()?;
        }
        let mut written = 0;
        for slice in from {
            let mut rest: &[u8] = slice;
            while !rest.is_empty() {
                let filled = self.memory.fill(self.machine.space(), rest);
                self.machine.commit(filled)?;
                if filled == 0 {
                    break;
                }
                written += filled;
                rest = rest.get(filled..).unwrap_or_default();
            }
        }
        if written == 0 {
            self.work.stalls += 1;
            return Ok(None);
        }
        self.went_on();
        Ok(Some(written))
    }

    /// The application has done something by which something may be posted.
    pub(crate) fn went_on(&mut self) {
        let now = self.now();
        self.busy = now;
        self.post(now);
    }

    /// Begins a graceful end: what was written is delivered first, for at most `linger`.
    pub fn close(&mut self, linger: Duration) {
        let now = self.now();
        self.machine.close(now, linger);
        self.post(now);
    }

    /// Whether a connection that was closed has ended in order; `None` while its last bytes are on their way.
    ///
    /// # Errors
    /// Not everything arrived.
    pub(crate) fn closed(&mut self) -> Result<Option<()>, Error> {
        self.check()?;
        match self.state() {
            State::Closed if self.unconfirmed() > 0 => Err(self.end()),
            State::Closed => Ok(Some(())),
            _ => Ok(None),
        }
    }

    /// Handles time, if it has come, and posts what can be posted. True if anything happened by which a read or write that
    /// had to wait may go on.
    pub(crate) fn handle_time(&mut self) -> bool {
        let now = self.now();
        let due = self.next_timeout().is_some_and(|at| now >= at);
        if due {
            if self.machine.state() == State::Connecting {
                let doing = "waiting for the peer to complete the connection";
                self.fail(Error::TimedOut { doing, after: self.options.handshake_timeout });
            }
            self.machine.handle_timeout(now);
            if self.machine.state() == State::Open && now >= self.busy.after(self.options.keep_memory) {
                self.release_memory(now);
            }
        }
        self.post(now);
        due
    }

    /// Gives back what only a busy connection needs, as far as nothing of it is in use.
    fn release_memory(&mut self, now: Instant) {
        if self.machine.unconfirmed() == 0 {
            self.memory.drop_send_buffer();
        }
        if let Some(index) = self.machine.drop_region() {
            self.memory.drop_window(index);
        }
        self.busy = now;
    }

    /// A call on what the connection shares with others failed.
    pub(crate) fn handle_refusal(&mut self, call: &'static str) {
        self.machine.handle_refusal(call);
        self.post(self.now());
    }

    /// Handles a connection-manager event of this connection. Hand over all completions that have arrived first: what the
    /// peer sent before counts as such, however late the event is read (VR-FLOW-003, VR-CLOSE-002).
    pub(crate) fn handle_event(&mut self, event: CmEventKind<B>) {
        tracing::debug!(peer = %self.peer, ?event, "connection event");
        match event {
            CmEventKind::Established { peer } => {
                // VR-CONN-012.
                if self.pair.set_min_rnr_timer(self.options.rnr_timer).is_err() {
                    // Only slower when the peer outruns our receives, so no reason to give up.
                    tracing::warn!(peer = %self.peer, "the device keeps its own RNR timer");
                }
                let now = self.now();
                self.machine.handle_established(now, peer.rnr_retry_count);
                self.post(now);
            }
            // Every way not to be connected is an error (VR-CONN-006).
            CmEventKind::Rejected { reason } => self.fail(Error::rejected(self.peer, reason)),
            CmEventKind::Unreachable { status } => {
                self.fail(Error::unreachable(self.peer, "it does not answer", status));
            }
            CmEventKind::ConnectError { status } => {
                self.fail(Error::unreachable(self.peer, "the connection could not be made", status));
            }
            CmEventKind::Disconnected => {
                self.machine.handle_disconnected();
                self.post(self.now());
            }
            CmEventKind::DeviceRemoval => self.fail(Error::DeviceRemoved),
            // The connection has moved on, or goes on.
            CmEventKind::AddressResolved
            | CmEventKind::RouteResolved
            | CmEventKind::TimewaitExit
            | CmEventKind::AddressChange => {}
            other => tracing::warn!(peer = %self.peer, event = ?other, "unexpected connection event"),
        }
    }

    /// Ends the connection for this reason, which everybody who waits is told (VR-CLOSE-003).
    pub(crate) fn fail(&mut self, failure: Error) {
        if self.check().is_ok() {
            self.failure = Some(failure);
        }
        self.machine.handle_disconnected();
        self.post(self.now());
    }

    /// Handles completions of this connection's queue pair, at most [`BATCH`], and posts what they allow.
    pub(crate) fn handle_completions<'a>(&mut self, completions: impl IntoIterator<Item = &'a Completion>) {
        let now = self.now();
        let mut slots = [0; BATCH];
        let mut used = 0;
        for completion in completions {
            self.work.completions += 1;
            if let Some(slot) = self.take_completion(now, completion)
                && let Some(place) = slots.get_mut(used)
            {
                *place = slot;
                used += 1;
            }
        }
        self.work.returned += self.memory.lendings.give_back(self.machine.confirmed());
        self.post_receives(slots.get(..used).unwrap_or_default());
        // Answers and windows must not wait for the end of a long queue, nor others for a peer's storm (VR-RES-007).
        self.post(now);
    }

    /// Hands one completion to the machine. For a receive: the slot that may be posted again.
    fn take_completion(&mut self, now: Instant, completion: &Completion) -> Option<u16> {
        match completion.result {
            // An immediate that comes with a message means nothing (VR-CTRL-010).
            Ok(Completed::Recv { len, .. }) => {
                let slot = receive_slot(completion.id)?;
                let (bytes, len) = self.memory.incoming_message(slot, len);
                self.machine.handle_message(now, bytes.get(..len).unwrap_or_default());
                // Answered one by one: only a peer that takes no answers can make them pile up (VR-FEAT-007).
                self.post(now);
                Some(slot)
            }
            Ok(Completed::RecvWrite { immediate }) => {
                self.machine.handle_immediate(now, immediate);
                self.busy = now;
                self.add_window();
                receive_slot(completion.id)
            }
            Ok(Completed::Send | Completed::Write | Completed::Read) => {
                self.machine.handle_sent(now, completion.id);
                None
            }
            Err(failure) => {
                tracing::debug!(peer = %self.peer, ?failure, "work request failed");
                match (failure.status, receive_slot(completion.id)) {
                    (CompletionStatus::WR_FLUSH_ERR, _) => _ = self.suspect.get_or_insert(failure),
                    (CompletionStatus::RETRY_EXC_ERR, None) => self.suspect = Some(failure),
                    (_, Some(_)) => self.machine.handle_receive_failure(failure),
                    (_, None) => self.machine.handle_failure(failure),
                }
                None
            }
        }
    }

    /// Whether there was a failure that [`Connection::conclude`] must judge.
    pub(crate) const fn is_suspect(&self) -> bool {
        self.suspect.is_some()
    }

    /// Holds the failure against the peer, unless an event has told that the peer ended the connection in order: a program that
    /// comes late finds the event and, by then, also requests that nobody has answered since (VR-CLOSE-005). Call it
    /// when all events are handled.
    pub(crate) fn conclude(&mut self) {
        if let Some(failure) = self.suspect.take() {
            self.machine.handle_failure(failure);
            self.post(self.now());
        }
    }

    /// Registers a second window once the peer has filled the first faster than it is read (VR-MEM-003).
    fn add_window(&mut self) {
        let Some(index) = self.machine.lacks_region().filter(|_| self.options.protocol.windows == 2) else {
            return;
        };
        match self.memory.add_window(index) {
            Ok(address) => self.machine.add_region(address),
            // It goes on with one window, only slower.
            Err(error) => tracing::debug!(peer = %self.peer, %error, "no second window"),
        }
    }

    /// Posts receives again, as many as were consumed (VR-RES-003).
    fn post_receives(&mut self, slots: &[u16]) {
        let (Some(first), State::Connecting | State::Open | State::Closing) =
            (slots.first(), self.machine.state())
        else {
            return;
        };
        let mut chain: [RecvRequest<'_, B::Region>; BATCH] = [self.memory.receive(*first); BATCH];
        for (request, slot) in chain.iter_mut().zip(slots) {
            *request = self.memory.receive(*slot);
        }
        self.work.receive_doorbells += 1;
        if self.pair.post_recv(chain.get(..slots.len()).unwrap_or_default()).is_err() {
            self.machine.handle_refusal("ibv_post_recv");
        }
    }

    /// Does what the machine asks for: chains of work requests, one doorbell each, and the disconnect.
    fn post(&mut self, now: Instant) {
        let max_inline = self.pair.max_inline();
        let mut disconnect = false;
        while let Some(action) = self.machine.poll_action(now) {
            let Some(first) = self.memory.request(max_inline, &action) else {
                disconnect = true;
                break;
            };
            let mut chain = [first; BATCH];
            let mut len = 1;
            for place in chain.iter_mut().skip(1) {
                let Some(action) = self.machine.poll_action(now) else { break };
                let Some(next) = self.memory.request(max_inline, &action) else {
                    disconnect = true;
                    break;
                };
                *place = next;
                len += 1;
            }
            self.work.doorbells += 1;
            self.work.requests += len as u64;
            if let Err(error) = self.pair.post_send(chain.get(..len).unwrap_or_default()) {
                tracing::debug!(peer = %self.peer, error = %error.error, "posting failed");
                self.machine.handle_refusal("ibv_post_send");
            }
            if disconnect {
                break;
            }
        }
        if disconnect {
            self.disconnect();
        }
    }

    fn disconnect(&self) {
        // Refused when the connection never came about; nothing is left to do then.
        if let Err(error) = self.id.disconnect() {
            tracing::debug!(peer = %self.peer, %error, "disconnecting");
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
