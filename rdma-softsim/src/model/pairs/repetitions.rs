//! Repetitions of messages.
//!
//! A queue pair may repeat messages faster than that helps, and may be destroyed meanwhile. So a
//! scheduled repetition goes with its queue pair, except in simulations, which count all events and
//! have no such programs.

use core::time::Duration;

use super::Pairs;
use super::queue_pair::Owner;
use crate::model::base::environment::Environment;
use crate::model::base::event::Event;
use crate::model::base::ids::PairId;
use crate::model::hosts::context::Contexts;

impl Pairs {
    /// Makes the messages in flight void.
    pub(in crate::model) fn forget_flights(
        &mut self,
        env: &mut Environment,
        contexts: &mut Contexts,
        id: PairId,
    ) {
        self.end_repeat(env, contexts, id);
        if let Some(pair) = self.get_mut(id) {
            pair.requester.forget_flights();
        }
    }

    /// Schedules the repetition of a message.
    ///
    /// In real time, those of a program keep a distance. A queue pair may repeat a message every
    /// 10 µs without an end, if its peer posts no receive. However many queue pairs of a program do
    /// that, the fabric must have time for others.
    pub(in crate::model) fn repeat_after(
        &mut self,
        env: &mut Environment,
        contexts: &mut Contexts,
        id: PairId,
        delay: Duration,
        event: Event,
    ) {
        const DISTANCE: Duration = Duration::from_micros(50);
        let observed = env.is_observed();
        let Some(pair) = self.get_mut(id) else { return };
        // Other processes reach the fabric by an opened device, whose context they own.
        let program = match pair.owner {
            Owner::Context(context, _) if !observed => Some(context),
            _ => None,
        };
        let repeats = program.and_then(|program| contexts.repeats(program));
        let least = repeats.map_or(Duration::ZERO, |repeats| DISTANCE * repeats);
        pair.requester.repeat = env.schedule(delay.max(least), event);
        // An immediate event has no key, so `end_repeat` would not take it off the count.
        if let Some(program) = program
            && pair.requester.repeat.is_some()
        {
            contexts.begin_repeat(program);
        }
    }

    /// Handles that a repetition has its turn, or has no meaning any more.
    pub(in crate::model) fn end_repeat(
        &mut self,
        env: &mut Environment,
        contexts: &mut Contexts,
        id: PairId,
    ) {
        let observed = env.is_observed();
        let Some(pair) = self.get_mut(id) else { return };
        let Some(key) = pair.requester.repeat.take().filter(|_| !observed) else { return };
        env.cancel(key);
        if let Owner::Context(context, _) = pair.owner {
            contexts.end_repeat(context);
        }
    }

    /// Handles a lost message or answer. The requester notices when its timer ends.
    pub(in crate::model) fn unanswered(
        &mut self,
        env: &mut Environment,
        contexts: &mut Contexts,
        id: PairId,
        epoch: u32,
    ) {
        let Some(pair) = self.get_mut(id) else { return };
        // One timer an epoch: whichever message was lost, the repetition starts at the oldest.
        if pair.requester.begin_timer(epoch) {
            let wait = pair.requester.ack_timeout.unwrap_or(env.parameters().ack_timeout);
            // A time-out of 0 means to wait for ever (`ibv_modify_qp(3)`); see `ack_timeout`.
            if wait < Duration::MAX {
                self.repeat_after(env, contexts, id, wait, Event::Timeout { pair: id, epoch });
            }
        }
    }
}
