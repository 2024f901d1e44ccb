//! The sending half of a queue pair: its work, messages in flight, and retries.
//!
//! Messages stand for all of their packets. Each transmission belongs to an *epoch*. Going back to
//! an earlier message (after an RNR NAK or a missing acknowledgement) starts the next epoch.
//! Messages still in flight from the old one are then void, as a responder drops packets out of
//! sequence.

use core::time::Duration;
use std::collections::VecDeque;

use rdma_backend::time::Instant;
use rdma_backend::{Access, CompletionStatus, RNR_RETRY_INFINITE, RnrTimer, SendOp};

use super::path::Addressed;
use crate::failure_class::ClassSet;
use crate::model::base::event_queue::Key;
use crate::model::regions::memory::Unreachable;
use crate::model::regions::parts::Parts;
use crate::request::{Atomic, Rights};

pub(in crate::model) struct SendWork {
    pub(in crate::model) id: u64,
    pub(in crate::model) op: SendOp,
    /// The change that this READ makes, of an atomic operation.
    pub(in crate::model) atomic: Option<Atomic>,
    pub(in crate::model) source: Source,
    pub(in crate::model) len: usize,
    /// Where a datagram goes.
    pub(in crate::model) to: Option<Addressed>,
    pub(in crate::model) signaled: bool,
    pub(in crate::model) solicited: bool,
    pub(in crate::model) shows: ClassSet,
    /// How the moving of a READ's bytes has ended; holds those for a capture. An atomic operation
    /// is not done again then, whatever happens to its answer.
    pub(in crate::model) brought: Option<Result<Vec<u8>, Unreachable>>,
}

impl SendWork {
    /// Returns the right that the peer must have given.
    pub(in crate::model) fn wanted(&self) -> Rights {
        match self.op {
            SendOp::Read(_) if self.atomic.is_some() => Rights::ATOMICS,
            SendOp::Read(_) => Access::REMOTE_READ.into(),
            SendOp::Write(_) | SendOp::WriteImmediate(..) => Access::REMOTE_WRITE.into(),
            SendOp::Send | SendOp::SendImmediate(_) => Access::NONE.into(),
        }
    }

    pub(in crate::model) const fn reads_memory(&self) -> bool {
        self.len > 0 && matches!(self.source, Source::Memory(_)) && !matches!(self.op, SendOp::Read(_))
    }
}

/// Where a request's bytes are.
pub(in crate::model) enum Source {
    /// In registered memory, read when the message is executed and not before.
    Memory(Parts),
    Inline(Vec<u8>),
}

/// The answer of the responder's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum Answer {
    Ack,
    /// No receive is posted: retry after this.
    RnrNak(RnrTimer),
    /// Refused: the work fails with this status.
    Nak(CompletionStatus),
    /// Not an answer: our own device found the work invalid. Queued with the answers, to keep the
    /// order.
    Fault(CompletionStatus),
}

