//! A completion queue, with one-shot notification.

use core::sync::atomic::Ordering::Release;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use rdma_backend::Completion;

use super::completion::{Detail, Entry};
use super::mirror::{Calls, Mirror};
use crate::model::base::arena::OnHost;
use crate::model::base::ids::{ContextId, HostId, PairId};
use crate::sync::AtomicBool;

pub(crate) struct CompletionQueue {
    pub(in crate::model) host: HostId,
    /// Who opened the device, and its name for the queue, for reporting an overrun.
    pub(in crate::model) context: Option<(ContextId, u64)>,
    /// The queue pairs that report to it.
    pub(in crate::model) pairs: BTreeSet<PairId>,
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
    pub(in crate::model) mirror: Option<Box<dyn Mirror>>,
    pub(in crate::model) shown: usize,
}

/// Which completion raises the next event.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Armed {
    No,
    /// One whose message asked for an event, or a failure.
    Solicited,
    Any,
}

impl CompletionQueue {
    pub(in crate::model) fn new(host: HostId, depth: u32, context: Option<(ContextId, u64)>) -> Self {
        Self {
            host,
            context,
            pairs: BTreeSet::new(),
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
    pub(in crate::model) fn note_ready(&self) {
        // A lost queue counts: the poll that returns its error needs the lock.
        self.ready.store(self.lost || !self.entries.is_empty(), Release);
    }

    pub(in crate::model) const fn is_lost(&self) -> bool {
        self.lost
    }

    pub(in crate::model) fn waiting(&self) -> usize {
        self.entries.len()
    }

    /// Returns the completion behind so many others.
    pub(in crate::model) fn entry(&self, behind: usize) -> Option<(Completion, Detail)> {
        self.entries.get(behind).map(|entry| (entry.completion, entry.detail))
    }

    /// Removes the next completion, whether its program was shown it or not.
    pub(in crate::model) fn pop(&mut self) -> Option<Entry> {
        let entry = self.entries.pop_front()?;
        self.shown = self.shown.saturating_sub(1);
        Some(entry)
    }

    /// Returns whether a completion raises an event.
    pub(in crate::model) fn is_armed_for(&self, solicited: bool) -> bool {
        match self.armed {
            Armed::No => false,
            Armed::Solicited => solicited,
            Armed::Any => true,
        }
    }

    pub(in crate::model) const fn depth(&self) -> u32 {
        self.depth
    }

    /// Returns whether a further completion would be one too many.
    pub(in crate::model) fn is_full(&self) -> bool {
        self.entries.len() >= self.depth as usize
    }

    pub(in crate::model) fn push(&mut self, entry: Entry) {
        self.entries.push_back(entry);
        self.note_ready();
    }

    /// Loses the queue: it yields nothing any more.
    pub(in crate::model) fn lose(&mut self) {
        self.lost = true;
        self.entries.clear();
        self.shown = 0;
        self.note_ready();
    }

    /// Returns whether this is the poll after an arming that completions had preceded.
    pub(in crate::model) fn end_race(&mut self) -> bool {
        core::mem::take(&mut self.raced) && !self.entries.is_empty() && self.events == 0
    }

    /// Arms for the given completions. An arming for all is never narrowed. Returns whether
    /// completions wait that will raise no event.
    pub(in crate::model) fn arm(&mut self, which: Armed) -> bool {
        // Narrowed, it would let a thread sleep on that has armed for all (IBA 11.4.2.2).
        if self.armed != Armed::Any {
            self.armed = which;
        }
        // They raise no event (`ibv_req_notify_cq(3)`): the program must poll once more.
        let raced = !self.entries.is_empty() && self.events == 0;
        self.raced |= raced;
        raced
    }

    /// Ends an arming.
    pub(in crate::model) const fn disarm(&mut self) {
        self.armed = Armed::No;
    }

    /// Returns how many events were raised and not taken.
    pub(in crate::model) const fn events(&self) -> u32 {
        self.events
    }

    pub(in crate::model) fn take_events(&mut self) -> u32 {
        core::mem::take(&mut self.events)
    }

    pub(in crate::model) fn ready(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.ready)
    }

    /// Raises an event, with or without a cause.
    pub(in crate::model) const fn raise(&mut self) {
        self.events += 1;
    }
}

impl OnHost for CompletionQueue {
    const NAME: &'static str = "completion queue";

    fn host(&self) -> HostId {
        self.host
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // A destroyed queue has an error to report.
        self.ready.store(true, Release);
        // Its program must call, to get the error.
        if let Some(mirror) = &self.mirror {
            mirror.ask(Calls { polls: true, arms: true });
        }
    }
}
