//! The runner's verdicts on targets that err outside the protocol: as processes.

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Duration;

use conformance::blackbox;
use conformance::blackbox::context::Side;
use conformance::blackbox::own::{OwnClients, OwnServer, small};
use conformance::blackbox::results::CaseResult;
use conformance::blackbox::run::{Plan, Runner};
use conformance::blackbox::select::Harm;
use conformance::blackbox::target::{Clients, Exit, Running, Server};
use conformance::peer::Listener;
use conformance::reqs::Role;
use conformance::resources::ProcessResources;
use rdma_conn::Options;
use rdma_softsim::{Fabric, SoftSim};
use suite::{Cause, Verdict};

const THEIRS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 6379);
const OURS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 66)), 6379);

fn judge(backend: &SoftSim, side: Side<'_, SoftSim>, role: Role, case: &str) -> CaseResult {
    let patience = Duration::from_secs(2);
    let plan = Plan { patience, harm: Harm::Allowed, again: "", arguments: &[], recorder: None };
    let cases = blackbox::cases();
    let case = cases.iter().find(|one| one.role == Some(role) && one.id == case).unwrap();
    Runner::new(backend, side, &plan).only(case)
}

/// Clients whose processes end as `exit` says, whatever they did.
struct Ending {
    own: OwnClients<SoftSim>,
    exit: Option<Exit>,
}

struct Process {
    own: Box<dyn Running>,
    exit: Option<Exit>,
}

impl Clients for Ending {
    fn start(&self, case: &str, address: SocketAddr) -> Result<Box<dyn Running>, String> {
        Ok(Box::new(Process { own: self.own.start(case, address)?, exit: self.exit.clone() }))
    }
}

impl Running for Process {
    fn ended(&mut self, patience: Duration) -> Option<Exit> {
        self.own.ended(patience)?;
        self.exit.clone()
    }
}

/// A client that does all that it should on the wire, and whose process stays or ends wrongly, passes nothing that ends with it.
#[test]
fn a_client_has_to_end() {
    for (exit, cause) in [
        (None, Some(Cause::Hung)),
        (Some(Exit::Crashed("signal: 11".into())), Some(Cause::Died)),
        (Some(Exit::Failure("no".into())), Some(Cause::Requirement)),
        (Some(Exit::Success), None),
    ] {
        for case in ["close.clean", "conn.plain", "xfer.round-trip", "keep.accepted"] {
            let fabric = Fabric::new();
            let backend = fabric.host(&[OURS.ip()]);
            let listener = Listener::new(&backend, OURS).unwrap();
            let own = OwnClients::new(fabric.host(&[THEIRS.ip()]), small(Options::client()));
            let clients = Ending { own, exit: exit.clone() };
            let result = judge(&backend, Side::Client(&listener, &clients), Role::Client, case);
            let wanted = if cause.is_some() { Verdict::Fail } else { Verdict::Pass };
            assert_eq!(
                (result.verdict, result.cause),
                (wanted, cause),
                "{case}, {exit:?}: {}",
                result.reason
            );
        }
    }
}

/// A server that pins what it was asked for only when it comes to look at the message.
struct Pinning {
    own: OwnServer,
    looks: Cell<u32>,
}

impl Server for Pinning {
    fn address(&self) -> SocketAddr {
        self.own.address()
    }

    fn death(&self, patience: Duration) -> Option<String> {
        self.own.death(patience)
    }

    fn restart(&self) -> Result<bool, String> {
        self.own.restart()
    }

    fn held(&self) -> Option<ProcessResources> {
        self.looks.set(self.looks.get() + 1);
        // Not yet right behind the message, and no longer at the end.
        Some(ProcessResources::new(10, if self.looks.get() == 3 { 4 << 20 } else { 0 }))
    }

    fn processor_time(&self) -> Option<Duration> {
        None
    }
}

#[test]
fn memory_pinned_in_between_is_seen() {
    let fabric = Fabric::new();
    let backend = fabric.host(&[OURS.ip()]);
    let own = OwnServer::start(&fabric.host(&[THEIRS.ip()]), THEIRS, small(Options::server())).unwrap();
    let server = Pinning { own, looks: Cell::new(0) };
    let result = judge(&backend, Side::Server(&server), Role::Server, "mem.of-4-gib");
    assert_eq!(result.verdict, Verdict::Fail, "{}", result.reason);
    assert!(result.reason.contains("4194304 KiB pinned"), "{}", result.reason);
}