pub(in crate::model) struct Requester {
    /// Work in order; the front is the oldest unacknowledged one.
    work: VecDeque<SendWork>,
    first: u64,
    /// How many, from the front, are in flight.
    sent: usize,
    reads: u8,
    pub(in crate::model) read_depth: u8,
    /// Slots in use: posted, and not freed by a polled completion.
    occupied: u32,
    /// Slots of work that ended since the last completion, which the next one frees too.
    silent: u32,
    epoch: u32,
    /// When the last message sent arrives.
    arrival: Instant,
    /// When the last answer arrives.
    pub(in crate::model) answer: Instant,
    /// Whether it waits for a responder that was not ready.
    waiting: bool,
    /// Whether one message is being retried after that. Those behind it wait for its
    /// acknowledgement: sending all of them each time would cost more the longer the responder
    /// takes.
    probing: bool,
    /// The acknowledgement time-out, if its owner has set one.
    pub(in crate::model) ack_timeout: Option<Duration>,
    /// In SQD: the sequence number from which on nothing leaves, and whether to raise an event when
    /// all before has ended.
    drain: Option<(u64, bool)>,
    /// Whether the acknowledgement timer of this epoch runs.
    timer: bool,
    /// The scheduled repetition of this epoch.
    pub(in crate::model) repeat: Option<Key>,
    retry: Budget,
    rnr_retry: Budget,
    /// Messages that arrived behind one whose bytes are being copied.
    pub(in crate::model) behind: VecDeque<(u32, u64)>,
    /// Whether bytes are being copied.
    pub(in crate::model) carrying: bool,
    /// The peer's memory was not accessed in time, and nothing was acknowledged since.
    pub(in crate::model) late: bool,
    pub(in crate::model) spare: Vec<Vec<u8>>,
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
    pub(in crate::model) fn new() -> Self {
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
            repeat: None,
            retry: Budget::default(),
            rnr_retry: Budget::default(),
            behind: VecDeque::new(),
            carrying: false,
            late: false,
            spare: Vec::new(),
        }
    }

    /// Resets the state. Messages in flight belong to no epoch of the new one.
    pub(in crate::model) fn renew(&mut self) {
        *self = Self { epoch: self.epoch.wrapping_add(1), ..Self::new() };
    }

    pub(in crate::model) fn configure(&mut self, retry: u8, rnr_retry: u8, read_depth: u8) {
        self.retry = Budget::new(retry);
        self.rnr_retry = Budget::new(rnr_retry);
        self.read_depth = read_depth;
    }

    /// Lets nothing leave from now on.
    pub(in crate::model) fn begin_drain(&mut self, notify: bool) {
        // Called again, the end stays: nothing was sent since.
        let end = self.drain.map_or(self.first + self.sent as u64, |(end, _)| end);
        self.drain = Some((end, notify));
    }

    pub(in crate::model) fn end_drain(&mut self) {
        self.drain = None;
    }

    /// Returns whether to raise the drained event now. Once.
    pub(in crate::model) fn is_drained(&mut self) -> bool {
        match &mut self.drain {
            Some((end, notify)) if self.first >= *end => core::mem::take(notify),
            _ => false,
        }
    }

    pub(in crate::model) fn has_work(&self) -> bool {
        !self.work.is_empty()
    }

    pub(in crate::model) fn next_sequence(&self) -> u64 {
        self.first + self.work.len() as u64
    }

    pub(in crate::model) fn oldest(&self) -> Option<&SendWork> {
        self.work.front()
    }

    pub(in crate::model) fn newest(&self) -> Option<&SendWork> {
        self.work.back()
    }

    /// Returns the sequence number below which the bytes belong to their owner: their completions
    /// were polled.
    pub(in crate::model) fn given_back(&self) -> u64 {
        self.next_sequence() - u64::from(self.occupied)
    }

    pub(in crate::model) const fn is_full(&self, depth: u32) -> bool {
        self.room(depth) == 0
    }

    /// Returns how many requests fit into a queue of this depth.
    pub(in crate::model) const fn room(&self, depth: u32) -> u32 {
        depth.saturating_sub(self.occupied)
    }

    /// Returns a buffer of `len` bytes, a reused one if possible.
    pub(in crate::model) fn buffer(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.resize(len, 0);
        bytes
    }

    pub(in crate::model) fn push(&mut self, work: SendWork) {
        self.occupied += 1;
        self.work.push_back(work);
    }

    pub(in crate::model) fn give_back(&mut self, slots: u32) {
        self.occupied = self.occupied.saturating_sub(slots);
    }

    /// Returns the work with this sequence number, if its transmission is still valid.
    pub(in crate::model) fn flight(&self, epoch: u32, sequence: u64) -> Option<&SendWork> {
        let place = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        (epoch == self.epoch && place < self.sent).then(|| self.work.get(place))?
    }

    pub(in crate::model) fn with_sequence(&mut self, sequence: u64) -> Option<&mut SendWork> {
        let place = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        self.work.get_mut(place)
    }

    /// Returns whether it fails after enough retries without a receive.
    pub(in crate::model) const fn gives_up_on_receives(&self) -> bool {
        self.rnr_retry.limit != RNR_RETRY_INFINITE
    }

    pub(in crate::model) fn retire(&mut self) -> Option<SendWork> {
        let work = self.work.pop_front()?;
        self.first += 1;
        // A flush also retires work that was never sent.
        if self.sent > 0 {
            self.sent -= 1;
            self.reads -= u8::from(matches!(work.op, SendOp::Read(_)));
        }
        Some(work)
    }

    pub(in crate::model) fn forget_flights(&mut self) {
        // Wraps: no message stays in flight for 2³² epochs.
        self.epoch = self.epoch.wrapping_add(1);
        self.sent = 0;
        self.reads = 0;
        self.waiting = false;
        // A timer of the old epoch, which simulations still execute, has no effect in `timed_out`.
        self.timer = false;
    }

    /// Returns the next work to send, by epoch and sequence number. READs beyond the depth wait,
    /// and everything behind them.
    pub(in crate::model) fn launch(&mut self) -> Option<(u32, u64)> {
        let work = self.work.get(self.sent).filter(|_| !self.waiting)?;
        if self.drain.is_some_and(|(end, _)| self.first + self.sent as u64 >= end) {
            return None;
        }
        // The probe is in flight. Its acknowledgement rings for those behind it.
        if self.probing && self.sent > 0 {
            return None;
        }
        if matches!(work.op, SendOp::Read(_)) {
            // Nothing overtakes it: a send queue is executed in order (IBA 9.5).
            if self.reads >= self.read_depth {
                return None;
            }
            self.reads += 1;
        }
        let sequence = self.first + self.sent as u64;
        self.sent += 1;
        Some((self.epoch, sequence))
    }

    /// Returns when a message that is sent now arrives: messages of a connection do not overtake
    /// each other.
    pub(in crate::model) fn arrival(&mut self, at: Instant) -> Instant {
        self.arrival = self.arrival.max(at);
        self.arrival
    }

    /// Returns whether this is the oldest work.
    pub(in crate::model) const fn is_oldest(&self, sequence: u64) -> bool {
        self.first == sequence
    }

    pub(in crate::model) const fn is_in(&self, epoch: u32) -> bool {
        self.epoch == epoch
    }

    /// Handles an acknowledgement. Returns whether it was that of a probe.
    pub(in crate::model) fn acknowledge(&mut self) -> bool {
        self.late = false;
        // Retries bound failures in a row, not of the connection: case `verbs.rnr.success-refills`.
        self.retry.refill();
        self.rnr_retry.refill();
        core::mem::take(&mut self.probing)
    }

    /// Takes a retry without a receive. Returns false if none is left.
    pub(in crate::model) fn spend_rnr_retry(&mut self) -> bool {
        // 7 is endless (`rdma_connect(3)`).
        self.rnr_retry.limit == RNR_RETRY_INFINITE || self.rnr_retry.spend()
    }

    /// Waits for a responder that was not ready. Returns the epoch.
    pub(in crate::model) const fn wait(&mut self) -> u32 {
        self.waiting = true;
        self.epoch
    }

    /// Lets one message leave after such a wait.
    pub(in crate::model) const fn probe(&mut self) {
        self.waiting = false;
        self.probing = true;
    }

    /// Starts the acknowledgement timer of an epoch. Returns false if it runs already.
    pub(in crate::model) fn begin_timer(&mut self, epoch: u32) -> bool {
        self.epoch == epoch && !core::mem::replace(&mut self.timer, true)
    }

    /// Returns whether the limit of retries is the greatest.
    pub(in crate::model) const fn has_most_retries(&self) -> bool {
        self.retry.limit == Budget::MOST
    }

    /// Takes a retry without an answer. Returns false if none is left.
    pub(in crate::model) fn spend_retry(&mut self) -> bool {
        self.retry.spend()
    }

    /// Counts work that has ended. The next completion frees its slot, too: case
    /// `verbs.signal.covers`.
    pub(in crate::model) const fn end_one(&mut self) {
        self.silent += 1;
    }

    /// Returns how many slots a completion frees.
    pub(in crate::model) fn take_ended(&mut self) -> u32 {
        core::mem::take(&mut self.silent)
    }
}
