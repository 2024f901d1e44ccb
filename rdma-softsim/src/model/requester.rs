//! The sending half of a queue pair: messages in flight, answers, and retries.
//!
//! Messages stand for all of their packets. Each transmission belongs to an *epoch*. Going back to
//! an earlier message (after an RNR NAK or a missing acknowledgement) starts the next epoch.
//! Messages still in flight from the old one are then void, as a responder drops packets out of
//! sequence.

use core::time::Duration;
use std::collections::VecDeque;

use rdma_backend::{Access, AsyncEvent, Completed, CompletionStatus, RNR_RETRY_INFINITE, RnrTimer, SendOp};

use super::completions::{Detail, Entry, failure, success};
use super::datagrams::Addressed;
use super::memory::Unreachable;
use super::parts::{Part, Parts};
use super::party::Target;
use super::queue_pair::QueuePairState;
use super::{Event, Model, PairId};
use crate::failure_class::{ClassSet, FailureClass};
use crate::faults::{Fault, Site};
use crate::request::{Atomic, Rights};
use crate::trace::{MESSAGE, Work};
use rdma_backend::time::Instant;

pub(super) struct SendWork {
    pub(super) id: u64,
    pub(super) op: SendOp,
    /// The change that this READ makes, of an atomic operation.
    pub(super) atomic: Option<Atomic>,
    pub(super) source: Source,
    pub(super) len: usize,
    /// Where a datagram goes.
    pub(super) to: Option<Addressed>,
    pub(super) signaled: bool,
    pub(super) solicited: bool,
    pub(super) shows: ClassSet,
    /// How the moving of a READ's bytes has ended; holds those for a capture. An atomic operation
    /// is not done again then, whatever happens to its answer.
    pub(super) brought: Option<Result<Vec<u8>, Unreachable>>,
}

impl SendWork {
    /// Returns the right that the peer must have given.
    pub(super) fn wanted(&self) -> Rights {
        match self.op {
            SendOp::Read(_) if self.atomic.is_some() => Rights::ATOMICS,
            SendOp::Read(_) => Access::REMOTE_READ.into(),
            SendOp::Write(_) | SendOp::WriteImmediate(..) => Access::REMOTE_WRITE.into(),
            SendOp::Send | SendOp::SendImmediate(_) => Access::NONE.into(),
        }
    }

    pub(super) const fn reads_memory(&self) -> bool {
        self.len > 0 && matches!(self.source, Source::Memory(_)) && !matches!(self.op, SendOp::Read(_))
    }
}

/// Where a request's bytes are.
pub(super) enum Source {
    /// In registered memory, read when the message is executed and not before.
    Memory(Parts),
    Inline(Vec<u8>),
}

/// The answer of the responder's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Ack,
    /// No receive is posted: retry after this.
    RnrNak(RnrTimer),
    /// Refused: the work fails with this status.
    Nak(CompletionStatus),
    /// Not an answer: our own device found the work invalid. Queued with the answers, to keep the
    /// order.
    Fault(CompletionStatus),
}

pub(super) struct Requester {
    /// Work in order; the front is the oldest unacknowledged one.
    work: VecDeque<SendWork>,
    first: u64,
    /// How many, from the front, are in flight.
    sent: usize,
    reads: u8,
    pub(super) read_depth: u8,
    /// Slots in use: posted, and not freed by a polled completion.
    occupied: u32,
    /// Slots of work that ended since the last completion, which the next one frees too.
    silent: u32,
    epoch: u32,
    /// When the last message sent arrives.
    arrival: Instant,
    /// When the last answer arrives.
    pub(super) answer: Instant,
    /// Whether it waits for a responder that was not ready.
    waiting: bool,
    /// Whether one message is being retried after that. Those behind it wait for its
    /// acknowledgement: sending all of them each time would cost more the longer the responder
    /// takes.
    probing: bool,
    /// The acknowledgement time-out, if its owner has set one.
    pub(super) ack_timeout: Option<Duration>,
    /// In SQD: the sequence number from which on nothing leaves, and whether to raise an event when
    /// all before has ended.
    drain: Option<(u64, bool)>,
    /// Whether the acknowledgement timer of this epoch runs.
    timer: bool,
    retry: Budget,
    rnr_retry: Budget,
    /// Messages that arrived behind one whose bytes are being copied.
    pub(super) behind: VecDeque<(u32, u64)>,
    /// Whether bytes are being copied.
    pub(super) carrying: bool,
    /// The peer's memory was not accessed in time, and nothing was acknowledged since.
    pub(super) late: bool,
    pub(super) spare: Vec<Vec<u8>>,
}

/// Attempts left, and the number after each success.
#[derive(Clone, Copy, Default)]
struct Budget {
    limit: u8,
    left: u8,
}

