//! Queue pairs: creation, posting, and the error state.

use std::net::IpAddr;

use rdma_backend::{CompletionStatus, QueuePairLimits, RnrTimer, SendOp};

use super::completions::{Entry, PendingCompletions, WorkQueue, failure};
use super::ownership::Ownership;
use super::parts::{Part, Parts};
use super::requester::{Requester, SendWork, Source};
use super::responder::{ReceiveWork, Responder};
use super::shared::LAST_REACHED;
use super::{ContextId, DomainId, Event, HostId, IdentifierId, Model, PairId, QueueId, RegionId, SharedId};
use crate::Error;
use crate::device_kind::Flush;
use crate::failure_class::{ClassSet, FailureClass};
use crate::faults::{Fault, Site};
use crate::request::{Atomic, Destination, Rights};
use crate::trace::EntryKind;

const MAX_MESSAGE: usize = 1 << 31;
/// The bytes of an atomic operation.
pub(super) const ATOMIC: usize = 8;

pub(crate) struct QueuePair {
    pub(super) host: HostId,
    pub(super) domain: DomainId,
    pub(super) send_queue: QueueId,
    pub(super) receive_queue: QueueId,
    /// The shared receive queue, if any.
    pub(super) shared: Option<SharedId>,
    /// Who gets its events.
    pub(super) owner: Owner,
    pub(super) identifier: Option<IdentifierId>,
    pub(super) number: u32,
    pub(super) limits: QueuePairLimits,
    pub(super) state: QueuePairState,
    /// The Q_Key, of a queue pair for datagrams.
    pub(super) key: Option<u32>,
    /// What its peer may do.
    pub(super) rights: Rights,
    /// The other end, once connected.
    pub(super) path: Option<Path>,
    pub(super) requester: Requester,
    pub(super) responder: Responder,
    /// Completions that have not reached their queue.
    pub(super) held: PendingCompletions,
    pub(super) ownership: Ownership,
    /// Whether a fault blocks its messages.
    pub(super) cut: bool,
    /// Copies of its long messages in progress.
    pub(super) bulks: u32,
}

/// Who gets the events of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The reader of this identifier's channel.
    Identifier(IdentifierId),
    /// Who opened the device, and its name for the object.
    Context(ContextId, u64),
}

impl QueuePair {
    pub(super) fn reports_to(&self, queue: QueueId) -> bool {
        self.send_queue == queue || self.receive_queue == queue
    }

    pub(super) const fn queue_of(&self, queue: WorkQueue) -> QueueId {
        match queue {
            WorkQueue::Send => self.send_queue,
            WorkQueue::Receive => self.receive_queue,
        }
    }

    /// Returns the path of a message.
    pub(super) fn path_of(&self, work: &SendWork) -> Option<Path> {
        work.to.map_or(self.path, |to| Some(to.path))
    }

    pub(super) fn is_ready(&self) -> bool {
        self.state == QueuePairState::Ready
    }

    /// Returns whether the device may still access a region for posted requests.
    pub(super) fn uses(&self, region: RegionId) -> bool {
        self.responder.receives.iter().any(|receive| receive.local.touch(region))
            || self.ownership.lends(region)
    }
}

/// States that behave differently (`ibv_modify_qp(3)` has more).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueuePairState {
    Reset,
    /// INIT: receives may be posted.
    Idle,
    /// RTR: receives and cannot send.
    Receiving,
    Ready,
    /// SQD: requests in flight are completed, and no others leave.
    Draining,
    /// ERR: posted requests are flushed, and the device does not answer.
    Error,
}

impl QueuePairState {
    pub(super) const fn responds(self) -> bool {
        matches!(self, Self::Receiving | Self::Ready | Self::Draining)
    }
}

/// The path to the other end.
#[derive(Clone, Copy)]
pub(super) struct Path {
    pub(super) peer: PairId,
    pub(super) local: IpAddr,
    pub(super) remote: IpAddr,
    /// Whether both ends are on one host, whatever their addresses are.
    pub(super) loopback: bool,
}

