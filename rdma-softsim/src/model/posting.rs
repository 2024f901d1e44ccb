//! Posting of work requests.

use super::pairs::queue_pair::{ATOMIC, PostedReceive, PostedSend, QueuePairState, Request};
use super::pairs::queueing::MAX_MESSAGE;
use super::pairs::requester::Source;
use super::pairs::responder::ReceiveWork;
use super::regions::parts::{Part, Parts};
use super::{Model, PairId, SharedId};
use crate::error::Error;
use crate::failure_class::FailureClass;
use crate::faults::{Fault, Site};
use crate::trace::EntryKind;

impl Model {
    /// Puts one request on the send queue. It leaves when [`Model::ring`] is called.
    pub(crate) fn post_send(&mut self, id: PairId, request: &PostedSend) -> Result<(), Error> {
        let pair = self.pairs.find(id)?;
        pair.check_part(&self.regions, &request.local)?;
        let Part { region, offset, len } = request.local;
        self.pairs.may_send(id, request.op, len, request.inline)?;
        // After the checks: a fault refuses only what a device would have taken.
        self.refuse_by_fault(id)?;
        let Some(pair) = self.pairs.get_mut(id) else { return Ok(()) };
        let source = if request.inline {
            // The caller may change them on return: case `verbs.move.inline-copied`.
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
        self.pairs.check_destination(&self.hosts, id, request.to)?;
        self.pairs.may_send(id, request.op, len, local.is_ok())?;
        if answered {
            self.refuse_by_fault(id)?;
        }
        let Some(pair) = self.pairs.get_mut(id) else { return Ok(()) };
        // Parts may name no region: a device reads them, and finds out, when it executes the work.
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

    /// Refuses a request if an injected fault says so.
    fn refuse_by_fault(&mut self, id: PairId) -> Result<(), Error> {
        let depth = self.pairs.find(id)?.limits.send_depth;
        let party = self.manager.party(&self.pairs, id);
        let refused = self.env.strike(Site::Post, |fault, on| {
            party.is_some_and(|party| party.is(on)) && matches!(fault, Fault::QueueFull)
        });
        if refused.is_some() {
            // Observed at once: the caller gets the error.
            self.env.count_observed(FailureClass::SendQueueFull);
            return Err(Error::QueueFull { queue: "send", depth });
        }
        Ok(())
    }

    /// Puts one request on the receive queue. Its slot is free again when a message has consumed
    /// it.
    pub(crate) fn post_receive(&mut self, id: PairId, request: &PostedReceive) -> Result<(), Error> {
        let pair = self.pairs.find(id)?;
        for part in request.local.list() {
            pair.check_part(&self.regions, part)?;
        }
        self.post_named_receive(id, request)
    }

    /// Posts like [`Model::post_receive`], with several parts of regions.
    pub(crate) fn post_named_receive(&mut self, id: PairId, request: &PostedReceive) -> Result<(), Error> {
        let pair = self.pairs.find(id)?;
        // In INIT it may receive already: case `verbs.receive.before-connect`.
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
        self.env.note(|| EntryKind::Received { pair: number, id: work });
        // Flushed like sends (case `verbs.fail.later-receives`); soft-RoCE does not.
        if failed {
            self.begin_flush(id);
        }
        Ok(())
    }

    fn enqueue(&mut self, id: PairId, request: Request, source: Source, len: usize) {
        let (env, bytes) = (&mut self.env, (source, len));
        if self.pairs.enqueue(env, &self.hosts, &self.regions, id, request, bytes) {
            self.begin_flush(id);
        }
    }

    /// `ibv_post_srq_recv(3)`.
    pub(crate) fn post_shared(&mut self, id: SharedId, request: &PostedReceive) -> Result<(), Error> {
        self.pairs.post_shared(id, request)
    }
}