impl Budget {
    /// The maximum of three bits.
    const MOST: u8 = 7;

    fn new(limit: u8) -> Self {
        let limit = limit.min(Self::MOST);
        Self { limit, left: limit }
    }

    fn refill(&mut self) {
        self.left = self.limit;
    }

    /// Takes one. Returns false if none is left.
    fn spend(&mut self) -> bool {
        let some = self.left > 0;
        self.left = self.left.saturating_sub(1);
        some
    }
}

impl Requester {
    pub(super) fn new() -> Self {
        Self {
            work: VecDeque::new(),
            first: 0,
            sent: 0,
            reads: 0,
            read_depth: 0,
            occupied: 0,
            silent: 0,
            epoch: 0,
            arrival: Instant::default(),
            answer: Instant::default(),
            waiting: false,
            probing: false,
            ack_timeout: None,
            drain: None,
            timer: false,
            retry: Budget::default(),
            rnr_retry: Budget::default(),
            behind: VecDeque::new(),
            carrying: false,
            late: false,
            spare: Vec::new(),
        }
    }

    /// Resets the state. Messages in flight belong to no epoch of the new one.
    pub(super) fn renew(&mut self) {
        *self = Self { epoch: self.epoch.wrapping_add(1), ..Self::new() };
    }

    pub(super) fn configure(&mut self, retry: u8, rnr_retry: u8, read_depth: u8) {
        self.retry = Budget::new(retry);
        self.rnr_retry = Budget::new(rnr_retry);
        self.read_depth = read_depth;
    }

    /// Lets nothing leave from now on.
    pub(super) fn begin_drain(&mut self, notify: bool) {
        let end = self.drain.map_or(self.first + self.sent as u64, |(end, _)| end);
        self.drain = Some((end, notify));
    }

    pub(super) fn end_drain(&mut self) {
        self.drain = None;
    }

    /// Returns whether to raise the drained event now. Once.
    fn is_drained(&mut self) -> bool {
        match &mut self.drain {
            Some((end, notify)) if self.first >= *end => core::mem::take(notify),
            _ => false,
        }
    }

    pub(super) fn has_work(&self) -> bool {
        !self.work.is_empty()
    }

    pub(super) fn next_sequence(&self) -> u64 {
        self.first + self.work.len() as u64
    }

    pub(super) fn oldest(&self) -> Option<&SendWork> {
        self.work.front()
    }

    pub(super) fn newest(&self) -> Option<&SendWork> {
        self.work.back()
    }

    /// Returns the sequence number below which the bytes belong to their owner: their completions
    /// were polled.
    pub(super) fn given_back(&self) -> u64 {
        self.next_sequence() - u64::from(self.occupied)
    }

    pub(super) const fn is_full(&self, depth: u32) -> bool {
        self.room(depth) == 0
    }

    /// Returns how many requests fit into a queue of this depth.
    pub(super) const fn room(&self, depth: u32) -> u32 {
        depth.saturating_sub(self.occupied)
    }

    /// Returns a buffer of `len` bytes, a reused one if possible.
    pub(super) fn buffer(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.resize(len, 0);
        bytes
    }

    pub(super) fn push(&mut self, work: SendWork) {
        self.occupied += 1;
        self.work.push_back(work);
    }

    pub(super) fn give_back(&mut self, slots: u32) {
        self.occupied = self.occupied.saturating_sub(slots);
    }

    /// Returns the work with this sequence number, if its transmission is still valid.
    pub(super) fn flight(&self, epoch: u32, sequence: u64) -> Option<&SendWork> {
        let place = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        (epoch == self.epoch && place < self.sent).then(|| self.work.get(place))?
    }

    pub(super) fn with_sequence(&mut self, sequence: u64) -> Option<&mut SendWork> {
        let place = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        self.work.get_mut(place)
    }

    /// Returns whether it fails after enough retries without a receive.
    pub(super) const fn gives_up_on_receives(&self) -> bool {
        self.rnr_retry.limit != RNR_RETRY_INFINITE
    }

    pub(super) fn retire(&mut self) -> Option<SendWork> {
        let work = self.work.pop_front()?;
        self.first += 1;
        if self.sent > 0 {
            self.sent -= 1;
            self.reads -= u8::from(matches!(work.op, SendOp::Read(_)));
        }
        Some(work)
    }

    pub(super) fn forget_flights(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.sent = 0;
        self.reads = 0;
        self.waiting = false;
        self.timer = false;
    }

