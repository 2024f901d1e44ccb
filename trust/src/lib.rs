//! Trials of this workspace. docs/trust.md has their results.
//!
//! They answer two questions. *The peer is wrong*: does the product survive? ([`sim`], [`own`],
//! [`outage`].) *We are wrong*: do the tests notice? ([`wrong`] for the conformance suite, the
//! patches in `mutants` for the simulator, the defects of the crate `explore` for the model
//! checker.)

pub mod crowd;
pub mod many;
pub mod outage;
pub mod own;
pub mod reqs;
pub mod right;
pub mod schedules;
pub mod semantics;
pub mod sim;
pub mod wrong;

/// The result of a case: a remark if it passed, else the fault that was found.
pub type Outcome = conformance::Outcome;
