//! A run: hosts, their programs, and the loop that advances time.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rdma_backend::time::Instant;
use rdma_softsim::trace::{Entry, EntryKind};
use rdma_softsim::{FailureClass, FailureCounts, Limits, Random, Resources, Simulation, SoftSim};

use super::app::{App, EndCause, Ending, Stream};
use super::end::{Acceptor, End};
use super::event_loop::{EventLoop, Usage};
use super::judge::check_end;
use super::oracle::{Oracle, Violation};
use super::rogue::Rogue;
use super::scenario::{Scenario, ScenarioConnection};

/// The server's address. The second port is for rogue servers, one each.
const PORT: u16 = 6379;
pub(super) const SERVER: u32 = 0;
/// After the last fault everything must end within this time.
const LIVENESS: Duration = Duration::from_secs(200);
/// More than any run needs. Each is a message, an answer or a completion.
const MOST_EVENTS: u64 = 1_000_000;
/// After so many turns without an event in between, a program does not work but spins.
const MOST_TURNS: u32 = 200;

/// The result of a run.
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub violation: Option<Violation>,
    /// A hash of all events.
    pub hash: u64,
    pub events: u64,
    /// Bytes read by all programs.
    pub bytes: u64,
    /// Windows that were registered before the last one was full.
    pub windows_ahead: u64,
    /// Classes of failure that occurred.
    pub failure_counts: FailureCounts,
    /// Faults that found no target.
    pub idle_faults: usize,
    /// The trace, if it was requested.
    pub trace: Vec<Entry>,
}

impl Outcome {
    /// The outcome of a run that panicked.
    #[must_use]
    pub fn panicked(message: String) -> Self {
        Self { violation: Some(Violation::new("panic", message)), ..Self::default() }
    }
}

pub(super) struct World<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) sim: Simulation,
    server: SoftSim,
    random: Random,
    acceptor: Option<Acceptor>,
    pub(super) event_loops: Vec<EventLoop>,
    pub(super) rogues: Vec<(usize, Rogue)>,
    /// When woken runners run.
    turns: BTreeMap<Runner, Instant>,
    oracle: Oracle,
    pub(super) failure_counts: FailureCounts,
    trace: Option<Vec<Entry>>,
    /// Faults that took effect: on which host, and whether connections may end because of them.
    pub(super) struck: Vec<(u32, bool)>,
    /// Whether any runner ran since the descriptors were last checked.
    stirred: bool,
    idle_turns: u32,
    last_stir: (u64, Instant),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Runner {
    Acceptor,
    EventLoop(usize),
    Rogue(usize),
}

fn address(host: u32) -> IpAddr {
    IpAddr::from([10, 0, 0, host as u8 + 1])
}

/// Runs a scenario to its end, or to the first broken rule.
#[must_use]
pub fn run(scenario: &Scenario, keep_trace: bool) -> Outcome {
    let mut world = World::new(scenario, keep_trace);
    let violation = world.begin().and_then(|()| world.live()).and_then(|()| world.judge()).err();
    let bytes = world.all_ends().map(|end| end.app().bytes_read()).sum();
    let idle_faults = world.sim.remaining_faults().len();
    // Last: only when no program holds anything can something be left behind.
    let violation = violation.or_else(|| world.clear_up().err());
    let mut failure_counts = world.sim.failure_counts();
    failure_counts.add(&world.failure_counts);
    Outcome {
        violation,
        hash: world.sim.hash(),
        events: world.sim.events(),
        bytes,
        windows_ahead: world.oracle.windows_ahead(),
        failure_counts,
        idle_faults,
        trace: world.trace.unwrap_or_default(),
    }
}

