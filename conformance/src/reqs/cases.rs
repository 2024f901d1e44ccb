//! The cases of all suites, for what they say about requirements.

use rdma_softsim::SoftSim;

use crate::suite::Case;
use crate::{blackbox, hostile, outage, semantics, smoke};

/// A case and the requirements it is about.
pub type Shows = (&'static str, &'static [&'static str]);

/// All cases of all suites.
pub fn all() -> Vec<Shows> {
    let suites = [
        shows(&smoke::cases::<SoftSim>()),
        shows(&outage::cases::<SoftSim>()),
        shows(&hostile::cases::<SoftSim>()),
        shows(&semantics::cases::<SoftSim>()),
        of_any_implementation(),
    ];
    suites.concat()
}

/// Those for any implementation. One that is for both roles counts once.
fn of_any_implementation() -> Vec<Shows> {
    let mut shows: Vec<Shows> = Vec::new();
    for case in blackbox::cases::<SoftSim>() {
        if !shows.contains(&(case.id, case.requirements)) {
            shows.push((case.id, case.requirements));
        }
    }
    shows
}

fn shows<S>(cases: &[Case<S>]) -> Vec<Shows> {
    cases.iter().map(|case| (case.id, case.requirements)).collect()
}
