//! Completion queues: completions in order, and one-shot notification.

use core::sync::atomic::Ordering::Release;
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::Arc;

use rdma_backend::time::Instant;
use rdma_backend::{AsyncEvent, Completed, Completion, CompletionError, CompletionStatus};

use super::context::About;
use super::mirror::{Calls, Mirror};
use super::{ContextId, Event, HostId, Model, PairId, QueueId, Wake};
use crate::Error;
use crate::failure_class::{ClassSet, FailureClass};
use crate::faults::{Fault, Site};
use crate::request::Atomic;
use crate::sync::AtomicBool;
use crate::trace::EntryKind;

pub(crate) struct CompletionQueue {
    pub(super) host: HostId,
    /// Who opened the device, and its name for the queue, for reporting an overrun.
    pub(super) context: Option<(ContextId, u64)>,
    depth: u32,
    entries: VecDeque<Entry>,
    /// Whether the next completion raises an event.
    armed: Armed,
    /// Whether unpolled completions came before the last arming. No event reports them.
    raced: bool,
    /// Events raised and not taken.
    events: u32,
    /// Overrun: the queue yields nothing any more.
    lost: bool,
    /// Whether a poll would return something. Its handle reads it without the fabric's lock, so
    /// that constant polling does not delay posting.
    ready: Arc<AtomicBool>,
    /// Where its program finds completions by itself, and how many of the first ones are there.
    pub(super) mirror: Option<Box<dyn Mirror>>,
    pub(super) shown: usize,
}

/// Which completion raises the next event.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Armed {
    No,
    /// One whose message asked for an event, or a failure.
    Solicited,
    Any,
}

/// What [`Completion`] does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detail {
    /// The number of bytes of the message.
    pub bytes: u32,
    /// Where a received datagram came from. Its first 40 bytes are the network header.
    pub source: Option<Source>,
    /// The operation, if it was an atomic one and not a READ.
    pub atomic: Option<Atomic>,
}

/// The source of a datagram, beside the address in its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The number of the queue pair that sent it.
    pub number: u32,
    /// Whether its network header is that of IPv4, in the last 20 bytes.
    pub ip4: bool,
}

/// A completion, and the effects of polling it.
pub(super) struct Entry {
    pub(super) completion: Completion,
    pub(super) pair: PairId,
    /// For a send, the slots that polling it frees.
    pub(super) frees: Option<u32>,
    pub(super) detail: Detail,
    pub(super) solicited: bool,
    /// The message after which the receive completed: the bytes of that and earlier ones have
    /// landed.
    pub(super) lands: Option<u64>,
    pub(super) shows: ClassSet,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkQueue {
    Send,
    Receive,
}

/// Completions on their way from a queue pair to its completion queue. Those of one work queue keep
/// their order; between the two queues there is none (`ibv_poll_cq(3)`).
#[derive(Default)]
pub(super) struct PendingCompletions {
    work_queues: [VecDeque<Entry>; 2],
    /// When the last one of each work queue comes.
    last: [Instant; 2],
    until: Instant,
}

pub(super) const fn failure(id: u64, queue_pair: u32, status: CompletionStatus) -> Completion {
    Completion { id, queue_pair, result: Err(CompletionError { status, vendor: 0 }) }
}

pub(super) const fn success(id: u64, queue_pair: u32, completed: Completed) -> Completion {
    Completion { id, queue_pair, result: Ok(completed) }
}

impl CompletionQueue {
    pub(super) fn new(host: HostId, depth: u32, context: Option<(ContextId, u64)>) -> Self {
        Self {
            host,
            context,
            depth,
            entries: VecDeque::new(),
            armed: Armed::No,
            raced: false,
            events: 0,
            lost: false,
            ready: Arc::default(),
            mirror: None,
            shown: 0,
        }
    }

    /// Updates whether a poll would return something.
    fn note_ready(&self) {
        self.ready.store(self.lost || !self.entries.is_empty(), Release);
    }

    pub(super) const fn is_lost(&self) -> bool {
        self.lost
    }

    pub(super) fn waiting(&self) -> usize {
        self.entries.len()
    }

