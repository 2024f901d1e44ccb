//! The scenario of a run: everything that is drawn from its seed before it begins.

use std::time::Duration;

use rdma_backend::RnrTimer;
use rdma_conn::{Keepalive, Options, Role};
use rdma_proto::wire::FeatureSet;
use rdma_softsim::{
    DeviceKind, Fault, FaultPlan, Injection, Limits, Parameters, Random, SimulationSettings, Site, When,
};

use super::app::{AppEnd, Workload};
use super::deviation::Deviation;
use super::event_loop::Usage;

/// A run, as data.
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Debug)]
pub struct Scenario {
    pub seed: u64,
    pub device_kind: DeviceKind,
    pub settings: SimulationSettings,
    pub server: Options,
    /// The limits of the server's device, and of the clients' devices.
    pub limits: Limits,
    /// Whether the limits are so tight that connections may fail because of them.
    pub tight: bool,
    pub connections: Vec<ScenarioConnection>,
    /// How long a woken runner may wait until it runs.
    pub sluggishness: Duration,
    /// Which sides have one endpoint for all their connections.
    pub endpoints: Endpoints,
    /// Whether programs of servers with an endpoint for each connection begin at the acceptance.
    pub eager: bool,
    pub plan: FaultPlan,
}

/// Hosts that have an endpoint, and how they use it.
#[allow(missing_docs)] // plain fields
#[derive(Clone, Copy, Debug, Default)]
pub struct Endpoints {
    pub server: Option<Usage>,
    pub clients: Option<Usage>,
}

/// One connection. The host of its client is its index in the list, plus one.
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Debug)]
pub struct ScenarioConnection {
    pub begins: Duration,
    pub options: Options,
    pub client: Workload,
    pub server: Workload,
    /// The side that breaks the rules, if one does.
    pub rogue: Option<Rogue>,
}

/// The side that breaks a rule, and the rule.
#[allow(missing_docs)] // the other is plain
#[derive(Clone, Copy, Debug)]
pub struct Rogue {
    /// Whether it is the server, not the client.
    pub serves: bool,
    pub deviation: Deviation,
}

const fn micros(count: u64) -> Duration {
    Duration::from_micros(count)
}

impl Scenario {
    /// Draws the run of `seed` on devices of a kind.
    #[must_use]
    pub fn draw(seed: u64, device_kind: DeviceKind) -> Self {
        // Not the same numbers as the simulation's, which begins with the seed itself.
        let mut random = Random::new(seed ^ 0x51a7_0000_0000_0000);
        let settings = settings(&mut random);
        let limits = Limits {
            max_queue_depth: random.pick(&[2, 4, 16, 1024, 1 << 14]),
            max_inline: random.pick(&[0, 16, 32, 256]),
            ..Limits::default()
        };
        let tight = random.chance(1, 16);
        let (locked_memory, max_queue_pairs) = match tight {
            true => (random.within(1000..=100_000), random.within(1..=3) as u32),
            false => (limits.locked_memory, limits.max_queue_pairs),
        };
        let limits = Limits { locked_memory, max_queue_pairs, ..limits };
        let server = options(&mut random, Role::Server);
        let count = random.pick(&[1, 1, 1, 1, 2, 2, 3]);
        let connections: Vec<_> =
            (0..count).map(|_| ScenarioConnection::draw(&mut random, &server)).collect();
        let mut this = Self {
            seed,
            device_kind,
            settings,
            server,
            limits,
            tight,
            connections,
            sluggishness: random.pick(&[Duration::ZERO, micros(1), micros(30), micros(500)]),
            endpoints: Endpoints::default(),
            eager: false,
            plan: FaultPlan::new(),
        };
        if random.chance(2, 3) {
            // A fault that ends connections would hide what a rogue does.
            let harmless = this.connections.iter().any(|connection| connection.rogue.is_some());
            this.plan = plan(&mut random, count, harmless);
        }
        // Each by a generator of its own, so that a further choice changes no other.
        this.corners(&mut Random::new(seed ^ 0xc0_4e45_0000_0000));
        this.faces(&mut Random::new(seed ^ 0xface_0000_0000));
        this.windows_ahead(&mut Random::new(seed ^ 0xaead_0000_0000));
        this.trespassers(&mut Random::new(seed ^ 0x7e55_0000_0000));
        this.processes(&mut Random::new(seed ^ 0xf04c_0000_0000));
        this.agree();
        this
    }

