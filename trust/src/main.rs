//! `valkey-rdma-trust`: tries this workspace, see docs/trust.md.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rdma_verbs::Verbs;
use suite::exit::{self, DONE, USAGE};
use suite::terminal::{cannot_run, run};

use trust::hostile::{self, Setting};
use trust::{crowd, explore, outage, reqs, semantics, sim, wrong};

#[derive(Parser)]
#[command(name = "valkey-rdma-trust", version, about = "What this workspace is tried with")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs clients and a server through whole lives in virtual time, and breaks everything that can break.
    Sim(sim::runner::Options),
    /// Takes two connection machines through every schedule there is, in small settings.
    Explore(explore::Arguments),
    /// Breaks the protocol's rules one at a time, against a server and a client of this library.
    Hostile(Hostile),
    /// Shows, rule by rule, that RDMA here is what the layers above take it for.
    Semantics(semantics::Arguments),
    /// What many connections cost a server with one thread: memory, time, processor.
    Crowd(crowd::Arguments),
    /// Takes the server, or the way to it, away in the middle of a reply.
    Outage(Outage),
    /// Runs every case of the suite for any implementation against targets that are wrong, and says which mistake fails it.
    Verdicts(wrong::command::Verdicts),
    /// The requirements of the protocol: what shows each, and their pages.
    #[command(subcommand)]
    Reqs(reqs::Command),
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
    exit::guarded(|| perform(cli.command))
}

fn perform(command: Command) -> ExitCode {
    match command {
        Command::Sim(options) => sim::runner::main(&options),
        Command::Explore(arguments) => explore::run(&arguments),
        Command::Hostile(hostile) => run_hostile(&hostile),
        Command::Semantics(arguments) => semantics::run(arguments),
        Command::Crowd(arguments) => crowd::run(&arguments),
        Command::Outage(outage) => run_outage(outage),
        Command::Verdicts(verdicts) => wrong::command::run(&verdicts),
        Command::Reqs(command) => reqs::run(command),
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
