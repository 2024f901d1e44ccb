//! `valkey-rdma-snapshot-suite`: is a publisher or a reader of the snapshot protocol right?

use std::process::ExitCode;

use clap::Parser;
use snapshot_suite::Command;
use suite::exit;

#[derive(Parser)]
#[command(
    name = "valkey-rdma-snapshot-suite",
    version,
    about = "Tests publishers and readers of the snapshot protocol"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match Cli::try_parse() {
        Ok(cli) => exit::guarded(|| snapshot_suite::run(&cli.command)),
        Err(error) => exit::misused(&error),
    }
}
