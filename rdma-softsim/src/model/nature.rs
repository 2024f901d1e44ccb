//! What makes a simulation of the model: choices, faults, and the record of what happened.
//!
//! In real time a model has no [`Nature`] before somebody injects a fault: messages then take exactly their latency, devices are prompt, nothing breaks by
//! itself, and nothing is recorded.

use core::hash::Hasher;
use core::time::Duration;

use rdma_proto::backend::AsyncEvent;
use rdma_proto::time::Instant;

use super::{Event, HostId, IdentifierId, Model, NoticeKind, PairId, Wake};
use crate::faults::{Chance, Fault, Injection, Site, When};
use crate::marks::{FailureClass, Marks};
use crate::personality::{Behaviour, Knobs, Personality};
use crate::settings::{Link, Parameters};
use crate::trace::{Entry, Trace, What};
use crate::{FaultPlan, Random};

/// The seeded part of a simulation, or of a fabric in real time that faults befall.
pub(crate) struct Nature {
    random: Random,
    /// Whether what happens is written down, and who owns which bytes is looked at: in simulations.
    observed: bool,
    pub(crate) behaviour: Behaviour,
    pub(crate) knobs: Knobs,
    /// Faults that have not struck.
    plan: FaultPlan,
    /// Faults that strike again and again.
    chances: Vec<(u32, Fault, Chance)>,
    /// How often each site was passed.
    passes: [u32; Site::COUNT],
    /// Events executed.
    pub(crate) events: u64,
    pub(crate) trace: Trace,
    pub(crate) marks: Marks,
    /// Until when the program on a host does not run.
    stalls: Vec<(u32, Instant)>,
    /// Keys of regions deregistered, and until when work under way may still use them.
    stale: Vec<(u32, Instant)>,
    /// When a fault last struck, ...
    pub(crate) last_fault: Option<Instant>,
    /// ... and how often any did.
    pub(crate) struck: u64,
}

impl Nature {
    pub(crate) fn new(seed: u64, personality: Personality, knobs: Knobs, plan: FaultPlan) -> Self {
        let mut random = Random::new(seed);
        let behaviour = Behaviour::of(personality, &mut random);
        Self {
            random,
            observed: true,
            behaviour,
            knobs,
            plan,
            chances: Vec::new(),
            passes: [0; Site::COUNT],
            events: 0,
            trace: Trace::default(),
            marks: Marks::default(),
            stalls: Vec::new(),
            stale: Vec::new(),
            last_fault: None,
            struck: 0,
        }
    }

    /// That of a fabric in real time: its devices are prompt, and its messages take their latency.
    fn of_real_time(parameters: Parameters, seed: u64) -> Self {
        let knobs = Knobs {
            parameters,
            jitter: Duration::ZERO,
            cm_jitter: Duration::ZERO,
            pauses: 0,
            pause: Duration::ZERO,
            accept_rnr_retry: None,
        };
        Self { observed: false, ..Self::new(seed, Personality::Ibta, knobs, FaultPlan::new()) }
    }

    fn is_due(&self, when: When) -> bool {
        match when {
            When::Event(event) => self.events >= event,
            When::Pass(site, pass) => self.passes[site as usize] >= pass,
        }
    }

    /// Takes the first fault out of the plan whose time has come and that is wanted.
    fn take(&mut self, now: Instant, wanted: impl Fn(&Fault, u32) -> bool) -> Option<Fault> {
        let place = self
            .plan
            .iter()
            .position(|injection| self.is_due(injection.when) && wanted(&injection.fault, injection.host));
        let injection: Injection = match place {
            Some(place) => self.plan.remove(place),
            None => self.by_chance(wanted)?,
        };
        self.struck += 1;
        self.marks.inject(injection.fault.class());
        self.last_fault = Some(now);
        if self.observed {
            self.trace.push(Entry { event: self.events, at: now, what: What::Struck(injection) });
        }
        Some(injection.fault)
    }

    /// A fault that is wanted and has the chance to strike, if it does.
    fn by_chance(&mut self, wanted: impl Fn(&Fault, u32) -> bool) -> Option<Injection> {
        let random = &mut self.random;
        let struck = self.chances.iter().find(|(host, fault, chance)| {
            wanted(fault, *host) && random.chance(chance.times.into(), Chance::OF)
        });
        let &(host, fault, _) = struck?;
        Some(Injection { when: When::Event(self.events), host, fault })
    }

