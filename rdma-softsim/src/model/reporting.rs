//! Completions: reported, polled, and shown to programs that poll by themselves.

use core::time::Duration;
use std::ops::Bound;
use std::sync::Arc;

use rdma_backend::{AsyncEvent, Completion, CompletionError, CompletionStatus};

use super::base::arena::visit;
use super::hosts::context::About;
use super::queues::completion::{Entry, WorkQueue};
use super::queues::completion_queue::{Armed, CompletionQueue};
use super::queues::mirror::{Arming, Calls, Look, Mirror};
use super::{Event, Model, PAUSE, PIECE, PairId, QueueId, Wake};
use crate::error::Error;
use crate::failure_class::FailureClass;
use crate::faults::{Fault, Site};
use crate::sync::AtomicBool;
use crate::trace::EntryKind;

impl Model {
    pub(crate) fn destroy_queue(&mut self, id: QueueId) {
        self.look(id);
        let Some(queue) = self.queues.remove(id) else { return };
        let host = queue.host.index();
        if !queue.pairs.is_empty() {
            self.env.note(|| EntryKind::Busy { host, what: "completion queue" });
        } else {
            self.env.count_observed(FailureClass::TeardownOrder);
        }
    }

    pub(crate) fn ready(&self, id: QueueId) -> Arc<AtomicBool> {
        // A destroyed queue has an error to report.
        self.queues.get(id).map_or_else(|| Arc::new(AtomicBool::new(true)), CompletionQueue::ready)
    }

    /// `ibv_poll_cq(3)`. A polled completion of a send frees its slot and those of earlier
    /// unsignalled ones.
    pub(crate) fn poll(&mut self, id: QueueId, into: &mut [Completion]) -> Result<usize, Error> {
        let mut places = into.iter_mut();
        self.poll_each(id, places.len(), |completion| {
            if let Some(place) = places.next() {
                *place = completion;
            }
        })
    }

    /// Polls like [`Model::poll`], and passes each completion to `take`.
    pub(crate) fn poll_each(
        &mut self,
        id: QueueId,
        most: usize,
        mut take: impl FnMut(Completion),
    ) -> Result<usize, Error> {
        let silent = self.env.behaviour().is_some_and(|behaviour| behaviour.silent_overrun);
        let queue = self.queues.find_mut(id)?;
        if queue.is_lost() {
            let depth = queue.depth();
            self.env.count_observed(FailureClass::QueueOverrun);
            // As on an mlx5, where an overrun queue looks empty.
            return if silent { Ok(0) } else { Err(Error::Overrun { depth }) };
        }
        let raced = queue.end_race();
        let mut count = 0;
        while count < most {
            let Some(entry) = self.queues.get_mut(id).and_then(CompletionQueue::pop) else { break };
            take(self.told(entry.completion));
            count += 1;
            self.polled(&entry);
        }
        if let Some(queue) = self.queues.get(id) {
            queue.note_ready();
        }
        // The program has polled again after arming, as it must.
        if raced {
            self.env.count_observed(FailureClass::NotificationRace);
        }
        Ok(count)
    }

    pub(super) fn told(&self, completion: Completion) -> Completion {
        let unnamed = self.env.simulation().is_some_and(|simulation| simulation.settings.unnamed_flushes);
        match completion.result {
            // Only of flushes: `SimulationSettings::unnamed_flushes`.
            Err(CompletionError { status: CompletionStatus::WR_FLUSH_ERR, .. }) if unnamed => {
                Completion { queue_pair: 0, ..completion }
            }
            _ => completion,
        }
    }

    fn polled(&mut self, entry: &Entry) {
        // A reset has given back all slots, those of earlier completions too.
        if let Some(frees) = entry.frees
            && let Some(pair) = self.pairs.get_mut(entry.pair)
            && pair.resets == entry.resets
        {
            pair.requester.give_back(frees);
        }
        if self.env.is_observed() {
            self.env.note(|| EntryKind::Polled(entry.completion));
            if let Some(sequence) = entry.lands {
                self.pairs.land(&mut self.env, &self.regions, entry.pair, sequence);
                if self.manager.is_half_open(&self.pairs, entry.pair) {
                    self.env.count_observed(FailureClass::EstablishmentRace);
                }
            }
            self.pairs.check_ownership(&mut self.env, &self.regions, entry.pair);
        }
        if self.env.simulation().is_some() {
            for class in entry.shows.union(entry.classes()).iter() {
                self.env.count_observed(class);
            }
        }
    }

