//! The fabric itself: one deterministic, single-threaded model.
//!
//! Nothing here reads a clock, starts a thread or opens a descriptor. Operations change the model
//! and schedule events on an [event queue](base::event_queue::EventQueue). [`Model::advance`]
//! executes what is due, in one total order, and [`Model::deadline`] returns the time of the next
//! event. Channels that may have sleepers are returned as [`Wake`]s. Two runs with the same calls
//! at the same times are the same.
//!
//! The state is divided into parts. Each has a folder and methods of its own, and takes the other
//! parts that it uses as arguments. A part uses only parts that stand above it here, and plain
//! types of any, such as answers and packets. Its tables are private. The objects in them, such as
//! a [queue pair](pairs::queue_pair::QueuePair), are open to all of the model:
//!
//! | Part | What it holds |
//! |---|---|
//! | [`Environment`] | time and scheduled events, random choices and faults, the trace |
//! | [`Hosts`], [`Contexts`] | hosts with their addresses, links and listeners; opened devices |
//! | [`Regions`] | protection domains, memory regions |
//! | [`Pairs`] | queue pairs, their numbers, shared receive queues |
//! | [`Queues`] | completion queues |
//! | [`Manager`] | the connection manager: event channels, identifiers, handshakes |
//! | [`Flights`] | bytes in flight that are moved without the fabric's lock |
//!
//! [`Model`] holds them, and is the only one that orchestrates them. A message that arrives may
//! fail a queue pair, which ends messages in flight, which may fail others. Such chains are methods
//! of `Model`, in the files beside this one, which no part imports.

mod base;
mod endings;
mod flights;
mod hosts;
mod identifier_calls;
mod injection;
mod manager;
mod moving;
mod objects;
mod pairs;
mod posting;
mod queues;
mod receiving;
mod recording;
mod regions;
mod reporting;
mod sending;
pub(crate) mod sizes;
#[cfg(test)]
mod tests;
mod transitions;

use core::time::Duration;

use rdma_backend::AsyncEvent;
use rdma_backend::time::Instant;

use crate::capture::Capture;
use crate::settings::{Link, Parameters};
use base::environment::Environment;
use base::event::Event;
use flights::Flights;
use hosts::Hosts;
use hosts::context::Contexts;
use manager::Manager;
use pairs::Pairs;
use queues::Queues;
use regions::Regions;

pub(crate) use base::event::Wake;
pub(crate) use base::ids::{
    ChannelId, ContextId, DomainId, HostId, IdentifierId, PairId, QueueId, RegionId, SharedId,
};
pub(crate) use base::seeded::SimulationState;
pub(crate) use flights::freight::Freight;
pub use hosts::context::About;
pub(crate) use manager::event_channel::NoticeKind;
pub use manager::identifier::listen_backlog;
pub(crate) use pairs::queue_pair::{PairAttributes, Payload, PostedReceive, QueuePairState, Request};
pub use queues::completion::{Detail, Source};
pub use queues::mirror::{Arming, Calls, Look, Mirror};
pub(crate) use regions::Registration;
pub use regions::memory::ForeignMemory;
pub(crate) use regions::memory::{Bytes, Memory};
pub(crate) use regions::parts::{Part, Parts};

pub(crate) struct Model {
    env: Environment,
    hosts: Hosts,
    contexts: Contexts,
    regions: Regions,
    pairs: Pairs,
    queues: Queues,
    manager: Manager,
    flights: Flights,
    capture: Option<Box<dyn Capture>>,
}

/// How many objects an event handles before the fabric's lock is given back, and for how long.
const PIECE: usize = 256;
const PAUSE: Duration = Duration::from_micros(100);

impl Model {
    pub(crate) fn new(parameters: Parameters) -> Self {
        Self::within(Environment::new(parameters))
    }

    pub(crate) fn simulated(simulation: SimulationState) -> Self {
        Self::within(Environment::simulated(simulation))
    }

    fn within(env: Environment) -> Self {
        Self {
            env,
            hosts: Hosts::new(),
            contexts: Contexts::new(),
            regions: Regions::new(),
            pairs: Pairs::new(),
            queues: Queues::new(),
            manager: Manager::new(),
            flights: Flights::default(),
            capture: None,
        }
    }