    /// Returns the completion behind so many others.
    pub(super) fn entry(&self, behind: usize) -> Option<(Completion, Detail)> {
        self.entries.get(behind).map(|entry| (entry.completion, entry.detail))
    }

    /// Removes the next completion, whether its program was shown it or not.
    fn pop(&mut self) -> Option<Entry> {
        let entry = self.entries.pop_front()?;
        self.shown = self.shown.saturating_sub(1);
        Some(entry)
    }

    /// Returns whether a completion raises an event.
    fn is_armed_for(&self, solicited: bool) -> bool {
        match self.armed {
            Armed::No => false,
            Armed::Solicited => solicited,
            Armed::Any => true,
        }
    }

    /// Raises an event, with or without a cause.
    pub(super) const fn raise(&mut self) {
        self.events += 1;
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // A destroyed queue has an error to report.
        self.ready.store(true, Release);
        if let Some(mirror) = &self.mirror {
            mirror.ask(Calls { polls: true, arms: true });
        }
    }
}

impl Entry {
    /// Returns the completion of a receive without bytes.
    pub(super) const fn new(completion: Completion, pair: PairId) -> Self {
        Self {
            completion,
            pair,
            frees: None,
            detail: Detail { bytes: 0, source: None, atomic: None },
            solicited: false,
            lands: None,
            shows: ClassSet::EMPTY,
        }
    }

    const fn work_queue(&self) -> WorkQueue {
        if self.frees.is_some() { WorkQueue::Send } else { WorkQueue::Receive }
    }

    /// Returns the failure classes of its status.
    fn classes(&self) -> ClassSet {
        let Err(error) = self.completion.result else { return ClassSet::EMPTY };
        let of_receive = self.work_queue() == WorkQueue::Receive;
        let class = match error.status {
            CompletionStatus::RNR_RETRY_EXC_ERR => Some(FailureClass::ReceiverNotReady),
            CompletionStatus::RETRY_EXC_ERR => Some(FailureClass::RetriesExceeded),
            CompletionStatus::REM_ACCESS_ERR | CompletionStatus::LOC_ACCESS_ERR => {
                Some(FailureClass::AccessRefused)
            }
            CompletionStatus::REM_INV_REQ_ERR | CompletionStatus::LOC_LEN_ERR => {
                Some(FailureClass::ReceiveTooSmall)
            }
            CompletionStatus::REM_OP_ERR => Some(FailureClass::ReceiveMemoryGone),
            CompletionStatus::LOC_PROT_ERR if of_receive => Some(FailureClass::ReceiveMemoryGone),
            CompletionStatus::LOC_PROT_ERR => Some(FailureClass::LocalProtection),
            CompletionStatus::WR_FLUSH_ERR => Some(FailureClass::Flush),
            _ => None,
        };
        let mut classes = ClassSet::EMPTY;
        // Every failure shows that only id, status and queue pair are reliable.
        classes.insert(FailureClass::ErrorContents);
        if let Some(class) = class {
            classes.insert(class);
        }
        classes
    }
}

impl Model {
    pub(crate) fn destroy_queue(&mut self, id: QueueId) {
        let busy = self.pairs.iter().any(|(_, pair)| pair.reports_to(id));
        self.look(id);
        let Some(queue) = self.queues.remove(id) else { return };
        let host = queue.host.index();
        if busy {
            self.note(|| EntryKind::Busy { host, what: "completion queue" });
        } else {
            self.count_observed(FailureClass::TeardownOrder);
        }
    }

    pub(crate) fn ready(&self, id: QueueId) -> Arc<AtomicBool> {
        // A destroyed queue has an error to report.
        self.queues.get(id).map_or_else(|| Arc::new(AtomicBool::new(true)), |queue| Arc::clone(&queue.ready))
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
        let silent = self.behaviour().is_some_and(|behaviour| behaviour.silent_overrun);
        let queue = self.queues.get_mut(id).ok_or(Error::Gone("completion queue"))?;
        if queue.lost {
            let depth = queue.depth;
            self.count_observed(FailureClass::QueueOverrun);
            return if silent { Ok(0) } else { Err(Error::Overrun { depth }) };
        }
        let raced = core::mem::take(&mut queue.raced) && !queue.entries.is_empty() && queue.events == 0;
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
        if raced {
            self.count_observed(FailureClass::NotificationRace);
        }
        Ok(count)
    }