    /// `ibv_req_notify_cq(3)`: only a completion later than this call raises the event.
    pub(crate) fn arm(&mut self, id: QueueId) -> Result<(), Error> {
        self.arm_for(id, Armed::Any)
    }

    /// Arms like [`Model::arm`], for the given completions. An arming for all is never narrowed.
    pub(crate) fn arm_for(&mut self, id: QueueId, which: Armed) -> Result<(), Error> {
        let spurious = self.env.by_chance(|simulation| simulation.behaviour.spurious);
        let silent = self.env.behaviour().is_some_and(|behaviour| behaviour.silent_overrun);
        let queue = self.queues.find_mut(id)?;
        if queue.is_lost() {
            return if silent { Ok(()) } else { Err(Error::Overrun { depth: queue.depth() }) };
        }
        if queue.arm(which) {
            self.env.count_injected(FailureClass::NotificationRace);
        }
        if spurious && let Some(queue) = self.queues.get_mut(id) {
            queue.raise();
            self.env.wake(Wake::Completions(id));
            self.env.count_injected(FailureClass::EventCoalescing);
        }
        Ok(())
    }

    pub(crate) fn has_events(&self, id: QueueId) -> bool {
        // A destroyed queue has an error to report.
        self.queues.get(id).is_none_or(|queue| queue.events() > 0)
    }

    pub(crate) fn take_events(&mut self, id: QueueId) -> Result<u32, Error> {
        let queue = self.queues.find_mut(id)?;
        let events = queue.take_events();
        let waiting = queue.waiting();
        if events > 0 {
            self.env.count_observed(FailureClass::EventAcknowledgement);
            if waiting != events as usize {
                self.env.count_observed(FailureClass::EventCoalescing);
            }
        }
        Ok(events)
    }

    /// Appends a completion, at once or after the device's delay.
    pub(super) fn report(&mut self, id: QueueId, entry: Entry) {
        // Nothing decides otherwise: no fault, no kind of device.
        if self.env.simulation().is_none() {
            return self.append_completion(id, entry);
        }
        let party = self.manager.party(&self.pairs, entry.pair);
        let struck = self.env.strike(Site::Report, |fault, on| {
            party.is_some_and(|party| party.is(on)) && matches!(fault, Fault::QueueLost | Fault::Hold { .. })
        });
        let hold = match struck {
            Some(Fault::QueueLost) => return self.lose_queue(id),
            Some(Fault::Hold { micros }) => Duration::from_micros(micros.into()),
            _ => Duration::ZERO,
        };
        let delay = self.env.by_duration(|simulation| simulation.behaviour.report_delay);
        let now = self.env.now();
        let of = entry.work_queue();
        let pair = entry.pair;
        let Some(owner) = self.pairs.get_mut(pair) else { return self.append_completion(id, entry) };
        let held = &mut owner.held;
        held.until = held.until.max(now.after(hold));
        // Not before one that the same work queue has held back: each keeps its order.
        let at = now.after(delay).max(held.until).max(held.last[of as usize]);
        if at <= now && held.work_queues[of as usize].is_empty() {
            return self.append_completion(id, entry);
        }
        held.last[of as usize] = at;
        held.work_queues[of as usize].push_back(entry);
        self.env.count_injected(FailureClass::CompletionOrder);
        self.env.schedule(at.since(now), Event::Report { pair, of });
    }

    pub(super) fn report_held(&mut self, pair: PairId, of: WorkQueue) {
        let Some(owner) = self.pairs.get_mut(pair) else { return };
        let queue = owner.queue_of(of);
        if let Some(mut entry) = owner.held.work_queues[of as usize].pop_front() {
            entry.shows.insert(FailureClass::CompletionOrder);
            self.append_completion(queue, entry);
        }
    }