    /// Returns the next work to send, by epoch and sequence number. READs beyond the depth wait,
    /// and everything behind them.
    fn launch(&mut self) -> Option<(u32, u64)> {
        let work = self.work.get(self.sent).filter(|_| !self.waiting)?;
        if self.drain.is_some_and(|(end, _)| self.first + self.sent as u64 >= end) {
            return None;
        }
        if self.probing && self.sent > 0 {
            return None;
        }
        if matches!(work.op, SendOp::Read(_)) {
            if self.reads >= self.read_depth {
                return None;
            }
            self.reads += 1;
        }
        let sequence = self.first + self.sent as u64;
        self.sent += 1;
        Some((self.epoch, sequence))
    }
}

impl Model {
    /// The doorbell: sends posted work, one message at a time.
    pub(crate) fn ring(&mut self, id: PairId) {
        if !self
            .pairs
            .get(id)
            .is_some_and(|pair| matches!(pair.state, QueuePairState::Ready | QueuePairState::Draining))
        {
            return;
        }
        while let Some((epoch, sequence)) = self.pairs.get_mut(id).and_then(|pair| pair.requester.launch()) {
            let travel = self.travel();
            let now = self.event_queue.now();
            let Some(pair) = self.pairs.get_mut(id) else { return };
            // Messages of a connection do not overtake each other.
            let at = now.after(travel).max(pair.requester.arrival);
            pair.requester.arrival = at;
            self.event_queue.schedule(at.since(now), Event::Arrive { from: id, epoch, sequence });
        }
    }

    pub(super) fn describe(&self, work: &SendWork) -> Work {
        let SendWork { id, op, len, signaled, .. } = *work;
        let mut message = [0; MESSAGE];
        let short = matches!(op, SendOp::Send | SendOp::SendImmediate(_)) && len <= MESSAGE;
        let read = short
            && match &work.source {
                Source::Inline(bytes) => {
                    message[..len].copy_from_slice(bytes);
                    true
                }
                Source::Memory(parts) => self.gather(parts, &mut message[..len]),
            };
        Work { id, op, len, signaled, message: read.then_some(message) }
    }

    pub(super) fn answered(&mut self, id: PairId, epoch: u32, sequence: u64, answer: Answer) {
        let Some(pair) = self.pairs.get(id) else { return };
        // Only the oldest message may end. An answer that overtook a lost one comes again with the
        // repetition.
        let Some(work) = pair.requester.flight(epoch, sequence).filter(|_| pair.requester.first == sequence)
        else {
            return;
        };
        // A datagram has no answer: this comes from its own device.
        let crosses = work.to.is_none();
        let cut = pair.path.is_none_or(|path| self.is_cut(id, path));
        let party = self.party(id);
        let strikes = |fault: &Fault, on: &Target| {
            party.is_some_and(|party| party.is(on)) && matches!(fault, Fault::LoseAnswer)
        };
        let lost = crosses && (cut || self.strike(Site::Answer, strikes).is_some());
        match answer {
            Answer::Fault(status) => self.fail(id, status),
            _ if lost => self.unanswered(id, epoch),
            Answer::Ack => self.acknowledged(id, sequence),
            Answer::RnrNak(timer) => {
                self.capture_answer(id, sequence, answer);
                self.count_observed(FailureClass::ReceiverNotReady);
                self.not_ready(id, timer);
            }
            Answer::Nak(status) => {
                self.capture_answer(id, sequence, answer);
                self.fail(id, status);
            }
        }
    }

    fn acknowledged(&mut self, id: PairId, sequence: u64) {
        if let Err(status) = self.finish_read(id) {
            return self.fail(id, status);
        }
        self.capture_answer(id, sequence, Answer::Ack);
        let Some(pair) = self.pairs.get_mut(id) else { return };
        pair.requester.late = false;
        pair.requester.retry.refill();
        pair.requester.rnr_retry.refill();
        let probed = core::mem::take(&mut pair.requester.probing);
        let Some(work) = pair.requester.retire() else { return };
        let completed = match work.op {
            SendOp::Send | SendOp::SendImmediate(_) => Completed::Send,
            SendOp::Write(_) | SendOp::WriteImmediate(..) => Completed::Write,
            SendOp::Read(_) => Completed::Read,
        };
        let was_read = completed == Completed::Read;
        self.end_send(id, work, Ok(completed));
        self.tell_drained(id);
        if was_read || probed {
            // The next READ may have waited for room, and messages behind a probe for its
            // acknowledgement.
            self.ring(id);
        }
    }

    /// Raises the drained event if it was requested and is due.
    pub(super) fn tell_drained(&mut self, id: PairId) {
        /// `IBV_EVENT_SQ_DRAINED`.
        const DRAINED: AsyncEvent = AsyncEvent::Other(5);
        if self.pairs.get_mut(id).is_some_and(|pair| pair.requester.is_drained()) {
            self.tell_pair(id, DRAINED);
        }
    }

