//! Wrong implementations, to see whether the suite notices: this library's server and client on a backend that makes one
//! mistake for them.
//!
//! A mistake ([`Mistake`]) is in what leaves a side (messages, writes, immediates, parameters), in what it is told of what
//! came, or in its settings. [`table::TABLE`] says for each which case has to notice; [`judge`] runs that case.

pub mod mistake;
mod mistaken;
pub mod table;
mod tamper;

use std::net::SocketAddr;
use std::time::Duration;

use rdma_conn::Options;
use rdma_softsim::Fabric;

use conformance::adversary::Lurker;
use conformance::blackbox::bench::Side;
use conformance::blackbox::own::{OwnClients, OwnServer, small};
use conformance::blackbox::results::CaseResult;
use conformance::blackbox::run::{Plan, Runner};
use conformance::blackbox::select::Harm;
use conformance::client::Failure;
use conformance::reqs::Role;

pub use mistake::Mistake;
pub use mistaken::{Mistaken, Wrong};

/// How long a wrong implementation may take for anything: as long as it takes to be sure that it does not.
const PATIENCE: Duration = Duration::from_secs(2);

/// Runs one case against an implementation with a mistake, or without.
///
/// # Errors
/// It cannot be set up.
pub fn judge(mistake: Option<Mistake>, role: Role, case: &str) -> Result<CaseResult, Failure> {
    let fabric = Fabric::new();
    let (theirs, ours) =
        (SocketAddr::from(([192, 0, 2, 1], 6379)), SocketAddr::from(([192, 0, 2, 66], 6379)));
    let wrong = Wrong::by(fabric.host(&[theirs.ip()]), Mistaken::new(mistake));
    let backend = fabric.host(&[ours.ip()]);
    let options = |options| {
        let mut options = small(options);
        if let Some(mistake) = mistake {
            mistake.disturb(&mut options);
        }
        options
    };
    let cases = conformance::blackbox::cases();
    let case = cases
        .iter()
        .find(|one| one.role == role && one.id == case)
        .ok_or_else(|| Failure::wrong(format!("there is no case {case}")))?;
    let plan = Plan { patience: PATIENCE, harm: Harm::Allowed, again: "", arguments: &[], recorder: None };
    match role {
        Role::Server => {
            let server = OwnServer::start(&wrong, theirs, options(Options::server()))?;
            Ok(Runner::new(&backend, Side::Server(&server), &plan).only(case))
        }
        Role::Client => {
            let lurker = Lurker::new(&backend, ours)?;
            let clients = OwnClients { backend: wrong, options: options(Options::client()) };
            Ok(Runner::new(&backend, Side::Client(&lurker, &clients), &plan).only(case))
        }
    }
}
