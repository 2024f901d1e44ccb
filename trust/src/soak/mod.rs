//! The soak: our clients against Valkey and against our server over a network that loses, delays and reorders packets and goes away,
//! while servers and clients are killed. Every byte is compared, every wait is timed, and what is held at the end is what was held
//! at the beginning. `lab/run soak` runs it in two guests.

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

/// A fault of what is under test.
const FAILED: u8 = 1;
/// There is no RDMA here.
const NO_ENVIRONMENT: u8 = 69;

/// The parts of a soak.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Runs the clients, and judges what they see.
    Load(load::Arguments),
    /// Runs the servers, kills them from time to time, and judges what the others hold at the end.
    Serve(serve::Arguments),
    /// Draws what was measured.
    Chart(chart::Arguments),
}

/// Runs one part.
pub(crate) fn run(command: &Command) -> ExitCode {
    match command {
        Command::Load(arguments) => load::run(arguments),
        Command::Serve(arguments) => serve::run(arguments),
        Command::Chart(arguments) => chart::run(arguments),
    }
}

/// A verdict in words, and as an exit status.
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

/// There is nothing to run it on.
fn cannot_run(why: impl std::fmt::Display) -> ExitCode {
    eprintln!("cannot run here: {why}");
    ExitCode::from(NO_ENVIRONMENT)
}
