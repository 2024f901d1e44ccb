//! One connection without waiting: a queue pair, its memory, and the machine that rules them.
//!
//! This is where a byte passes from the application to a work request and back:
//!
//! ```text
//! try_write ─ copy ─▶ send buffer ─ Connection::poll_action ─▶ post ─ QueuePair::post_send ─▶ the peer's window
//! try_read  ◀─ copy ─ our window  ◀─ Connection::handle_immediate ── take_completions ◀────── CompletionQueue::poll
//! ```

use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_proto::backend::{
    Backend, CmEventKind, Completed, Completion, CompletionQueue, ConnectParams, EventChannel, Identifier,
    QueuePair, QueuePairLimits, RNR_RETRY_INFINITE, RecvRequest, Region, SendOp, SendRequest,
};
use rdma_proto::time::Instant;
use rdma_proto::{Action, Connection, Counters, State, TransportError};

use crate::error::Error;
use crate::memory::{Memory, receive_slot};
use crate::options::Options;

/// Work requests per doorbell and completions per poll.
const BATCH: usize = 16;

/// What both sides pass to `rdma_connect` and `rdma_accept`: no READs beyond what the C implementations allow, and endless
/// RNR retries for the peer, so that it waits for our receives instead of failing (VR-CONN-004). Six retries where nothing
/// answers, since soft-RoCE takes seven for endless there as well, and would never find a peer gone (VR-KEEP-006).
pub(crate) const CONNECT_PARAMS: ConnectParams = ConnectParams {
    responder_resources: 1,
    initiator_depth: 1,
    retry_count: 6,
    rnr_retry_count: RNR_RETRY_INFINITE,
};

/// One connection's verbs objects and its machine. Nothing here blocks; see [`Stream`](crate::Stream) for that.
///
/// The fields are in the order in which they must go (VR-RES-001); backends keep what a handle needs alive, so this is
/// only the shortest way.
pub struct Link<B: Backend> {
    pair: B::QueuePair,
    id: B::Identifier,
    completions: B::CompletionQueue,
    memory: Memory<B::Region>,
    events: B::EventChannel,
    backend: B,
    machine: Connection,
    /// What ended the connection, where the machine does not know it: connection-manager events.
    failure: Option<Error>,
    options: Options,
    peer: SocketAddr,
    /// When an accepted connection must be established.
    establish_by: Option<Instant>,
}

impl<B: Backend> Link<B> {
    /// Makes the resources of a connection on `id`, whose device is known, with all receives posted, so that the peer's
    /// first message finds one (VR-CONN-003).
    pub(crate) fn new(
        backend: B,
        events: B::EventChannel,
        id: B::Identifier,
        peer: SocketAddr,
        mut options: Options,
    ) -> Result<Self, Error> {
        let limits = id.capabilities().map_err(Error::backend("asking for the device's limits"))?;
        let deepest = u16::try_from(limits.max_queue_depth).unwrap_or(u16::MAX);
        options.protocol.send_depth = options.protocol.send_depth.min(deepest);
        options.receives = options.receives.clamp(1, deepest.max(1));
        options.protocol.check()?;

        let domain = id.create_domain().map_err(Error::backend("allocating a protection domain"))?;
        let memory = Memory::register::<B>(&domain, &options.protocol, options.receives)?;
        let depth = QueuePairLimits {
            send_depth: options.protocol.send_depth.into(),
            recv_depth: options.receives.into(),
            inline: options.inline,
        };
        let completions = id
            .create_completion_queue(depth.send_depth + depth.recv_depth, options.completion_vector)
            .map_err(Error::backend("creating a completion queue"))?;
        let pair = id
            .create_queue_pair(&domain, &completions, depth)
            .map_err(Error::backend("creating a queue pair"))?;
        let machine = Connection::new(options.protocol, memory.addresses())?;
        let mut link = Self {
            pair,
            id,
            completions,
            memory,
            events,
            backend,
            machine,
            failure: None,
            options,
            peer,
            establish_by: None,
        };
        let receives: Vec<u16> = (0..options.receives).collect();
        for slots in receives.chunks(BATCH) {
            link.post_receives(slots);
        }
        link.check()?;
        Ok(link)
    }

    pub(crate) fn connect(&self) -> Result<(), Error> {
        self.id.connect(&CONNECT_PARAMS, &[]).map_err(Error::backend("connecting"))
    }