pub(crate) struct PostedSend {
    pub(crate) id: u64,
    pub(crate) op: SendOp,
    pub(crate) local: Part,
    pub(crate) signaled: bool,
    pub(crate) inline: bool,
}

/// The request of a send, wherever its bytes are.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) op: SendOp,
    /// The change that this READ makes, of an atomic operation.
    pub(crate) atomic: Option<Atomic>,
    pub(crate) signaled: bool,
    /// Whether its receive raises a solicited event.
    pub(crate) solicited: bool,
    /// Where a datagram goes.
    pub(crate) to: Option<Destination>,
}

pub(crate) struct PostedReceive {
    pub(crate) id: u64,
    pub(crate) local: Parts,
}

impl Model {
    /// Destroys it. If its owner's memory may be being written, resets it and returns false.
    pub(crate) fn retire_pair(&mut self, id: PairId) -> bool {
        if self.lands_for(id) {
            let _gone = self.reset(id);
            return false;
        }
        self.destroy_pair(id);
        true
    }

    pub(crate) fn destroy_pair(&mut self, id: PairId) {
        let Some(pair) = self.pairs.remove(id) else { return };
        self.numbers.take_back(pair.number);
        self.capture_end(id);
        self.cut_short_of(id);
        if let Some(identifier) = pair.identifier.and_then(|id| self.identifiers.get_mut(id)) {
            identifier.pair = None;
        }
        if pair.requester.has_work() || !pair.responder.receives.is_empty() {
            self.count_injected(FailureClass::TeardownOrder);
            if pair.state == QueuePairState::Error {
                // Flushed by destruction, unobserved.
                self.count_observed(FailureClass::Flush);
            }
        }
    }

    /// Checks as a device does when posting: the slice is inside its region, and the region in the
    /// pair's domain.
    fn check_part(&self, pair: &QueuePair, part: &Part) -> Result<(), Error> {
        let region = self.regions.get(part.region).ok_or(Error::Gone("region"))?;
        if region.domain != pair.domain {
            return Err(Error::Argument("the region is of another protection domain"));
        }
        if part.offset.checked_add(part.len).is_none_or(|end| end > region.memory.len()) {
            return Err(Error::Argument("the slice is not inside its region"));
        }
        if part.len > MAX_MESSAGE {
            return Err(Error::Argument("a message is at most 2 GiB long"));
        }
        Ok(())
    }

    /// Puts one request on the send queue. It leaves when [`Model::ring`] is called.
    pub(crate) fn post_send(&mut self, id: PairId, request: &PostedSend) -> Result<(), Error> {
        let pair = self.pairs.get(id).ok_or(Error::Gone("queue pair"))?;
        self.check_part(pair, &request.local)?;
        let Part { region, offset, len } = request.local;
        self.may_send(id, request.op, len, request.inline)?;
        self.refuse_by_fault(id)?;
        let Some(pair) = self.pairs.get_mut(id) else { return Ok(()) };
        let source = if request.inline {
            let mut bytes = pair.requester.buffer(len);
            let inside = self.regions.get(region).is_some_and(|r| r.memory.read(offset, &mut bytes));
            debug_assert!(inside, "check_part has looked");
            Source::Inline(bytes)
        } else {
            Source::Memory(Parts::One(request.local))
        };
        let &PostedSend { id: work, op, signaled, .. } = request;
        let request = Request { id: work, op, atomic: None, signaled, solicited: false, to: None };
        self.enqueue(id, request, source, len);
        Ok(())
    }