    pub(super) fn told(&self, completion: Completion) -> Completion {
        let unnamed = self.simulation.as_ref().is_some_and(|simulation| simulation.settings.unnamed_flushes);
        match completion.result {
            Err(CompletionError { status: CompletionStatus::WR_FLUSH_ERR, .. }) if unnamed => {
                Completion { queue_pair: 0, ..completion }
            }
            _ => completion,
        }
    }

    fn polled(&mut self, entry: &Entry) {
        if let Some(frees) = entry.frees
            && let Some(pair) = self.pairs.get_mut(entry.pair)
        {
            pair.requester.give_back(frees);
        }
        if self.is_observed() {
            self.note(|| EntryKind::Polled(entry.completion));
            if let Some(sequence) = entry.lands {
                self.land(entry.pair, sequence);
                if self.is_half_open(entry.pair) {
                    self.count_observed(FailureClass::EstablishmentRace);
                }
            }
            self.check_ownership(entry.pair);
        }
        if self.simulation.is_some() {
            for class in entry.shows.union(entry.classes()).iter() {
                self.count_observed(class);
            }
        }
    }

    /// `ibv_req_notify_cq(3)`: only a completion later than this call raises the event.
    pub(crate) fn arm(&mut self, id: QueueId) -> Result<(), Error> {
        self.arm_for(id, Armed::Any)
    }

    /// Arms like [`Model::arm`], for the given completions. An arming for all is never narrowed.
    pub(crate) fn arm_for(&mut self, id: QueueId, which: Armed) -> Result<(), Error> {
        let spurious = self.by_chance(|simulation| simulation.behaviour.spurious);
        let silent = self.behaviour().is_some_and(|behaviour| behaviour.silent_overrun);
        let queue = self.queues.get_mut(id).ok_or(Error::Gone("completion queue"))?;
        if queue.lost {
            return if silent { Ok(()) } else { Err(Error::Overrun { depth: queue.depth }) };
        }
        if queue.armed != Armed::Any {
            queue.armed = which;
        }
        if !queue.entries.is_empty() && queue.events == 0 {
            queue.raced = true;
            self.count_injected(FailureClass::NotificationRace);
        }
        if spurious && let Some(queue) = self.queues.get_mut(id) {
            queue.events += 1;
            self.wakes.push(Wake::Completions(id));
            self.count_injected(FailureClass::EventCoalescing);
        }
        Ok(())
    }

    pub(crate) fn has_events(&self, id: QueueId) -> bool {
        // A destroyed queue has an error to report.
        self.queues.get(id).is_none_or(|queue| queue.events > 0)
    }

    pub(crate) fn take_events(&mut self, id: QueueId) -> Result<u32, Error> {
        let queue = self.queues.get_mut(id).ok_or(Error::Gone("completion queue"))?;
        let events = core::mem::take(&mut queue.events);
        let waiting = queue.entries.len();
        if events > 0 {
            self.count_observed(FailureClass::EventAcknowledgement);
            if waiting != events as usize {
                self.count_observed(FailureClass::EventCoalescing);
            }
        }
        Ok(events)
    }

