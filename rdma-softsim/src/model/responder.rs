//! The receiving half of a queue pair: handles arriving messages.

use core::cmp::Ordering;
use core::time::Duration;
use std::collections::VecDeque;

use rdma_backend::{
    Access, AsyncEvent, Completed, CompletionStatus, Immediate, RemoteAddress, RnrTimer, SendOp,
};

use super::bulk::LONG;
use super::completions::{Detail, Entry, failure, success};
use super::datagrams::{Datagram, MTU};
use super::memory::Unreachable;
use super::parts::{Part, Parts};
use super::queue_pair::{ATOMIC, Path};
use super::requester::{Answer, SendWork, Source};
use super::{Event, Model, PairId};
use crate::failure_class::FailureClass;
use crate::faults::{Fault, Site};
use crate::request::Rights;
use crate::trace::EntryKind;

#[derive(Clone)]
pub(super) struct ReceiveWork {
    pub(super) id: u64,
    pub(super) local: Parts,
}

pub(super) struct Responder {
    pub(super) receives: VecDeque<ReceiveWork>,
    /// The receive of a shared queue that a message's bytes are being moved to.
    pub(super) reserved: Option<ReceiveWork>,
    /// Datagrams that wait to be stored, and whether one is being stored.
    pub(super) arrived: VecDeque<Datagram>,
    pub(super) storing: bool,
    /// The sequence number of the next message; lower ones were executed.
    expected: u64,
    pub(super) rnr_timer: RnrTimer,
    /// Whether an event has reported a first message that preceded the connection manager's event.
    told: bool,
    /// Number of further notifications for which a fault hides the receives.
    pub(super) unready: u8,
}

/// Why a message cannot be executed: the answer to the requester, and the status of the consumed
/// receive.
pub(super) struct Refusal {
    requester: CompletionStatus,
    pub(super) receive: CompletionStatus,
}

impl Refusal {
    /// The message's target memory is gone.
    const MEMORY_GONE: Self =
        Self { requester: CompletionStatus::REM_OP_ERR, receive: CompletionStatus::LOC_PROT_ERR };
}

/// What is known of an arriving message.
#[derive(Default)]
pub(super) struct Arrival {
    /// The fault that strikes it, if decided.
    pub(super) struck: Option<Option<Fault>>,
    /// The outcome of moving its bytes, if they were moved.
    pub(super) moved: Option<Result<(), Unreachable>>,
    /// Its bytes for a capture, if they are not in this process.
    pub(super) seen: Option<Vec<u8>>,
    /// Whether its bytes were in flight already, so that they are not moved again.
    pub(super) carried: bool,
}

impl Responder {
    pub(super) const fn new() -> Self {
        Self {
            receives: VecDeque::new(),
            reserved: None,
            arrived: VecDeque::new(),
            storing: false,
            expected: 0,
            rnr_timer: RnrTimer::SLOWEST,
            told: false,
            unready: 0,
        }
    }
}

impl Model {
    /// Handles an arriving message. Only the link can lose it, but a device whose queue pair is not
    /// connected does not answer.
    pub(super) fn arrive(&mut self, from: PairId, epoch: u32, sequence: u64) {
        let Some(pair) = self.pairs.get_mut(from) else { return };
        if pair.requester.carrying {
            pair.requester.behind.push_back((epoch, sequence));
        } else {
            self.arrive_with(from, epoch, sequence, Arrival::default());
        }
    }

