//! The subcommand `sim` of `valkey-rdma-trust`, and nothing else.

use std::process::ExitCode;

use clap::Parser;

#[path = "../../../src/sim/mod.rs"]
pub mod sim;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: sim::runner::Options,
}

fn main() -> ExitCode {
    sim::runner::main(&Cli::parse().options)
}
