//! Arriving messages: their checks, their execution, and the answers to them.

use core::cmp::Ordering;
use core::time::Duration;

use rdma_backend::{AsyncEvent, Completed, CompletionStatus, Immediate, SendOp};

use super::flights::bulk::LONG;
use super::flights::freight::Held;
use super::pairs::datagram::{Datagram, HEADER, MOST_WAITING, MTU, header, sent_immediate};
use super::pairs::delivery::check_receive;
use super::pairs::path::Addressed;
use super::pairs::requester::{self, Answer};
use super::pairs::responder::{Arrival, Refusal};
use super::queues::completion::{Detail, Entry, Source, failure, success};
use super::regions::memory::Unreachable;
use super::{Event, Model, PairId};
use crate::failure_class::FailureClass;
use crate::faults::{Fault, Site};
use crate::trace::EntryKind;

impl Model {
    /// Handles an arriving message. Only the link can lose it, but a device whose queue pair is not
    /// connected does not answer.
    pub(super) fn arrive(&mut self, from: PairId, epoch: u32, sequence: u64) {
        let Some(pair) = self.pairs.get_mut(from) else { return };
        // It must not be executed before the message whose bytes are still being moved (IBA 9.5).
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
        // Decided once: a message comes here again when its bytes have been moved.
        let struck = match arrival.struck {
            Some(struck) => struck,
            None if self.env.simulation().is_some() => self.strike_message(from, epoch, sequence),
            None => None,
        };
        // Another process may provide its pages late, so they are not accessed under the lock.
        if !arrival.carried && self.begin_freight(from, epoch, sequence, struck) {
            return;
        }
        let readable = self.pairs.flight(from, epoch, sequence);
        let readable = readable.is_some_and(|work| work.readable(&self.regions));
        let unread = is_datagram && arrival.moved == Some(Err(Unreachable::Source));
        let answer = if !readable || unread || (struck == Some(Fault::SourceGone) && sourced) {
            // Its own device cannot read the memory: nothing leaves, and the peer does not notice.
            self.env.count_injected(FailureClass::LocalProtection);
            Answer::Fault(CompletionStatus::LOC_PROT_ERR)
        } else if is_datagram && len > MTU {
            Answer::Fault(CompletionStatus::LOC_LEN_ERR)
        } else {
            self.capture_message(from, epoch, sequence, arrival.seen.as_deref());
            let heard = self
                .pairs
                .listening(&self.hosts, from, epoch, sequence)
                .filter(|_| struck != Some(Fault::Lose));
            match heard {
                // Who sends a datagram does not learn what becomes of it.
                None if is_datagram => Answer::Ack,
                None => return self.pairs.unanswered(&mut self.env, &mut self.contexts, from, epoch),
                // Its acknowledgement was lost: acknowledged and not executed again (IBA 9.4.4).
                Some(Ordering::Less) => {
                    // The device has read the bytes again.
                    self.env.count_injected(FailureClass::BufferOwnership);
                    self.pairs.check_ownership(&mut self.env, &self.regions, from);
                    self.env.count_observed(FailureClass::PacketLoss);
                    Answer::Ack
                }
                // One before it is missing: dropped.
                Some(Ordering::Greater) => return,
                Some(Ordering::Equal) => match struck {
                    Some(Fault::KeyRefused) => {
                        let status = self.env.bad_key();
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
            answer => (answer, self.env.travel()),
        };
        let now = self.env.now();
        let Some(pair) = self.pairs.get_mut(from) else { return };
        // Answers of a connection do not overtake each other.
        let at = now.after(travel).max(pair.requester.answer);
        pair.requester.answer = at;
        self.env.schedule(at.since(now), Event::Answer { to: from, epoch, sequence, answer });
    }

    /// Returns the fault that strikes an arriving message.
    fn strike_message(&mut self, from: PairId, epoch: u32, sequence: u64) -> Option<Fault> {
        let pair = self.pairs.get(from)?;
        let work = pair.requester.flight(epoch, sequence)?;
        let (op, some, sourced) = (work.op, work.len > 0, work.reads_memory());
        let peer = pair.path_of(work)?.peer;
        let receives = self.pairs.has_receive(peer);
        let (sender, receiver) =
            (self.manager.party(&self.pairs, from)?, self.manager.party(&self.pairs, peer)?);
        let struck = self.env.strike(Site::Arrive, |fault, on| match fault {
            // Inline bytes left their memory when they were posted.
            Fault::SourceGone => sender.is(on) && sourced,
            Fault::Lose => receiver.is(on),
            // WRITEs and READs consume no receive.
            Fault::NotReady { .. } => receiver.is(on) && !matches!(op, SendOp::Write(_) | SendOp::Read(_)),
            // Without bytes the key is not checked (IBA 9.7.4.1.2).
            Fault::KeyRefused | Fault::RequestRefused => {
                receiver.is(on) && some && matches!(op, SendOp::Write(_) | SendOp::WriteImmediate(..))
            }
            // Only if a receive is posted, whose completion then reports the fault.
            Fault::ReceiveGone => {
                receiver.is(on) && some && receives && matches!(op, SendOp::Send | SendOp::SendImmediate(_))
            }
            _ => false,
        });
        if let Some(Fault::NotReady { times }) = struck
            && let Some(peer) = self.pairs.get_mut(peer)
        {
            // From this message on: it is executed after this.
            peer.responder.unready = times;
        }
        struck
    }

    /// Ends the queue pair because of a request that consumed no receive. An event must report it
    /// to the owner (IBA 9.9.3.1.3), if the device raises it.
    fn refuse_request(&mut self, at: PairId, event: AsyncEvent) {
        self.enter_error(at);
        if self.env.behaviour().is_none_or(|behaviour| behaviour.tells_of_requests) {
            self.tell_pair(at, event);
        }
    }

    /// Fails the oldest receive, and the queue pair with it.
    pub(super) fn refuse_receive(&mut self, at: PairId, status: CompletionStatus) {
        if let Some(receive) = self.pairs.consume_receive(&mut self.env, &mut self.contexts, at)
            && let Some(peer) = self.pairs.get(at)
        {
            let (number, queue) = (peer.number, peer.receive_queue);
            self.report(queue, Entry::new(failure(receive.id, number, status), at));
        }
        self.enter_error(at);
    }

    /// Executes the expected message: checks it, moves its bytes, and consumes a receive if it
    /// takes one. A refusal puts the responder's queue pair into the error state too.
    fn execute(&mut self, from: PairId, at: PairId, epoch: u32, sequence: u64, arrival: Arrival) -> Answer {
        let Some(work) = self.pairs.flight(from, epoch, sequence) else {
            return Answer::Ack;
        };
        let (op, len, solicited, wanted) = (work.op, work.len, work.solicited, work.wanted());
        let Some(peer) = self.pairs.get(at) else { return Answer::Ack };
        // Empty ones consume one, too: cases `verbs.receive.send-takes-one`, `immediate-takes-one`.
        let receive = match op {
            SendOp::Write(_) | SendOp::Read(_) => None,
            SendOp::Send | SendOp::SendImmediate(_) | SendOp::WriteImmediate(..) => {
                match self.pairs.next_receive(at) {
                    Some(receive) if peer.responder.unready == 0 => Some(receive.clone()),
                    _ => return self.pairs.not_ready_for(&mut self.env, from, at),
                }
            }
        };
        let consumes = receive.is_some();
        let checked = match (op, receive) {
            // A READ delivers nothing here: its bytes come with the answer.
            (SendOp::Read(remote), _) => self
                .pairs
                .check_remote(&mut self.env, &self.regions, at, remote, len, wanted)
                .map(|place| place.filter(|_| wanted.atomics)),
            (SendOp::Write(remote) | SendOp::WriteImmediate(remote, _), _) => {
                self.pairs.check_remote(&mut self.env, &self.regions, at, remote, len, wanted)
            }
            (SendOp::Send | SendOp::SendImmediate(_), Some(receive)) => {
                check_receive(&self.regions, receive, len)
            }
            (SendOp::Send | SendOp::SendImmediate(_), None) => Ok(None),
        };
        let reads = matches!(op, SendOp::Read(_));
        let delivered = checked.map(|target| match (arrival.moved, target) {
            (Some(moved), Some(_)) => moved,
            // A mover has brought these bytes to the requester already.
            (Some(moved), None) if reads => moved,
            (None, Some(target)) => {
                self.pairs.deliver(&mut self.env, &self.regions, from, at, (epoch, sequence), target)
            }
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
        if self.env.is_observed() && outcome.is_ok() {
            self.note_execution(from, at, epoch, sequence);
        }
        // Also by a message that was refused: the completion of the receive reports it.
        let receive =
            if consumes { self.pairs.consume_receive(&mut self.env, &mut self.contexts, at) } else { None };
        let Some(peer) = self.pairs.get_mut(at) else { return Answer::Ack };
        let (number, queue) = (peer.number, peer.receive_queue);
        let (answer, result) = match outcome {
            Ok(()) => {
                // A refused message is not counted: its queue pair fails, and nothing follows.
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
            self.env.count_injected(match result {
                Err(CompletionStatus::LOC_LEN_ERR) => FailureClass::ReceiveTooSmall,
                _ => FailureClass::AccessRefused,
            });
            // A consumed receive has reported it. Without one, an event must (IBA 9.9.3.1.3).
            match status {
                _ if consumes => self.enter_error(at),
                CompletionStatus::REM_INV_REQ_ERR => self.refuse_request(at, AsyncEvent::QpReqErr),
                _ => self.refuse_request(at, AsyncEvent::QpAccessErr),
            }
        } else if self.manager.is_half_open(&self.pairs, at) {
            self.tell_of_first(at);
        }
        answer
    }

    /// Reports an executed message that preceded the connection manager's event, if the device
    /// raises such an event.
    fn tell_of_first(&mut self, at: PairId) {
        let raises = self.env.behaviour().is_none_or(|behaviour| behaviour.tells_of_first);
        if let Some(pair) = self.pairs.get_mut(at)
            && raises
            && !core::mem::replace(&mut pair.responder.told, true)
        {
            self.tell_pair(at, AsyncEvent::CommEst);
        }
    }

    /// Records an executed message, and the failure classes that it shows.
    fn note_execution(&mut self, from: PairId, at: PairId, epoch: u32, sequence: u64) {
        let Some(work) = self.pairs.flight(from, epoch, sequence) else {
            return;
        };
        let (work, empty) = (work.describe(&self.regions), work.len == 0);
        let (from_number, to) = (self.pairs.number(from), self.pairs.number(at));
        if empty && matches!(work.op, SendOp::Write(_) | SendOp::WriteImmediate(..)) {
            self.env.count_injected(FailureClass::EmptyWrite);
            if let Some(work) =
                self.pairs.get_mut(from).and_then(|pair| pair.requester.with_sequence(sequence))
            {
                work.shows.insert(FailureClass::EmptyWrite);
            }
        }
        if self.manager.is_half_open(&self.pairs, at) {
            self.env.count_injected(FailureClass::EstablishmentRace);
        }
        self.env.note(|| EntryKind::Executed { from: from_number, to, work });
    }

    /// Passes a datagram that has arrived to the receiver's device. One too many is lost.
    pub(super) fn pass_datagram(
        &mut self,
        from: PairId,
        epoch: u32,
        sequence: u64,
        arrival: Arrival,
    ) -> Answer {
        let Some(pair) = self.pairs.get(from) else { return Answer::Ack };
        let Some(work) = pair.requester.flight(epoch, sequence) else { return Answer::Ack };
        let Some(Addressed { path, .. }) = work.to else { return Answer::Ack };
        let immediate = sent_immediate(work.op);
        let mut bytes = Vec::with_capacity(HEADER + work.len);
        // The length counts the immediate and the padding, as the headers on a wire do.
        bytes.extend(header(path, immediate.map_or(0, |_| 4) + work.len.next_multiple_of(4)));
        match (arrival.seen, &work.source) {
            (Some(seen), _) => bytes.extend(seen),
            (None, requester::Source::Inline(inline)) => bytes.extend(inline),
            (None, requester::Source::Memory(parts)) => {
                bytes.resize(HEADER + work.len, 0);
                if !bytes.get_mut(HEADER..).is_some_and(|payload| self.regions.gather(parts, payload)) {
                    // Its own device could not read it, so nothing was sent.
                    return Answer::Fault(CompletionStatus::LOC_PROT_ERR);
                }
            }
        }
        let source = Source { number: pair.number, ip4: path.local.is_ipv4() && path.remote.is_ipv4() };
        let (len, solicited) = (bytes.len() as u32, work.solicited);
        let mut held = Held::new(&self.flights.store);
        let room = held.has_room();
        held.add(bytes.len());
        let Some(peer) = self.pairs.get_mut(path.peer) else { return Answer::Ack };
        // One that is stored at once needs no place to wait.
        if !peer.responder.storing || (room && peer.responder.arrived.len() < MOST_WAITING) {
            let datagram = Datagram { bytes, len, source, immediate, solicited, _held: held };
            peer.responder.arrived.push_back(datagram);
            self.store_datagrams(path.peer);
        }
        Answer::Ack
    }

    /// Stores datagrams that have arrived at a queue pair, one at a time. Those that find no
    /// receive are lost.
    pub(super) fn store_datagrams(&mut self, at: PairId) {
        while let Some(pair) = self.pairs.get_mut(at)
            && !pair.responder.storing
            && let Some(datagram) = pair.responder.arrived.pop_front()
        {
            let hidden = pair.responder.unready > 0;
            pair.responder.unready = pair.responder.unready.saturating_sub(1);
            let Some(receive) = self.pairs.next_receive(at).filter(|_| !hidden) else { continue };
            match check_receive(&self.regions, receive.clone(), datagram.bytes.len()) {
                Ok(Some(target)) if self.regions.is_any_foreign(&target) => {
                    self.begin_storing(at, datagram, target);
                }
                Ok(target) => {
                    let stored =
                        target.is_none_or(|target| self.regions.scatter(&target, 0, &datagram.bytes));
                    self.end_storing(at, &datagram, stored);
                }
                Err(refusal) => self.refuse_receive(at, refusal.receive),
            }
        }
    }

    /// Handles a datagram whose bytes were stored, or could not be.
    pub(super) fn end_storing(&mut self, at: PairId, datagram: &Datagram, stored: bool) {
        let Some(pair) = self.pairs.get_mut(at) else { return };
        pair.responder.storing = false;
        let (number, queue) = (pair.number, pair.receive_queue);
        if !stored {
            return self.refuse_receive(at, CompletionStatus::LOC_PROT_ERR);
        }
        if let Some(receive) = self.pairs.consume_receive(&mut self.env, &mut self.contexts, at) {
            let &Datagram { len, source, immediate, solicited, .. } = datagram;
            let completion = success(receive.id, number, Completed::Recv { len, immediate });
            let detail = Detail { bytes: len, source: Some(source), atomic: None };
            self.report(queue, Entry { detail, solicited, ..Entry::new(completion, at) });
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