    /// Handles a message like [`Model::arrive`], with what is known of it.
    pub(super) fn arrive_with(&mut self, from: PairId, epoch: u32, sequence: u64, arrival: Arrival) {
        let Some(pair) = self.pairs.get(from) else { return };
        let Some(work) = pair.requester.flight(epoch, sequence) else { return };
        let Some(path) = pair.path_of(work) else { return };
        let (sourced, len, is_datagram) = (work.reads_memory(), work.len, work.to.is_some());
        let struck = match arrival.struck {
            Some(struck) => struck,
            None if self.simulation.is_some() => self.strike_message(from, epoch, sequence),
            None => None,
        };
        if !arrival.carried && self.begin_freight(from, epoch, sequence, struck) {
            return;
        }
        let readable = self.pairs.get(from).and_then(|pair| pair.requester.flight(epoch, sequence));
        let readable = readable.is_some_and(|work| self.readable(work));
        let unread = is_datagram && arrival.moved == Some(Err(Unreachable::Source));
        let answer = if !readable || unread || (struck == Some(Fault::SourceGone) && sourced) {
            // Its own device cannot read the memory: nothing leaves, and the peer does not notice.
            self.count_injected(FailureClass::LocalProtection);
            Answer::Fault(CompletionStatus::LOC_PROT_ERR)
        } else if is_datagram && len > MTU {
            Answer::Fault(CompletionStatus::LOC_LEN_ERR)
        } else {
            self.capture_message(from, epoch, sequence, arrival.seen.as_deref());
            let heard = self.listening(from, epoch, sequence).filter(|_| struck != Some(Fault::Lose));
            match heard {
                // Who sends a datagram does not learn what becomes of it.
                None if is_datagram => Answer::Ack,
                None => return self.unanswered(from, epoch),
                Some(Ordering::Less) => {
                    // The device has read the bytes again.
                    self.count_injected(FailureClass::BufferOwnership);
                    self.check_ownership(from);
                    self.count_observed(FailureClass::PacketLoss);
                    Answer::Ack
                }
                // One before it is missing: dropped.
                Some(Ordering::Greater) => return,
                Some(Ordering::Equal) => match struck {
                    Some(Fault::KeyRefused) => {
                        let status = self.bad_key();
                        self.refuse_request(path.peer, AsyncEvent::QpAccessErr);
                        Answer::Nak(status)
                    }
                    Some(Fault::RequestRefused) => {
                        self.refuse_request(path.peer, AsyncEvent::QpReqErr);
                        Answer::Nak(CompletionStatus::REM_INV_REQ_ERR)
                    }
                    Some(Fault::ReceiveGone) => {
                        self.refuse_receive(path.peer, CompletionStatus::LOC_PROT_ERR);
                        Answer::Nak(CompletionStatus::REM_OP_ERR)
                    }
                    _ if is_datagram => self.pass_datagram(from, epoch, sequence, arrival),
                    _ if !arrival.carried
                        && len >= LONG
                        && self.begin_bulk(from, path.peer, epoch, sequence) =>
                    {
                        return;
                    }
                    _ => self.execute(from, path.peer, epoch, sequence, arrival),
                },
            }
        };
        // Its own device answers a datagram, at once and never in the negative.
        let (answer, travel) = match answer {
            Answer::Nak(_) | Answer::RnrNak(_) if is_datagram => (Answer::Ack, Duration::ZERO),
            own if is_datagram => (own, Duration::ZERO),
            answer => (answer, self.travel()),
        };
        let now = self.event_queue.now();
        let Some(pair) = self.pairs.get_mut(from) else { return };
        let at = now.after(travel).max(pair.requester.answer);
        pair.requester.answer = at;
        self.event_queue.schedule(at.since(now), Event::Answer { to: from, epoch, sequence, answer });
    }

    /// Returns the fault that strikes an arriving message.
    fn strike_message(&mut self, from: PairId, epoch: u32, sequence: u64) -> Option<Fault> {
        let pair = self.pairs.get(from)?;
        let work = pair.requester.flight(epoch, sequence)?;
        let (op, some, sourced) = (work.op, work.len > 0, work.reads_memory());
        let peer = pair.path_of(work)?.peer;
        let receives = self.has_receive(peer);
        let (sender, receiver) = (self.party(from)?, self.party(peer)?);
        let struck = self.strike(Site::Arrive, |fault, on| match fault {
            Fault::SourceGone => sender.is(on) && sourced,
            Fault::Lose => receiver.is(on),
            Fault::NotReady { .. } => receiver.is(on) && !matches!(op, SendOp::Write(_) | SendOp::Read(_)),
            Fault::KeyRefused | Fault::RequestRefused => {
                receiver.is(on) && some && matches!(op, SendOp::Write(_) | SendOp::WriteImmediate(..))
            }
            Fault::ReceiveGone => {
                receiver.is(on) && some && receives && matches!(op, SendOp::Send | SendOp::SendImmediate(_))
            }
            _ => false,
        });
        if let Some(Fault::NotReady { times }) = struck
            && let Some(peer) = self.pairs.get_mut(peer)
        {
            peer.responder.unready = times;
        }
        struck
    }

    /// Returns the requester's status for a key that its peer's device refuses.
    fn bad_key(&self) -> CompletionStatus {
        self.behaviour().map_or(CompletionStatus::REM_ACCESS_ERR, |behaviour| behaviour.bad_key)
    }

