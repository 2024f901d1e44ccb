//! Right implementations under the conformance suite. None may fail for anything that is allowed.
//!
//! A verdict on other people's software needs stricter tests than our own side. So the suite meets
//! sides that are right in other ways: see [`Who`], windows of any length, devices of every kind,
//! and latency. `UNDECIDED` lists cases that decide nothing for some windows; others must pass.

pub mod command;
mod example;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use rdma_conn::Options;
use rdma_softsim::{DeviceKind, Fabric};
use suite::Verdict;

use conformance::blackbox::builtin::{BuiltInClients, BuiltInServer, WINDOW, with_window};
use conformance::blackbox::context::Side;
use conformance::blackbox::results::CaseResult;
use conformance::blackbox::run::{Plan, Runner};
use conformance::client::Failure;
use conformance::requirements::Role;
use conformance::tester::Listener;
use intercept::mistakes::{self, Variant};

use example::Example;

/// How long a right implementation may take for anything: more than a busy machine needs.
const PATIENCE: Duration = Duration::from_secs(20);

/// Lengths of windows where something could go wrong: short, odd, and where a number gains a digit.
pub const WINDOWS: [u32; 12] =
    [1, 17, 64, 999, 1000, 1001, 4096, 10_000, 65_536, 100_000, 1_000_000, 1 << 20];

/// The kind of right implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Who {
    /// Our own side.
    Ours,
    /// Our own side, ending connections at once where that is allowed.
    EndsAtOnce,
    /// Our own side, ending connections at a keepalive with an immediate.
    EndsAtKeepalive,
    /// Our own client, asking for features repeatedly.
    AsksAgain,
    /// Our own client, sending requests before the replies arrive.
    Pipelines,
    /// The example client in C (docs/adopt/client.c), over our own side.
    Example,
}

impl Who {
    const fn variant(self) -> Option<Variant> {
        match self {
            Self::EndsAtOnce => Some(Variant::EndsAtOnce),
            Self::EndsAtKeepalive => Some(Variant::EndsAtKeepalive),
            Self::AsksAgain => Some(Variant::AsksAgain),
            Self::Ours | Self::Pipelines | Self::Example => None,
        }
    }

    /// Returns whether this implementation exists for the role.
    #[must_use]
    pub fn plays(self, role: Role) -> bool {
        role == Role::Client || !matches!(self, Self::AsksAgain | Self::Pipelines | Self::Example)
    }
}

/// A right implementation, and its environment.
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    pub who: Who,
    pub window: u32,
    /// The kind of its device and of the suite's.
    pub kind: DeviceKind,
    /// How long a message travels, one way.
    pub latency: Duration,
    pub seed: u64,
}

impl Right {
    /// Our own side with its defaults.
    #[must_use]
    pub const fn ours() -> Self {
        let (kind, latency) = (DeviceKind::Ibta, Duration::ZERO);
        Self { who: Who::Ours, window: WINDOW, kind, latency, seed: 0 }
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, window, kind, latency, seed } = self;
        write!(f, "{who:?}, windows of {window}, {}, {latency:?}, seed {seed}", kind.name())
    }
}

/// Cases that decide nothing for some windows: the shortest and the longest that they are for.
const UNDECIDED: &[(&str, u32, u32)] = &[
    // It is about the length.
    ("mem.length", 64 << 10, 16 << 20),
    // They need room for one command, or for several.
    ("mem.length-stays", 256, u32::MAX),
    ("mem.not-before-full", 256, u32::MAX),
    ("xfer.around-the-window", 256, u32::MAX),
    ("xfer.many-writes", 2048, u32::MAX),
    ("xfer.empty-write", 2048, u32::MAX),
    ("xfer.in-arrears", 2048, u32::MAX),
    ("xfer.not-before-told", 256, u32::MAX),
    ("xfer.never-told", 256, u32::MAX),
    ("xfer.overwritten", 2048, u32::MAX),
    // With short windows, our client stores no long value.
    ("xfer.send-memory", 32 << 10, u32::MAX),
    // With short windows, registrations prove all the time that notifications were handled.
    ("flow.unhandled", 32 << 10, u32::MAX),
    ("flow.room-to-ask", 32 << 10, u32::MAX),
    // It may take longer than the suite serves a client.
    ("close.clean", 999, u32::MAX),
    // It reaches four bytes before the end of the window.
    ("sec.write-outside", 4, u32::MAX),
    ("sec.write-immediate-outside", 4, u32::MAX),
];

