//! Completion queues whose program polls and arms them in memory that it shares with the device,
//! without a call.
//!
//! The model keeps its completions until the program has taken them. It looks at what the program
//! has done before it adds one and once that is shown, and before it needs to know.

use rdma_backend::Completion;

use super::completions::{Armed, Detail};
use super::{HostId, Model, PairId, QueueId};
use crate::Error;

/// Memory in which a program finds the completions of its queue.
///
/// The functions are called under the fabric's lock. They must not block and must not call the
/// fabric. What the program writes there is up to it: the model never trusts what it is told of it.
pub trait Mirror: Send + Sync {
    /// Looks at what the program has done since the last call.
    fn look(&self) -> Look;

    /// Shows the program another completion. Returns false if there is no room.
    fn show(&self, completion: &Completion, detail: Detail) -> bool;

    /// Tells the program what it must call the fabric for. It comes after each series of
    /// [`Mirror::show`].
    ///
    /// The next [`Mirror::look`] finds the arming of every program that armed its queue and then
    /// found neither what was shown before nor this.
    fn ask(&self, calls: Calls);
}

/// What a program has done with its completion queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Completions taken before it was armed last.
    pub before: usize,
    /// Whether it was armed, and for what.
    pub armed: Option<Arming>,
    /// Completions taken since.
    pub after: usize,
}

/// The completions that an arming is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arming {
    /// One whose message asked for an event, or a failure.
    Solicited,
    /// Any.
    All,
}

/// What a program must call the fabric for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// A poll that finds nothing: there is more than was shown, or the queue is lost.
    pub polls: bool,
    /// Arming: an event may follow from it at once.
    pub arms: bool,
}

impl Model {
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
        if !self.is_stalled(queue.host) {
            while let Some((completion, detail)) = queue.entry(shown)
                && mirror.show(&self.told(completion), detail)
            {
                shown += 1;
            }
        }
        let polls = queue.is_lost() || shown < queue.waiting();
        let arms = self.behaviour().is_some_and(|behaviour| behaviour.spurious > 0);
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

    /// As [`Model::look`], for all queues.
    pub(crate) fn look_at_all(&mut self) {
        for id in self.queues.select(|queue| queue.mirror.is_some()) {
            self.look(id);
        }
    }

    /// A program's call about a queue: what it found there was not all.
    pub(crate) fn called(&mut self, id: QueueId) -> Result<(), Error> {
        self.look(id);
        self.show(id);
        match self.queues.get(id) {
            Some(queue) if !queue.is_lost() => Ok(()),
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

    /// Whether a fault stops the programs of this host: they then find nothing until they call.
    fn is_stalled(&self, host: HostId) -> bool {
        let until = self.simulation().and_then(|simulation| simulation.stalled_until(host.index()));
        until.is_some_and(|until| until > self.now())
    }
}
