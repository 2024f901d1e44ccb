//! Answers to messages, retries, and the ends of sent work.

use rdma_backend::{AsyncEvent, Completed, CompletionStatus, RnrTimer, SendOp};

use super::base::target::Target;
use super::pairs::requester::{Answer, SendWork, Source};
use super::queues::completion::{Detail, Entry, failure, success};
use super::{Event, Model, PairId};
use crate::failure_class::FailureClass;
use crate::faults::{Fault, Site};

impl Model {
    /// The doorbell: sends posted work, one message at a time.
    pub(crate) fn ring(&mut self, id: PairId) {
        self.pairs.ring(&mut self.env, id);
    }

    pub(super) fn answered(&mut self, id: PairId, epoch: u32, sequence: u64, answer: Answer) {
        let Some(pair) = self.pairs.get(id) else { return };
        // Only the oldest message may end. An answer that overtook a lost one comes again with the
        // repetition.
        let Some(work) =
            pair.requester.flight(epoch, sequence).filter(|_| pair.requester.is_oldest(sequence))
        else {
            return;
        };
        // A datagram has no answer: this comes from its own device.
        let crosses = work.to.is_none();
        let cut = pair.path.is_none_or(|path| self.pairs.is_cut(&self.hosts, id, path));
        let party = self.manager.party(&self.pairs, id);
        let strikes = |fault: &Fault, on: &Target| {
            party.is_some_and(|party| party.is(on)) && matches!(fault, Fault::LoseAnswer)
        };
        let lost = crosses && (cut || self.env.strike(Site::Answer, strikes).is_some());
        match answer {
            // From its own device, without a link that could lose it.
            Answer::Fault(status) => self.fail(id, status),
            _ if lost => self.pairs.unanswered(&mut self.env, &mut self.contexts, id, epoch),
            Answer::Ack => self.acknowledged(id, sequence),
            Answer::RnrNak(timer) => {
                self.capture_answer(id, sequence, answer);
                self.env.count_observed(FailureClass::ReceiverNotReady);
                self.not_ready(id, timer);
            }
            Answer::Nak(status) => {
                self.capture_answer(id, sequence, answer);
                self.fail(id, status);
            }
        }
    }

    fn acknowledged(&mut self, id: PairId, sequence: u64) {
        if let Err(status) = self.pairs.finish_read(&self.regions, id) {
            return self.fail(id, status);
        }
        // After `finish_read`, which stores the bytes that a capture sees.
        self.capture_answer(id, sequence, Answer::Ack);
        let Some(pair) = self.pairs.get_mut(id) else { return };
        let probed = pair.requester.acknowledge();
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

    /// Handles an RNR NAK: sends the same message again after the responder's timer, and then all
    /// behind it.
    fn not_ready(&mut self, id: PairId, timer: RnrTimer) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if !pair.requester.spend_rnr_retry() {
            return self.fail(id, CompletionStatus::RNR_RETRY_EXC_ERR);
        }
        self.pairs.forget_flights(&mut self.env, &mut self.contexts, id);
        let Some(pair) = self.pairs.get_mut(id) else { return };
        let epoch = pair.requester.wait();
        self.pairs.repeat_after(
            &mut self.env,
            &mut self.contexts,
            id,
            timer.delay(),
            Event::Again { pair: id, epoch },
        );
    }

    pub(super) fn timed_out(&mut self, id: PairId, epoch: u32) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        // Something was repeated since, and has a timer of its own.
        if !pair.requester.is_in(epoch) {
            return;
        }
        // Soft-RoCE treats 7 as endless (docs/decisions.md, 8).
        let endless = pair.requester.has_most_retries() && self.endless_retries();
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if !endless && !pair.requester.spend_retry() {
            return self.fail(id, CompletionStatus::RETRY_EXC_ERR);
        }
        self.pairs.forget_flights(&mut self.env, &mut self.contexts, id);
        self.ring(id);
    }

    fn endless_retries(&self) -> bool {
        self.env.behaviour().is_some_and(|behaviour| behaviour.endless_retries)
    }

    pub(super) fn again(&mut self, id: PairId, epoch: u32) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        if pair.requester.is_in(epoch) {
            // Its turn has come: it no longer counts among the repetitions of its program.
            self.pairs.end_repeat(&mut self.env, &mut self.contexts, id);
            let Some(pair) = self.pairs.get_mut(id) else { return };
            pair.requester.probe();
            self.ring(id);
        }
    }

    /// Fails the oldest work, and the queue pair with it.
    fn fail(&mut self, id: PairId, status: CompletionStatus) {
        let Some(pair) = self.pairs.get_mut(id) else { return };
        // The cause completes before those that are flushed: case `verbs.fail.cause-first`.
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
            // Reused, so that posting inline bytes does not allocate each time.
            // No more of them than slots: one is made only if none is spare.
            pair.requester.spare.push(bytes);
        }
        pair.requester.end_one();
        let completion = match result {
            Ok(_) if !work.signaled => return,
            Ok(completed) => success(work.id, pair.number, completed),
            Err(status) => failure(work.id, pair.number, status),
        };
        // As devices report it: bytes that came, none that were sent.
        let bytes = if matches!(work.op, SendOp::Read(_)) { work.len } else { 0 };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let detail = Detail { bytes, source: None, atomic: work.atomic };
        let (frees, resets) = (pair.requester.take_ended(), pair.resets);
        let queue = pair.send_queue;
        let mut shows = work.shows;
        // Reported although not requested (IBA 10.7.3.1): case `verbs.fail.unsignaled`.
        if result.is_err() && !work.signaled {
            shows.insert(FailureClass::UnsignaledFails);
            self.env.count_injected(FailureClass::UnsignaledFails);
        }
        if result.is_err() {
            self.env.count_injected(FailureClass::ErrorContents);
        }
        self.report(queue, Entry { frees: Some(frees), resets, detail, shows, ..Entry::new(completion, id) });
    }
}
