//! The suites on the embedded fabric, so that `cargo test` shows what the program shows.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conformance::hostile::{self, Setting};
use conformance::kv;
use conformance::smoke::{self, Peer, Scale};
use conformance::suite::{self, Case};
use indicatif::ProgressBar;
use rdma_conn::{Connect, Listener, Options};
use rdma_softsim::{Fabric, SoftSim};

/// One suite at a time, from before it opens anything: they count the process's descriptors and its use of the processor.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs all cases and tells of all that fail.
fn run<S>(cases: &[Case<S>], setting: &S, select: &str) {
    let reports = suite::run(cases, setting, select, |_| ProgressBar::hidden());
    assert!(!reports.is_empty(), "no case has {select} in its name");
    let failed: Vec<String> = reports
        .iter()
        .filter_map(|report| Some(format!("{}: {}", report.id, report.outcome.as_ref().err()?)))
        .collect();
    assert!(failed.is_empty(), "{} of {} cases failed:\n{}", failed.len(), reports.len(), failed.join("\n"));
}

#[test]
fn smoke() {
    let _alone = alone();
    let fabric = Fabric::new();
    let server = SocketAddr::from(([192, 0, 2, 1], 6379));
    let mut options = Options::server();
    // So that the suite's idle seconds can be few.
    options.protocol.keepalive.every = Some(Duration::from_millis(250));
    let listener = Listener::bind(&fabric.host(&[server.ip()]), server, options).expect("a free port");
    std::thread::spawn(move || serve(&listener));
    let connect = Connect::default();
    let scale = Scale {
        keys: 300,
        connections: 4,
        pipeline: 2000,
        busy_commands: 1500,
        idle: Duration::from_secs(1),
        cycles: 20,
        window: connect.options.protocol.window as usize,
    };
    let backend = fabric.host(&[[192, 0, 2, 2].into()]);
    run(&smoke::cases(), &Peer { backend, address: server.to_string(), connect, scale }, "");
}

/// The example server, for as long as the test runs.
fn serve(listener: &Listener<SoftSim>) {
    let store = Arc::new(kv::Store::default());
    while let Ok((stream, _)) = listener.accept() {
        let store = Arc::clone(&store);
        // Clients of the suite leave in order; if not, their case tells.
        std::thread::spawn(move || store.serve(stream));
    }
}

#[test]
fn hostile_clients() {
    let _alone = alone();
    run(&hostile::cases(), &Setting::softsim(), "hostile.server.");
}

#[test]
fn hostile_servers() {
    let _alone = alone();
    run(&hostile::cases(), &Setting::softsim(), "hostile.client.");
}

#[test]
fn every_case_has_a_name_of_its_own_and_requirements() {
    let cases = hostile::cases::<SoftSim>();
    let mut ids: Vec<_> = cases.iter().map(|case| case.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), cases.len());
    assert!(cases.iter().all(|case| case.requirements.iter().all(|id| id.starts_with("VR-"))));
}