    /// Appends a completion, at once or after the device's delay.
    pub(super) fn report(&mut self, id: QueueId, entry: Entry) {
        if self.simulation.is_none() {
            return self.append_completion(id, entry);
        }
        let party = self.party(entry.pair);
        let struck = self.strike(Site::Report, |fault, on| {
            party.is_some_and(|party| party.is(on)) && matches!(fault, Fault::QueueLost | Fault::Hold { .. })
        });
        let hold = match struck {
            Some(Fault::QueueLost) => return self.lose_queue(id),
            Some(Fault::Hold { micros }) => Duration::from_micros(micros.into()),
            _ => Duration::ZERO,
        };
        let delay = self.by_duration(|simulation| simulation.behaviour.report_delay);
        let now = self.event_queue.now();
        let of = entry.work_queue();
        let pair = entry.pair;
        let Some(owner) = self.pairs.get_mut(pair) else { return self.append_completion(id, entry) };
        let held = &mut owner.held;
        held.until = held.until.max(now.after(hold));
        let at = now.after(delay).max(held.until).max(held.last[of as usize]);
        if at <= now && held.work_queues[of as usize].is_empty() {
            return self.append_completion(id, entry);
        }
        held.last[of as usize] = at;
        held.work_queues[of as usize].push_back(entry);
        self.count_injected(FailureClass::CompletionOrder);
        self.event_queue.schedule(at.since(now), Event::Report { pair, of });
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
        let Some(queue) = self.queues.get(id).filter(|queue| !queue.lost) else { return };
        if queue.entries.len() >= queue.depth as usize {
            return self.lose_queue(id);
        }
        let completion = entry.completion;
        self.note(|| EntryKind::Completed(completion));
        let Some(queue) = self.queues.get_mut(id) else { return };
        let solicited = entry.solicited || completion.result.is_err();
        queue.entries.push_back(entry);
        queue.note_ready();
        let raises = queue.is_armed_for(solicited);
        self.show(id);
        // A program that armed its queue just before may have found nothing.
        let raises =
            raises || self.look(id) && self.queues.get(id).is_some_and(|queue| queue.is_armed_for(solicited));
        let Some(queue) = self.queues.get_mut(id) else { return };
        if raises {
            queue.armed = Armed::No;
            queue.events += 1;
            if queue.events == 1 {
                self.wakes.push(Wake::Completions(id));
            }
            self.count_injected(FailureClass::EventAcknowledgement);
        } else if queue.events > 0 {
            self.count_injected(FailureClass::EventCoalescing);
        }
    }

    fn lose_queue(&mut self, id: QueueId) {
        let silent = self.behaviour().is_some_and(|behaviour| behaviour.silent_overrun);
        let Some(queue) = self.queues.get_mut(id) else { return };
        queue.lost = true;
        queue.entries.clear();
        queue.shown = 0;
        queue.note_ready();
        if !silent {
            // Sleepers on the queue must learn of it.
            queue.events += 1;
            self.wakes.push(Wake::Completions(id));
        }
        self.event_queue.schedule(Duration::ZERO, Event::Overrun(id));
        self.show(id);
    }

    /// Puts the queue pairs of a lost queue into the error state: they can report no more.
    pub(super) fn overrun(&mut self, id: QueueId) {
        if let Some((context, name)) = self.queues.get(id).and_then(|queue| queue.context) {
            self.tell(context, AsyncEvent::CqErr, About::Queue(name));
        }
        for pair in self.pairs.select(|pair| pair.reports_to(id)) {
            self.enter_error(pair);
            self.tell_pair(pair, AsyncEvent::CqErr);
        }
    }

    /// After a reset, polling earlier completions frees no new slots.
    pub(super) fn free_nothing(&mut self, pair: PairId) {
        self.look_at_sends(pair);
        let Some(owner) = self.pairs.get(pair) else { return };
        let Some(queue) = self.queues.get_mut(owner.send_queue) else { return };
        for frees in queue
            .entries
            .iter_mut()
            .filter(|entry| entry.pair == pair)
            .filter_map(|entry| entry.frees.as_mut())
        {
            *frees = 0;
        }
    }

    /// Returns whether any completion of `pair` was not polled yet.
    pub(super) fn has_unpolled(&mut self, pair: PairId) -> bool {
        let Some(owner) = self.pairs.get(pair) else { return false };
        let queues = [owner.send_queue, owner.receive_queue];
        for id in queues {
            self.look(id);
        }
        let mut queues = queues.iter().filter_map(|id| self.queues.get(*id));
        let Some(owner) = self.pairs.get(pair) else { return false };
        queues.any(|queue| queue.waiting() > 0)
            || owner.held.work_queues.iter().any(|queue| !queue.is_empty())
    }
}
