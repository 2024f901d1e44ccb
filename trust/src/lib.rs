//! What this workspace is tried with; docs/trust.md tells what came of it.
//!
//! Two questions. *The peer is wrong*: does the product survive it? ([`sim`], [`own`], [`outage`].) *We are wrong*: do the
//! tests notice? ([`wrong`] for the suite of any implementation, the patches in `mutants` for the simulator, the defects of
//! the crate `explore` for the model checker.)

pub mod crowd;
pub mod explore;
pub mod outage;
pub mod own;
pub mod reqs;
pub mod semantics;
pub mod sim;
pub mod wrong;

/// What a passed case has to tell, or what was wrong.
pub type Outcome = conformance::Outcome;
