//! The cases of all suites, with the requirements that they show.

use conformance::{blackbox, smoke};
use rdma_semantics as semantics;
use rdma_softsim::SoftSim;
use suite::Case;

use crate::{outage, own};

/// A case and its requirements.
pub type CaseRequirements = (&'static str, &'static [&'static str]);

/// All cases of all suites.
pub fn all() -> Vec<CaseRequirements> {
    // The lists are the same on every backend.
    let suites = [
        shows(&smoke::cases::<SoftSim>()),
        shows(&outage::cases::<SoftSim>()),
        shows(&semantics::cases::<SoftSim>()),
        of_any_implementation(),
    ];
    suites.concat()
}

/// Returns the cases for any implementation and for our own side, those for both roles once.
fn of_any_implementation() -> Vec<CaseRequirements> {
    let mut shows: Vec<CaseRequirements> = Vec::new();
    for case in blackbox::cases::<SoftSim>().into_iter().chain(own::cases::cases()) {
        if !shows.contains(&(case.id, case.requirements)) {
            shows.push((case.id, case.requirements));
        }
    }
    shows
}

/// Returns what a suite's cases show.
pub fn shows<S>(cases: &[Case<S>]) -> Vec<CaseRequirements> {
    cases.iter().map(|case| (case.id, case.requirements)).collect()
}
