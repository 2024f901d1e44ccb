//! `valkey-rdma-trust`: tries this workspace, see docs/trust.md.

mod soak;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rdma_verbs::Verbs;
use suite::exit;
use suite::terminal::{cannot_run, run};

use trust::{crowd, many, outage, own, reqs, right, schedules, semantics, sim, wrong};

#[derive(Parser)]
#[command(name = "valkey-rdma-trust", version, about = "What this workspace is tried with")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run clients and a server for whole lifetimes in virtual time, with every kind of fault.
    Sim(sim::runner::Options),
    /// Run two connection machines through every schedule of small settings.
    Explore(schedules::Arguments),
    /// Run the conformance suite against a server and a client of this library, and check the
    /// errors that they report.
    Own(own::command::Arguments),
    /// Check rule by rule that RDMA here does what the layers above rely on.
    Semantics(semantics::Arguments),
    /// Measure what many idle connections hold of a server with one thread: memory, queues,
    /// descriptors.
    Crowd(crowd::Arguments),
    /// Make many connections in one process: what each costs, or the limit that ends them.
    /// `trust/many` runs it for every face.
    Many(many::Arguments),
    /// Take the server, or the path to it, away in the middle of a reply.
    Outage(Outage),
    /// Run every case of the conformance suite against wrong targets, and report which mistake
    /// fails it.
    Verdicts(wrong::command::Verdicts),
    /// Run the conformance suite against right targets of every kind: none may fail.
    Right(right::command::Arguments),
    /// Run clients and servers for hours over a network with faults. `lab/run soak` runs it in two
    /// guests.
    #[command(subcommand)]
    Soak(soak::Command),
    /// The requirements of the protocol: what shows each, and their pages.
    #[command(subcommand)]
    Reqs(reqs::Command),
}

#[derive(Args)]
struct Outage {
    /// The server, over a real RDMA device (HOST:PORT).
    #[arg(long)]
    target: String,
    /// Shell command that takes it away, for instance `kill -9 PID`.
    #[arg(long)]
    command: String,
    /// Seconds within which the client must report the loss.
    #[arg(long, default_value_t = 60)]
    within: u64,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        // Results are on stdout.
        .with_writer(std::io::stderr)
        .init();
    // `parse` would exit with clap's own status, 2, and not with the documented one.
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit::misused(&error),
    };
    exit::guarded(|| perform(cli.command))
}

fn perform(command: Command) -> ExitCode {
    match command {
        Command::Sim(options) => sim::runner::main(&options),
        Command::Explore(arguments) => schedules::run(&arguments),
        Command::Own(arguments) => own::command::run(&arguments),
        Command::Semantics(arguments) => semantics::run(arguments),
        Command::Crowd(arguments) => crowd::run(&arguments),
        Command::Many(arguments) => many::run(&arguments),
        Command::Outage(outage) => run_outage(outage),
        Command::Verdicts(verdicts) => wrong::command::run(&verdicts),
        Command::Right(arguments) => right::command::run(&arguments),
        Command::Soak(command) => soak::run(&command),
        Command::Reqs(command) => reqs::run(command),
    }
}

fn run_outage(Outage { target, command, within }: Outage) -> ExitCode {
    if let Err(reason) = conformance::blackbox::command::resolve(&target) {
        return conformance::blackbox::command::finish(Err(reason));
    }
    let backend = match Verbs::load() {
        Ok(verbs) => verbs,
        Err(error) => return cannot_run(&error.to_string()),
    };
    let title = format!("{target}, then `{command}`");
    let setting = outage::Setting { backend, address: target, command, within: Duration::from_secs(within) };
    run(&title, &outage::cases(), &setting, "")
}
