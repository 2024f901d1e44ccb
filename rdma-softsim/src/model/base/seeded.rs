//! The seeded state of a simulation: random choices, faults, and the trace.

use core::hash::Hasher;
use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use rdma_backend::time::Instant;

use super::arena::visit;
use super::target::Target;
use crate::device_kind::{Behaviour, DeviceKind, SimulationSettings};
use crate::failure_class::FailureCounts;
use crate::faults::FaultPlan;
use crate::faults::{Chance, Connections, Fault, Injection, Site, When};
use crate::random::Random;
use crate::settings::Parameters;
use crate::trace::{Entry, EntryKind, Trace};

/// The seeded part of a simulation, or of a real-time fabric with faults.
pub(crate) struct SimulationState {
    random: Random,
    /// Whether events are recorded and byte ownership is checked: in simulations.
    observed: bool,
    pub(crate) behaviour: Behaviour,
    pub(crate) settings: SimulationSettings,
    /// Faults that have not struck, each with its possible connections.
    plan: Vec<(Injection, Connections)>,
    /// Faults that strike repeatedly, by chance.
    chances: Vec<(Target, Fault, Chance)>,
    passes: [u32; Site::COUNT],
    pub(crate) events: u64,
    pub(crate) trace: Trace,
    pub(crate) failure_counts: FailureCounts,
    /// Until when programs on hosts do not run.
    stalls: BTreeMap<u32, Instant>,
    /// Until when requests in flight may still use the keys of deregistered regions.
    stale: BTreeMap<u32, Instant>,
    /// These keys, in the order of their deregistration.
    stale_keys: VecDeque<u32>,
    /// When a fault last struck.
    pub(crate) last_fault: Option<Instant>,
    /// How many faults have struck.
    pub(crate) struck: u64,
}

impl SimulationState {
    pub(crate) fn new(
        seed: u64,
        device_kind: DeviceKind,
        settings: SimulationSettings,
        plan: FaultPlan,
    ) -> Self {
        let mut random = Random::new(seed);
        // Drawn first, so that it depends on the seed alone.
        let behaviour = Behaviour::of(device_kind, &mut random);
        Self {
            random,
            observed: true,
            behaviour,
            settings,
            plan: plan.into_iter().map(|injection| (injection, Connections::All)).collect(),
            chances: Vec::new(),
            passes: [0; Site::COUNT],
            events: 0,
            trace: Trace::default(),
            failure_counts: FailureCounts::default(),
            stalls: BTreeMap::new(),
            stale: BTreeMap::new(),
            stale_keys: VecDeque::new(),
            last_fault: None,
            struck: 0,
        }
    }

    /// Returns the state for a real-time fabric: its devices act at once, and its messages take
    /// their latency.
    pub(in crate::model) fn of_real_time(parameters: Parameters, seed: u64) -> Self {
        let settings = SimulationSettings {
            parameters,
            jitter: Duration::ZERO,
            cm_jitter: Duration::ZERO,
            pauses: 0,
            pause: Duration::ZERO,
            accept_rnr_retry: None,
            unnamed_flushes: false,
            held_descriptors: false,
        };
        Self { observed: false, ..Self::new(seed, DeviceKind::Ibta, settings, FaultPlan::new()) }
    }

    fn is_due(&self, when: When) -> bool {
        match when {
            // Or later, at the first target.
            When::Event(event) => self.events >= event,
            When::Pass(site, pass) => self.passes[site as usize] >= pass,
        }
    }

    /// Removes the first wanted fault of the plan whose time has come.
    fn take(&mut self, now: Instant, wanted: impl Fn(&Fault, &Target) -> bool) -> Option<Fault> {
        let place = self.plan.iter().position(|(injection, connections)| {
            let target = Target { host: injection.host, connections: *connections };
            self.is_due(injection.when) && wanted(&injection.fault, &target)
        });
        let injection: Injection = match place {
            Some(place) => self.plan.remove(place).0,
            None => self.by_chance(wanted)?,
        };
        self.struck += 1;
        self.failure_counts.inject(injection.fault.class());
        self.last_fault = Some(now);
        if self.observed {
            self.trace.push(Entry { event: self.events, at: now, what: EntryKind::Struck(injection) });
        }
        Some(injection.fault)
    }

    /// Returns a wanted fault that strikes by chance now, if any.
    fn by_chance(&mut self, wanted: impl Fn(&Fault, &Target) -> bool) -> Option<Injection> {
        let random = &mut self.random;
        // `wanted` first: a chance is one in so many possible targets, and others draw nothing.
        let struck = self.chances.iter().find(|(target, fault, chance)| {
            wanted(fault, target) && random.chance(chance.times.into(), Chance::OF)
        });
        let &(Target { host, .. }, fault, _) = struck?;
        Some(Injection { when: When::Event(self.events), host, fault })
    }

