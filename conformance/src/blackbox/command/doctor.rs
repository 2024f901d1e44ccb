//! What is there, what is missing, and what will therefore be skipped.

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::Args;
use rdma_proto::backend::{Backend as _, EventChannel as _};
use rdma_verbs::Verbs;

use crate::exit::{DONE, NO_ENVIRONMENT};

/// Looks at this machine.
#[derive(Args, Clone, Debug)]
pub struct Doctor {
    /// Also see whether one can listen at this address of a device (ADDRESS:PORT; port 0 takes any).
    #[arg(long)]
    listen: Option<SocketAddr>,
}

/// Says what it finds.
pub fn doctor(options: &Doctor) -> ExitCode {
    println!("softsim: here, as everywhere");
    let verbs = match Verbs::load() {
        Ok(verbs) => verbs,
        Err(error) => return missing("libraries", &error.to_string()),
    };
    println!("libraries: librdmacm and libibverbs are loaded");
    let devices: Vec<String> = std::fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let channel = match verbs.event_channel() {
        Ok(channel) if !devices.is_empty() => channel,
        Ok(_) => {
            return missing(
                "devices",
                "none in /sys/class/infiniband; `rdma link add` makes a soft-RoCE one",
            );
        }
        Err(error) => return missing("devices", &error.to_string()),
    };
    println!("devices: {}", devices.join(", "));
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let memory = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    println!("locked memory: {} (soft, hard; a run wants about 32 MiB)", memory.unwrap_or("?").trim());
    if let Some(address) = options.listen {
        match channel.listen(address, 0) {
            Ok(_) => println!("listening at {address}: possible"),
            Err(error) => return missing("listening", &format!("{address}: {error}")),
        }
    }
    ExitCode::from(DONE)
}

fn missing(what: &str, why: &str) -> ExitCode {
    println!("{what}: {why}");
    println!("so: only softsim can be used; runs against a target end with status {NO_ENVIRONMENT}");
    ExitCode::from(NO_ENVIRONMENT)
}
