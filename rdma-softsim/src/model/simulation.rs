//! The part of the model for simulations: random choices, faults, and the trace.
//!
//! In real time a model has no [`SimulationState`] before a fault is injected. Messages then take
//! exactly their latency, devices act at once, nothing breaks by itself, and nothing is recorded.

use core::hash::Hasher;
use core::time::Duration;

use rdma_backend::AsyncEvent;
use rdma_backend::time::Instant;

use super::party::{Party, Target};
use super::{Event, HostId, IdentifierId, Model, NoticeKind, PairId, Wake};
use crate::device_kind::{Behaviour, DeviceKind, SimulationSettings};
use crate::failure_class::{FailureClass, FailureCounts};
use crate::faults::{Chance, Connections, Fault, Injection, Site, When};
use crate::settings::{Link, Parameters};
use crate::trace::{Entry, EntryKind, Trace};
use crate::{FaultPlan, Random};

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
    stalls: Vec<(u32, Instant)>,
    /// Keys of deregistered regions, and until when requests in flight may still use them.
    stale: Vec<(u32, Instant)>,
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
            stalls: Vec::new(),
            stale: Vec::new(),
            last_fault: None,
            struck: 0,
        }
    }

    /// Returns the state for a real-time fabric: its devices act at once, and its messages take
    /// their latency.
    fn of_real_time(parameters: Parameters, seed: u64) -> Self {
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
        let struck = self.chances.iter().find(|(target, fault, chance)| {
            wanted(fault, target) && random.chance(chance.times.into(), Chance::OF)
        });
        let &(Target { host, .. }, fault, _) = struck?;
        Some(Injection { when: When::Event(self.events), host, fault })
    }

    /// Adds a fault for `target`: once, when its time has come, or by chance. Times count from now.
    fn inject(&mut self, target: Target, fault: Fault, when: Result<When, Chance>) {
        match when {
            Ok(when) => {
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
        self.stalls.iter().filter(|(stalled, _)| *stalled == host).map(|(_, until)| *until).max()
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
}

impl Model {
    pub(crate) fn simulated(simulation: SimulationState) -> Self {
        let mut model = Self::new(simulation.settings.parameters);
        model.simulation = Some(Box::new(simulation));
        model
    }

    pub(crate) fn simulation(&self) -> Option<&SimulationState> {
        self.simulation.as_deref()
    }

    pub(crate) fn simulation_mut(&mut self) -> Option<&mut SimulationState> {
        self.simulation.as_deref_mut()
    }

    /// Returns whether events are recorded and byte ownership is checked.
    pub(super) fn is_observed(&self) -> bool {
        self.simulation.as_ref().is_some_and(|simulation| simulation.observed)
    }

    pub(crate) fn seed_faults(&mut self, seed: u64) {
        self.faults().random = Random::new(seed);
    }

    /// Adds a fault for these connections of `host`, once or by chance.
    pub(crate) fn inject(
        &mut self,
        host: HostId,
        connections: Connections,
        fault: Fault,
        when: Result<When, Chance>,
    ) {
        self.faults().inject(Target { host: host.index(), connections }, fault, when);
    }

    /// Sets the kind of devices from now on, in real time.
    pub(crate) fn set_device_kind(&mut self, kind: DeviceKind) {
        let state = self.faults();
        state.behaviour = Behaviour::of(kind, &mut state.random);
    }

    /// Sets the one-way latency of later messages.
    pub(crate) const fn set_latency(&mut self, latency: Duration) {
        self.parameters.latency = latency;
    }

    fn faults(&mut self) -> &mut SimulationState {
        let parameters = self.parameters;
        self.simulation.get_or_insert_with(|| Box::new(SimulationState::of_real_time(parameters, 0)))
    }

    pub(crate) fn faults_struck(&self) -> u64 {
        self.simulation.as_ref().map_or(0, |simulation| simulation.struck)
    }

    pub(crate) fn faults_ahead(&self) -> usize {
        self.simulation.as_ref().map_or(0, |simulation| simulation.plan.len() + simulation.chances.len())
    }

    /// Records an entry, if the trace is on.
    pub(super) fn note(&mut self, what: impl FnOnce() -> EntryKind) {
        let at = self.event_queue.now();
        if let Some(simulation) = self.simulation.as_mut().filter(|simulation| simulation.observed) {
            let event = simulation.events;
            simulation.trace.push(Entry { event, at, what: what() });
        }
    }

    pub(super) fn count_injected(&mut self, class: FailureClass) {
        if let Some(simulation) = &mut self.simulation {
            simulation.failure_counts.inject(class);
        }
    }

    pub(super) fn count_observed(&mut self, class: FailureClass) {
        if let Some(simulation) = &mut self.simulation {
            simulation.failure_counts.observe(class);
        }
    }

    pub(super) fn behaviour(&self) -> Option<&Behaviour> {
        self.simulation.as_ref().map(|simulation| &simulation.behaviour)
    }

    /// Returns the wanted fault that strikes at this place, if one is due.
    pub(super) fn strike(&mut self, site: Site, wanted: impl Fn(&Fault, &Target) -> bool) -> Option<Fault> {
        let now = self.event_queue.now();
        let simulation = self.simulation.as_mut()?;
        simulation.passes[site as usize] += 1;
        simulation.take(now, wanted)
    }

    /// Returns whether a fault makes a creation on `host` fail.
    pub(super) fn strikes_creation(&mut self, host: HostId) -> bool {
        let party = Party::host(host.index());
        let strikes = |fault: &Fault, on: &Target| party.is(on) && matches!(fault, Fault::Exhausted);
        let struck = self.strike(Site::Create, strikes).is_some();
        if struck {
            self.count_observed(FailureClass::Exhaustion);
        }
        struck
    }

    /// Returns true `times` in 256.
    pub(super) fn by_chance(&mut self, times: impl Fn(&SimulationState) -> u8) -> bool {
        self.simulation.as_mut().is_some_and(|simulation| {
            let times = times(simulation);
            times > 0 && simulation.random.chance(times.into(), 256)
        })
    }

    /// Returns a random duration of at most `longest`, or zero outside a simulation.
    pub(super) fn by_duration(&mut self, longest: impl Fn(&SimulationState) -> Duration) -> Duration {
        let Some(simulation) = self.simulation.as_mut() else { return Duration::ZERO };
        let longest = longest(simulation);
        if longest.is_zero() { longest } else { simulation.random.duration(longest) }
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.simulation.as_mut().map_or(0, |simulation| simulation.random.below(bound))
    }

    /// Returns the latency of a message that is sent now.
    pub(super) fn travel(&mut self) -> Duration {
        self.parameters.latency + self.by_duration(|simulation| simulation.settings.jitter)
    }

    /// Executes the next event, at its time. Returns false if there is none.
    pub(crate) fn step(&mut self) -> bool {
        if self.event_queue.deadline().is_none() {
            return false;
        }
        let next = self.event_queue.next(Instant::from_start(Duration::MAX));
        if let Some(event) = next {
            self.happen(event);
        }
        true
    }

    /// Counts an event, and lets faults strike that strike by themselves.
    pub(super) fn count_event(&mut self) {
        let now = self.event_queue.now();
        let Some(simulation) = self.simulation.as_mut() else { return };
        simulation.events += 1;
        if simulation.plan.is_empty() {
            return;
        }
        while let Some(simulation) = self.simulation.as_mut()
            && let Some((injection, connections)) = simulation
                .plan
                .iter()
                .find(|(i, _)| i.fault.strikes_by_itself() && simulation.is_due(i.when))
                .copied()
        {
            let target = Target { host: injection.host, connections };
            simulation.take(now, |fault, on| *fault == injection.fault && *on == target);
            self.befall(target, injection.fault);
        }
    }

    fn befall(&mut self, target: Target, fault: Fault) {
        let host = target.host;
        let Some((id, _)) = self.hosts.at(host) else { return };
        match fault {
            Fault::LinkDown { micros } if target.connections != Connections::All => {
                for pair in self.targets(&target) {
                    if let Some(pair) = self.pairs.get_mut(pair) {
                        pair.cut = true;
                    }
                    self.event_queue.schedule(Duration::from_micros(micros.into()), Event::PairUp(pair));
                }
            }
            Fault::LinkDown { micros } => {
                for address in self.addresses(id) {
                    self.set_link(address, Link::Down);
                }
                self.tell_all(id, NoticeKind::Async(AsyncEvent::PortErr));
                self.event_queue.schedule(Duration::from_micros(micros.into()), Event::LinkUp(id));
            }
            Fault::Spurious => {
                for queue in self.queues.select(|queue| queue.host == id) {
                    if let Some(queue) = self.queues.get_mut(queue) {
                        queue.raise();
                    }
                    self.wakes.push(Wake::Completions(queue));
                }
            }
            Fault::DeviceRemoval | Fault::DeviceFatal => {
                for pair in self.pairs.select(|pair| pair.host == id) {
                    self.enter_error(pair);
                }
                self.tell_all(id, NoticeKind::Async(AsyncEvent::DeviceFatal));
                if fault == Fault::DeviceRemoval {
                    self.tell_all(id, NoticeKind::DeviceRemoval);
                }
            }
            Fault::AddressChange => self.tell_all(id, NoticeKind::AddressChange),
            Fault::PairFatal => {
                let ready = |id: &PairId| self.pairs.get(*id).is_some_and(|pair| pair.is_ready());
                let pairs: Vec<_> = self.targets(&target).into_iter().filter(ready).collect();
                if !pairs.is_empty() {
                    let place = self.below(pairs.len() as u64) as usize;
                    self.enter_error(pairs[place]);
                    self.tell_pair(pairs[place], AsyncEvent::QpFatal);
                }
            }
            Fault::Kill => {
                self.kill_host(id);
                self.count_observed(FailureClass::DisconnectMidWrite);
            }
            Fault::Stall { micros } => {
                let until = self.event_queue.now().after(Duration::from_micros(micros.into()));
                if let Some(simulation) = &mut self.simulation {
                    simulation.stalls.push((host, until));
                }
            }
            _ => {}
        }
    }

    /// Makes the program lose its processor between two calls, while the fabric continues.
    pub(crate) fn pause(&mut self) {
        if self.by_chance(|simulation| simulation.settings.pauses) {
            let pause = self.by_duration(|simulation| simulation.settings.pause);
            self.advance(self.event_queue.now().after(pause));
        }
    }

    /// Records a deregistered region. Its key may work a little longer, or not, which is a failure
    /// class.
    pub(super) fn remember_stale(&mut self, rkey: u32) {
        let until = self.event_queue.now().after(self.parameters.latency * 8);
        let now = self.event_queue.now();
        if let Some(simulation) = &mut self.simulation {
            simulation.stale.retain(|(_, until)| now <= *until);
            simulation.stale.push((rkey, until));
        }
    }

    /// Returns whether `rkey` belonged to a region until a moment ago, and whether this device lets
    /// requests in flight succeed.
    pub(super) fn was_deregistered(&self, rkey: u32) -> Option<bool> {
        let simulation = self.simulation.as_ref()?;
        let now = self.event_queue.now();
        let known = simulation.stale.iter().any(|(key, until)| *key == rkey && now <= *until);
        known.then_some(simulation.behaviour.stale_keys)
    }

    pub(super) fn pair_number(&self, id: PairId) -> u32 {
        self.pairs.get(id).map_or(0, |pair| pair.number)
    }

    pub(super) fn note_call(&mut self, id: IdentifierId, what: &'static str) {
        if self.is_observed()
            && let Some(identifier) = self.identifiers.get(id)
        {
            let (host, identifier) = (identifier.host.index(), identifier.key.0);
            self.note(|| EntryKind::Called { host, identifier, what });
        }
    }
}
