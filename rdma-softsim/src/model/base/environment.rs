//! What every part of the model acts in: time and scheduled events, random choices and faults, the
//! trace, and the channels that became readable.
//!
//! In real time there is no [`SimulationState`] before a fault is injected. Messages then take
//! exactly their latency, devices act at once, nothing breaks by itself, and nothing is recorded.

use core::time::Duration;

use rdma_backend::CompletionStatus;
use rdma_backend::time::Instant;

use super::event::{Event, Wake};
use super::event_queue::{EventQueue, Key};
use super::ids::HostId;
use super::seeded::SimulationState;
use super::target::{Party, Target};
use crate::device_kind::Behaviour;
use crate::failure_class::FailureClass;
use crate::faults::{Fault, Site};
use crate::settings::Parameters;
use crate::trace::EntryKind;

pub(in crate::model) struct Environment {
    parameters: Parameters,
    event_queue: EventQueue<Event>,
    wakes: Vec<Wake>,
    simulation: Option<Box<SimulationState>>,
}

impl Environment {
    pub(in crate::model) const fn new(parameters: Parameters) -> Self {
        Self { parameters, event_queue: EventQueue::new(), wakes: Vec::new(), simulation: None }
    }

    pub(in crate::model) fn simulated(simulation: SimulationState) -> Self {
        let parameters = simulation.settings.parameters;
        Self { simulation: Some(Box::new(simulation)), ..Self::new(parameters) }
    }

    pub(in crate::model) const fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    pub(in crate::model) const fn now(&self) -> Instant {
        self.event_queue.now()
    }

    /// Returns the time of the next event.
    pub(in crate::model) fn deadline(&self) -> Option<Instant> {
        self.event_queue.deadline()
    }

    /// Returns the next event not later than `until`, and moves the clock to its time.
    pub(in crate::model) fn next(&mut self, until: Instant) -> Option<Event> {
        self.event_queue.next(until)
    }

    /// Schedules an event. Returns its key, unless it is immediate.
    pub(in crate::model) fn schedule(&mut self, delay: Duration, event: Event) -> Option<Key> {
        self.event_queue.schedule(delay, event)
    }

    pub(in crate::model) fn cancel(&mut self, key: Key) {
        self.event_queue.cancel(key);
    }

    /// Returns how many events are scheduled.
    #[cfg(test)]
    pub(in crate::model) fn scheduled(&self) -> usize {
        self.event_queue.len()
    }

    /// Wakes the sleepers on a channel.
    pub(in crate::model) fn wake(&mut self, wake: Wake) {
        self.wakes.push(wake);
    }

