//! `valkey-rdma-snapshot-suite`: tests publishers and readers of the snapshot protocol.

use std::process::ExitCode;

use clap::Parser;
use snapshot_suite::Command;
use suite::exit;

const EXAMPLES: &str = "\
Examples:
  valkey-rdma-snapshot-suite publisher
  valkey-rdma-snapshot-suite publisher --target 192.0.2.1:7400
  valkey-rdma-snapshot-suite reader --listen 192.0.2.1:7400 \\
      --exec 'valkey-rdma-sync pull {host}:{port} --file {file}'";

#[derive(Parser)]
#[command(
    name = "valkey-rdma-snapshot-suite",
    version,
    about = "Tests publishers and readers of the snapshot protocol",
    after_help = EXAMPLES
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
    exit::run(|cli: Cli| snapshot_suite::run(&cli.command))
}
