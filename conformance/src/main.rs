//! `valkey-rdma-conformance`: is an implementation of Valkey over RDMA right?
//!
//! Without arguments: the smoke suite, client and server in this process, over the embedded RDMA fabric.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use comfy_table::{Cell, ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rdma_conn::{Connect, Descriptors, Listener, Options};
use rdma_softsim::Fabric;
use rdma_verbs::Verbs;

use conformance::blackbox::command::{self, Who};
use conformance::blackbox::own;
use conformance::exit::{self, DONE, FAILED, NO_ENVIRONMENT, NOTHING, USAGE};
use conformance::hostile::{self, Setting};
use conformance::smoke::{self, Peer, Scale};
use conformance::suite::{self, Case, Report, Verdict};
use conformance::trace::{Limits, Recorded, Recorder};
use conformance::{crowd, explore, kv, outage, reqs, semantics, sim, trace, vectors, wrong};

#[derive(Parser)]
#[command(
    name = "valkey-rdma-conformance",
    version,
    about = "Is an implementation of Valkey over RDMA right?",
    args_conflicts_with_subcommands = true
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Where the main job, which is done without a command, writes its reports.
    #[arg(long, default_value = "target/conformance")]
    out: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// Tests any server or client: what it does on the wire, rule by rule.
    Run {
        #[command(subcommand)]
        who: Who,
    },
    /// Lists the cases of `run`.
    List(command::List),
    /// Runs again what failed in an earlier run, and says whether it is fixed.
    Replay(command::Replay),
    /// Makes reports from the results of runs.
    Report(command::Report),
    /// Says what this machine has for runs on a device, and what is missing.
    Doctor(command::Doctor),
    /// Does what a client under test should do, with this library's client, over a real RDMA device (ADDRESS:PORT).
    Client { target: SocketAddr },
    /// Does what clients do against a server, and checks every byte.
    Smoke(Smoke),
    /// Breaks the protocol's rules one at a time, against a server and a client of this library.
    Hostile(Hostile),
    /// Takes the server, or the way to it, away in the middle of a reply.
    Outage(Outage),
    /// The requirements of the protocol: lists them, and what shows each.
    #[command(subcommand)]
    Reqs(reqs::Command),
    /// Runs clients and a server through whole lives in virtual time, and breaks everything that can break.
    Sim(sim::runner::Options),
    /// The test vectors, run against any implementation.
    #[command(subcommand)]
    Vectors(vectors::Command),
    /// Takes two connection machines through every schedule there is, in small settings.
    Explore(explore::Arguments),
    /// What many connections cost a server with one thread: memory, time, processor.
    Crowd(crowd::Arguments),
    /// Runs every case against targets that are wrong, and says which mistake fails it.
    Verdicts(wrong::command::Verdicts),
    /// Shows, rule by rule, that RDMA here is what the layers above take it for.
    Semantics(Semantics),
    /// Recordings of connections: shows them as timelines, turns them into packets for Wireshark.
    #[command(subcommand)]
    Trace(trace::Command),
}

#[derive(Args)]
struct Semantics {
    /// Run on the real RDMA device with this address, both ends in this process, instead of the embedded fabric
    /// (ADDRESS:PORT; port 0 takes any). Repeat it for further addresses; most cases use the first.
    #[arg(long)]
    listen: Vec<SocketAddr>,
    /// Expect the deviations of this provider, whatever the device is called.
    #[arg(long, requires = "listen")]
    provider: Option<String>,
    /// Only cases whose id contains this.
    #[arg(long, default_value = "")]
    select: String,
}

#[derive(Args)]
struct Outage {
    /// The server, over a real RDMA device (HOST:PORT).
    #[arg(long)]
    target: String,
    /// Shell command that does it, for instance `kill -9 PID`.
    #[arg(long)]
    command: String,
    /// Seconds within which the client must report it.
    #[arg(long, default_value_t = 60)]
    within: u64,
}

#[derive(Args)]
struct Hostile {
    /// Run over a real RDMA device that has this address (any port), both sides in this process, instead of the embedded
    /// fabric.
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Only cases whose id contains this.
    #[arg(long, default_value = "")]
    select: String,
}

#[derive(Args)]
struct Smoke {
    /// Run against this server over a real RDMA device (HOST:PORT), instead of an own one.
    #[arg(long, conflicts_with = "listen")]
    target: Option<String>,
    /// Start an own server on this address of a real RDMA device and run against it (ADDRESS:PORT; port 0 takes any).
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Only cases whose id contains this.
    #[arg(long)]
    select: Option<String>,
    /// Keys to store and read back.
    #[arg(long, default_value_t = 6000)]
    keys: u64,
    /// Connections to do it on.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    connections: u16,
    /// Commands in the pipeline.
    #[arg(long, default_value_t = 10_000)]
    pipeline: usize,
    /// Seconds to stay idle: at least 4, for a server has 3 until its keepalive.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u64).range(4..))]
    idle: u64,
    /// Record the connections into this file, for `trace show` and `trace pcap`.
    #[arg(long)]
    record: Option<PathBuf>,
}

