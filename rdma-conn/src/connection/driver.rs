//! Feeds a connection's machine time, events and completions, and carries out its actions.

use std::slice;

use arrayvec::ArrayVec;
use rdma_backend::time::Instant;
use rdma_backend::{
    AsyncEvent, Backend, CmEventKind, Completed, Completion, CompletionError, CompletionStatus, Identifier,
    QueuePair, RecvRequest, SendRequest,
};
use rdma_proto::{Action, PeerMisbehaved, State};

use super::{BATCH, Cause, Connection, Run};
use crate::error::Error;
use crate::memory::{Memory, receive_slot};

impl<B: Backend> Connection<B> {
    pub(crate) fn handle_time(&mut self, now: Instant) {
        self.machine.handle_timeout(now);
        if self.machine.state() == State::Open && now >= self.busy.after(self.options.keep_memory) {
            // Used since the last visit, at an unknown time. So memory stays for one to two times
            // `keep_memory`.
            if std::mem::take(&mut self.used) {
                self.busy = now;
            } else {
                self.release_memory(now);
            }
        }
        self.post(Some(now));
    }

    // The send buffer stays until all of it has arrived: the device may read it again, to repeat a
    // lost packet (VR-XFER-011).
    fn release_memory(&mut self, now: Instant) {
        if self.memory.has_full_send_buffer() {
            if self.machine.unconfirmed() == 0 {
                let length = self.memory.drop_send_buffer();
                self.machine.replace_send_buffer(length);
            } else {
                // It goes on the next visit.
                self.machine.confirm();
            }
        }
        if let Some(index) = self.machine.drop_region() {
            self.memory.drop_window(index);
        }
        self.busy = now;
    }

    #[cold]
    pub(super) fn refused(&mut self, call: &'static str, error: B::Error) {
        tracing::debug!(peer = %self.peer, %error, call, "refused");
        // Only the first error counts (VR-CLOSE-006).
        if self.check().is_ok() {
            self.cause = Cause::Known(Error::backend(call)(error));
        }
        self.machine.handle_refusal(call);
    }

    /// First hand over all completions: what the peer sent before the event counts as received,
    /// however late the event is read (VR-FLOW-003, VR-CLOSE-002).
    pub(crate) fn handle_event(&mut self, event: CmEventKind<B>) {
        tracing::debug!(peer = %self.peer, ?event, "connection event");
        match event {
            CmEventKind::Established { peer } => {
                // VR-CONN-012.
                if self.pair.set_min_rnr_timer(self.options.rnr_timer).is_err() {
                    // This only slows a peer that outruns our receives.
                    tracing::warn!(peer = %self.peer, "the device keeps its own RNR timer");
                }
                let now = self.now();
                self.machine.handle_established(now, peer.rnr_retry_count);
                self.post(Some(now));
            }
            // The server gave up a connection before it saw the handshake's last message: an end.
            CmEventKind::Rejected { .. } if matches!(self.machine.state(), State::Open | State::Closing) => {
                self.machine.handle_disconnected();
                self.post(None);
            }
            // Every outcome other than a connection is an error (VR-CONN-006).
            CmEventKind::Rejected { reason } => self.fail(Error::rejected(self.peer, reason)),
            CmEventKind::Unreachable { status } => {
                self.fail(Error::unreachable(self.peer, "it does not answer", status));
            }
            CmEventKind::ConnectError { status } => {
                self.fail(Error::unreachable(self.peer, "the connection could not be made", status));
            }
            CmEventKind::Disconnected => {
                self.machine.handle_disconnected();
                self.post(None);
            }
            CmEventKind::DeviceRemoval => self.fail(Error::DeviceRemoved),
            CmEventKind::Async(event) => self.handle_async_event(event),
            CmEventKind::AddressResolved
            | CmEventKind::RouteResolved
            | CmEventKind::TimewaitExit
            | CmEventKind::AddressChange => {}
            other => tracing::warn!(peer = %self.peer, event = ?other, "unexpected connection event"),
        }
    }

    /// Handles an event of the device, such as a failure without a completion (VR-CLOSE-008).
    fn handle_async_event(&mut self, event: AsyncEvent) {
        match event {
            // A queue pair that is stopping reports nothing new.
            _ if matches!(self.state(), State::Closed | State::Failed(_)) => {}
            // The peer is established. `Established` follows, although its message may be lost.
            AsyncEvent::CommEst => {
                if let Err(error) = self.id.notify_established() {
                    tracing::debug!(peer = %self.peer, %error, "the first message came");
                }
            }
            AsyncEvent::QpAccessErr => self.fail(Error::Protocol(PeerMisbehaved::ReachedOutside.into())),
            event if event.is_fatal() => self.fail(Error::Device { event }),
            event => tracing::info!(peer = %self.peer, "{}", event.describe()),
        }
    }