    /// From now on `fault` may befall `host`: once, when that time has come, or by chance. Times count from now on.
    fn inject(&mut self, host: u32, fault: Fault, when: Result<When, Chance>) {
        match when {
            Ok(when) => {
                let when = match when {
                    When::Event(event) => When::Event(self.events.saturating_add(event)),
                    When::Pass(site, pass) => {
                        When::Pass(site, self.passes[site as usize].saturating_add(pass))
                    }
                };
                self.plan.push(Injection { when, host, fault });
            }
            Err(chance) => self.chances.push((host, fault, chance)),
        }
    }

    pub(crate) fn stalled_until(&self, host: u32) -> Option<Instant> {
        self.stalls.iter().filter(|(stalled, _)| *stalled == host).map(|(_, until)| *until).max()
    }

    /// Stands for everything that happened.
    pub(crate) fn digest(&self) -> u64 {
        self.trace.digest.finish()
    }

    /// Faults of the plan that have not struck.
    pub(crate) fn remaining(&self) -> &[Injection] {
        &self.plan
    }

    /// No fault strikes from now on.
    pub(crate) fn stop_faults(&mut self) {
        self.plan.clear();
        self.chances.clear();
    }
}

impl Model {
    /// The model as a simulation.
    pub(crate) fn simulated(nature: Nature) -> Self {
        let mut model = Self::new(nature.knobs.parameters);
        model.nature = Some(Box::new(nature));
        model
    }

    pub(crate) fn nature(&self) -> Option<&Nature> {
        self.nature.as_deref()
    }

    pub(crate) fn nature_mut(&mut self) -> Option<&mut Nature> {
        self.nature.as_deref_mut()
    }

    /// Whether what happens is written down, and who owns which bytes is looked at.
    pub(super) fn is_observed(&self) -> bool {
        self.nature.as_ref().is_some_and(|nature| nature.observed)
    }

    /// Draws from `seed` what befalls a fabric in real time.
    pub(crate) fn seed_faults(&mut self, seed: u64) {
        self.faults().random = Random::new(seed);
    }

    /// From now on `fault` may befall `host`, once or by chance.
    pub(crate) fn inject(&mut self, host: HostId, fault: Fault, when: Result<When, Chance>) {
        self.faults().inject(host.index(), fault, when);
    }

    fn faults(&mut self) -> &mut Nature {
        let parameters = self.parameters;
        self.nature.get_or_insert_with(|| Box::new(Nature::of_real_time(parameters, 0)))
    }

    /// How often faults struck.
    pub(crate) fn faults_struck(&self) -> u64 {
        self.nature.as_ref().map_or(0, |nature| nature.struck)
    }

    /// Notes what happens, if anybody wants to know.
    pub(super) fn note(&mut self, what: impl FnOnce() -> What) {
        let at = self.agenda.now();
        if let Some(nature) = self.nature.as_mut().filter(|nature| nature.observed) {
            let event = nature.events;
            nature.trace.push(Entry { event, at, what: what() });
        }
    }

    pub(super) fn mark_injected(&mut self, class: FailureClass) {
        if let Some(nature) = &mut self.nature {
            nature.marks.inject(class);
        }
    }

    pub(super) fn mark_observed(&mut self, class: FailureClass) {
        if let Some(nature) = &mut self.nature {
            nature.marks.observe(class);
        }
    }

    pub(super) fn behaviour(&self) -> Option<&Behaviour> {
        self.nature.as_ref().map(|nature| &nature.behaviour)
    }

    /// A place that faults can strike: the fault that does, if one that is wanted is due.
    pub(super) fn strike(&mut self, site: Site, wanted: impl Fn(&Fault, u32) -> bool) -> Option<Fault> {
        let now = self.agenda.now();
        let nature = self.nature.as_mut()?;
        nature.passes[site as usize] += 1;
        nature.take(now, wanted)
    }

    /// Something that is made on `host`: whether a fault makes that fail.
    pub(super) fn strikes_creation(&mut self, host: HostId) -> bool {
        let struck = self
            .strike(Site::Create, |fault, on| on == host.index() && matches!(fault, Fault::Exhausted))
            .is_some();
        if struck {
            self.mark_observed(FailureClass::Exhaustion);
        }
        struck
    }

    /// True `times` in 256.
    pub(super) fn by_chance(&mut self, times: impl Fn(&Nature) -> u8) -> bool {
        self.nature.as_mut().is_some_and(|nature| {
            let times = times(nature);
            times > 0 && nature.random.chance(times.into(), 256)
        })
    }

