//! The sending half of a queue pair: what is on its way, what comes back, and when to try again.
//!
//! Messages stand for all of their packets. Each transmission belongs to an *epoch*; going back to an earlier message
//! (after an RNR NAK or a missing acknowledgement) starts the next epoch, and whatever still travels in the old one is
//! then void, as a responder drops packets out of sequence.

use core::time::Duration;
use std::collections::VecDeque;

use rdma_backend::{Access, AsyncEvent, Completed, CompletionStatus, RNR_RETRY_INFINITE, RnrTimer, SendOp};

use super::completions::{Entry, failure, success};
use super::memory::Unreachable;
use super::parts::{Part, Parts};
use super::party::Target;
use super::queue_pair::State;
use super::{Event, Model, PairId};
use crate::failure_class::{ClassSet, FailureClass};
use crate::faults::{Fault, Site};
use crate::trace::{MESSAGE, Work};
use rdma_backend::time::Instant;

/// Send work that is posted and not yet ended.
pub(super) struct SendWork {
    pub(super) id: u64,
    pub(super) op: SendOp,
    pub(super) source: Source,
    pub(super) len: usize,
    pub(super) signaled: bool,
    pub(super) solicited: bool,
    /// The classes of failure that its completion shows.
    pub(super) shows: ClassSet,
    /// The bytes of this READ are there, and what a capture saw of them.
    pub(super) brought: Option<Vec<u8>>,
}

impl SendWork {
    /// Returns whether the device fetches its bytes from registered memory.
    pub(super) const fn reads_memory(&self) -> bool {
        self.len > 0 && matches!(self.source, Source::Memory(_)) && !matches!(self.op, SendOp::Read(_))
    }
}

/// Where its bytes are.
pub(super) enum Source {
    /// In registered memory, read when the message is executed and not before.
    Memory(Parts),
    /// Copied when it was posted.
    Inline(Vec<u8>),
}

/// The answer of the responder's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Executed.
    Ack,
    /// No receive is posted: come again after this.
    RnrNak(RnrTimer),
    /// Refused: the work ends with this status.
    Nak(CompletionStatus),
    /// Not an answer at all: our own device found the work wrong. In line with the answers, to keep the order.
    Fault(CompletionStatus),
}

/// The sending half of a queue pair.
pub(super) struct Requester {
    /// Work in order; the front is the oldest that is not acknowledged.
    work: VecDeque<SendWork>,
    /// The sequence number of the front.
    first: u64,
    /// How many, from the front on, are on their way.
    sent: usize,
    /// How many of these are READs.
    reads: u8,
    pub(super) read_depth: u8,
    /// Slots in use: posted, and not given back by a polled completion.
    occupied: u32,
    /// Slots of work that ended since the last completion; the next one gives them back too.
    silent: u32,
    epoch: u32,
    /// When the last message sent gets there, ...
    arrival: Instant,
    /// ... and when the last answer gets here.
    pub(super) answer: Instant,
    /// Waiting for a responder that was not ready.
    waiting: bool,
    /// A message goes to such a responder again. Those behind it stay until it is acknowledged: to send all of them each time costs
    /// the more, the longer the responder takes.
    probing: bool,
    /// How long it waits for an acknowledgement, if its owner says so.
    pub(super) ack_timeout: Option<Duration>,
    /// In SQD: the sequence number from which on nothing leaves, and whether an event is to tell that all before has ended.
    drain: Option<(u64, bool)>,
    /// The acknowledgement timer of this epoch runs.
    timer: bool,
    retry: Budget,
    rnr_retry: Budget,
    /// Messages that arrived while the bytes of one before them are copied.
    pub(super) behind: VecDeque<(u32, u64)>,
    /// Whether they are.
    pub(super) carrying: bool,
    /// The peer's memory was not reached in time, and nothing was acknowledged since.
    pub(super) late: bool,
    /// Emptied buffers of inline data.
    pub(super) spare: Vec<Vec<u8>>,
}

/// Attempts left, and how many there are after each success.
#[derive(Clone, Copy, Default)]
struct Budget {
    limit: u8,
    left: u8,
}

impl Budget {
    /// As much as three bits hold.
    const MOST: u8 = 7;

    fn new(limit: u8) -> Self {
        let limit = limit.min(Self::MOST);
        Self { limit, left: limit }
    }

    fn refill(&mut self) {
        self.left = self.limit;
    }

    /// Takes one; false if there was none.
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

    /// Begins anew. What was on its way belongs to no epoch of the new one.
    pub(super) fn renew(&mut self) {
        *self = Self { epoch: self.epoch.wrapping_add(1), ..Self::new() };
    }

    /// The parameters that the connection manager negotiated.
    pub(super) fn configure(&mut self, retry: u8, rnr_retry: u8, read_depth: u8) {
        self.retry = Budget::new(retry);
        self.rnr_retry = Budget::new(rnr_retry);
        self.read_depth = read_depth;
    }

    /// From now on nothing leaves but what has left before.
    pub(super) fn begin_drain(&mut self, notify: bool) {
        let end = self.drain.map_or(self.first + self.sent as u64, |(end, _)| end);
        self.drain = Some((end, notify));
    }

    pub(super) fn end_drain(&mut self) {
        self.drain = None;
    }

    /// Whether an event is to tell now that all that had left has ended. Once.
    fn is_drained(&mut self) -> bool {
        match &mut self.drain {
            Some((end, notify)) if self.first >= *end => core::mem::take(notify),
            _ => false,
        }
    }

    pub(super) fn has_work(&self) -> bool {
        !self.work.is_empty()
    }