    /// Ends the queue pair because of a request that consumed no receive. An event must report it
    /// to the owner (IBA 9.9.3.1.3), if the device raises it.
    fn refuse_request(&mut self, at: PairId, event: AsyncEvent) {
        self.enter_error(at);
        if self.behaviour().is_none_or(|behaviour| behaviour.tells_of_requests) {
            self.tell_pair(at, event);
        }
    }

    /// Fails the oldest receive, and the queue pair with it.
    pub(super) fn refuse_receive(&mut self, at: PairId, status: CompletionStatus) {
        if let Some(receive) = self.consume_receive(at)
            && let Some(peer) = self.pairs.get(at)
        {
            let (number, queue) = (peer.number, peer.receive_queue);
            self.report(queue, Entry::new(failure(receive.id, number, status), at));
        }
        self.enter_error(at);
    }

    /// Returns whether the sending device may read the message's bytes.
    pub(super) fn readable(&self, work: &SendWork) -> bool {
        match work.source {
            Source::Memory(ref parts) if work.reads_memory() => self.allows(parts, work.len, Access::NONE),
            // Not done at the peer if its result cannot be stored.
            Source::Memory(ref parts) if work.atomic.is_some() => {
                self.allows(parts, work.len, Access::LOCAL_WRITE)
            }
            _ => true,
        }
    }

    /// Returns whether the peer's device has had this message, expects it or misses one before it,
    /// if its queue pair is reachable and listens to this one.
    pub(super) fn listening(&self, from: PairId, epoch: u32, sequence: u64) -> Option<Ordering> {
        let pair = self.pairs.get(from)?;
        let work = pair.requester.flight(epoch, sequence)?;
        let path = pair.path_of(work).filter(|path| !self.is_cut(from, *path))?;
        let peer = self.pairs.get(path.peer).filter(|peer| peer.state.responds())?;
        match work.to {
            // Each stands alone: its key decides.
            Some(to) => (peer.key == Some(to.key)).then_some(Ordering::Equal),
            // A connected queue pair accepts messages only from its peer.
            None if peer.path.is_some_and(|theirs| theirs.peer == from) => {
                Some(sequence.cmp(&peer.responder.expected))
            }
            None => None,
        }
    }

    /// Returns whether messages between a queue pair and its peer are blocked.
    pub(super) fn is_cut(&self, id: PairId, path: Path) -> bool {
        let cut = |id: PairId| self.pairs.get(id).is_some_and(|pair| pair.cut);
        self.cut(path.local, path.remote) || cut(id) || cut(path.peer)
    }

    pub(super) fn is_ready_for_receives(&self, id: PairId) -> bool {
        self.pairs.get(id).is_some_and(|pair| pair.responder.unready == 0)
    }

    fn has_receive(&self, id: PairId) -> bool {
        self.next_receive(id).is_some()
    }