    /// Ends the connection with this error, which every waiting call then returns (VR-CLOSE-003).
    #[cold]
    pub(crate) fn fail(&mut self, failure: Error) {
        if self.check().is_ok() {
            self.cause = Cause::Known(failure);
        }
        // To the machine this is an end like any other. `cause` has the reason.
        self.machine.handle_disconnected();
        self.post(None);
    }

    /// Handles at most [`BATCH`] completions of this queue pair, and posts what they allow. Returns
    /// false if they only announced bytes, so that nothing else about the connection has changed.
    #[inline(always)]
    pub(crate) fn handle_completions(
        &mut self,
        now: Instant,
        run: Run<impl Iterator<Item = Completion> + Clone>,
    ) -> bool {
        self.work.completions += run.count as u64;
        // Completions nearly always announce only bytes in the window, so handle them together.
        if !run.announces || !self.machine.handle_immediates(now, run.count, run.bytes) {
            self.handle_each(now, run.completions());
            return true;
        }
        self.busy = now;
        self.post_receives(run.count);
        if self.machine.is_settled() {
            return false;
        }
        self.follow_up(now);
        true
    }

    #[inline(never)]
    fn handle_each(&mut self, now: Instant, completions: impl Iterator<Item = Completion>) {
        let mut receives = 0;
        for completion in completions {
            if let Ok(Completed::RecvWrite { immediate }) = completion.result {
                self.machine.handle_immediate(now, immediate);
                self.busy = now;
                receives += 1;
            } else if self.take_completion(now, &completion) {
                // Before anything that the message allows: proofs of the peer rely on it. Post each
                // answer. Answers pile up only if the peer takes none (VR-FEAT-007).
                self.post_receives(std::mem::take(&mut receives) + 1);
                self.post(Some(now));
            }
        }
        self.post_receives(receives);
        self.follow_up(now);
    }

    #[inline(never)]
    fn follow_up(&mut self, now: Instant) {
        // Nothing follows a full window until the next one is announced.
        if self.machine.lacks_region().is_some() {
            self.add_window();
        }
        if !self.memory.lendings.is_empty() {
            self.work.returned += self.memory.lendings.give_back(self.machine.confirmed());
        }
        // Answers and windows must not wait behind a long queue, nor other connections behind a
        // peer's flood (VR-RES-007).
        self.post(Some(now));
    }

    /// Handles a completion that announces no bytes. Returns whether it brought a message.
    fn take_completion(&mut self, now: Instant, completion: &Completion) -> bool {
        match completion.result {
            // The immediate of a message has no meaning (VR-CTRL-010).
            Ok(Completed::Recv { len, .. }) => {
                let Some(slot) = receive_slot(completion.id) else { return false };
                let (bytes, len) = self.memory.incoming_message(slot, len);
                self.machine.handle_message(now, bytes.get(..len).unwrap_or_default());
                true
            }
            Ok(_) => {
                self.machine.handle_sent(now, completion.id);
                false
            }
            Err(failure) => {
                tracing::debug!(peer = %self.peer, ?failure, "work request failed");
                match (failure.status, receive_slot(completion.id), &self.cause) {
                    // A flush explains nothing if a cause is known.
                    (CompletionStatus::WR_FLUSH_ERR, _, Cause::Suspect(_) | Cause::Known(_))
                    | (CompletionStatus::RETRY_EXC_ERR, None, Cause::Known(_)) => {}
                    // Both follow from an orderly end, too: an unread event may say so
                    // (VR-CLOSE-009).
                    (CompletionStatus::WR_FLUSH_ERR, ..) | (CompletionStatus::RETRY_EXC_ERR, None, _) => {
                        self.cause = Cause::Suspect(failure);
                    }
                    (_, Some(_), _) => self.machine.handle_receive_failure(failure),
                    (_, None, _) => self.machine.handle_failure(failure),
                }
                false
            }
        }
    }

    /// Attributes a failure on a shared queue that names no queue pair. Returns true if this queue
    /// pair has stopped for an unknown reason.
    pub(crate) fn has_failed_by(&mut self, failure: CompletionError) -> bool {
        // After the end a flush is no error, and a known cause stays (VR-CLOSE-008).
        if !matches!(self.cause, Cause::Machine) || self.machine.has_ended() {
            return false;
        }
        let failed = self.pair.has_failed().unwrap_or_else(|error| {
            tracing::debug!(peer = %self.peer, %error, "asking for the state of the queue pair");
            false
        });
        if failed {
            tracing::debug!(peer = %self.peer, ?failure, "a work request failed, and the device does not say whose");
            self.cause = Cause::Suspect(failure);
        }
        failed
    }

    pub(crate) const fn is_suspect(&self) -> bool {
        matches!(self.cause, Cause::Suspect(_))
    }