    /// Draws settings that independent draws hardly ever combine, and where defects hide.
    fn corners(&mut self, random: &mut Random) {
        if random.chance(1, 8) {
            // One side is silent, without keepalives: a side that misses a wake-up sleeps on.
            self.server.protocol.keepalive = Some(Keepalive::NONE);
            for connection in &mut self.connections {
                connection.options.protocol.keepalive = Some(Keepalive::NONE);
                let silent =
                    if random.chance(3, 4) { &mut connection.server } else { &mut connection.client };
                silent.says_nothing();
            }
        }
        if random.chance(1, 8) {
            // Long queues of small items, and programs that are late.
            self.sluggishness = micros(500);
            self.settings.cm_jitter = Duration::ZERO;
            self.limits.max_queue_depth = self.limits.max_queue_depth.max(1024);
            deepen(&mut self.server);
            for connection in self.connections.iter_mut().filter(|connection| connection.rogue.is_none()) {
                deepen(&mut connection.options);
                connection.client.says_little_at_once();
                connection.server.says_little_at_once();
            }
        }
    }

    /// Draws the endpoints, and rogues that never begin.
    fn faces(&mut self, random: &mut Random) {
        let tight = self.tight;
        let usage = |random: &mut Random| Usage {
            edges: random.chance(1, 2),
            abandons: random.chance(1, 4),
            limits: match tight && random.chance(1, 2) {
                true => rdma_conn::Limits::NONE
                    .connections(random.within(1..=3) as usize)
                    .registered_bytes(random.within(1000..=100_000)),
                false => rdma_conn::Limits::default(),
            },
        };
        self.endpoints.server = random.chance(1, 3).then(|| usage(random));
        self.endpoints.clients = random.chance(1, 4).then(|| usage(random));
        for connection in &mut self.connections {
            if let Some(rogue) =
                connection.rogue.as_mut().filter(|rogue| !rogue.serves && random.chance(1, 8))
            {
                rogue.deviation = Deviation::NeverReady;
                // The limit of the handshake must end its wait, and not the program.
                connection.server.waits_for_ever();
            }
        }
    }

    /// Draws the sides that want windows registered ahead: in a third of the runs some do (VM-001).
    fn windows_ahead(&mut self, random: &mut Random) {
        if !random.chance(1, 3) {
            return;
        }
        if random.chance(3, 4) {
            self.server.protocol.features = FeatureSet::MULTI_BUFFER;
        }
        for connection in &mut self.connections {
            match &mut connection.rogue {
                None if random.chance(3, 4) => {
                    let protocol = &mut connection.options.protocol;
                    // A client that does not ask is offered nothing (VM-001).
                    (protocol.features, protocol.negotiate) = (FeatureSet::MULTI_BUFFER, true);
                }
                Some(Rogue { serves: false, deviation }) if random.chance(1, 2) => {
                    *deviation = Deviation::WindowsWithoutEnd;
                }
                _ => {}
            }
        }
    }

    /// Draws rogues that return to earlier windows, of victims that expect enough data for memory
    /// of their own.
    fn trespassers(&mut self, random: &mut Random) {
        for connection in &mut self.connections {
            if let Some(rogue) = &mut connection.rogue
                && !matches!(rogue.deviation, Deviation::NeverReady | Deviation::WindowsWithoutEnd)
                && random.chance(1, 6)
            {
                rogue.deviation = Deviation::Trespass;
                let (victim, rogue) = match rogue.serves {
                    true => (&connection.options, &mut connection.server),
                    false => (&self.server, &mut connection.client),
                };
                rogue.says(8 * u64::from(victim.protocol.window));
            }
        }
    }

    /// Draws forked processes, whose children hold all descriptors; programs of servers that begin
    /// early; and devices that do not report whose requests they have flushed.
    fn processes(&mut self, random: &mut Random) {
        self.settings.held_descriptors = random.chance(1, 3);
        self.settings.unnamed_flushes = random.chance(1, 4);
        self.eager = random.chance(1, 3);
    }