    pub(crate) fn accept(&mut self) -> Result<(), Error> {
        self.establish_by = Some(self.now().after(self.options.handshake_timeout));
        self.id.accept(&CONNECT_PARAMS, &[]).map_err(Error::backend("accepting"))
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

    /// The peer's address.
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

    /// The backend's clock.
    pub fn now(&self) -> Instant {
        self.backend.now()
    }

    /// When [`Link::progress`] must be called at the latest.
    pub fn next_timeout(&self) -> Option<Instant> {
        let establish_by = self.establish_by.filter(|_| self.machine.state() == State::Connecting);
        establish_by.into_iter().chain(self.machine.next_timeout()).min()
    }

    /// The channel of this connection's connection-manager events.
    pub const fn event_channel(&self) -> &B::EventChannel {
        &self.events
    }

    /// The queue of this connection's completions.
    pub const fn completion_queue(&self) -> &B::CompletionQueue {
        &self.completions
    }

    /// Reads what has arrived; `None` when there is nothing now, `Some(0)` at the end of the stream.
    ///
    /// # Errors
    /// What ended the connection, once all that arrived before is read.
    pub fn try_read(&mut self, mut into: &mut [u8]) -> Result<Option<usize>, Error> {
        let wanted = into.len();
        while !into.is_empty() {
            let Some(readable) = self.machine.readable() else { break };
            let copied = self.memory.read_window(readable, into);
            if copied == 0 {
                return Err(Error::Protocol(rdma_proto::Error::Unreachable(
                    "readable bytes outside their window",
                )));
            }
            self.machine.consume(copied)?;
            into = into.get_mut(copied as usize..).unwrap_or_default();
        }
        let read = wanted - into.len();
        if read > 0 || wanted == 0 {
            // A window that was emptied is announced again at once.
            self.post();
            return Ok(Some(read));
        }
        self.check()?;
        Ok((self.machine.state() == State::Closed).then_some(0))
    }

    /// Takes as many bytes as there is room for and sends them as one notification; `None` when there is no room now.
    ///
    /// # Errors
    /// What ended the connection.
    pub fn try_write(&mut self, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        self.check()?;
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
        if written > 0 {
            self.post();
            if !self.is_flushed() {
                // What holds the rest back may have been lifted by completions that nobody has looked at yet.
                self.progress();
            }
            return Ok(Some(written));
        }
        self.machine.commit(0)?;
        Ok(from.iter().all(|slice| slice.is_empty()).then_some(0))
    }

    /// Begins a graceful end: what was written is delivered first, for at most `linger`.
    pub fn close(&mut self, linger: Duration) {
        self.machine.close(self.now(), linger);
        self.post();
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

    /// Takes completions, handles time, and posts what can be posted. Call it after the completion queue's descriptor was
    /// readable, and when [`Link::next_timeout`] has come. True if anything happened by which a read or write that had to
    /// wait may go on.
    pub fn progress(&mut self) -> bool {
        let mut moved = self.take_completions();
        let now = self.now();
        if self.next_timeout().is_some_and(|at| now >= at) {
            if self.machine.state() == State::Connecting {
                let doing = "waiting for the peer to complete the connection";
                self.fail(Error::TimedOut { doing, after: self.options.handshake_timeout });
            }
            self.machine.handle_timeout(now);
            moved = true;
        }
        self.post();
        moved
    }

    /// Asks for one wake-up by the next completion. Call [`Link::progress`] once more before waiting for it.
    pub fn arm(&mut self) {
        if self.completions.arm().is_err() {
            self.machine.handle_refusal("ibv_req_notify_cq");
        }
    }

    /// Takes wake-ups off the completion channel. Call it when the channel's descriptor was readable.
    pub fn take_completion_events(&mut self) {
        if self.completions.take_events().is_err() {
            self.machine.handle_refusal("ibv_get_cq_event");
        }
    }

    /// Takes connection-manager events. Call it when the event channel's descriptor was readable.
    /// True if there were any.
    pub fn take_events(&mut self) -> bool {
        let mut any = false;
        loop {
            match self.events.next_event() {
                Ok(Some(event)) if event.id == self.id.key() => self.take_event(event.kind),
                Ok(Some(_)) => {}
                Ok(None) => return any,
                Err(error) => {
                    self.fail(Error::backend("reading connection events")(error));
                    return true;
                }
            }
            any = true;
        }
    }

    fn take_event(&mut self, event: CmEventKind<B>) {
        tracing::debug!(peer = %self.peer, ?event, "connection event");
        match event {
            CmEventKind::Established { peer } => {
                if self.pair.set_min_rnr_timer(self.options.rnr_timer).is_err() {
                    // Only slower when the peer outruns our receives, so no reason to give up.
                    tracing::warn!(peer = %self.peer, "the device keeps its own RNR timer");
                }
                // What the peer sent before it was given a window is judged as such, however late this event is read
                // (VR-FLOW-003).
                self.take_completions();
                self.machine.handle_established(self.now(), peer.rnr_retry_count);
                self.post();
            }
            CmEventKind::Rejected { reason } => self.fail(Error::rejected(self.peer, reason)),
            CmEventKind::Unreachable { status } => {
                self.fail(Error::unreachable(self.peer, "it does not answer", status));
            }
            CmEventKind::ConnectError { status } => {
                self.fail(Error::unreachable(self.peer, "the connection could not be made", status));
            }
            CmEventKind::Disconnected => {
                // The peer's last bytes may have arrived before this event was read (VR-CLOSE-002).
                self.take_completions();
                self.machine.handle_disconnected();
                self.post();
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

    fn fail(&mut self, failure: Error) {
        if self.check().is_ok() {
            self.failure = Some(failure);
        }
        self.machine.handle_disconnected();
        self.post();
    }

    /// Takes all completions; true if there were any.
    fn take_completions(&mut self) -> bool {
        let mut batch = [Completion::EMPTY; BATCH];
        let mut any = false;
        loop {
            let Ok(count) = self.completions.poll(&mut batch) else {
                self.machine.handle_refusal("ibv_poll_cq");
                return true;
            };
            any |= count > 0;
            let taken = batch.get(..count).unwrap_or_default();
            let mut slots = [0; BATCH];
            let mut used = 0;
            for completion in taken {
                if let Some(slot) = self.take_completion(completion)
                    && let Some(place) = slots.get_mut(used)
                {
                    *place = slot;
                    used += 1;
                }
            }
            self.post_receives(slots.get(..used).unwrap_or_default());
            if count < BATCH {
                return any;
            }
            // Answers and windows must not wait for the end of a long queue.
            self.post();
        }
    }

    /// Hands one completion to the machine. For a receive: the slot that may be posted again.
    fn take_completion(&mut self, completion: &Completion) -> Option<u16> {
        let now = self.now();
        match completion.result {
            Ok(Completed::Recv { len, .. }) => {
                let slot = receive_slot(completion.id)?;
                let (bytes, len) = self.memory.incoming_message(slot, len);
                self.machine.handle_message(now, bytes.get(..len).unwrap_or_default());
                // Answered one by one: only a peer that takes no answers can make them pile up (VR-FEAT-007).
                self.post();
                Some(slot)
            }
            Ok(Completed::RecvWrite { immediate }) => {
                self.machine.handle_immediate(now, immediate);
                receive_slot(completion.id)
            }
            Ok(Completed::Send | Completed::Write | Completed::Read) => {
                self.machine.handle_sent(now, completion.id);
                None
            }
            Err(failure) => {
                tracing::debug!(peer = %self.peer, ?failure, "work request failed");
                match receive_slot(completion.id) {
                    Some(_) => self.machine.handle_receive_failure(failure),
                    None => self.machine.handle_failure(failure),
                }
                None
            }
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
        if self.pair.post_recv(chain.get(..slots.len()).unwrap_or_default()).is_err() {
            self.machine.handle_refusal("ibv_post_recv");
        }
    }

    /// Does what the machine asks for: chains of work requests, one doorbell each, and the disconnect.
    fn post(&mut self) {
        let now = self.now();
        let max_inline = self.pair.max_inline();
        let mut disconnect = false;
        while let Some(action) = self.machine.poll_action(now) {
            let Some(first) = request(&self.memory, max_inline, &action) else {
                disconnect = true;
                break;
            };
            let mut chain = [first; BATCH];
            let mut len = 1;
            for place in chain.iter_mut().skip(1) {
                let Some(action) = self.machine.poll_action(now) else { break };
                let Some(next) = request(&self.memory, max_inline, &action) else {
                    disconnect = true;
                    break;
                };
                *place = next;
                len += 1;
            }
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

/// The work request for an action; `None` for a disconnect.
fn request<'a, R: Region>(
    memory: &'a Memory<R>,
    max_inline: usize,
    action: &Action,
) -> Option<SendRequest<'a, R>> {
    let (id, signaled, op, local) = match *action {
        Action::Send { id, signaled, slot, ref message } => {
            (id, signaled, SendOp::Send, memory.outgoing_message(slot, message))
        }
        Action::Write { id, signaled, from, to, immediate } => {
            let op = match immediate {
                Some(immediate) => SendOp::WriteImmediate(to, immediate),
                None => SendOp::Write(to),
            };
            (id, signaled, op, memory.outgoing(from))
        }
        Action::Disconnect => return None,
    };
    Some(SendRequest { id, op, local, signaled, inline: local.len <= max_inline })
}

impl<B: Backend> std::fmt::Debug for Link<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("peer", &self.peer)
            .field("machine", &self.machine)
            .finish_non_exhaustive()
    }
}
