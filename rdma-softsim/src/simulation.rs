//! The fabric in virtual time.

use core::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use rdma_backend::time::Instant;

use crate::device_kind::{DeviceKind, SimulationSettings};
use crate::driver::Driver;
use crate::fabric::{Fabric, SoftSim};
use crate::failure_class::FailureCounts;
use crate::faults::{FaultPlan, Injection};
use crate::model::SimulationState;
use crate::settings::Limits;
use crate::trace::Entry;

/// A fabric under a seeded clock. Everything that happens on it follows from its arguments and the
/// calls on its hosts, including faults and the choices that verbs leaves to devices.
///
/// Nothing happens by itself. [`Simulation::step`] executes the next event, at its time. Calls on
/// hosts come in between, and may lose the processor for a while, so that events come between two
/// of them. There are no threads. Descriptors become readable as in real time, but a program that
/// sleeps on one sleeps for ever. Check whether it is readable, or use
/// [`EventChannel::is_readable`](crate::EventChannel::is_readable) and
/// [`CompletionQueue::is_readable`](crate::CompletionQueue::is_readable), and call `step` again.
pub struct Simulation {
    driver: Arc<Driver>,
}

impl Simulation {
    /// Returns a simulation without hosts.
    #[must_use]
    pub fn new(seed: u64, device_kind: DeviceKind, settings: SimulationSettings, plan: FaultPlan) -> Self {
        Self { driver: Arc::new(Driver::simulated(SimulationState::new(seed, device_kind, settings, plan))) }
    }

    /// Adds a host. Faults and traces name it by its number, counted from 0.
    #[must_use]
    pub fn host(&self, addresses: &[IpAddr], limits: Limits) -> SoftSim {
        self.fabric().host_with(addresses, limits)
    }

    /// Returns the network, for changes from outside.
    #[must_use]
    pub fn fabric(&self) -> Fabric {
        Fabric::of(&self.driver)
    }

    /// Returns the current time.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.driver.now()
    }

    /// Returns the time of the next event.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.driver.peek(|model| model.deadline())
    }

    /// Executes the next event and moves the clock to it. Returns false if there is none.
    #[expect(clippy::must_use_candidate, reason = "whoever looked at the deadline knows")]
    pub fn step(&self) -> bool {
        self.driver.peek(|model| model.step())
    }

    /// Advances time to `at`, and executes all events until then.
    pub fn advance(&self, at: Instant) {
        self.driver.peek(|model| model.advance(at));
    }

    /// Returns whether a descriptor became readable since the last call.
    #[must_use]
    pub fn has_woken(&self) -> bool {
        self.driver.has_woken()
    }

    /// Returns the number of events so far.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.driver.simulation(|simulation| simulation.events)
    }

    /// Returns the events since the last call, in order.
    #[must_use]
    pub fn take_trace(&self) -> Vec<Entry> {
        self.driver.simulation(|simulation| core::mem::take(&mut simulation.trace.entries))
    }

    /// Returns a hash of everything that ever happened. Two runs are the same if their hashes are.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.driver.simulation(|simulation| simulation.digest())
    }

    /// Returns the counts of failure classes.
    #[must_use]
    pub fn failure_counts(&self) -> FailureCounts {
        self.driver.simulation(|simulation| simulation.failure_counts)
    }

    /// Returns until when a fault stops the program on a host.
    #[must_use]
    pub fn stalled_until(&self, host: u32) -> Option<Instant> {
        self.driver.simulation(|simulation| simulation.stalled_until(host))
    }

    /// Returns whether a fault has ended the process on a host.
    #[must_use]
    pub fn is_killed(&self, host: u32) -> bool {
        self.driver.peek(|model| model.is_killed(host))
    }

    /// Returns faults of the plan that have not struck yet.
    #[must_use]
    pub fn remaining_faults(&self) -> Vec<Injection> {
        self.driver.simulation(|simulation| simulation.remaining())
    }

    /// Drops the rest of the fault plan.
    pub fn stop_faults(&self) {
        self.driver.simulation(SimulationState::stop_faults);
    }

    /// Returns when a fault last struck.
    #[must_use]
    pub fn last_fault(&self) -> Option<Instant> {
        self.driver.simulation(|simulation| simulation.last_fault)
    }
}

impl fmt::Debug for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulation").field("now", &self.now()).finish_non_exhaustive()
    }
}
