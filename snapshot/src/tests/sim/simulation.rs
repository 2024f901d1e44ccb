//! A run: the publisher, the readers, and time.
//!
//! A sleeper runs only when one of its descriptors is readable or one of its timers has expired, as
//! with `poll`. So another program's wake-up cannot hide a missing one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_softsim::{Link, SoftSim};

use super::origin::Origin;
use super::replica::{End, Replica};
use super::rogue::Rogue;
use super::scenario::{ORIGIN, Scenario, Trouble};
use super::{MOST_EVENTS, SECRET, Violation, World, address, content, is_readable};
use crate::publisher::{self, Publisher};
use crate::wire::{Reason, SnapshotId};
use crate::{Error, Secret};

pub(super) const PORT: u16 = 7000;
/// How long the last messages take.
const LINGER: Duration = Duration::from_secs(2);
/// A run without faults takes no longer than its source and its sinks, and this.
const AT_LEAST: Duration = Duration::from_millis(450);
/// The most turns at one moment.
const MOST_TURNS: u32 = 20_000;

pub(super) fn violated(oracle: &'static str, what: impl Into<String>) -> Violation {
    Violation { oracle, what: what.into() }
}

pub(super) type Originals = BTreeMap<SnapshotId, Original>;

/// The true contents of a snapshot.
pub(super) struct Original {
    bytes: Vec<u8>,
    /// The start of each chunk, and the end of the last.
    starts: Vec<usize>,
}

impl Original {
    pub(super) fn new(seed: u64, lengths: &[usize]) -> Self {
        let mut starts = vec![0];
        for length in lengths {
            starts.push(starts.last().copied().unwrap_or(0) + length);
        }
        Self { bytes: content(seed, starts.last().copied().unwrap_or(0)), starts }
    }

    pub(super) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(super) fn chunk(&self, index: usize) -> &[u8] {
        &self.bytes[self.starts[index]..self.starts[index + 1]]
    }

    /// Checks that these bytes are that chunk, in order.
    pub(super) fn check(&self, index: u64, at: u64, bytes: &[u8]) -> Result<(), Violation> {
        let (index, at) = (index as usize, at as usize);
        if index + 1 >= self.starts.len() || self.starts[index] != at || self.chunk(index) != bytes {
            return Err(violated(
                "content",
                format!("chunk {index} of {} bytes at byte {at} is a wrong one", bytes.len()),
            ));
        }
        Ok(())
    }
}

/// A process's publisher, and until when it stays for the last messages.
pub(super) struct Serving {
    pub(super) publisher: Publisher<SoftSim>,
    leaving: Option<Instant>,
}

impl Serving {
    pub(super) fn bind(backend: &SoftSim, host: u8, scenario: &Scenario) -> Result<Self, Error> {
        let config = publisher::Config {
            secret: Secret::new(SECRET),
            readers: if host == ORIGIN { scenario.readers } else { 64 },
            depth: scenario.depth,
            lease: scenario.lease,
            ..publisher::Config::default()
        };
        let publisher = Publisher::bind(backend, SocketAddr::new(address(host), PORT), config)?;
        Ok(Self { publisher, leaving: None })
    }

    pub(super) fn leave(&mut self, reason: Reason, now: Instant) {
        if self.leaving.is_none() {
            self.publisher.withdraw(reason);
            self.leaving = Some(now.after(LINGER));
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.publisher.next_timeout().into_iter().chain(self.leaving).min()
    }

    pub(super) fn is_readable(&self) -> bool {
        is_readable(&self.publisher.sources())
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    /// Runs as far as possible. An error ends it, and so does the end of its last messages.
    pub(super) fn turn(&mut self, now: Instant) -> Result<(), Error> {
        if self.leaving.is_some_and(|by| now >= by) {
            return Err(Error::Stopped);
        }
        self.publisher.progress()
    }
}

enum Step {
    Trouble(Trouble),
    /// A dead process comes back, and so does its link.
    Back {
        host: u8,
    },
    Heal {
        host: u8,
        chunk: usize,
    },
}

pub(super) struct Simulation<'a> {
    scenario: &'a Scenario,
    world: World,
    originals: Originals,
    origin: Origin,
    replicas: Vec<Replica>,
    rogues: Vec<Rogue>,
    /// Ordered by the number of events, and by the clock.
    steps: Vec<(u64, Step)>,
    timers: Vec<(Instant, Step)>,
    turns: u32,
}

/// The result of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) events: u64,
    pub(super) bytes: u64,
    pub(super) cuts: u64,
    pub(super) whole: u64,
    pub(super) failed: u64,
}