fn program(scenario: &Scenario, now: Instant, random: &mut Random, place: usize, client: bool) -> App {
    let ScenarioConnection { client: ours, server: theirs, .. } = scenario.connections[place];
    // Both sides derive both streams, so that no channel beside the connection is needed.
    let stream = |client: bool| Stream(scenario.seed ^ (place as u64) << 32 ^ u64::from(client) << 48);
    let (ours, theirs) = if client { (ours, theirs) } else { (theirs, ours) };
    App::new(ours, stream(client), stream(!client), theirs.bytes, now, random.next())
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, keep_trace: bool) -> Self {
        let sim =
            Simulation::new(scenario.seed, scenario.device_kind, scenario.settings, scenario.plan.clone());
        let server = sim.host(&[address(SERVER)], scenario.limits);
        Self {
            scenario,
            sim,
            server,
            random: Random::new(scenario.seed ^ 0x77),
            acceptor: None,
            event_loops: Vec::new(),
            rogues: Vec::new(),
            turns: BTreeMap::new(),
            oracle: Oracle::default(),
            failure_counts: FailureCounts::default(),
            trace: keep_trace.then(Vec::new),
            struck: Vec::new(),
            stirred: true,
            idle_turns: 0,
            last_stir: (0, Instant::default()),
        }
    }

    fn begin(&mut self) -> Result<(), Violation> {
        let listening = SocketAddr::new(address(SERVER), PORT);
        if let Some(usage) = self.scenario.endpoints.server {
            if let Ok(mut event_loop) = EventLoop::new(&self.server, SERVER, usage) {
                event_loop.listen(listening, self.scenario.server);
                self.event_loops.push(event_loop);
            }
        } else {
            // Without a listener, for instance after a fault, all clients are refused.
            self.acceptor = Acceptor::open(&self.server, listening, self.scenario.server).ok();
        }
        for (place, connection) in self.scenario.connections.iter().enumerate() {
            let host = place as u32 + 1;
            // A client's device is an ordinary one, unless all are tight.
            let rogue = connection.rogue;
            let limits = if rogue.is_some() { Limits::default() } else { self.scenario.limits };
            let backend = self.sim.host(&[address(host)], limits);
            let begins = self.sim.now().after(connection.begins);
            match rogue {
                Some(rogue) if rogue.serves => {
                    // The victim dials from the server's host, which has no other clients.
                    let target = SocketAddr::new(address(host), PORT);
                    if let Ok(rogue) = Rogue::listen(&backend, target, rogue.deviation) {
                        self.rogues.push((place, rogue));
                    }
                    let (server, usage) = (self.server.clone(), self.scenario.endpoints.server);
                    self.dial(&server, (SERVER, place), target, begins, usage);
                }
                Some(rogue) => {
                    if let Ok(rogue) = Rogue::dial(&backend, listening, rogue.deviation) {
                        self.rogues.push((place, rogue));
                    }
                }
                None => {
                    self.dial(&backend, (host, place), listening, begins, self.scenario.endpoints.clients);
                }
            }
        }
        self.look()
    }

    fn dial(
        &mut self,
        backend: &SoftSim,
        (host, place): (u32, usize),
        peer: SocketAddr,
        at: Instant,
        usage: Option<Usage>,
    ) {
        let app = program(self.scenario, self.sim.now(), &mut self.random, place, true);
        let options = self.scenario.connections[place].options;
        let own = self.event_loops.iter_mut().find(|event_loop| usage.is_some() && event_loop.host() == host);
        if let Some(event_loop) = own {
            event_loop.dial(peer, options, at, place, app);
            return;
        }
        let usage = usage.unwrap_or_else(|| Usage::draw(&mut self.random));
        // Without an endpoint, say after a fault, there is no connection to blame a side for.
        if let Ok(mut event_loop) = EventLoop::new(backend, host, usage) {
            event_loop.dial(peer, options, at, place, app);
            self.event_loops.push(event_loop);
        }
    }

    pub(super) fn all_ends(&self) -> impl Iterator<Item = &End> {
        self.event_loops.iter().flat_map(EventLoop::ends)
    }

    fn live(&mut self) -> Result<(), Violation> {
        while !self.is_over() {
            self.wake();
            let now = self.sim.now();
            let next_turn = self.next_turn(now);
            let next_event = self.sim.deadline();
            match (next_turn, next_event) {
                (Some((at, runner)), event) if event.is_none_or(|event| at <= event) => {
                    self.sim.advance(at);
                    self.look()?;
                    self.turn(runner)?;
                }
                (_, Some(_)) => {
                    self.sim.step();
                }
                (None, None) => return Err(self.stuck("all sleep for ever")),
                (Some(_), None) => {}
            }
            self.look()?;
            // A fault may make every wait begin anew.
            let since = self.sim.last_fault().unwrap_or_default();
            if self.sim.now().since(since) > LIVENESS {
                return Err(self.stuck("nothing came to an end in time"));
            }
            if self.sim.events() > MOST_EVENTS {
                return Err(self.stuck("too many events"));
            }
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.event_loops.iter().all(EventLoop::is_over)
            && self.rogues.iter().all(|(_, rogue)| rogue.is_over())
            && self.turns.is_empty()
    }

    /// Gives every runner with a readable descriptor a turn, after a delay.
    fn wake(&mut self) {
        // Nothing else makes a descriptor readable, and to look at all of them costs system calls.
        if self.sim.has_woken() || std::mem::take(&mut self.stirred) {
            let now = self.sim.now();
            let acceptor =
                self.acceptor.as_ref().is_some_and(Acceptor::is_readable).then_some(Runner::Acceptor);
            let rogues = self.rogues.iter().enumerate().filter(|(_, (_, rogue))| rogue.is_readable());
            let killed = |event_loop: &EventLoop| self.sim.is_killed(event_loop.host());
            let event_loops = self.event_loops.iter().enumerate();
            let event_loops = event_loops.filter(|(_, event_loop)| {
                // A killed program gets a last turn, in which it is given up.
                event_loop.is_readable() || killed(event_loop) && !event_loop.is_over()
            });
            let woken: Vec<_> = rogues
                .map(|(place, _)| Runner::Rogue(place))
                .chain(event_loops.map(|(place, _)| Runner::EventLoop(place)))
                .chain(acceptor)
                .collect();
            for runner in woken {
                let delay = self.random.duration(self.scenario.sluggishness);
                // One that is woken again keeps its turn.
                self.turns.entry(runner).or_insert_with(|| now.after(delay));
            }
        }
    }

    fn next_turn(&mut self, now: Instant) -> Option<(Instant, Runner)> {
        let woken = self.turns.iter().map(|(runner, at)| (*at, *runner));
        let event_loops = self.event_loops.iter().enumerate();
        let event_loops = event_loops
            .filter_map(|(place, event_loop)| Some((event_loop.next_wake()?, Runner::EventLoop(place))));
        let rogues = self.rogues.iter().enumerate().filter(|(_, (_, rogue))| !rogue.is_over());
        let rogues = rogues.map(|(place, (_, rogue))| (rogue.next_wake(), Runner::Rogue(place)));
        let stalled = |(at, runner): (Instant, Runner)| {
            let host = match runner {
                Runner::Acceptor => SERVER,
                Runner::EventLoop(place) => self.event_loops[place].host(),
                Runner::Rogue(_) => return (at.max(now), runner),
            };
            (at.max(now).max(self.sim.stalled_until(host).unwrap_or_default()), runner)
        };
        // By time, then by runner: the same in every run of a seed.
        woken.chain(event_loops).chain(rogues).map(stalled).min()
    }

    fn turn(&mut self, runner: Runner) -> Result<(), Violation> {
        self.turns.remove(&runner);
        self.stirred = true;
        match runner {
            Runner::Acceptor => self.accept(),
            Runner::EventLoop(place) => self.run_event_loop(place)?,
            Runner::Rogue(place) => self.rogues[place].1.run(),
        }
        let stir = (self.sim.events(), self.sim.now());
        self.idle_turns =
            if std::mem::replace(&mut self.last_stir, stir) == stir { self.idle_turns + 1 } else { 0 };
        if self.idle_turns > MOST_TURNS {
            return Err(self.stuck("a program spins"));
        }
        Ok(())
    }

    fn run_event_loop(&mut self, place: usize) -> Result<(), Violation> {
        let event_loop = &mut self.event_loops[place];
        let host = event_loop.host();
        if self.sim.stalled_until(host).is_some_and(|until| until == self.sim.now()) {
            self.failure_counts.observe(FailureClass::SlowConsumer);
        }
        let (scenario, now) = (self.scenario, self.sim.now());
        let accepted = |random: &mut Random, place| program(scenario, now, random, place, false);
        self.failure_counts.inject(FailureClass::Scheduling);
        let lost = self.sim.is_killed(host)
            || match event_loop.run(&mut self.random, accepted) {
                Ok(true) => {
                    self.failure_counts.observe(FailureClass::Scheduling);
                    false
                }
                Ok(false) => false,
                Err(_) => true,
            };
        // Before `give_up`, which drops the connections.
        for (place, end) in event_loop.ends().iter().enumerate() {
            check_end(end, event_loop.connection(place))?;
        }
        // A time-out that the endpoint has forgotten would be late (mutant 53).
        if !lost && event_loop.oversleeps() {
            let what = format!("{event_loop:?} sleeps longer than its connections");
            return Err(Violation::new("timers", what));
        }
        if lost {
            event_loop.give_up();
        }
        Ok(())
    }

    fn accept(&mut self) {
        if self.sim.is_killed(SERVER) {
            self.acceptor = None;
            return;
        }
        while let Some((endpoint, id)) = self.acceptor.as_mut().and_then(Acceptor::accept) {
            let Some(IpAddr::V4(ip)) = endpoint.peer_addr(id).map(|peer| peer.ip()) else { continue };
            // The inverse of `address`, for the host of a client.
            let place = usize::from(ip.octets()[3]).saturating_sub(2);
            if place < self.scenario.connections.len() {
                let app = program(self.scenario, self.sim.now(), &mut self.random, place, false);
                let usage = Usage::draw(&mut self.random);
                let event_loop = EventLoop::accepted((endpoint, id), SERVER, usage, place, app);
                let eager = self.scenario.eager && self.scenario.connections[place].rogue.is_none();
                self.event_loops.extend(event_loop.map(|mut event_loop| {
                    if eager {
                        event_loop.begin();
                    }
                    event_loop
                }));
            }
        }
    }

    fn look(&mut self) -> Result<(), Violation> {
        let entries = self.sim.take_trace();
        if entries.is_empty() {
            return Ok(());
        }
        // First: what was read by now decides whether a window may be announced again.
        self.note_reads();
        let mut verdict = Ok(());
        for entry in &entries {
            if let EntryKind::Struck(injection) = &entry.what {
                self.struck.push((injection.host, injection.fault.may_end_connections()));
            }
            // After a violation, only faults and the trace are recorded.
            if verdict.is_ok() {
                let connections = &self.scenario.connections;
                let honest = |host| host == SERVER || connections[host as usize - 1].rogue.is_none();
                verdict = self.oracle.look(entry, honest);
            }
        }
        if let Some(trace) = &mut self.trace {
            trace.extend(entries);
        }
        verdict
    }

    fn note_reads(&mut self) {
        for end in self.event_loops.iter_mut().flat_map(EventLoop::ends_mut) {
            if let Some(pair) = end.pair() {
                self.oracle.has_read(pair, end.app().bytes_read());
                // A killed process tells its peers nothing; its kernel does.
                let alive = !self.sim.is_killed(end.host);
                if alive && matches!(end.ending(), Some(Ending { cause: EndCause::Failed(_), .. })) {
                    self.oracle.has_failed(pair);
                }
                if end.ending().is_some() {
                    end.forget_pair();
                }
            }
        }
    }

    fn clear_up(&mut self) -> Result<(), Violation> {
        self.event_loops.clear();
        self.rogues.clear();
        self.acceptor = None;
        // Late packets and time-waits.
        for _ in 0..10_000 {
            if !self.sim.step() {
                break;
            }
        }
        self.look()?;
        let fabric = self.sim.fabric();
        for host in 0..=self.scenario.connections.len() as u32 {
            let held = fabric.resources(address(host));
            if held != Resources::default() {
                return Err(Violation::new("resources", format!("host {host} still holds {held:?}")));
            }
        }
        Ok(())
    }
}
