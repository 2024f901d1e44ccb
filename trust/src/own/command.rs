//! `valkey-rdma-trust own`.

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::Args;
use rdma_conn::Descriptors;
use rdma_verbs::Verbs;
use suite::Role;
use suite::terminal::{self, cannot_run};

use super::{Setting, cases};

/// Where to run, and which cases.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Run over the real RDMA device that has this address (any port), both sides in this process,
    /// instead of the embedded fabric.
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Only cases whose id contains this.
    #[arg(long, default_value = "")]
    select: String,
    /// Only our server, or our client.
    #[arg(long)]
    role: Option<Role>,
}

/// Runs the cases.
#[must_use]
pub fn run(arguments: &Arguments) -> ExitCode {
    let Some(address) = arguments.listen else {
        return run_on("embedded fabric", &Setting::softsim(), arguments);
    };
    match Verbs::load() {
        Ok(verbs) => run_on("real verbs", &Setting::verbs(verbs, address), arguments),
        Err(error) => cannot_run(&error.to_string()),
    }
}

fn run_on<B: Descriptors>(carrier: &str, setting: &Setting<B>, arguments: &Arguments) -> ExitCode {
    let mut cases = cases();
    cases.retain(|case| arguments.role.is_none() || case.role == arguments.role);
    terminal::run(&format!("our own side, {carrier}"), &cases, setting, &arguments.select)
}