impl Default for Smoke {
    fn default() -> Self {
        let Ok(Cli { command: Some(Command::Smoke(smoke)), .. }) = Cli::try_parse_from(["", "smoke"]) else {
            unreachable!("every argument of `smoke` has a default")
        };
        smoke
    }
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _to_a_closed_terminal = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { DONE });
        }
    };
    exit::guarded(|| perform(cli))
}

fn perform(Cli { command, out }: Cli) -> ExitCode {
    let Some(command) = command else { return main_job(&out) };
    match command {
        Command::Run { who } => command::run(&who, &std::env::args().skip(1).collect::<Vec<_>>()),
        Command::List(list) => command::list(&list),
        Command::Replay(replay) => command::replay(&replay),
        Command::Report(report) => command::make_report(&report),
        Command::Doctor(doctor) => command::doctor(&doctor),
        Command::Client { target } => run_client(target),
        Command::Smoke(smoke) => run_smoke(&smoke),
        Command::Hostile(hostile) => run_hostile(&hostile),
        Command::Outage(outage) => run_outage(outage),
        Command::Reqs(command) => reqs::run(command),
        Command::Sim(options) => sim::runner::main(&options),
        Command::Vectors(command) => vectors::run(command),
        Command::Explore(arguments) => explore::run(&arguments),
        Command::Crowd(arguments) => crowd::run(&arguments),
        Command::Verdicts(verdicts) => wrong::command::run(&verdicts),
        Command::Semantics(semantics) => run_semantics(semantics),
        Command::Trace(command) => trace::run(command),
    }
}

/// What the README promises: the whole suite on the embedded fabric, and a share of the smoke suite.
fn main_job(out: &Path) -> ExitCode {
    let smoke = Smoke { keys: 1000, pipeline: 5000, idle: 4, ..Smoke::default() };
    let (smoke, whole) = (run_smoke(&smoke), command::whole(out));
    if smoke == ExitCode::SUCCESS { whole } else { smoke }
}

fn run_client(target: SocketAddr) -> ExitCode {
    let verbs = match Verbs::load() {
        Ok(verbs) => verbs,
        Err(error) => return cannot_run(&error.to_string()),
    };
    match own::run_client(&verbs, target, Duration::from_secs(5), Options::client()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(FAILED)
        }
    }
}

fn run_hostile(Hostile { listen, select }: &Hostile) -> ExitCode {
    let Some(address) = listen else {
        return run("hostile peers, embedded fabric", &hostile::cases(), &Setting::softsim(), select);
    };
    match Verbs::load() {
        Ok(verbs) => {
            run("hostile peers, real verbs", &hostile::cases(), &Setting::verbs(verbs, *address), select)
        }
        Err(error) => cannot_run(&error.to_string()),
    }
}

fn run_semantics(Semantics { listen, provider, select }: Semantics) -> ExitCode {
    if listen.is_empty() {
        return check_semantics(&semantics::embedded(), &select);
    }
    match Verbs::load() {
        Ok(verbs) => check_semantics(&semantics::device(&verbs, listen, provider), &select),
        Err(error) => cannot_run(&error.to_string()),
    }
}

fn check_semantics<B: Descriptors>(setting: &semantics::Setting<B>, select: &str) -> ExitCode {
    let title = format!("verbs semantics of {}", setting.provider);
    let judge = |reports: &mut [Report]| semantics::deviations::judge(&setting.provider, reports);
    run_judged(&title, &semantics::cases(), setting, select, judge)
}

fn run_outage(Outage { target, command, within }: Outage) -> ExitCode {
    if let Err(reason) = command::resolve(&target) {
        return command::finish(Err(reason));
    }
    let backend = match Verbs::load() {
        Ok(verbs) => verbs,
        Err(error) => return cannot_run(&error.to_string()),
    };
    let title = format!("{target}, then `{command}`");
    let setting = outage::Setting { backend, address: target, command, within: Duration::from_secs(within) };
    run(&title, &outage::cases(), &setting, "")
}

fn cannot_run(reason: &str) -> ExitCode {
    eprintln!("cannot run here: {reason}");
    ExitCode::from(NO_ENVIRONMENT)
}