    pub(super) fn report_all(&mut self, pair: PairId) {
        for of in [WorkQueue::Receive, WorkQueue::Send] {
            while self.pairs.get(pair).is_some_and(|owner| !owner.held.work_queues[of as usize].is_empty()) {
                self.report_held(pair, of);
            }
        }
    }

    /// Appends a completion. One too many loses the queue and, a moment later, its queue pairs.
    fn append_completion(&mut self, id: QueueId, entry: Entry) {
        self.look(id);
        let Some(queue) = self.queues.get(id).filter(|queue| !queue.is_lost()) else { return };
        // `look` has taken off what the program polled by itself, so these are unpolled.
        if queue.is_full() {
            return self.lose_queue(id);
        }
        let completion = entry.completion;
        self.env.note(|| EntryKind::Completed(completion));
        let Some(queue) = self.queues.get_mut(id) else { return };
        // A failure raises a solicited event, too (`ibv_req_notify_cq(3)`).
        let solicited = entry.solicited || completion.result.is_err();
        queue.push(entry);
        let raises = queue.is_armed_for(solicited);
        self.show(id);
        // A program that armed its queue just before may have found nothing.
        let raises =
            raises || self.look(id) && self.queues.get(id).is_some_and(|queue| queue.is_armed_for(solicited));
        let Some(queue) = self.queues.get_mut(id) else { return };
        if raises {
            // One event for one arming (`ibv_req_notify_cq(3)`).
            queue.disarm();
            queue.raise();
            // With more events the descriptor is readable already.
            if queue.events() == 1 {
                self.env.wake(Wake::Completions(id));
            }
            self.env.count_injected(FailureClass::EventAcknowledgement);
        } else if queue.events() > 0 {
            self.env.count_injected(FailureClass::EventCoalescing);
        }
    }

    fn lose_queue(&mut self, id: QueueId) {
        let silent = self.env.behaviour().is_some_and(|behaviour| behaviour.silent_overrun);
        let Some(queue) = self.queues.get_mut(id) else { return };
        queue.lose();
        if !silent {
            // Sleepers on the queue must learn of it.
            queue.raise();
            self.env.wake(Wake::Completions(id));
        }
        // An event of its own: the caller may be flushing one of these queue pairs.
        self.env.schedule(Duration::ZERO, Event::Overrun { queue: id, after: None });
        self.show(id);
    }

    /// Puts the queue pairs of a lost queue into the error state: they can report no more. If they
    /// are many, the fabric's lock is given back in between.
    pub(super) fn overrun(&mut self, id: QueueId, after: Option<PairId>) {
        let Some(queue) = self.queues.get(id) else { return };
        // Only the first piece reports the queue itself.
        let context = queue.context.filter(|_| after.is_none());
        let behind = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let pairs: Vec<_> = queue.pairs.range(behind).inspect(|_| visit()).take(PIECE).copied().collect();
        if let Some((context, name)) = context {
            self.contexts.tell(&mut self.env, context, AsyncEvent::CqErr, About::Queue(name));
        }
        for pair in &pairs {
            self.enter_error(*pair);
            self.tell_pair(*pair, AsyncEvent::CqErr);
        }
        if let (PIECE, Some(last)) = (pairs.len(), pairs.last()) {
            self.env.schedule(PAUSE, Event::Overrun { queue: id, after: Some(*last) });
        }
    }

    /// After a reset, polling earlier completions frees no new slots.
    pub(super) fn free_nothing(&mut self, pair: PairId) {
        self.look_at_sends(pair);
        if let Some(pair) = self.pairs.get_mut(pair) {
            pair.resets = pair.resets.wrapping_add(1);
        }
    }

    /// Returns whether any completion of `pair` was not polled yet.
    pub(super) fn has_unpolled(&mut self, pair: PairId) -> bool {
        let Some(owner) = self.pairs.get(pair) else { return false };
        let queues = [owner.send_queue, owner.receive_queue];
        for id in queues {
            // A program that polls in its own memory may have taken them.
            self.look(id);
        }
        let mut queues = queues.iter().filter_map(|id| self.queues.get(*id));
        let Some(owner) = self.pairs.get(pair) else { return false };
        queues.any(|queue| queue.waiting() > 0)
            || owner.held.work_queues.iter().any(|queue| !queue.is_empty())
    }

