//! The driver of a connection's machine: it hands it time, events and completions, and does what it asks for.

use rdma_proto::backend::{
    AsyncEvent, Backend, CmEventKind, Completed, Completion, CompletionStatus, Identifier, QueuePair,
    RecvRequest,
};
use rdma_proto::time::Instant;
use rdma_proto::{PeerMisbehaved, State};

use super::{BATCH, Connection};
use crate::error::Error;
use crate::memory::receive_slot;

impl<B: Backend> Connection<B> {
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
            CmEventKind::Async(event) => self.handle_async_event(event),
            // The connection has moved on, or goes on.
            CmEventKind::AddressResolved
            | CmEventKind::RouteResolved
            | CmEventKind::TimewaitExit
            | CmEventKind::AddressChange => {}
            other => tracing::warn!(peer = %self.peer, event = ?other, "unexpected connection event"),
        }
    }

    /// Handles what the device tells of this connection: the failures that no completion tells of (VR-CLOSE-008), and that the
    /// peer is there though the connection manager does not say so yet.
    pub(crate) fn handle_async_event(&mut self, event: AsyncEvent) {
        match event {
            // A queue pair that was told to stop, or has ended, says nothing new.
            _ if matches!(self.state(), State::Closed | State::Failed(_)) => {}
            // `Established` follows; the peer's own word for it may be lost.
            AsyncEvent::CommEst => {
                if let Err(error) = self.id.notify_established() {
                    tracing::debug!(peer = %self.peer, %error, "the first message came");
                }
            }
            AsyncEvent::QpAccessErr => self.fail(Error::Protocol(PeerMisbehaved::WroteOutside.into())),
            event if event.is_fatal() => self.fail(Error::Device { event }),
            event => tracing::info!(peer = %self.peer, "{}", event.describe()),
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
    pub(super) fn post_receives(&mut self, slots: &[u16]) {
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
    pub(super) fn post(&mut self, now: Instant) {
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
}