    /// Copies what the oldest work reads, if it is a READ: its bytes travel in the answer.
    fn finish_read(&self, id: PairId) -> Result<(), CompletionStatus> {
        let Some(pair) = self.pairs.get(id) else { return Ok(()) };
        let Some(SendWork {
            op: SendOp::Read(remote),
            source: Source::Memory(parts),
            len,
            brought: None,
            ..
        }) = pair.requester.work.front()
        else {
            return Ok(());
        };
        let (remote, len) = (*remote, *len);
        if len == 0 {
            return Ok(());
        }
        if !self.allows(parts, len, Access::LOCAL_WRITE) {
            return Err(CompletionStatus::LOC_PROT_ERR);
        }
        let copied = || {
            let peer = self.pairs.get(pair.path?.peer)?;
            let (region, offset) = self.remote(peer, remote, len, Access::REMOTE_READ.into())?;
            Some(self.copy_parts(&Parts::One(Part { region, offset, len }), parts, len))
        };
        match copied() {
            Some(Ok(())) => Ok(()),
            Some(Err(Unreachable::Source)) => Err(CompletionStatus::REM_OP_ERR),
            Some(Err(Unreachable::Target)) => Err(CompletionStatus::LOC_PROT_ERR),
            None => Err(CompletionStatus::REM_ACCESS_ERR),
        }
    }

    /// Handles an RNR NAK: sends the same message again after the responder's timer, and then all
    /// behind it.
    fn not_ready(&mut self, id: PairId, timer: RnrTimer) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        let requester = &mut pair.requester;
        if requester.rnr_retry.limit != RNR_RETRY_INFINITE && !requester.rnr_retry.spend() {
            return self.fail(id, CompletionStatus::RNR_RETRY_EXC_ERR);
        }
        requester.forget_flights();
        requester.waiting = true;
        self.event_queue.schedule(timer.delay(), Event::Again { pair: id, epoch: requester.epoch });
    }

    /// Handles a lost message or answer. The requester notices when its timer ends.
    pub(super) fn unanswered(&mut self, id: PairId, epoch: u32) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if pair.requester.epoch == epoch && !core::mem::replace(&mut pair.requester.timer, true) {
            let wait = pair.requester.ack_timeout.unwrap_or(self.parameters.ack_timeout);
            if wait < Duration::MAX {
                self.event_queue.schedule(wait, Event::Timeout { pair: id, epoch });
            }
        }
    }

    pub(super) fn timed_out(&mut self, id: PairId, epoch: u32) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if pair.requester.epoch != epoch {
            return;
        }
        let endless = pair.requester.retry.limit == Budget::MOST && self.endless_retries();
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if !endless && !pair.requester.retry.spend() {
            return self.fail(id, CompletionStatus::RETRY_EXC_ERR);
        }
        pair.requester.forget_flights();
        self.ring(id);
    }

    fn endless_retries(&self) -> bool {
        self.behaviour().is_some_and(|behaviour| behaviour.endless_retries)
    }

    pub(super) fn again(&mut self, id: PairId, epoch: u32) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if pair.requester.epoch == epoch {
            pair.requester.waiting = false;
            pair.requester.probing = true;
            self.ring(id);
        }
    }

    /// Fails the oldest work, and the queue pair with it.
    fn fail(&mut self, id: PairId, status: CompletionStatus) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        let Some(work) = pair.requester.retire() else { return };
        self.end_send(id, work, Err(status));
        self.enter_error(id);
    }

    /// Finishes work and reports it: a success only if requested, a failure always.
    pub(super) fn end_send(
        &mut self,
        id: PairId,
        work: SendWork,
        result: Result<Completed, CompletionStatus>,
    ) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if let Source::Inline(bytes) = work.source {
            pair.requester.spare.push(bytes);
        }
        pair.requester.silent += 1;
        let completion = match result {
            Ok(_) if !work.signaled => return,
            Ok(completed) => success(work.id, pair.number, completed),
            Err(status) => failure(work.id, pair.number, status),
        };
        let bytes = if matches!(work.op, SendOp::Read(_)) { work.len } else { 0 };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let detail = Detail { bytes, source: None, atomic: work.atomic };
        let frees = core::mem::take(&mut pair.requester.silent);
        let queue = pair.send_queue;
        let mut shows = work.shows;
        if result.is_err() && !work.signaled {
            shows.insert(FailureClass::UnsignaledFails);
            self.count_injected(FailureClass::UnsignaledFails);
        }
        if result.is_err() {
            self.count_injected(FailureClass::ErrorContents);
        }
        self.report(queue, Entry { frees: Some(frees), detail, shows, ..Entry::new(completion, id) });
    }
}