    /// Adapts choices to each other, so that a run stays within the rules.
    fn agree(&mut self) {
        // A device may take fewer receives than the options ask for.
        let deepest = u16::try_from(self.limits.max_queue_depth).unwrap_or(u16::MAX);
        let server_receives = self.server.receives.min(deepest);
        for connection in &mut self.connections {
            if self.settings.accept_rnr_retry.is_some() {
                // A peer that cannot wait relies on the receives that it was promised.
                let protocol = &mut connection.options.protocol;
                protocol.peer_receives = protocol.peer_receives.min(server_receives).max(2);
            }
        }
        if self.settings.accept_rnr_retry.is_some() && server_receives < 2 {
            self.settings.accept_rnr_retry = None;
        }
        if self.settings.accept_rnr_retry.is_some() {
            // One receive that is not ready would end the connection.
            self.plan.retain(|injection| !matches!(injection.fault, Fault::NotReady { .. }));
        }
        if self.plan.iter().any(|injection| injection.fault.may_end_connections()) {
            // Without keepalives no side would learn of an end without a disconnect.
            let keepalive = &mut self.server.protocol.keepalive;
            keepalive.get_or_insert(Keepalive::NONE).every.get_or_insert(Duration::from_secs(3));
            for connection in &mut self.connections {
                let keepalive = &mut connection.options.protocol.keepalive;
                keepalive.get_or_insert(Keepalive::NONE).probe.get_or_insert(Duration::from_secs(10));
            }
        }
    }
}

fn settings(random: &mut Random) -> SimulationSettings {
    let latency = micros(random.pick(&[0, 1, 5, 50, 1000]));
    SimulationSettings {
        parameters: Parameters { latency, timewait: micros(500), ..Parameters::default() },
        jitter: random.pick(&[Duration::ZERO, latency, micros(20)]),
        cm_jitter: random.pick(&[Duration::ZERO, micros(100), micros(3000)]),
        pauses: random.pick(&[0, 8, 64, 128]),
        pause: random.pick(&[latency, latency * 3, micros(50)]),
        accept_rnr_retry: random.pick(&[None, None, Some(0), Some(1)]),
        ..SimulationSettings::default()
    }
}

fn options(random: &mut Random, role: Role) -> Options {
    let usual = Options::default();
    let often = random.pick(&[None, Some(micros(5_000)), Some(micros(50_000)), Some(Duration::from_secs(3))]);
    usual
        .protocol(
            usual
                .protocol
                // Small and odd, so that ends of windows, buffers and queues come often.
                .window(random.pick(&[1, 2, 3, 5, 8, 16, 64, 100, 256, 1000, 4096]))
                .windows(random.pick(&[1, 2, 2]))
                .send_buffer(random.pick(&[1, 2, 3, 7, 16, 64, 100, 512, 4096, 8192]))
                .send_depth(random.pick(&[1, 2, 3, 4, 5, 8, 16, 64]))
                .peer_receives(random.pick(&[2, 3, 4, 5, 8, 16, 64]))
                // The longest window that a side may draw.
                .window_limit(4096)
                .negotiate(random.chance(1, 4))
                .keepalive(Some(match role {
                    Role::Server => Keepalive::NONE.every(often),
                    Role::Client => Keepalive::NONE.probe(often),
                }))
                .stall_limit(random.pick(&[None, None, Some(Duration::from_secs(100))])),
        )
        .receives(random.pick(&[1, 2, 3, 4, 8, 16, 64]))
        .inline(random.pick(&[0, 16, 32, 64]))
        .rnr_timer(random.pick(&[RnrTimer::MICROS_640, RnrTimer::from_code(8).unwrap_or(RnrTimer::SLOWEST)]))
        .keep_memory(random.pick(&[usual.keep_memory, micros(1_000), micros(20_000)]))
}

fn deepen(options: &mut Options) {
    options.receives = 64;
    let protocol = &mut options.protocol;
    (protocol.window, protocol.send_buffer) = (4096, 4096);
    (protocol.send_depth, protocol.peer_receives) = (64, 64);
}