    /// Executes everything that is due at `now`, in order of time. Time does not go back: an
    /// earlier `now` counts as the latest one seen.
    pub(crate) fn advance(&mut self, now: Instant) {
        while let Some(event) = self.env.next(now) {
            self.happen(event);
        }
    }

    /// Executes a bounded part of what [`Model::advance`] does, in the same order. Returns whether
    /// that is all. Otherwise time has passed only as far as it was executed.
    ///
    /// A caller executes what others have scheduled, under the fabric's lock: much of it, if timers
    /// of many queue pairs end together.
    pub(crate) fn advance_some(&mut self, now: Instant) -> bool {
        const MOST: usize = 64;
        for _ in 0..MOST {
            let Some(event) = self.env.next(now) else { return true };
            self.happen(event);
        }
        false
    }

    fn happen(&mut self, event: Event) {
        // First: a fault of the plan may strike before this event.
        self.env.count_event();
        // More than one may be due at the same event.
        while let Some((target, fault)) = self.env.own_fault() {
            self.befall(target, fault);
        }
        match event {
            Event::Arrive { from, epoch, sequence } => self.arrive(from, epoch, sequence),
            Event::Answer { to, epoch, sequence, answer } => self.answered(to, epoch, sequence, answer),
            Event::Again { pair, epoch } => self.again(pair, epoch),
            Event::Timeout { pair, epoch } => self.timed_out(pair, epoch),
            Event::Sweep => self.sweep(),
            Event::Overrun { queue, after } => self.overrun(queue, after),
            Event::Joined(host) => {
                let addresses = self.hosts.addresses(host);
                self.find(host, &addresses);
            }
            Event::Resolved { id, resolution, how } => {
                self.manager.resolved(&mut self.env, id, resolution, how);
            }
            Event::Packet(packet) => self.packet(packet),
            // A destroyed identifier gets no event: `notify` does not find it.
            Event::TimewaitExit(id) => self.manager.notify(&mut self.env, id, NoticeKind::TimewaitExit),
            Event::Report { pair, of } => self.report_held(pair, of),
            Event::Flush(pair) => {
                // If it was reset meanwhile, it has nothing to flush.
                if self.pairs.get(pair).is_some_and(|pair| pair.state == QueuePairState::Error) {
                    self.flush(pair);
                }
            }
            // The end of a `Fault::LinkDown` of single connections. A short one does not end a
            // longer one.
            Event::PairUp(pair) => {
                let now = self.env.now();
                if let Some(pair) = self.pairs.get_mut(pair).filter(|pair| now >= pair.cut_until) {
                    pair.cut = false;
                }
            }
            Event::LinkUp(host) if !self.hosts.is_repaired(host, self.env.now()) => {}
            Event::LinkUp(host) => {
                for address in self.hosts.addresses(host) {
                    self.set_link(address, Link::Up);
                }
                self.tell_all(host, NoticeKind::Async(AsyncEvent::PortActive));
            }
        }
    }

    pub(crate) const fn reach(&self) -> Duration {
        self.env.parameters().reach
    }

    pub(crate) const fn now(&self) -> Instant {
        self.env.now()
    }

    /// Executes what is due without moving the clock.
    pub(crate) fn settle(&mut self) {
        self.advance(self.env.now());
    }

    /// Returns when [`Model::advance`] has something to do next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.env.deadline()
    }

    pub(crate) fn wakes(&mut self) -> std::vec::Drain<'_, Wake> {
        self.env.wakes()
    }

    /// Executes the next event, at its time. Returns false if there is none.
    pub(crate) fn step(&mut self) -> bool {
        // `next` would move the clock to the end of time.
        if self.env.deadline().is_none() {
            return false;
        }
        let next = self.env.next(Instant::from_start(Duration::MAX));
        if let Some(event) = next {
            self.happen(event);
        }
        true
    }

    /// Makes the program lose its processor between two calls, while the fabric continues.
    pub(crate) fn pause(&mut self) {
        if self.env.by_chance(|simulation| simulation.settings.pauses) {
            let pause = self.env.by_duration(|simulation| simulation.settings.pause);
            self.advance(self.env.now().after(pause));
        }
    }
}