    /// A span of at most `longest`; none without a nature.
    pub(super) fn by_duration(&mut self, longest: impl Fn(&Nature) -> Duration) -> Duration {
        let Some(nature) = self.nature.as_mut() else { return Duration::ZERO };
        let longest = longest(nature);
        if longest.is_zero() { longest } else { nature.random.duration(longest) }
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.nature.as_mut().map_or(0, |nature| nature.random.below(bound))
    }

    /// How long a message takes that is sent now.
    pub(super) fn travel(&mut self) -> Duration {
        self.parameters.latency + self.by_duration(|nature| nature.knobs.jitter)
    }

    /// Executes the next event, at its moment. False if there is none.
    pub(crate) fn step(&mut self) -> bool {
        if self.agenda.deadline().is_none() {
            return false;
        }
        let next = self.agenda.next(Instant::from_start(Duration::MAX));
        if let Some(event) = next {
            self.happen(event);
        }
        true
    }

    /// Counts an event, and lets strike what strikes by itself.
    pub(super) fn count_event(&mut self) {
        let now = self.agenda.now();
        let Some(nature) = self.nature.as_mut() else { return };
        nature.events += 1;
        if nature.plan.is_empty() {
            return;
        }
        while let Some(nature) = self.nature.as_mut()
            && let Some(injection) =
                nature.plan.iter().find(|i| i.fault.strikes_by_itself() && nature.is_due(i.when)).copied()
        {
            nature.take(now, |fault, host| (*fault, host) == (injection.fault, injection.host));
            self.befall(injection);
        }
    }

    fn befall(&mut self, Injection { host, fault, .. }: Injection) {
        let Some((id, _)) = self.hosts.at(host) else { return };
        match fault {
            Fault::LinkDown { micros } => {
                for address in self.addresses(id) {
                    self.set_link(address, Link::Down);
                }
                self.tell_all(id, NoticeKind::Async(AsyncEvent::PortErr));
                self.agenda.schedule(Duration::from_micros(micros.into()), Event::LinkUp(id));
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
                let pairs = self.pairs.select(|pair| pair.host == id && pair.is_ready());
                if !pairs.is_empty() {
                    let place = self.below(pairs.len() as u64) as usize;
                    self.enter_error(pairs[place]);
                    self.tell_pair(pairs[place], AsyncEvent::QpFatal);
                }
            }
            Fault::Kill => {
                self.kill_host(id);
                self.mark_observed(FailureClass::DisconnectMidWrite);
            }
            Fault::Stall { micros } => {
                let until = self.agenda.now().after(Duration::from_micros(micros.into()));
                if let Some(nature) = &mut self.nature {
                    nature.stalls.push((host, until));
                }
            }
            _ => {}
        }
    }

    /// The program loses its processor between two calls, and the fabric goes on.
    pub(crate) fn pause(&mut self) {
        if self.by_chance(|nature| nature.knobs.pauses) {
            let pause = self.by_duration(|nature| nature.knobs.pause);
            self.advance(self.agenda.now().after(pause));
        }
    }

    /// What is lost in a class of its own when a region goes: its key may work a little longer, or not.
    pub(super) fn remember_stale(&mut self, rkey: u32) {
        let until = self.agenda.now().after(self.parameters.latency * 8);
        let now = self.agenda.now();
        if let Some(nature) = &mut self.nature {
            nature.stale.retain(|(_, until)| now <= *until);
            nature.stale.push((rkey, until));
        }
    }

    /// Whether `rkey` belonged to a region until a moment ago; and whether this device lets what was under way succeed.
    pub(super) fn was_deregistered(&self, rkey: u32) -> Option<bool> {
        let nature = self.nature.as_ref()?;
        let now = self.agenda.now();
        let known = nature.stale.iter().any(|(key, until)| *key == rkey && now <= *until);
        known.then_some(nature.behaviour.stale_keys)
    }

    pub(super) fn pair_number(&self, id: PairId) -> u32 {
        self.pairs.get(id).map_or(0, |pair| pair.number)
    }

    /// Notes a call of the connection manager.
    pub(super) fn note_call(&mut self, id: IdentifierId, what: &'static str) {
        if self.is_observed()
            && let Some(identifier) = self.identifiers.get(id)
        {
            let (host, identifier) = (identifier.host.index(), identifier.key.0);
            self.note(|| What::Called { host, identifier, what });
        }
    }
}
