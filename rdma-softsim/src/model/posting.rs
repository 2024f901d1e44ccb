//! Posting of work requests.

use super::pairs::queue_pair::{ATOMIC, Payload, PostedReceive, QueuePairState, Request};
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
    /// Posts like [`Model::post_named`], a request of one part of a region, which is checked now.
    pub(crate) fn post_send(
        &mut self,
        id: PairId,
        request: Request,
        part: Part,
        inline: bool,
    ) -> Result<(), Error> {
        self.pairs.find(id)?.check_part(&self.regions, &part)?;
        let payload = if inline { Payload::Copied(part) } else { Payload::Memory(Parts::One(part)) };
        self.post_named(id, request, payload, true)
    }

    /// Puts one request on the send queue. It leaves when [`Model::ring`] is called. No fault
    /// refuses a request that is not `answered`.
    pub(crate) fn post_named(
        &mut self,
        id: PairId,
        request: Request,
        payload: Payload<'_>,
        answered: bool,
    ) -> Result<(), Error> {
        let (mut len, inline) = match &payload {
            Payload::Inline(bytes) => (bytes.len(), true),
            Payload::Copied(part) => (part.len, true),
            Payload::Memory(parts) => (parts.len(), false),
        };
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
        self.pairs.may_send(id, request.op, len, inline)?;
        // After the checks: a fault refuses only what a device would have taken.
        if answered {
            self.refuse_by_fault(id)?;
        }
        let Some(pair) = self.pairs.get_mut(id) else { return Ok(()) };
        // The caller may change inline bytes on return: case `verbs.move.inline-copied`.
        let source = match payload {
            Payload::Inline(bytes) => {
                let mut copy = pair.requester.buffer(len);
                copy.copy_from_slice(bytes);
                Source::Inline(copy)
            }
            Payload::Copied(Part { region, offset, .. }) => {
                let mut copy = pair.requester.buffer(len);
                let inside = self.regions.get(region).is_some_and(|r| r.memory.read(offset, &mut copy));
                debug_assert!(inside, "check_part has looked");
                Source::Inline(copy)
            }
            Payload::Memory(parts) => Source::Memory(parts),
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