/// Cases in which a target takes more than 100 kB: each of its windows costs a message and a wait.
const LONG: &[(&str, u32)] = &[
    ("xfer.many-windows", 4096),
    ("xfer.send-memory", 32 << 10),
    ("xfer.lengths", 999),
    ("xfer.kept", 999),
    ("flow.crossing", 999),
    ("close.in-a-reply", 999),
    ("close.vanishes-in-a-reply", 999),
    ("res.never-drains", 999),
    ("res.long-replies", 4096),
    ("xfer.pipeline", 999),
    ("mem.window-of-1-mib", 4096),
    ("mem.window-of-16-mib", 999),
    ("mem.window-of-4096", 999),
    ("mem.window-of-65535", 999),
    ("mem.unaligned", 999),
    ("mem.same-again", 999),
    ("mem.other-place", 999),
    ("mem.other-length", 999),
    ("mem.landing", 999),
    ("res.nothing-left", 64),
    ("res.nothing-left-of-the-vanished", 64),
];

/// Cases about what a client counts: not the questions of one that asks repeatedly.
const COUNTED: [&str; 2] = ["flow.unhandled", "flow.room-to-ask"];

/// Returns whether a case is tried with these windows.
#[must_use]
pub fn is_tried(right: &Right, role: Role, case: &str) -> bool {
    // A server receives the suite's data through its windows; a client chooses what it requests.
    match role {
        Role::Server => LONG.iter().all(|(long, least)| *long != case || right.window >= *least),
        // The client in C requests half a megabyte each time.
        Role::Client if right.who == Who::AsksAgain && COUNTED.contains(&case) => false,
        // It reads the long value back.
        Role::Client if right.who == Who::Example && case == "xfer.send-memory" => right.window >= 32 << 10,
        Role::Client => right.who != Who::Example || right.window >= 17,
    }
}

/// Returns whether a verdict accuses nothing, and decides where it can.
#[must_use]
pub fn is_right(right: &Right, case: &str, verdict: Verdict) -> bool {
    let decides =
        UNDECIDED.iter().all(|(one, least, most)| *one != case || (*least..=*most).contains(&right.window));
    match verdict {
        Verdict::Pass | Verdict::PassLenient => true,
        // It may report what is true of its subject.
        Verdict::Fail => !decides && case == "mem.length",
        Verdict::Inconclusive => !decides,
        // A client need not ask for features.
        Verdict::NotApplicable => matches!(right.who, Who::Example),
        _ => false,
    }
}

/// Runs one case against a right implementation.
///
/// # Errors
/// It cannot be set up.
pub fn judge(right: &Right, role: Role, id: &str, example: Option<&PathBuf>) -> Result<CaseResult, Failure> {
    let fabric = Fabric::new();
    fabric.seed_faults(right.seed);
    fabric.set_latency(right.latency);
    // After the seed, from which a kind draws its choices.
    fabric.set_device_kind(right.kind);
    let (theirs, ours) =
        (SocketAddr::from(([192, 0, 2, 1], 6379)), SocketAddr::from(([192, 0, 2, 66], 6379)));
    let target = mistakes::variant(fabric.host(&[theirs.ip()]), right.who.variant());
    let backend = fabric.host(&[ours.ip()]);
    let plan = Plan::harmful(PATIENCE);
    let judged = |side| {
        let cases = conformance::blackbox::cases();
        let case = cases.iter().find(|one| one.role == Some(role) && one.id == id);
        let case = case.ok_or_else(|| Failure::wrong(format!("there is no case {id}")))?;
        Ok(Runner::new(&backend, side, &plan).only(case))
    };
    let options = |options| {
        let mut options = with_window(options, right.window);
        // Its own limits are not part of the trial.
        options.protocol.stall_limit = Some(PATIENCE);
        options
    };
    if role == Role::Server {
        let server = BuiltInServer::start(&target, theirs, options(Options::default()))?;
        return judged(Side::Server(&server));
    }
    let listener = Listener::new(&backend, ours)?;
    let options = options(Options::default());
    match (right.who, example) {
        (Who::Example, Some(program)) => {
            judged(Side::Client(&listener, &Example { backend: target, options, program: program.clone() }))
        }
        (Who::Example, None) => Err(Failure::wrong("the example client is not built")),
        _ => {
            let mut clients = BuiltInClients::new(target, options);
            clients.pipelines = right.who == Who::Pipelines;
            judged(Side::Client(&listener, &clients))
        }
    }
}
