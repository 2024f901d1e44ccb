//! The soak: our clients against Valkey and against our server, over a network with faults, while
//! servers and clients are killed. Every byte is compared, every wait is timed, and the resources
//! held at the end must equal those at the beginning. `lab/run soak` runs it in two guests.

mod chart;
mod client;
mod face;
mod faults;
mod figures;
mod keys;
mod load;
mod phases;
mod serve;
#[cfg(test)]
mod tests;

use std::process::ExitCode;

use clap::Subcommand;

const FAILED: u8 = 1;
/// There is no RDMA here.
const NO_ENVIRONMENT: u8 = 69;

/// The parts of a soak.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Run the clients, and judge what they see.
    Load(load::Arguments),
    /// Run the servers, kill some of them from time to time, and judge what the others hold at the
    /// end.
    Serve(serve::Arguments),
    /// Draw the measurements.
    Chart(chart::Arguments),
}

pub(crate) fn run(command: &Command) -> ExitCode {
    match command {
        Command::Load(arguments) => load::run(arguments),
        Command::Serve(arguments) => serve::run(arguments),
        Command::Chart(arguments) => chart::run(arguments),
    }
}

fn conclude(who: &str, failures: &[String]) -> ExitCode {
    if failures.is_empty() {
        println!("{who}: passed");
        return ExitCode::SUCCESS;
    }
    for failure in failures {
        println!("{who}: FAILED: {failure}");
    }
    ExitCode::from(FAILED)
}

fn cannot_run(why: impl std::fmt::Display) -> ExitCode {
    eprintln!("cannot run here: {why}");
    ExitCode::from(NO_ENVIRONMENT)
}