    /// Executes the expected message: checks it, moves its bytes, and consumes a receive if it
    /// takes one. A refusal puts the responder's queue pair into the error state too.
    fn execute(&mut self, from: PairId, at: PairId, epoch: u32, sequence: u64, arrival: Arrival) -> Answer {
        let Some(work) = self.pairs.get(from).and_then(|pair| pair.requester.flight(epoch, sequence)) else {
            return Answer::Ack;
        };
        let (op, len, solicited, wanted) = (work.op, work.len, work.solicited, work.wanted());
        let Some(peer) = self.pairs.get(at) else { return Answer::Ack };
        let receive = match op {
            SendOp::Write(_) | SendOp::Read(_) => None,
            SendOp::Send | SendOp::SendImmediate(_) | SendOp::WriteImmediate(..) => {
                match self.next_receive(at) {
                    Some(receive) if peer.responder.unready == 0 => Some(receive.clone()),
                    _ => return self.not_ready_for(from, at),
                }
            }
        };
        let consumes = receive.is_some();
        let checked = match (op, receive) {
            (SendOp::Read(remote), _) => {
                self.check_remote(at, remote, len, wanted).map(|place| place.filter(|_| wanted.atomics))
            }
            (SendOp::Write(remote) | SendOp::WriteImmediate(remote, _), _) => {
                self.check_remote(at, remote, len, wanted)
            }
            (SendOp::Send | SendOp::SendImmediate(_), Some(receive)) => self.check_receive(receive, len),
            (SendOp::Send | SendOp::SendImmediate(_), None) => Ok(None),
        };
        let reads = matches!(op, SendOp::Read(_));
        let delivered = checked.map(|target| match (arrival.moved, target) {
            (Some(moved), Some(_)) => moved,
            (Some(moved), None) if reads => moved,
            (None, Some(target)) => self.deliver(from, at, epoch, sequence, target),
            (_, None) => Ok(()),
        });
        let outcome = match delivered {
            Ok(Ok(())) => Ok(()),
            // The responder of a READ cannot read its memory, and reports that. The requester
            // reports that it cannot write.
            Ok(Err(Unreachable::Source)) if reads => return Answer::Nak(CompletionStatus::REM_OP_ERR),
            Ok(Err(Unreachable::Target)) if reads => return Answer::Fault(CompletionStatus::LOC_PROT_ERR),
            // As if the memory had never been registered: nothing leaves, and the peer does not
            // notice.
            Ok(Err(Unreachable::Source)) => return Answer::Fault(CompletionStatus::LOC_PROT_ERR),
            Ok(Err(Unreachable::Target)) => Err(Refusal::MEMORY_GONE),
            Err(refusal) => Err(refusal),
        };
        if self.is_observed() && outcome.is_ok() {
            self.note_execution(from, at, epoch, sequence);
        }
        let receive = if consumes { self.consume_receive(at) } else { None };
        let Some(peer) = self.pairs.get_mut(at) else { return Answer::Ack };
        let (number, queue) = (peer.number, peer.receive_queue);
        let (answer, result) = match outcome {
            Ok(()) => {
                peer.responder.expected = sequence + 1;
                (Answer::Ack, Ok(received(op, len)))
            }
            Err(refusal) => (Answer::Nak(refusal.requester), Err(refusal.receive)),
        };
        if let Some(receive) = receive {
            let bytes = u32::try_from(len).unwrap_or(u32::MAX);
            let completion = match result {
                Ok(completed) => success(receive.id, number, completed),
                Err(status) => failure(receive.id, number, status),
            };
            let detail = Detail { bytes, source: None, atomic: None };
            let entry = Entry { lands: Some(sequence), detail, solicited, ..Entry::new(completion, at) };
            self.report(queue, entry);
        }
        if let Answer::Nak(status) = answer {
            self.count_injected(match result {
                Err(CompletionStatus::LOC_LEN_ERR) => FailureClass::ReceiveTooSmall,
                _ => FailureClass::AccessRefused,
            });
            match status {
                _ if consumes => self.enter_error(at),
                CompletionStatus::REM_INV_REQ_ERR => self.refuse_request(at, AsyncEvent::QpReqErr),
                _ => self.refuse_request(at, AsyncEvent::QpAccessErr),
            }
        } else if self.is_half_open(at) {
            self.tell_of_first(at);
        }
        answer
    }

    /// Reports an executed message that preceded the connection manager's event, if the device
    /// raises such an event.
    fn tell_of_first(&mut self, at: PairId) {
        let raises = self.behaviour().is_none_or(|behaviour| behaviour.tells_of_first);
        if let Some(pair) = self.pairs.get_mut(at)
            && raises
            && !core::mem::replace(&mut pair.responder.told, true)
        {
            self.tell_pair(at, AsyncEvent::CommEst);
        }
    }

    /// Handles a notification without a receive, or with hidden ones.
    fn not_ready_for(&mut self, from: PairId, at: PairId) -> Answer {
        let limited = self.pairs.get(from).is_some_and(|pair| pair.requester.gives_up_on_receives());
        let (sender, receiver) = (self.pair_number(from), self.pair_number(at));
        let Some(peer) = self.pairs.get_mut(at) else { return Answer::Ack };
        let injected = peer.responder.unready > 0;
        peer.responder.unready = peer.responder.unready.saturating_sub(1);
        let timer = peer.responder.rnr_timer;
        self.note(|| EntryKind::NotReady { from: sender, to: receiver, injected, limited });
        if !injected {
            self.count_injected(FailureClass::ReceiverNotReady);
        }
        Answer::RnrNak(timer)
    }