impl ScenarioConnection {
    fn draw(random: &mut Random, server: &Options) -> Self {
        let mut options = options(random, Role::Client);
        let rogue = random.chance(1, 6).then(|| {
            let serves = random.chance(1, 3);
            Rogue { serves, deviation: Deviation::draw(random, serves) }
        });
        if let Some(rogue) = rogue {
            rogue.deviation.prepare(&mut options.protocol);
        }
        let mut client = Workload::draw(random, &options.protocol, &server.protocol);
        let mut peer = Workload::draw(random, &server.protocol, &options.protocol);
        // One side must end the connection. If it waits for all, its peer must let it finish.
        let read = AppEnd::Close { reads_first: true };
        match random.below(8) {
            0 => (client.end, peer.end) = (AppEnd::Close { reads_first: false }, AppEnd::Wait),
            1 => (client.end, peer.end) = (AppEnd::Wait, AppEnd::Close { reads_first: false }),
            2 => client.end = AppEnd::Drop { after: random.below(client.bytes + 1) },
            3 => peer.end = AppEnd::Drop { after: random.below(peer.bytes + 1) },
            4 => (client.end, peer.end) = (AppEnd::Wait, read),
            5 => (client.end, peer.end) = (read, read),
            _ => (client.end, peer.end) = (read, AppEnd::Wait),
        }
        if rogue.is_some() {
            // A program does not wait for a rogue's orderly end: `faces_rogue` has a limit.
            (client.end, peer.end) = (AppEnd::Wait, AppEnd::Wait);
            client.faces_rogue();
            peer.faces_rogue();
        }
        Self { begins: micros(random.pick(&[0, 0, 100, 5000])), options, client, server: peer, rogue }
    }
}

/// Draws faults: first which kinds this run has, then how many of each.
fn plan(random: &mut Random, clients: u32, harmless: bool) -> FaultPlan {
    let mut plan = FaultPlan::new();
    // 24 kinds of their own in `fault`, and one for the rest.
    for kind in 0..25 {
        if !random.chance(1, 6) {
            continue;
        }
        loop {
            let fault = fault(random, kind);
            if !(harmless && fault.may_end_connections()) {
                let (when, host) = (when(random, fault), random.below(u64::from(clients) + 1) as u32);
                plan.push(Injection { when, host, fault });
            }
            if random.chance(2, 3) || plan.len() > 12 {
                break;
            }
        }
    }
    plan
}

fn fault(random: &mut Random, kind: u64) -> Fault {
    let micros = random.pick(&[10, 200, 5_000, 100_000, 300_000]);
    match kind {
        0 => Fault::NotReady { times: random.within(1..=4) as u8 },
        1 => Fault::LinkDown { micros },
        2 => Fault::LinkDown { micros: 2_000_000 },
        3 => Fault::KeyRefused,
        4 => Fault::ReceiveGone,
        5 => Fault::SourceGone,
        6 => Fault::QueueLost,
        7 => Fault::QueueFull,
        8 => Fault::Hold { micros },
        9 => Fault::Spurious,
        10 => Fault::Lose,
        11 => Fault::LoseAnswer,
        12 => Fault::AddressError,
        13 => Fault::RouteError,
        14 => Fault::Unreachable,
        15 => Fault::Rejected { reason: random.pick(&[4, 8, 28]) },
        16 => Fault::ConnectError,
        17 => Fault::SlowReady { micros },
        18 => Fault::DeviceRemoval,
        19 => Fault::AddressChange,
        20 => Fault::PairFatal,
        21 => Fault::Exhausted,
        22 => Fault::DeviceFatal,
        23 => Fault::RequestRefused,
        _ => random.pick(&[Fault::Stall { micros }, Fault::Stall { micros }, Fault::Kill]),
    }
}

fn when(random: &mut Random, fault: Fault) -> When {
    let many = random.pick(&[4, 30, 200, 1000]);
    let site = match fault {
        Fault::NotReady { .. }
        | Fault::KeyRefused
        | Fault::RequestRefused
        | Fault::ReceiveGone
        | Fault::SourceGone
        | Fault::Lose => Site::Arrive,
        Fault::QueueLost | Fault::Hold { .. } => Site::Report,
        Fault::QueueFull => Site::Post,
        Fault::LoseAnswer => Site::Answer,
        Fault::Exhausted => return When::Pass(Site::Create, random.below(24) as u32),
        Fault::AddressError | Fault::RouteError => return When::Pass(Site::Resolve, random.below(3) as u32),
        Fault::Unreachable | Fault::Rejected { .. } | Fault::ConnectError | Fault::SlowReady { .. } => {
            return When::Pass(Site::Packet, random.below(4) as u32);
        }
        _ => return When::Event(random.below(many)),
    };
    if random.chance(1, 2) {
        When::Event(random.below(many))
    } else {
        When::Pass(site, random.below(many) as u32)
    }
}