impl Outcome {
    pub(super) fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.bytes += other.bytes;
        self.cuts += other.cuts;
        self.whole += other.whole;
        self.failed += other.failed;
    }
}

impl<'a> Simulation<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> Self {
        let replicas = scenario.replicas.len() as u8;
        let rogue_host = replicas + 2;
        let world = World::new(scenario.seed, scenario.personality, rogue_host, scenario.plan());
        let mut rogues = Vec::new();
        let mut steps = Vec::new();
        for trouble in &scenario.troubles {
            let backend = &world.hosts[usize::from(rogue_host) - 1];
            match trouble {
                Trouble::RogueReader => rogues.push(Rogue::reader(backend, scenario.seed)),
                Trouble::RoguePublisher { .. } if rogues.iter().all(Rogue::is_reader) => {
                    rogues.push(Rogue::publisher(backend, rogue_host, scenario.seed));
                }
                Trouble::Torn { at, .. }
                | Trouble::Withdrawn { at, .. }
                | Trouble::Death { at, .. }
                | Trouble::Sleep { at, .. } => steps.push((*at, Step::Trouble(trouble.clone()))),
                _ => {}
            }
        }
        let asks_rogue = |host: u8| {
            let is_it =
                |trouble: &Trouble| matches!(trouble, Trouble::RoguePublisher { host: it } if *it == host);
            scenario.troubles.iter().any(is_it).then_some(rogue_host)
        };
        let replicas = scenario.replicas.iter().map(|plan| {
            let backend = world.hosts[usize::from(plan.host) - 1].clone();
            Replica::new(backend, scenario, *plan, asks_rogue(plan.host))
        });
        Self {
            scenario,
            replicas: replicas.collect(),
            origin: Origin::new(world.hosts[0].clone()),
            world,
            originals: Originals::new(),
            rogues,
            steps,
            timers: Vec::new(),
            turns: 0,
        }
    }

    /// Runs to the end, and checks what is left.
    pub(super) fn run(mut self) -> Result<Outcome, Violation> {
        loop {
            self.take_steps();
            if self.is_over() {
                break;
            }
            self.turn()?;
        }
        let began = self.world.sim.now();
        self.judge(began)?;
        let outcome = Outcome {
            events: self.world.sim.events(),
            bytes: self.replicas.iter().map(|replica| replica.bytes).sum(),
            cuts: self.replicas.iter().map(|replica| replica.cuts).sum(),
            whole: self.replicas.iter().filter(|replica| replica.is_done()).count() as u64,
            failed: self.replicas.iter().filter(|replica| matches!(replica.end, Some(End::Failed(_)))).count()
                as u64,
        };
        self.forget()?;
        Ok(outcome)
    }

    fn is_over(&self) -> bool {
        let now = self.world.sim.now();
        let is_pending = |replica: &Replica| {
            self.timers
                .iter()
                .any(|(_, step)| matches!(step, Step::Back { host } if *host == replica.plan.host))
        };
        self.replicas.iter().all(|replica| replica.is_over(now) && !is_pending(replica))
    }

    /// Runs each program that is due, or lets time pass.
    fn turn(&mut self) -> Result<(), Violation> {
        let now = self.world.sim.now();
        let mut any = self.origin.is_due(now);
        if any {
            self.origin.turn(self.scenario, &mut self.originals)?;
        }
        for replica in &mut self.replicas {
            if replica.is_due(self.world.sim.now()) {
                any = true;
                replica.turn(self.scenario, &self.originals)?;
            }
        }
        for rogue in &mut self.rogues {
            if rogue.is_due(self.world.sim.now()) {
                any = true;
                rogue.turn();
            }
        }
        if any {
            self.turns += 1;
            if self.turns > MOST_TURNS {
                return Err(violated("spin", "somebody is woken again and again, and time does not pass"));
            }
            return Ok(());
        }
        self.turns = 0;
        let replicas = self.replicas.iter().filter_map(Replica::next_timeout);
        let rogues = self.rogues.iter().filter_map(Rogue::next_timeout);
        let timers = self.timers.iter().map(|(at, _)| *at);
        let next = self.origin.next_timeout().into_iter().chain(replicas).chain(rogues).chain(timers).min();
        self.pass(next)
    }

    /// Lets time pass until the next event, or until `at`.
    fn pass(&self, at: Option<Instant>) -> Result<(), Violation> {
        let sim = &self.world.sim;
        match (sim.deadline(), at) {
            (Some(event), Some(at)) if at < event => sim.advance(at),
            (Some(_), _) => assert!(sim.step()),
            (None, Some(at)) if at.since_start() < Duration::from_secs(86_400) => sim.advance(at),
            _ => return Err(violated("liveness", "everybody waits for ever")),
        }
        if sim.events() > MOST_EVENTS {
            return Err(violated("liveness", "a run without end"));
        }
        Ok(())
    }

    /// Performs the steps that are due.
    fn take_steps(&mut self) {
        let (now, events) = (self.world.sim.now(), self.world.sim.events());
        let due: Vec<_> = self.timers.extract_if(.., |(at, _)| *at <= now).map(|(_, step)| step).collect();
        let also: Vec<_> = self.steps.extract_if(.., |(at, _)| *at <= events).map(|(_, step)| step).collect();
        for step in due.into_iter().chain(also) {
            self.perform(step, now);
        }
    }

    fn replica(&mut self, host: u8) -> Option<&mut Replica> {
        self.replicas.iter_mut().find(|replica| replica.plan.host == host)
    }

    fn serving(&self, host: u8) -> Option<&Serving> {
        if host == ORIGIN {
            return self.origin.serving.as_ref();
        }
        self.replicas.iter().find(|replica| replica.plan.host == host)?.serving.as_ref()
    }

    fn perform(&mut self, step: Step, now: Instant) {
        match step {
            Step::Trouble(Trouble::Torn { host, chunk, heals, .. }) => {
                let spoilt = self.serving(host).is_some_and(|serving| serving.publisher.store.spoil(chunk));
                if let Some(after) = heals.filter(|_| spoilt) {
                    self.timers.push((now.after(after), Step::Heal { host, chunk }));
                }
            }
            Step::Heal { host, chunk } => {
                // The same change again restores it. A restarted publisher has nothing to restore.
                if !self
                    .scenario
                    .troubles
                    .iter()
                    .any(|trouble| matches!(trouble, Trouble::Death { host: dead, .. } if *dead == host))
                    && let Some(serving) = self.serving(host)
                {
                    serving.publisher.store.spoil(chunk);
                }
            }
            Step::Trouble(Trouble::Withdrawn { reason, .. }) => {
                if let Some(serving) = &mut self.origin.serving {
                    serving.leave(reason, now);
                }
            }
            Step::Trouble(Trouble::Death { host, silent, back, .. }) => {
                let fabric = self.world.sim.fabric();
                if silent {
                    fabric.set_link(address(host), Link::Down);
                }
                if host == ORIGIN {
                    self.origin.die();
                } else if let Some(replica) = self.replica(host).filter(|replica| replica.end.is_none()) {
                    replica.die();
                } else {
                    fabric.set_link(address(host), Link::Up);
                    return;
                }
                match back {
                    Some(after) => self.timers.push((now.after(after), Step::Back { host })),
                    None => self.origin.fallen |= true,
                }
            }
            Step::Back { host } => {
                self.world.sim.fabric().set_link(address(host), Link::Up);
                if host == ORIGIN {
                    self.origin.begin(now);
                } else if let Some(replica) = self.replica(host) {
                    replica.begin(now);
                }
            }
            Step::Trouble(Trouble::Sleep { host, lasts, .. }) => {
                let until = now.after(lasts.unwrap_or(Duration::from_secs(1 << 24)));
                if host == ORIGIN {
                    self.origin.asleep = Some(until);
                } else if let Some(replica) = self.replica(host).filter(|replica| replica.end.is_none()) {
                    replica.asleep = Some(until);
                }
            }
            Step::Trouble(_) => {}
        }
    }

    /// Checks that each program ended as this run allows.
    fn judge(&self, now: Instant) -> Result<(), Violation> {
        let scenario = self.scenario;
        let quiet = scenario.troubles.is_empty();
        for replica in &self.replicas {
            let host = replica.plan.host;
            match &replica.end {
                Some(End::Whole | End::Dead) => {}
                None if replica.is_over(now) => {}
                Some(End::Failed(error)) if !quiet && self.may_fail(replica, error) => {}
                other => return Err(violated("end", format!("host {host} ended with {other:?}"))),
            }
        }
        let sinks = scenario.replicas.iter().map(|plan| plan.pace).max().unwrap_or_default();
        let chunks = scenario.lengths.len() as u32 + 1;
        let most = (scenario.pace + sinks * scenario.replicas.len() as u32) * chunks + AT_LEAST;
        if quiet && now.since_start() > most {
            return Err(violated(
                "time",
                format!("{:?}, although nothing went wrong: {most:?} is enough", now.since_start()),
            ));
        }
        Ok(())
    }

    /// Returns whether a pull may fail permanently. Faults that a few more attempts survive are no
    /// reason.
    fn may_fail(&self, replica: &Replica, error: &Error) -> bool {
        let scenario = self.scenario;
        // A machine's missing resources stay missing. A replica whose publisher has failed has no
        // other.
        let is_lacking = matches!(error, Error::Backend { .. } | Error::Device(_) | Error::Control(_))
            && !error.may_resume();
        let has_fallen =
            |one: &Replica| matches!(one.end, Some(End::Failed(_) | End::Dead)) || one.asleep.is_some();
        let leans = replica.plan.parent != ORIGIN && self.replicas.iter().any(has_fallen);
        let is_final = |trouble: &Trouble| match trouble {
            Trouble::Faults(_) | Trouble::RogueReader | Trouble::Sleep { .. } => false,
            // Another snapshot is another pull.
            Trouble::Death { host, back, .. } => *host == ORIGIN || back.is_none(),
            Trouble::Torn { heals, .. } => heals.is_none() || scenario.layout == crate::wire::Layout::Rcp,
            Trouble::Forgery(_) | Trouble::Withdrawn { .. } | Trouble::Crowded => true,
            Trouble::Stranger { host } | Trouble::RoguePublisher { host } => *host == replica.plan.host,
        };
        is_lacking || leans || self.origin.fallen || scenario.troubles.iter().any(is_final)
    }

    /// Ends all but the publisher and sleepers. The publisher must notice. Then it ends, too, and
    /// nothing may be left.
    fn forget(mut self) -> Result<(), Violation> {
        let fabric = self.world.sim.fabric();
        self.world.sim.stop_faults();
        self.rogues.retain(Rogue::is_reader);
        for replica in self.replicas.iter_mut().filter(|replica| replica.asleep.is_none()) {
            replica.die();
        }
        self.timers.clear();
        self.steps.clear();
        if !self.origin.is_silent() {
            let until = self.world.sim.now().after(self.scenario.lease + Duration::from_secs(100));
            while self.world.sim.now() < until {
                if self.origin.is_due(self.world.sim.now()) {
                    self.origin.turn(self.scenario, &mut self.originals)?;
                    self.turns += 1;
                    if self.turns > MOST_TURNS {
                        return Err(violated("spin", "the publisher is woken again and again"));
                    }
                    continue;
                }
                self.turns = 0;
                let next = self.origin.next_timeout().into_iter().chain([until]).min();
                self.pass(next)?;
            }
            let held = fabric.resources(address(ORIGIN));
            let own = self.origin.registered();
            if held.queue_pairs > 0 || held.registered_bytes != own {
                return Err(violated(
                    "lease",
                    format!("{held:?} without a replica, and {own} bytes of its own"),
                ));
            }
        }
        let Self { world, origin, replicas, rogues, .. } = self;
        drop((origin, replicas, rogues));
        if world.is_empty() { Ok(()) } else { Err(violated("resources", "something is held")) }
    }
}