    /// Posts like [`Model::post_send`], with inline bytes or several parts of regions. No fault
    /// refuses a request that is not `answered`.
    pub(crate) fn post_named(
        &mut self,
        id: PairId,
        request: Request,
        local: Result<&[u8], Parts>,
        answered: bool,
    ) -> Result<(), Error> {
        let mut len = local.as_ref().map_or_else(Parts::len, |bytes| bytes.len());
        if request.atomic.is_some() {
            if len < ATOMIC {
                return Err(Error::Argument("an atomic operation stores eight bytes"));
            }
            len = ATOMIC;
        }
        if len > MAX_MESSAGE {
            return Err(Error::Argument("a message is at most 2 GiB long"));
        }
        self.check_destination(id, request.to)?;
        self.may_send(id, request.op, len, local.is_ok())?;
        if answered {
            self.refuse_by_fault(id)?;
        }
        let Some(pair) = self.pairs.get_mut(id) else { return Ok(()) };
        let source = match local {
            Ok(bytes) => {
                let mut copy = pair.requester.buffer(len);
                copy.copy_from_slice(bytes);
                Source::Inline(copy)
            }
            Err(parts) => Source::Memory(parts),
        };
        self.enqueue(id, request, source, len);
        Ok(())
    }

    /// Checks whether the send queue takes such a request.
    fn may_send(&self, id: PairId, op: SendOp, len: usize, inline: bool) -> Result<(), Error> {
        let pair = self.pairs.get(id).ok_or(Error::Gone("queue pair"))?;
        if !matches!(pair.state, QueuePairState::Ready | QueuePairState::Draining | QueuePairState::Error) {
            return Err(Error::State("the queue pair is not connected: it cannot send"));
        }
        if inline && (len > pair.limits.inline as usize || matches!(op, SendOp::Read(_))) {
            return Err(Error::Argument("inline data is for sends and writes of at most max_inline bytes"));
        }
        if matches!(op, SendOp::Read(_))
            && pair.requester.read_depth == 0
            && pair.state != QueuePairState::Error
        {
            return Err(Error::Argument("the connection was made without RDMA READs (initiator_depth)"));
        }
        if pair.requester.is_full(pair.limits.send_depth) {
            return Err(Error::QueueFull { queue: "send", depth: pair.limits.send_depth });
        }
        Ok(())
    }

    /// Refuses a request if an injected fault says so.
    fn refuse_by_fault(&mut self, id: PairId) -> Result<(), Error> {
        let depth = self.pairs.get(id).ok_or(Error::Gone("queue pair"))?.limits.send_depth;
        let party = self.party(id);
        let refused = self.strike(Site::Post, |fault, on| {
            party.is_some_and(|party| party.is(on)) && matches!(fault, Fault::QueueFull)
        });
        if refused.is_some() {
            self.count_observed(FailureClass::SendQueueFull);
            return Err(Error::QueueFull { queue: "send", depth });
        }
        Ok(())
    }

    fn enqueue(&mut self, id: PairId, request: Request, source: Source, len: usize) {
        let Some(pair) = self.pairs.get(id) else { return };
        let number = pair.number;
        let Request { id: work, op, atomic, signaled, solicited, to } = request;
        let to = to.map(|to| self.addressed(pair, to));
        let shows = ClassSet::EMPTY;
        let work =
            SendWork { id: work, op, atomic, source, len, to, signaled, solicited, shows, brought: None };
        let failed = pair.state == QueuePairState::Error;
        if self.is_observed() {
            let posted = self.describe(&work);
            self.note(|| EntryKind::Posted { pair: number, work: posted });
        }
        let Some(pair) = self.pairs.get_mut(id) else { return };
        pair.requester.push(work);
        self.lend(id);
        if failed {
            self.begin_flush(id);
        }
    }

    /// Puts one request on the receive queue. Its slot is free again when a message has consumed
    /// it.
    pub(crate) fn post_receive(&mut self, id: PairId, request: &PostedReceive) -> Result<(), Error> {
        let pair = self.pairs.get(id).ok_or(Error::Gone("queue pair"))?;
        for part in request.local.list() {
            self.check_part(pair, part)?;
        }
        self.post_named_receive(id, request)
    }