    pub(in crate::model) fn wakes(&mut self) -> std::vec::Drain<'_, Wake> {
        self.wakes.drain(..)
    }

    pub(in crate::model) fn simulation(&self) -> Option<&SimulationState> {
        self.simulation.as_deref()
    }

    pub(in crate::model) fn simulation_mut(&mut self) -> Option<&mut SimulationState> {
        self.simulation.as_deref_mut()
    }

    /// Returns the seeded state, and makes that of a real-time fabric if there is none.
    pub(in crate::model) fn faults(&mut self) -> &mut SimulationState {
        let parameters = self.parameters;
        // Seed 0, until `Fabric::seed_faults` sets another.
        self.simulation.get_or_insert_with(|| Box::new(SimulationState::of_real_time(parameters, 0)))
    }

    /// Returns whether events are recorded and byte ownership is checked.
    pub(in crate::model) fn is_observed(&self) -> bool {
        self.simulation().is_some_and(SimulationState::is_observed)
    }

    /// Sets the one-way latency of later messages.
    pub(in crate::model) const fn set_latency(&mut self, latency: Duration) {
        self.parameters.latency = latency;
    }

    /// Records an entry, if the trace is on.
    pub(in crate::model) fn note(&mut self, what: impl FnOnce() -> EntryKind) {
        let at = self.now();
        if let Some(simulation) = &mut self.simulation {
            simulation.note(at, what);
        }
    }

    pub(in crate::model) fn count_injected(&mut self, class: FailureClass) {
        if let Some(simulation) = &mut self.simulation {
            simulation.failure_counts.inject(class);
        }
    }

    pub(in crate::model) fn count_observed(&mut self, class: FailureClass) {
        if let Some(simulation) = &mut self.simulation {
            simulation.failure_counts.observe(class);
        }
    }

    pub(in crate::model) fn behaviour(&self) -> Option<&Behaviour> {
        self.simulation().map(|simulation| &simulation.behaviour)
    }

    /// Counts an event of a simulation.
    pub(in crate::model) fn count_event(&mut self) {
        if let Some(simulation) = &mut self.simulation {
            simulation.events += 1;
        }
    }

    /// Returns the next fault that strikes by itself now, if any.
    pub(in crate::model) fn own_fault(&mut self) -> Option<(Target, Fault)> {
        let now = self.now();
        self.simulation_mut()?.take_own(now)
    }

    /// Returns the wanted fault that strikes at this place, if one is due.
    pub(in crate::model) fn strike(
        &mut self,
        site: Site,
        wanted: impl Fn(&Fault, &Target) -> bool,
    ) -> Option<Fault> {
        let now = self.now();
        self.simulation_mut()?.pass(site, now, wanted)
    }

    /// Returns whether a fault makes a creation on `host` fail.
    pub(in crate::model) fn strikes_creation(&mut self, host: HostId) -> bool {
        let party = Party::host(host.index());
        let strikes = |fault: &Fault, on: &Target| party.is(on) && matches!(fault, Fault::Exhausted);
        let struck = self.strike(Site::Create, strikes).is_some();
        if struck {
            self.count_observed(FailureClass::Exhaustion);
        }
        struck
    }

    /// Returns true `times` in 256.
    pub(in crate::model) fn by_chance(&mut self, times: impl Fn(&SimulationState) -> u8) -> bool {
        self.simulation_mut().is_some_and(|simulation| simulation.draw(times(simulation)))
    }

    /// Returns a random duration of at most `longest`, or zero outside a simulation.
    pub(in crate::model) fn by_duration(
        &mut self,
        longest: impl Fn(&SimulationState) -> Duration,
    ) -> Duration {
        let Some(simulation) = self.simulation_mut() else { return Duration::ZERO };
        simulation.draw_duration(longest(simulation))
    }

    pub(in crate::model) fn below(&mut self, bound: u64) -> u64 {
        self.simulation_mut().map_or(0, |simulation| simulation.draw_below(bound))
    }

    /// Returns the latency of a message that is sent now.
    pub(in crate::model) fn travel(&mut self) -> Duration {
        self.parameters.latency + self.by_duration(|simulation| simulation.settings.jitter)
    }

    /// Records a deregistered region. Its key may work a little longer.
    pub(in crate::model) fn remember_stale(&mut self, rkey: u32) {
        let now = self.now();
        let until = now.after(self.parameters.latency * 8);
        if let Some(simulation) = &mut self.simulation {
            simulation.remember_stale(rkey, now, until);
        }
    }

    /// Returns whether `rkey` belonged to a region until a moment ago, and whether this device lets
    /// requests in flight succeed.
    pub(in crate::model) fn was_deregistered(&self, rkey: u32) -> Option<bool> {
        self.simulation()?.was_deregistered(rkey, self.now())
    }

    /// Stops the programs of a host for a while.
    pub(in crate::model) fn stall(&mut self, host: u32, time: Duration) {
        let until = self.now().after(time);
        if let Some(simulation) = &mut self.simulation {
            simulation.stall(host, until);
        }
    }

    /// Returns whether a fault stops the programs of this host: they then find nothing until they
    /// call.
    pub(in crate::model) fn is_stalled(&self, host: HostId) -> bool {
        let until = self.simulation().and_then(|simulation| simulation.stalled_until(host.index()));
        until.is_some_and(|until| until > self.now())
    }

    /// Returns the requester's status for a key that its peer's device refuses.
    pub(in crate::model) fn bad_key(&self) -> CompletionStatus {
        self.behaviour().map_or(CompletionStatus::REM_ACCESS_ERR, |behaviour| behaviour.bad_key)
    }
}