fn run_smoke(smoke: &Smoke) -> ExitCode {
    if let Some(Err(reason)) = smoke.target.as_deref().map(command::resolve) {
        return command::finish(Err(reason));
    }
    let result = match (&smoke.target, smoke.listen) {
        (None, None) => {
            let fabric = Fabric::new();
            let server = SocketAddr::from(([192, 0, 2, 1], 6379));
            own_server(&fabric.host(&[server.ip()]), server).map(|server| {
                check(smoke, fabric.host(&[[192, 0, 2, 2].into()]), server.to_string(), "embedded fabric")
            })
        }
        (None, Some(listen)) => Verbs::load().map_err(|error| error.to_string()).and_then(|verbs| {
            let server = own_server(&verbs, listen)?;
            Ok(check(smoke, verbs, server.to_string(), "own server, real verbs"))
        }),
        (Some(target), _) => Verbs::load()
            .map(|verbs| check(smoke, verbs, target.clone(), "real verbs"))
            .map_err(|error| error.to_string()),
    };
    result.unwrap_or_else(|reason| cannot_run(&reason))
}

/// Starts the example server on `address`; where it listens.
fn own_server<B: Descriptors>(backend: &B, address: SocketAddr) -> Result<SocketAddr, String> {
    let listener = Listener::bind(backend, address, Options::server()).map_err(|error| error.to_string())?;
    let bound = listener.local_addr().unwrap_or(address);
    let store = Arc::new(kv::Store::default());
    std::thread::spawn(move || {
        while let Ok((stream, peer)) = listener.accept() {
            let store = Arc::clone(&store);
            std::thread::spawn(move || {
                if let Err(error) = store.serve(stream) {
                    tracing::warn!(%peer, %error, "client lost");
                }
            });
        }
    });
    Ok(bound)
}

fn check<B: Descriptors>(smoke: &Smoke, backend: B, address: String, what: &str) -> ExitCode {
    let connect = Connect::default();
    let scale = Scale {
        keys: smoke.keys,
        connections: smoke.connections.into(),
        pipeline: smoke.pipeline,
        busy_commands: 2000,
        idle: Duration::from_secs(smoke.idle),
        cycles: 200,
        window: connect.options.protocol.window as usize,
    };
    let title = format!("{address}, {what}");
    let recorder = Recorder::new(smoke.record.as_ref().map_or(Limits::NOTHING, |_| Limits::default()));
    let peer = Peer { backend: Recorded::new(backend, &recorder), address, connect, scale };
    let code = run(&title, &smoke::cases(), &peer, smoke.select.as_deref().unwrap_or_default());
    match smoke.record.as_ref().map(|file| recorder.recording().save(file)) {
        Some(Err(error)) => cannot_run(&error.to_string()),
        Some(Ok(())) | None => code,
    }
}

fn run<S>(title: &str, cases: &[Case<S>], setting: &S, select: &str) -> ExitCode {
    run_judged(title, cases, setting, select, |_| {})
}

/// Runs cases and reports; `judge` may know better what an outcome means.
fn run_judged<S>(
    title: &str,
    cases: &[Case<S>],
    setting: &S,
    select: &str,
    judge: impl FnOnce(&mut [Report]),
) -> ExitCode {
    let begun = Instant::now();
    let mut reports = suite::run(cases, setting, select, progress);
    judge(&mut reports);
    if reports.is_empty() {
        eprintln!(
            "no case matches; there are: {}",
            cases.iter().map(|case| case.id).collect::<Vec<_>>().join(", ")
        );
        return ExitCode::from(NOTHING);
    }
    let count = |verdict| reports.iter().filter(|report| report.verdict == verdict).count();
    let (passed, deviate, failed) =
        (count(Verdict::Passed), count(Verdict::Deviates), count(Verdict::Failed));
    let deviate = if deviate > 0 { format!("{deviate} deviate, ") } else { String::new() };
    println!("{}", table(&reports));
    println!("{title}: {passed} passed, {deviate}{failed} failed, {:.1} s", begun.elapsed().as_secs_f64());
    ExitCode::from(if failed > 0 { FAILED } else { DONE })
}

fn table(reports: &[Report]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["case", "shows", "result", "time", "details"]);
    for report in reports {
        let verdict = match report.verdict {
            Verdict::Passed => "pass",
            Verdict::Deviates => "deviates",
            Verdict::Failed => "FAIL",
        };
        let details = match &report.outcome {
            Ok(details) => details.clone(),
            Err(failure) => failure.to_string(),
        };
        let shows = match report.source {
            "" => report.intent.into(),
            source => format!("{} [{source}]", report.intent),
        };
        let time = format!("{:.1} s", report.took.as_secs_f64());
        table.add_row([report.id, &shows, verdict, &time, &details].map(Cell::new));
    }
    table
}

/// A progress bar on a terminal; nothing elsewhere.
fn progress(case: &'static str) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template("{msg:24} [{wide_bar}] {percent:>3} % {elapsed:>4}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(None, target).with_style(style).with_message(case)
}