    /// Blames the peer for a failure that no event explained. First read all events
    /// (VR-CLOSE-009): after an orderly disconnect, a late program finds unacknowledged requests
    /// too (VR-CLOSE-005).
    pub(crate) fn conclude(&mut self) {
        if let Cause::Suspect(failure) = self.cause {
            self.cause = Cause::Machine;
            self.machine.handle_failure(failure);
            self.post(None);
        }
    }

    /// Registers a second window when the peer fills the first faster than it is read (VR-MEM-003).
    #[cold]
    fn add_window(&mut self) {
        let Some(index) = self.machine.lacks_region().filter(|_| self.options.protocol.windows == 2) else {
            return;
        };
        match self.memory.add_window(index) {
            Ok(address) => {
                self.machine.add_region(address);
                self.sooner = true;
            }
            // One window is enough, only slower.
            Err(error) => tracing::debug!(peer = %self.peer, %error, "no second window"),
        }
    }

    /// Posts `count` receives, at most [`BATCH`], in place of those consumed (VR-RES-003). Call it
    /// before the connection acts on what consumed them (VR-RES-012).
    pub(super) fn post_receives(&mut self, count: usize) {
        if self.machine.has_ended() {
            return;
        }
        // Most polls find one.
        if count != 1 {
            self.post_receive_chain(count);
            return;
        }
        self.work.receive_doorbells += 1;
        let first = self.next_receive;
        self.next_receive = self.receive_behind(first);
        if let Err(error) = self.pair.post_recv(&[self.memory.receive(first)]) {
            self.refused("ibv_post_recv", error.error);
        }
    }

    #[inline(never)]
    fn post_receive_chain(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        self.work.receive_doorbells += 1;
        let mut chain = ArrayVec::<RecvRequest<'_, B::Region>, BATCH>::new();
        let mut slot = self.next_receive;
        for _ in 0..count.min(BATCH) {
            chain.push(self.memory.receive(slot));
            slot = self.receive_behind(slot);
        }
        self.next_receive = slot;
        let posted = self.pair.post_recv(&chain);
        drop(chain);
        if let Err(error) = posted {
            self.refused("ibv_post_recv", error.error);
        }
    }

    #[inline]
    const fn receive_behind(&self, slot: u16) -> u16 {
        if slot + 1 < self.options.receives { slot + 1 } else { 0 }
    }

    /// Carries out the machine's actions: chains of requests, one doorbell each, and the
    /// disconnect. Reads the clock only if it must and the time is not `known`.
    #[inline]
    pub(super) fn post(&mut self, known: Option<Instant>) {
        // Most writes are one request. This copy of the step has no other case.
        let more =
            if self.machine.is_one_write() { self.post_next(known) } else { !self.machine.is_settled() };
        if more {
            self.post_all(known);
        }
    }

    #[inline(never)]
    fn post_all(&mut self, known: Option<Instant>) {
        while self.post_next(known) {}
        self.sooner |= self.machine.take_sooner();
    }

    #[inline(always)]
    fn post_next(&mut self, known: Option<Instant>) -> bool {
        let backend = &self.backend;
        let now = move || known.unwrap_or_else(|| backend.now());
        let Some(action) = self.machine.poll_action(now) else { return false };
        let Some(first) = self.memory.request(self.max_inline, action) else { return self.disconnect() };
        self.work.doorbells += 1;
        // Nearly always nothing follows, and a chain of one needs no array.
        let (posted, mut more) = if self.machine.is_settled() {
            (self.pair.post_send(slice::from_ref(&first)), false)
        } else {
            let (machine, memory) = (&mut self.machine, &self.memory);
            let (chain, disconnects) = chain(first, memory, self.max_inline, || machine.poll_action(now));
            let posted = self.pair.post_send(&chain);
            if disconnects {
                self.disconnect();
            }
            (posted, true)
        };
        if let Err(error) = posted {
            self.refused("ibv_post_send", error.error);
            // A disconnect is due now, by which the peer learns of the end (VR-CLOSE-003).
            more = true;
        }
        more
    }

    #[cold]
    fn disconnect(&self) -> bool {
        // Refused if it was never established. Nothing remains to do then.
        if let Err(error) = self.id.disconnect() {
            tracing::debug!(peer = %self.peer, %error, "disconnecting");
        }
        false
    }
}

/// Returns requests from `first` on that one doorbell may cover, and whether a disconnect follows.
#[inline(never)]
fn chain<'a, B: Backend>(
    first: SendRequest<'a, B::Region>,
    memory: &'a Memory<B>,
    max_inline: usize,
    mut next: impl FnMut() -> Option<Action>,
) -> (ArrayVec<SendRequest<'a, B::Region>, BATCH>, bool) {
    let mut chain = ArrayVec::from_iter([first]);
    while !chain.is_full()
        && let Some(action) = next()
    {
        let Some(request) = memory.request(max_inline, action) else { return (chain, true) };
        chain.push(request);
    }
    (chain, false)
}
