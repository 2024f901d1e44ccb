//! Opened devices (`ibv_open_device(3)`), and their asynchronous events.

use std::collections::VecDeque;

use rdma_backend::AsyncEvent;

use crate::error::Error;
use crate::model::base::arena::{Objects, OnHost};
use crate::model::base::environment::Environment;
use crate::model::base::event::Wake;
use crate::model::base::ids::{ContextId, HostId, kind};

pub(crate) struct Context {
    pub(in crate::model) host: HostId,
    /// How many repetitions of messages are scheduled, of its queue pairs.
    pub(in crate::model) repeats: u32,
    notices: VecDeque<AsyncNotice>,
}

impl OnHost for Context {
    const NAME: &'static str = "device context";

    fn host(&self) -> HostId {
        self.host
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AsyncNotice {
    pub(crate) event: AsyncEvent,
    pub(crate) about: About,
}

/// The object of the event, by its creator's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// A queue pair.
    Pair(u64),
    /// A completion queue.
    Queue(u64),
    /// A shared receive queue.
    Shared(u64),
    /// The device or its port.
    Device,
}

/// Maximum waiting events of one context. A program that reads none misses later ones.
pub(in crate::model) const MOST_NOTICES: usize = 1024;

/// The devices that programs have opened.
pub(in crate::model) struct Contexts {
    all: Objects<kind::Context, Context>,
}

impl Contexts {
    pub(in crate::model) const fn new() -> Self {
        Self { all: Objects::new() }
    }

    pub(in crate::model) const fn all(&self) -> &Objects<kind::Context, Context> {
        &self.all
    }

    pub(in crate::model) fn open(&mut self, host: HostId) -> ContextId {
        self.all.insert(Context { host, repeats: 0, notices: VecDeque::new() })
    }

    pub(in crate::model) fn close(&mut self, id: ContextId) {
        // Its objects may outlive it. What they report then finds no reader (`tell`).
        self.all.remove(id);
    }

    pub(in crate::model) fn host(&self, id: ContextId) -> Result<HostId, Error> {
        Ok(self.all.find(id)?.host)
    }

    /// Raises an asynchronous event.
    pub(in crate::model) fn tell(
        &mut self,
        env: &mut Environment,
        id: ContextId,
        event: AsyncEvent,
        about: About,
    ) {
        let Some(context) = self.all.get_mut(id) else { return };
        if context.notices.len() < MOST_NOTICES {
            context.notices.push_back(AsyncNotice { event, about });
        }
        // With more the descriptor is readable already.
        if context.notices.len() == 1 {
            env.wake(Wake::Asynchronous(id));
        }
    }

    /// Raises an event of a device for everyone who opened it.
    pub(in crate::model) fn tell_all(&mut self, env: &mut Environment, host: HostId, event: AsyncEvent) {
        for context in self.all.on(host) {
            self.tell(env, context, event, About::Device);
        }
    }

    /// Takes the next asynchronous event, and returns whether it was the last.
    pub(in crate::model) fn take(&mut self, id: ContextId) -> Result<(Option<AsyncNotice>, bool), Error> {
        let context = self.all.find_mut(id)?;
        let notice = context.notices.pop_front();
        Ok((notice, context.notices.is_empty()))
    }

    /// Returns how many repetitions of messages a program has scheduled, if there is one.
    pub(in crate::model) fn repeats(&self, id: ContextId) -> Option<u32> {
        Some(self.all.get(id)?.repeats)
    }

    pub(in crate::model) fn begin_repeat(&mut self, id: ContextId) {
        if let Some(program) = self.all.get_mut(id) {
            program.repeats += 1;
        }
    }

    pub(in crate::model) fn end_repeat(&mut self, id: ContextId) {
        if let Some(program) = self.all.get_mut(id) {
            // Never below zero: `Pairs::end_repeat` takes off only what `repeat_after` has counted.
            program.repeats -= 1;
        }
    }
}