    /// The sequence number of the next request.
    pub(super) fn next_sequence(&self) -> u64 {
        self.first + self.work.len() as u64
    }

    pub(super) fn oldest(&self) -> Option<&SendWork> {
        self.work.front()
    }

    pub(super) fn newest(&self) -> Option<&SendWork> {
        self.work.back()
    }

    /// The sequence number below which the owner of the bytes may touch them again: their completions were polled.
    pub(super) fn given_back(&self) -> u64 {
        self.next_sequence() - u64::from(self.occupied)
    }

    pub(super) const fn is_full(&self, depth: u32) -> bool {
        self.room(depth) == 0
    }

    /// How many requests a queue of this depth takes now.
    pub(super) const fn room(&self, depth: u32) -> u32 {
        depth.saturating_sub(self.occupied)
    }

    /// A buffer of `len` bytes, an old one if there is one.
    pub(super) fn buffer(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.resize(len, 0);
        bytes
    }

    pub(super) fn push(&mut self, work: SendWork) {
        self.occupied += 1;
        self.work.push_back(work);
    }

    /// Slots given back by a polled completion.
    pub(super) fn give_back(&mut self, slots: u32) {
        self.occupied = self.occupied.saturating_sub(slots);
    }

    /// The work with this sequence number, if it belongs to a transmission that still counts.
    pub(super) fn flight(&self, epoch: u32, sequence: u64) -> Option<&SendWork> {
        let place = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        (epoch == self.epoch && place < self.sent).then(|| self.work.get(place))?
    }

    /// The work with this sequence number.
    pub(super) fn with_sequence(&mut self, sequence: u64) -> Option<&mut SendWork> {
        let place = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        self.work.get_mut(place)
    }

    /// Returns whether it fails when it meets no receive often enough.
    pub(super) const fn gives_up_on_receives(&self) -> bool {
        self.rnr_retry.limit != RNR_RETRY_INFINITE
    }

    /// Takes the oldest work out, however it ended.
    pub(super) fn retire(&mut self) -> Option<SendWork> {
        let work = self.work.pop_front()?;
        self.first += 1;
        if self.sent > 0 {
            self.sent -= 1;
            self.reads -= u8::from(matches!(work.op, SendOp::Read(_)));
        }
        Some(work)
    }

    /// Voids everything that is on its way.
    pub(super) fn forget_flights(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.sent = 0;
        self.reads = 0;
        self.waiting = false;
        self.timer = false;
    }

    /// The next work to leave: its epoch and sequence number. READs beyond the depth wait, and all behind them.
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
    /// The doorbell: sends what is posted, each message on its own.
    pub(crate) fn ring(&mut self, id: PairId) {
        if !self.pairs.get(id).is_some_and(|pair| matches!(pair.state, State::Ready | State::Draining)) {
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

    /// Work as a trace has it.
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

    /// The responder's answer arrives.
    pub(super) fn answered(&mut self, id: PairId, epoch: u32, sequence: u64, answer: Answer) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        // Only the oldest message may end; an answer that overtook a lost one comes again with the repetition.
        if pair.requester.flight(epoch, sequence).is_none() || pair.requester.first != sequence {
            return;
        }
        let cut = pair.path.is_none_or(|path| self.is_cut(id, path));
        let party = self.party(id);
        let strikes = |fault: &Fault, on: &Target| {
            party.is_some_and(|party| party.is(on)) && matches!(fault, Fault::LoseAnswer)
        };
        let lost = cut || self.strike(Site::Answer, strikes).is_some();
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
            // The next READ may have been waiting for room, and what is behind a probe for its acknowledgement.
            self.ring(id);
        }
    }

    /// Tells whoever asked that the send queue is drained, if it is.
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
            let (region, offset) = self.remote(peer.domain, remote, len, Access::REMOTE_READ)?;
            Some(self.copy_parts(&Parts::One(Part { region, offset, len }), parts, len))
        };
        match copied() {
            Some(Ok(())) => Ok(()),
            Some(Err(Unreachable::Source)) => Err(CompletionStatus::REM_OP_ERR),
            Some(Err(Unreachable::Target)) => Err(CompletionStatus::LOC_PROT_ERR),
            None => Err(CompletionStatus::REM_ACCESS_ERR),
        }
    }

    /// An RNR NAK: the same message again when the responder's timer says so, and then all behind it.
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

    /// A message or its answer was lost. The requester will notice when its timer ends.
    pub(super) fn unanswered(&mut self, id: PairId, epoch: u32) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if pair.requester.epoch == epoch && !core::mem::replace(&mut pair.requester.timer, true) {
            let wait = pair.requester.ack_timeout.unwrap_or(self.parameters.ack_timeout);
            if wait < Duration::MAX {
                self.event_queue.schedule(wait, Event::Timeout { pair: id, epoch });
            }
        }
    }

    /// The acknowledgement timer ended.
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

    /// The responder's timer ended.
    pub(super) fn again(&mut self, id: PairId, epoch: u32) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if pair.requester.epoch == epoch {
            pair.requester.waiting = false;
            pair.requester.probing = true;
            self.ring(id);
        }
    }

    /// The oldest work fails, and the queue pair with it.
    fn fail(&mut self, id: PairId, status: CompletionStatus) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        let Some(work) = pair.requester.retire() else { return };
        self.end_send(id, work, Err(status));
        self.enter_error(id);
    }

    /// Accounts for ended work and reports it: a success only if asked for, a failure always.
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
        self.report(queue, Entry { frees: Some(frees), shows, ..Entry::new(completion, id) });
    }
}