    /// Records an executed message, and the failure classes that it shows.
    fn note_execution(&mut self, from: PairId, at: PairId, epoch: u32, sequence: u64) {
        let Some(work) = self.pairs.get(from).and_then(|pair| pair.requester.flight(epoch, sequence)) else {
            return;
        };
        let (work, empty) = (self.describe(work), work.len == 0);
        let (from_number, to) = (self.pair_number(from), self.pair_number(at));
        if empty && matches!(work.op, SendOp::Write(_) | SendOp::WriteImmediate(..)) {
            self.count_injected(FailureClass::EmptyWrite);
            if let Some(work) =
                self.pairs.get_mut(from).and_then(|pair| pair.requester.with_sequence(sequence))
            {
                work.shows.insert(FailureClass::EmptyWrite);
            }
        }
        if self.is_half_open(at) {
            self.count_injected(FailureClass::EstablishmentRace);
        }
        self.note(|| EntryKind::Executed { from: from_number, to, work });
    }

    /// Returns the target of the peer's WRITE or READ. Without bytes only the queue pair must allow
    /// it (IBA: R_Key is not validated).
    fn check_remote(
        &mut self,
        at: PairId,
        remote: RemoteAddress,
        len: usize,
        wanted: Rights,
    ) -> Result<Option<Parts>, Refusal> {
        let invalid = CompletionStatus::REM_INV_REQ_ERR;
        let peer = self.pairs.get(at);
        if peer.is_some_and(|peer| !peer.rights.allow(wanted))
            || (wanted.atomics && !remote.address.is_multiple_of(ATOMIC as u64))
        {
            return Err(Refusal { requester: invalid, receive: CompletionStatus::LOC_ACCESS_ERR });
        }
        if len == 0 {
            return Ok(None);
        }
        let found = peer.and_then(|peer| self.remote(peer, remote, len, wanted));
        if let Some((region, offset)) = found {
            return Ok(Some(Parts::One(Part { region, offset, len })));
        }
        if let Some(succeeds) = self.was_deregistered(remote.rkey) {
            // Requests in flight may succeed or fail; these bytes are discarded.
            self.count_injected(FailureClass::Deregistered);
            self.count_observed(FailureClass::Deregistered);
            if succeeds {
                return Ok(None);
            }
        }
        Err(Refusal { requester: self.bad_key(), receive: CompletionStatus::LOC_ACCESS_ERR })
    }

    pub(super) fn check_receive(&self, receive: ReceiveWork, len: usize) -> Result<Option<Parts>, Refusal> {
        if len > receive.local.len() {
            return Err(Refusal {
                requester: CompletionStatus::REM_INV_REQ_ERR,
                receive: CompletionStatus::LOC_LEN_ERR,
            });
        }
        if !self.allows(&receive.local, len, Access::LOCAL_WRITE) {
            return Err(Refusal::MEMORY_GONE);
        }
        Ok((len > 0).then_some(receive.local))
    }

    /// Stores the bytes of a checked message: now, or as late as is allowed.
    fn deliver(
        &mut self,
        from: PairId,
        at: PairId,
        epoch: u32,
        sequence: u64,
        target: Parts,
    ) -> Result<(), Unreachable> {
        let Some(work) = self.pairs.get(from).and_then(|pair| pair.requester.flight(epoch, sequence)) else {
            return Ok(());
        };
        if work.atomic.is_some() {
            // Done when its bytes were moved, or before its answer was lost.
            return match &work.brought {
                Some(Ok(_)) => Ok(()),
                Some(Err(end)) => Err(*end),
                None => Err(Unreachable::Source),
            };
        }
        // Only in simulations: a real program may poll its memory for bytes that would then never
        // land.
        if self.is_observed() && self.behaviour().is_some_and(|behaviour| behaviour.late_bytes) {
            let mut bytes = vec![0; work.len];
            let read = match &work.source {
                Source::Inline(inline) => {
                    bytes.copy_from_slice(inline);
                    true
                }
                Source::Memory(parts) => self.gather(parts, &mut bytes),
            };
            if !read {
                return Err(Unreachable::Source);
            }
            self.lands_late(at, sequence, bytes, target);
            return Ok(());
        }
        match &work.source {
            Source::Inline(bytes) if self.scatter(&target, 0, bytes) => Ok(()),
            Source::Inline(_) => Err(Unreachable::Target),
            Source::Memory(parts) => self.copy_parts(parts, &target, work.len),
        }
    }
}

fn received(op: SendOp, len: usize) -> Completed {
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    let recv = |immediate: Option<Immediate>| Completed::Recv { len, immediate };
    match op {
        SendOp::WriteImmediate(_, immediate) => Completed::RecvWrite { immediate },
        SendOp::SendImmediate(immediate) => recv(Some(immediate)),
        _ => recv(None),
    }
}