    /// Adds a fault for `target`: once, when its time has come, or by chance. Times count from now.
    pub(in crate::model) fn inject(&mut self, target: Target, fault: Fault, when: Result<When, Chance>) {
        match when {
            Ok(when) => {
                // Saturating: a far time means never, and a sum that wraps would mean at once.
                let when = match when {
                    When::Event(event) => When::Event(self.events.saturating_add(event)),
                    When::Pass(site, pass) => {
                        When::Pass(site, self.passes[site as usize].saturating_add(pass))
                    }
                };
                self.plan.push((Injection { when, host: target.host, fault }, target.connections));
            }
            Err(chance) => self.chances.push((target, fault, chance)),
        }
    }

    pub(crate) fn stalled_until(&self, host: u32) -> Option<Instant> {
        self.stalls.get(&host).copied()
    }

    pub(crate) fn digest(&self) -> u64 {
        self.trace.digest.finish()
    }

    pub(crate) fn remaining(&self) -> Vec<Injection> {
        self.plan.iter().map(|(injection, _)| *injection).collect()
    }

    pub(crate) fn stop_faults(&mut self) {
        self.plan.clear();
        self.chances.clear();
    }

    /// Records a deregistered region. Its key may work a little longer, or not, which is a failure
    /// class.
    pub(in crate::model) fn remember_stale(&mut self, rkey: u32, now: Instant, until: Instant) {
        // Here and not by events: only a deregistration adds a key, so it can remove those that
        // ended.
        while let Some(key) = self.stale_keys.front()
            && self.stale.get(key).is_none_or(|until| *until < now)
        {
            visit();
            self.stale.remove(key);
            self.stale_keys.pop_front();
        }
        self.stale.insert(rkey, until);
        self.stale_keys.push_back(rkey);
    }

    /// Returns whether `rkey` belonged to a region until a moment ago, and whether this device lets
    /// requests in flight succeed.
    pub(in crate::model) fn was_deregistered(&self, rkey: u32, now: Instant) -> Option<bool> {
        let known = self.stale.get(&rkey).is_some_and(|until| now <= *until);
        known.then_some(self.behaviour.stale_keys)
    }

    /// Returns how many faults have not struck yet.
    pub(in crate::model) fn ahead(&self) -> usize {
        self.plan.len() + self.chances.len()
    }

    /// Counts that an event passes a place where faults strike, and removes the wanted one whose
    /// time has come.
    pub(in crate::model) fn pass(
        &mut self,
        site: Site,
        now: Instant,
        wanted: impl Fn(&Fault, &Target) -> bool,
    ) -> Option<Fault> {
        self.passes[site as usize] += 1;
        self.take(now, wanted)
    }

    /// Removes the first fault whose time has come and that strikes by itself.
    pub(in crate::model) fn take_own(&mut self, now: Instant) -> Option<(Target, Fault)> {
        // Asked for at every event, and mostly empty.
        if self.plan.is_empty() {
            return None;
        }
        // Not those of `chances`: `Fabric::inject` accepts no such fault by chance.
        let due = |(i, _): &&(Injection, Connections)| i.fault.strikes_by_itself() && self.is_due(i.when);
        let (injection, connections) = self.plan.iter().find(due).copied()?;
        let target = Target { host: injection.host, connections };
        self.take(now, |fault, on| *fault == injection.fault && *on == target);
        Some((target, injection.fault))
    }

    /// Stops the programs of a host until this time.
    pub(in crate::model) fn stall(&mut self, host: u32, until: Instant) {
        let stalled = self.stalls.entry(host).or_insert(until);
        // A short stall does not end a longer one.
        *stalled = until.max(*stalled);
    }

    /// Returns true `times` in 256.
    pub(in crate::model) fn draw(&mut self, times: u8) -> bool {
        // Draws nothing if it is off, so that later choices stay the same.
        times > 0 && self.random.chance(times.into(), 256)
    }

    /// Returns a random duration of at most `longest`.
    pub(in crate::model) fn draw_duration(&mut self, longest: Duration) -> Duration {
        // Draws nothing if it is off, so that later choices stay the same.
        if longest.is_zero() { longest } else { self.random.duration(longest) }
    }

    pub(in crate::model) fn draw_below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    pub(in crate::model) fn seed(&mut self, seed: u64) {
        self.random = Random::new(seed);
    }

    /// Sets the kind of devices from now on.
    pub(in crate::model) fn set_device_kind(&mut self, kind: DeviceKind) {
        self.behaviour = Behaviour::of(kind, &mut self.random);
    }

    pub(in crate::model) const fn is_observed(&self) -> bool {
        self.observed
    }

    /// Records an entry, if the trace is on.
    pub(in crate::model) fn note(&mut self, at: Instant, what: impl FnOnce() -> EntryKind) {
        // An entry is not even made without a trace.
        if self.observed {
            self.trace.push(Entry { event: self.events, at, what: what() });
        }
    }
}