    /// Posts like [`Model::post_receive`], with several parts of regions.
    pub(crate) fn post_named_receive(&mut self, id: PairId, request: &PostedReceive) -> Result<(), Error> {
        let pair = self.pairs.get(id).ok_or(Error::Gone("queue pair"))?;
        if pair.state == QueuePairState::Reset {
            return Err(Error::State("the queue pair is reset: it takes no receives"));
        }
        if pair.shared.is_some() {
            return Err(Error::Argument("the queue pair takes its receives from a shared queue"));
        }
        if pair.responder.receives.len() >= pair.limits.recv_depth as usize {
            return Err(Error::QueueFull { queue: "receive", depth: pair.limits.recv_depth });
        }
        let Some(pair) = self.pairs.get_mut(id) else { return Ok(()) };
        pair.responder.receives.push_back(ReceiveWork { id: request.id, local: request.local.clone() });
        let (number, failed, work) = (pair.number, pair.state == QueuePairState::Error, request.id);
        self.note(|| EntryKind::Received { pair: number, id: work });
        if failed {
            self.begin_flush(id);
        }
        Ok(())
    }

    /// `min_rnr_timer` of `ibv_modify_qp(3)`.
    pub(crate) fn set_min_rnr_timer(&mut self, id: PairId, timer: RnrTimer) -> Result<(), Error> {
        let pair = self.pairs.get_mut(id).ok_or(Error::Gone("queue pair"))?;
        if !pair.state.responds() {
            return Err(Error::State("min_rnr_timer is set on a connected queue pair"));
        }
        pair.responder.rnr_timer = timer;
        Ok(())
    }

    /// The address vector of `ibv_query_qp(3)`: whether it leads to this host. It outlives the
    /// connection.
    pub(crate) fn is_loopback(&self, id: PairId) -> Result<bool, Error> {
        let pair = self.pairs.get(id).ok_or(Error::Gone("queue pair"))?;
        let path = pair.path.ok_or(Error::State("a queue pair has a path once it is connected"))?;
        Ok(path.loopback)
    }

    /// The state of `ibv_query_qp(3)`: whether it is the error state.
    pub(crate) fn has_failed(&self, id: PairId) -> Result<bool, Error> {
        let pair = self.pairs.get(id).ok_or(Error::Gone("queue pair"))?;
        Ok(pair.state == QueuePairState::Error)
    }

    /// Enters the error state: everything outstanding is flushed, in order. The peer is not
    /// notified.
    pub(super) fn enter_error(&mut self, id: PairId) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        let pair_shares = pair.shared.is_some() && pair.state != QueuePairState::Error;
        pair.state = QueuePairState::Error;
        pair.requester.forget_flights();
        if pair.requester.has_work() || !pair.responder.receives.is_empty() {
            self.count_injected(FailureClass::Flush);
        }
        if pair_shares {
            // None of its receives is flushed. This event says that it will consume none any more.
            self.tell_pair(id, LAST_REACHED);
        }
        self.cut_short_of(id);
        self.begin_flush(id);
    }

    /// Flushes when this kind of device does.
    pub(super) fn begin_flush(&mut self, id: PairId) {
        // Flushed bytes belong to their owner, and a copy still uses them. The end of the copy
        // comes back here.
        if self.pairs.get(id).is_some_and(|pair| pair.bulks > 0) {
            return;
        }
        match self.behaviour().map_or(Flush::AtOnce, |behaviour| behaviour.flush) {
            Flush::AtOnce => self.flush(id),
            Flush::Late(longest) => {
                let delay = self.by_duration(|_| longest);
                self.event_queue.schedule(delay, Event::Flush(id));
            }
            Flush::AtDestruction => {}
        }
    }

    pub(super) fn flush(&mut self, id: PairId) {
        while let Some(pair) = self.pairs.get_mut(id)
            && let Some(work) = pair.requester.retire()
        {
            self.end_send(id, work, Err(CompletionStatus::WR_FLUSH_ERR));
        }
        while let Some(pair) = self.pairs.get_mut(id)
            && let Some(work) = pair.responder.receives.pop_front()
        {
            let completion = failure(work.id, pair.number, CompletionStatus::WR_FLUSH_ERR);
            let queue = pair.receive_queue;
            self.report(queue, Entry::new(completion, id));
        }
    }
}
