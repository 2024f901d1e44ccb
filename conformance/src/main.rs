//! `valkey-rdma-conformance`: tests implementations of Valkey over RDMA.
//!
//! Without arguments: the smoke suite, client and server in this process, over the embedded RDMA
//! fabric.

mod help;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use rdma_conn::{Connect, Descriptors, Options};
use rdma_softsim::Fabric;

use conformance::blackbox::builtin::{self, BuiltInServer};
use conformance::blackbox::command::{self, TargetCommand};
use conformance::blackbox::target::TargetServer as _;
use conformance::exit::{self, FAILED};
use conformance::smoke::{self, Scale, Setting};
use conformance::{device, requirements, trace, vectors};
use intercept::trace::{Limits, Recorded, Recorder};
use suite::terminal::{cannot_run, complain, run};

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
    /// Shows the protocol at work, and what a failure looks like.
    Demo(command::Demo),
    /// Tests a server or client: what it does on the wire, rule by rule.
    Run {
        #[command(subcommand)]
        who: TargetCommand,
    },
    /// Lists the cases of `run`.
    List(command::List),
    /// Says what a case or a requirement is about.
    Explain(command::Explain),
    /// Runs again what failed in an earlier run: is it fixed?
    Replay(command::Replay),
    /// Makes reports from the results of runs.
    Report(command::Report),
    /// Says what this machine has, or lacks, for runs on a device.
    Doctor(command::Doctor),
    /// Does what a client under test should do, over an RDMA device.
    Client {
        /// The server (ADDRESS:PORT).
        target: SocketAddr,
    },
    /// Does what clients do against a server, and checks every byte.
    Smoke(Smoke),
    /// The requirements of the protocol.
    #[command(subcommand)]
    Reqs(requirements::Command),
    /// The test vectors, run against any implementation.
    #[command(subcommand)]
    Vectors(vectors::Command),
    /// Shows recorded connections as timelines, or to Wireshark.
    #[command(subcommand)]
    Trace(trace::Command),
}

#[derive(Args)]
struct Smoke {
    /// Run against this server over a real RDMA device (HOST:PORT), instead of an own one.
    #[arg(long, conflicts_with = "listen")]
    target: Option<String>,
    /// Start an own server on this address of a real RDMA device and run against it (ADDRESS:PORT;
    /// port 0 takes any).
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
    exit::run_as(help::grouped(exit::with_common(Cli::command())), perform)
}

fn perform(Cli { command, out }: Cli) -> ExitCode {
    let Some(command) = command else { return main_job(&out) };
    match command {
        Command::Demo(demo) => command::demo(&demo),
        Command::Run { who } => command::run(&who, &std::env::args().skip(1).collect::<Vec<_>>()),
        Command::List(list) => command::list(&list),
        Command::Explain(id) => command::explain(&id),
        Command::Replay(replay) => command::replay(&replay),
        Command::Report(report) => command::make_report(&report),
        Command::Doctor(doctor) => command::doctor(&doctor),
        Command::Client { target } => run_client(target),
        Command::Smoke(smoke) => run_smoke(&smoke),
        Command::Reqs(command) => requirements::run(command),
        Command::Vectors(command) => vectors::run(command),
        Command::Trace(command) => trace::run(command),
    }
}

/// Runs the README's main example: the whole suite on the embedded fabric, part of the smoke suite.
fn main_job(out: &Path) -> ExitCode {
    let smoke = Smoke { keys: 1000, pipeline: 5000, idle: 4, ..Smoke::default() };
    let (smoke, whole) = (run_smoke(&smoke), command::whole(out));
    if smoke == ExitCode::SUCCESS { whole } else { smoke }
}

fn run_client(target: SocketAddr) -> ExitCode {
    let verbs = match device() {
        Ok(verbs) => verbs,
        Err(reason) => return cannot_run(&reason),
    };
    // Empty if no suite tests it: then it does what every case needs.
    let case = std::env::var("CONFORMANCE_CASE").unwrap_or_default();
    let work = builtin::Work::of(&case, || {
        // However stdin ends, the client continues.
        let _end = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    });
    match builtin::run_client(&verbs, target, Duration::from_secs(5), Options::default(), work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            complain(&failure.to_string(), 4);
            ExitCode::from(FAILED)
        }
    }
}

fn run_smoke(smoke: &Smoke) -> ExitCode {
    if let Some(Err(reason)) = smoke.target.as_deref().map(command::resolve) {
        return command::finish(Err(reason));
    }
    let result = match (&smoke.target, smoke.listen) {
        (None, None) => {
            let fabric = Fabric::new();
            let server = SocketAddr::from(([192, 0, 2, 1], 6379));
            start(&fabric.host(&[server.ip()]), server).map(|own| {
                let address = own.address().to_string();
                check(smoke, fabric.host(&[[192, 0, 2, 2].into()]), address, "embedded fabric")
            })
        }
        (None, Some(listen)) => device().and_then(|verbs| {
            let own = start(&verbs, listen)?;
            let address = own.address().to_string();
            Ok(check(smoke, verbs, address, "own server, real verbs"))
        }),
        (Some(target), _) => device().map(|verbs| check(smoke, verbs, target.clone(), "real verbs")),
    };
    result.unwrap_or_else(|reason| cannot_run(&reason))
}

fn start<B: Descriptors>(backend: &B, address: SocketAddr) -> Result<BuiltInServer, String> {
    BuiltInServer::start(backend, address, Options::default()).map_err(|error| error.to_string())
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
    let setting = Setting { backend: Recorded::new(backend, &recorder), address, connect, scale };
    let code = run(&title, &smoke::cases(), &setting, smoke.select.as_deref().unwrap_or_default());
    match smoke.record.as_ref().map(|file| recorder.recording().save(file)) {
        Some(Err(error)) => cannot_run(&error.to_string()),
        Some(Ok(())) | None => code,
    }
}