    pub(crate) fn set_mirror(&mut self, id: QueueId, mirror: Box<dyn Mirror>) {
        if let Some(queue) = self.queues.get_mut(id) {
            queue.mirror = Some(mirror);
        }
        self.show(id);
    }

    /// Takes up what the program of a queue has done. Returns whether it has armed the queue while
    /// completions waited.
    pub(crate) fn look(&mut self, id: QueueId) -> bool {
        let Some(mirror) = self.queues.get(id).and_then(|queue| queue.mirror.as_ref()) else { return false };
        let Look { before, armed, after } = mirror.look();
        // In the order of the program: what it took, its arming, what it took since.
        self.taken(id, before);
        let mut waited = false;
        if let Some(arming) = armed {
            let armed = match arming {
                Arming::Solicited => Armed::Solicited,
                Arming::All => Armed::Any,
            };
            waited = self.queues.get(id).is_some_and(|queue| queue.waiting() > 0);
            // The event of the last arming is the program's: it has read it, or will. A lost queue
            // has told its program to call.
            let _events = self.take_events(id);
            let _armed = self.arm_for(id, armed);
        }
        self.taken(id, after);
        waited
    }

    /// Shows the program of a queue what there is, and what it must call for.
    pub(crate) fn show(&mut self, id: QueueId) {
        let Some(queue) = self.queues.get(id) else { return };
        let Some(mirror) = &queue.mirror else { return };
        let mut shown = queue.shown;
        if !self.env.is_stalled(queue.host) {
            while let Some((completion, detail)) = queue.entry(shown)
                && mirror.show(&self.told(completion), detail)
            {
                shown += 1;
            }
        }
        let polls = queue.is_lost() || shown < queue.waiting();
        // A kind of device with spurious events may raise one at any arming, which needs a call.
        let arms = self.env.behaviour().is_some_and(|behaviour| behaviour.spurious > 0);
        mirror.ask(Calls { polls, arms });
        if let Some(queue) = self.queues.get_mut(id) {
            queue.shown = shown;
        }
    }

    /// As [`Model::look`], for the queue of a queue pair's sends, whose slots it gives back.
    pub(crate) fn look_at_sends(&mut self, id: PairId) {
        if let Some(queue) = self.pairs.get(id).map(|pair| pair.send_queue) {
            self.look(queue);
        }
    }

    /// As [`Model::look`], for the queues at the next places from `from` on. Returns where the
    /// others begin.
    pub(crate) fn look_at_some(&mut self, from: u32) -> Option<u32> {
        const MOST: u32 = 256;
        let end = from.saturating_add(MOST);
        for place in from..end.min(self.queues.places()) {
            if let Some((id, _)) = self.queues.at(place) {
                self.look(id);
            }
        }
        (end < self.queues.places()).then_some(end)
    }

    /// A program's call about a queue: what it found there was not all.
    pub(crate) fn called(&mut self, id: QueueId) -> Result<(), Error> {
        self.look(id);
        self.show(id);
        match self.queues.get(id) {
            Some(queue) if !queue.is_lost() => Ok(()),
            // Returns the error that a poll would: the queue is lost or gone.
            _ => self.poll_each(id, 0, |_completion| {}).map(drop),
        }
    }

    /// The program says that it has taken so many; it can have taken what it was shown.
    fn taken(&mut self, id: QueueId, count: usize) {
        let shown = self.queues.get(id).map_or(0, |queue| queue.shown);
        let count = count.min(shown);
        if count > 0 {
            // It fails for a lost queue, which shows nothing.
            let _polled = self.poll_each(id, count, |_completion| {});
        }
    }

    /// Returns whether the device has reports about `pair` that it will never make, for the counts
    /// of failures.
    pub(super) fn ends_in_the_middle(&mut self, id: PairId) -> bool {
        self.pairs.get(id).is_some_and(|pair| pair.requester.has_work()) || self.has_unpolled(id)
    }
}
