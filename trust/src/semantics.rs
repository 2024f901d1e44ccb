//! `valkey-rdma-trust semantics`: the rules of verbs, checked on both backends.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

use clap::Args;
use rdma_semantics::{Descriptors, Setting, cases, deviations};
use rdma_softsim::{Fabric, SoftSim};
use rdma_verbs::Verbs;
use suite::Report;
use suite::terminal::{cannot_run, run_judged};

/// Where to run, and which cases.
#[derive(Args)]
pub struct Arguments {
    /// Run on the real RDMA device with this address, both ends in this process, instead of the
    /// embedded fabric (ADDRESS:PORT; port 0 takes any). Repeat it for further addresses; most
    /// cases use the first.
    #[arg(long)]
    listen: Vec<SocketAddr>,
    /// Expect the deviations of this provider, whatever the device's name is.
    #[arg(long, requires = "listen")]
    provider: Option<String>,
    /// Only cases whose id contains this.
    #[arg(long, default_value = "")]
    select: String,
}
/// The embedded fabric, with two hosts on it.
#[must_use]
pub fn embedded() -> Setting<SoftSim> {
    let fabric = Fabric::new();
    let host = |number: u8| {
        // Both families, for the cases about addresses: those for documentation
        // (RFC 5737, RFC 3849).
        let v6 = IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, number.into()]);
        [IpAddr::from([192, 0, 2, number]), v6]
    };
    Setting {
        server: fabric.host(&host(1)),
        client: fabric.host(&host(2)),
        addresses: host(1).map(|ip| SocketAddr::new(ip, 0)).into(),
        provider: "softsim".into(),
    }
}

/// The device behind `addresses`, with both ends on it.
#[must_use]
pub fn device(verbs: &Verbs, addresses: Vec<SocketAddr>, provider: Option<String>) -> Setting<Verbs> {
    let found = || addresses.first().and_then(|address| deviations::provider_at(address.ip()));
    let provider = provider.or_else(found).unwrap_or_else(|| "unknown".into());
    Setting { server: verbs.clone(), client: verbs.clone(), addresses, provider }
}

/// Runs the cases.
pub fn run(Arguments { listen, provider, select }: Arguments) -> ExitCode {
    if listen.is_empty() {
        return check(&embedded(), &select);
    }
    match Verbs::load() {
        Ok(verbs) => check(&device(&verbs, listen, provider), &select),
        Err(error) => cannot_run(&error.to_string()),
    }
}

fn check<B: Descriptors>(setting: &Setting<B>, select: &str) -> ExitCode {
    let title = format!("verbs semantics of {}", setting.provider);
    let judge = |reports: &mut [Report]| deviations::judge(&setting.provider, reports);
    run_judged(&title, &cases(), setting, select, judge)
}
