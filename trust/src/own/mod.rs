//! The conformance suite against our own server and client, judged by the errors that our side
//! reports.
//!
//! A peer sees that a connection ended; our own side also reports why. Every case of
//! [`conformance::blackbox`], and the [`mod@cases`] that only our side can be shown, runs against a
//! server and a client of ours. [`table::TABLE`] has the error, variant and text, that our side
//! must end a connection with; one without a row must end in order. Every run also checks that
//!
//! * a client of our server from before, and a new one, get their answers;
//! * descriptors, device objects and registered memory return to their initial values, and never
//!   exceed a cap;
//! * all of this takes bounded time.

pub mod cases;
pub mod command;
pub mod deviations;
pub mod table;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rdma_conn::{Connect, Descriptors, Options, Stream};
use rdma_softsim::{Fabric, Limits, SoftSim};
use rdma_verbs::Verbs;
use suite::resources::ProcessResources;
use suite::{Case, Role};

use crate::Outcome;
use conformance::blackbox::builtin::{BuiltInClients, BuiltInServer, Connections, Ended, small};
use conformance::blackbox::context::{Context, Side};
use conformance::blackbox::run::{Plan, Runner};
use conformance::client::{Failure, RespClient};
use conformance::tester::Listener;

use deviations::Deviation;
use table::{Row, TABLE};

/// The roles of our side that a row is about.
#[allow(missing_docs)] // the names say it
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Roles {
    Server,
    Client,
    Both,
}

impl Roles {
    /// Returns whether the row is about this role.
    #[must_use]
    pub fn includes(self, role: Role) -> bool {
        match self {
            Self::Server => role == Role::Server,
            Self::Client => role == Role::Client,
            Self::Both => true,
        }
    }
}

/// The most bytes that our side may register in any case: enough for three dozen connections, and
/// far less than a hostile peer requests. Enforced where the backend can.
const CAP: u64 = 10 << 20;
/// Our time to notice a failure: a device repeats a request eight times, four seconds apart.
const BOUND: Duration = Duration::from_secs(60);
/// How long the suite, and clients beside the case, wait for anything.
const PATIENCE: Duration = Duration::from_secs(10);

/// The backend and the address that the cases run on.
pub struct Setting<B> {
    /// The backend of our side.
    pub ours: B,
    /// The backend of the suite's peers.
    pub theirs: B,
    /// Where our side listens; port 0 takes any.
    pub our_address: SocketAddr,
    /// Where the suite's peers listen; port 0 takes any.
    pub their_address: SocketAddr,
    deviations: &'static [Deviation],
    /// Returns the objects and the registered bytes of our side's device.
    device: Box<dyn Fn() -> (usize, u64) + Send + Sync>,
}

impl Setting<SoftSim> {
    /// An embedded fabric with a host for each side.
    #[must_use]
    pub fn softsim() -> Self {
        let (ours, theirs) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 66]));
        let fabric = Fabric::new();
        let limits = Limits { locked_memory: CAP, ..Limits::default() };
        Self {
            ours: fabric.host_with(&[ours], limits),
            theirs: fabric.host(&[theirs]),
            our_address: (ours, 0).into(),
            their_address: (theirs, 0).into(),
            deviations: &[],
            device: Box::new(move || {
                let held = fabric.resources(ours);
                let objects = held.event_channels
                    + held.identifiers
                    + held.domains
                    + held.regions
                    + held.completion_queues
                    + held.queue_pairs;
                (objects, held.registered_bytes)
            }),
        }
    }
}

impl Setting<Verbs> {
    /// A real device, with both sides in this process, whose descriptors and pinned memory count.
    #[must_use]
    pub fn verbs(verbs: Verbs, address: SocketAddr) -> Self {
        let address = SocketAddr::new(address.ip(), 0);
        Self {
            ours: verbs.clone(),
            theirs: verbs,
            our_address: address,
            their_address: address,
            deviations: deviations::OF_DEVICES,
            device: Box::new(|| (0, 0)),
        }
    }
}

impl<B> Setting<B> {
    fn resources(&self) -> Resources {
        let (objects, registered) = (self.device)();
        Resources { process: ProcessResources::now(), objects, registered }
    }
}

#[derive(Clone, Copy, Debug)]
struct Resources {
    process: ProcessResources,
    objects: usize,
    registered: u64,
}

impl Resources {
    fn exceed(self, other: Self) -> bool {
        self.process.exceeds(other.process)
            || self.objects > other.objects
            || self.registered > other.registered
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {} RDMA objects, {} bytes registered", self.process, self.objects, self.registered)
    }
}

