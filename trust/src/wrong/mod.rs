//! Wrong implementations, which the suite must notice: those of [`intercept::mistakes`], and some
//! that do not respond. [`table::rows`] has the cases for each mistake; [`judge`] runs one.

pub mod command;
pub mod table;
mod unresponsive;

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_conn::Options;
use rdma_softsim::Fabric;

use conformance::blackbox::builtin::{BuiltInClients, BuiltInServer, small};
use conformance::blackbox::context::Side;
use conformance::blackbox::results::CaseResult;
use conformance::blackbox::run::{Plan, RECORDED, Runner};
use conformance::blackbox::target::TargetClients;
use conformance::client::Failure;
use conformance::requirements::Role;
use conformance::tester::Listener;
use intercept::mistakes::{self, Mistake};
use intercept::trace::{Recorded, Recorder};

use unresponsive::{UnresponsiveClients, UnresponsiveServer};

pub use unresponsive::Unresponsive;

/// How long a right implementation, or connecting to any, may take: more than a busy machine needs.
const MUCH_PATIENCE: Duration = Duration::from_secs(20);
/// How long a wrong implementation may take: less than our side takes to give up otherwise.
const PATIENCE: Duration = Duration::from_millis(1500);
/// How long an unresponsive target may take. It does nothing, however long the suite waits.
const LITTLE_PATIENCE: Duration = Duration::from_millis(300);

/// The target of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// This library's own side.
    Right,
    /// This library's own side with a mistake.
    Mistaken(Mistake),
    /// An unresponsive side.
    Unresponsive(Unresponsive),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Right => f.write_str("nothing"),
            Self::Mistaken(mistake) => write!(f, "{mistake:?}"),
            Self::Unresponsive(unresponsive) => write!(f, "{unresponsive:?}"),
        }
    }
}

/// Runs one case against a target of this role.
///
/// # Errors
/// It cannot be set up.
pub fn judge(target: Target, role: Role, id: &str) -> Result<CaseResult, Failure> {
    let fabric = Fabric::new();
    let (theirs, ours) =
        (SocketAddr::from(([192, 0, 2, 1], 6379)), SocketAddr::from(([192, 0, 2, 66], 6379)));
    let mistake = match target {
        Target::Mistaken(mistake) => Some(mistake),
        Target::Right | Target::Unresponsive(_) => None,
    };
    let wrong = mistakes::host(fabric.host(&[theirs.ip()]), mistake);
    let recorder = Recorder::new(RECORDED);
    let backend = Recorded::new(fabric.host(&[ours.ip()]), &recorder);
    let options = |options| {
        let mut options = small(options);
        options.handshake_timeout = MUCH_PATIENCE;
        match mistake {
            Some(mistake) => mistake.disturb(&mut options),
            // A right side must not give up before the suite has decided.
            None => options.protocol.stall_limit = Some(MUCH_PATIENCE),
        }
        options
    };
    let patience = match target {
        Target::Right => MUCH_PATIENCE,
        Target::Mistaken(_) => PATIENCE,
        Target::Unresponsive(_) => LITTLE_PATIENCE,
    };
    let plan = Plan { recorder: Some(&recorder), ..Plan::harmful(patience) };
    let judged = |side| {
        let cases = conformance::blackbox::cases();
        let case = cases.iter().find(|one| one.role == Some(role) && one.id == id);
        let case = case.ok_or_else(|| Failure::wrong(format!("there is no case {id}")))?;
        Ok(Runner::new(&backend, side, &plan).only(case))
    };
    match (role, target) {
        (Role::Server, Target::Unresponsive(how)) => {
            judged(Side::Server(&UnresponsiveServer::start(&wrong, theirs, how)?))
        }
        (Role::Server, _) => {
            let server = BuiltInServer::start(&wrong, theirs, options(Options::default()))?;
            judged(Side::Server(&server))
        }
        (Role::Client, _) => {
            let listener = Listener::new(&backend, ours)?;
            let clients: Box<dyn TargetClients> = match target {
                Target::Unresponsive(how) => Box::new(UnresponsiveClients { backend: wrong, how }),
                _ => Box::new(BuiltInClients::new(wrong, options(Options::default()))),
            };
            judged(Side::Client(&listener, &*clients))
        }
    }
}