/// All cases: one for each row of the table, and one for each case of the suite without a row.
#[must_use]
pub fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    suite_cases::<B>()
        .into_iter()
        .filter_map(|case| Some((case.role?, case)))
        .flat_map(|(role, case)| {
            let of_case = |row: &&Row| row.case == case.id && row.role.includes(role);
            let mut rows: Vec<Row> = TABLE.iter().filter(of_case).copied().collect();
            if rows.is_empty() {
                rows.push(Row::in_order(case.id));
            }
            rows.into_iter().map(move |row| {
                Case::new(case.id, case.intent, case.requirements, move |setting, _| {
                    try_case(setting, role, &row)
                })
                .of(role)
            })
        })
        .collect()
}

/// The cases of the suite for any implementation, and those for our own side.
#[must_use]
pub fn suite_cases<'a, B: Descriptors>() -> Vec<Case<Context<'a, B>>> {
    conformance::blackbox::cases().into_iter().chain(cases::cases()).collect()
}

fn try_case<B: Descriptors>(setting: &Setting<B>, role: Role, row: &Row) -> Outcome {
    let options = |options: Options| {
        let mut options = small(options);
        (row.options)(&mut options);
        options
    };
    let (server_options, client_options) = (options(Options::default()), options(Options::default()));
    let server = BuiltInServer::start(&setting.ours, setting.our_address, server_options)?;
    // Connected before resources are counted, because it stays.
    let mut bystander = connect(setting, &server, client_options)?;
    let before = setting.resources();
    let plan = Plan::harmful(PATIENCE);
    let run = |side| {
        let cases = suite_cases();
        let case = cases.iter().find(|case| case.role == Some(role) && case.id == row.case);
        let case = case.ok_or_else(|| Failure::wrong(format!("there is no case {}", row.case)))?;
        Ok::<_, Failure>(Runner::new(&setting.theirs, side, &plan).only(case))
    };
    let (result, ended) = match role {
        // The bystander stays open.
        Role::Server => (run(Side::Server(&server))?, all_ended(server.connections(), 1)?),
        Role::Client => {
            let listener = Listener::new(&setting.theirs, setting.their_address)?;
            let clients = BuiltInClients::new(setting.ours.clone(), client_options);
            (run(Side::Client(&listener, &clients))?, all_ended(&clients.connections, 0)?)
        }
    };
    if !result.verdict.is_pass() {
        return Err(Failure::wrong(format!("{}: {}; {}", result.verdict, result.reason, told(&ended))));
    }
    let told = row.judge(role, &ended, setting.deviations).map_err(Failure::wrong)?;
    // A peer ends its own connection at most (VR-SEC-004).
    ping(&mut bystander).map_err(by("the bystander"))?;
    // Whatever the peer did, the server accepts others.
    let mut newcomer = connect(setting, &server, client_options).map_err(by("a new connection"))?;
    newcomer.stream().close(PATIENCE).map_err(|error| by("a new connection")(error.into()))?;
    drop(newcomer);
    if let [Ended::InOrder] = all_ended(server.connections(), 1)?[..] {
    } else {
        return Err(Failure::wrong("a new connection did not end in order"));
    }
    // Nothing is left of a connection that has ended (VR-RES-001).
    let after = await_no_more_than(setting, before);
    if after.exceed(before) {
        return Err(Failure::wrong(format!("before: {before}; after: {after}")));
    }
    Ok(told)
}

/// Returns how connections ended, once no more than `open` of them are left.
fn all_ended(connections: &Connections, open: usize) -> Result<Vec<Ended>, Failure> {
    let deadline = Instant::now() + BOUND;
    while connections.open() > open {
        if Instant::now() >= deadline {
            let left = connections.open() - open;
            let told = format!("{left} connections of our side did not end within {BOUND:?}");
            return Err(Failure::wrong(told));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(connections.take_ended())
}

fn told(ended: &[Ended]) -> String {
    let mut told: Vec<String> = ended.iter().map(ToString::to_string).collect();
    // In cases of many connections, most end alike.
    told.dedup();
    format!("connections of our side ended {}", told.join("; "))
}

fn by(whom: &'static str) -> impl Fn(Failure) -> Failure {
    move |failure| Failure::wrong(format!("{whom}: {failure}"))
}

fn connect<B: Descriptors>(
    setting: &Setting<B>,
    server: &BuiltInServer,
    options: Options,
) -> Result<RespClient<Stream<B>>, Failure> {
    use conformance::blackbox::target::TargetServer as _;
    let how = Connect::default().timeout(PATIENCE).options(options);
    let mut stream = Stream::connect_with(&setting.ours, server.address(), &how)?;
    stream.set_read_timeout(Some(PATIENCE));
    stream.set_write_timeout(Some(PATIENCE));
    let mut client = RespClient::new(stream);
    ping(&mut client)?;
    Ok(client)
}

fn ping<B: Descriptors>(client: &mut RespClient<Stream<B>>) -> Result<(), Failure> {
    client.send(&[b"PING"])?;
    client.expect("PONG")
}

/// Waits until our side holds no more than `before`: threads end a little later than connections.
fn await_no_more_than<B>(setting: &Setting<B>, before: Resources) -> Resources {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = setting.resources();
        if !now.exceed(before) || Instant::now() >= deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
