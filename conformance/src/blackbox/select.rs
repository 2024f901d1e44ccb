//! The selection of cases.

use clap::Args;
use glob::Pattern;
use rdma_conn::Descriptors;

use super::case::{Case, Tag};
use crate::requirements::{Level, Profile, Requirements, Role};

/// The selection of `--quick`: fifteen cases a role, of all areas, that are quick and harmless.
const QUICK: [&str; 18] = [
    "conn.plain",
    "ctrl.between-payload",
    "ctrl.opcode-4",
    "feat.skipped",
    "feat.asked",
    "feat.only-offered",
    "feat.unasked",
    "mem.length-stays",
    "mem.other-place",
    "xfer.round-trip",
    "xfer.lengths",
    "xfer.many-writes",
    "flow.slow-reader",
    "keep.accepted",
    "close.answered",
    "close.clean",
    "res.reposts",
    "sec.write-outside",
];

/// The selection of cases.
#[derive(Args, Clone, Debug, Default)]
pub struct Select {
    /// Only cases whose id, one of whose requirements, or one of whose tags matches (`flow.*`,
    /// `VR-MEM-*`, `slow`). Repeat it for more.
    #[arg(long, value_name = "GLOB")]
    pub select: Vec<Pattern>,
    /// Not those that match this. Repeat it for more.
    #[arg(long, value_name = "GLOB")]
    pub skip: Vec<Pattern>,
    /// Only cases at least this binding.
    #[arg(long, default_value = "may")]
    pub level: Option<Level>,
    /// Only fifteen cases of all areas, which take seconds: for every build, where all of them are
    /// for every night.
    #[arg(long)]
    pub quick: bool,
    /// Only cases of this profile: the wire contract, or what keeps peers that do wrong from doing
    /// harm.
    #[arg(long)]
    pub profile: Option<Profile>,
}

impl Select {
    /// Returns whether this case is selected.
    pub fn wants<B: Descriptors>(&self, case: &Case<'_, B>, requirements: &Requirements) -> bool {
        let matches = |pattern: &Pattern| {
            pattern.matches(case.id)
                || case.requirements.iter().any(|id| pattern.matches(id))
                || case.tags.iter().any(|tag| pattern.matches(tag.name()))
        };
        (!self.quick || QUICK.contains(&case.id))
            && (self.select.is_empty() || self.select.iter().any(matches))
            && !self.skip.iter().any(matches)
            && requirements.level(case.requirements) <= self.level.unwrap_or(Level::May)
            && self.profile.is_none_or(|profile| requirements.profile(case.requirements) == profile)
    }

    /// Returns whether cases are selected by name.
    pub const fn names(&self) -> bool {
        !self.select.is_empty()
    }

    /// Returns the cases selected for a role.
    pub fn cases<'a, B: Descriptors>(&self, role: Role) -> Vec<Case<'a, B>> {
        let requirements = Requirements::built_in();
        let mut cases = super::cases::<B>();
        cases.retain(|case| case.role == Some(role) && self.wants(case, &requirements));
        cases
    }
}

/// Whether cases may harm the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// Disruptive cases are skipped.
    None,
    /// They run.
    Allowed,
}

impl Harm {
    /// Returns why a case is not run.
    pub fn forbids<B: Descriptors>(self, case: &Case<'_, B>) -> Option<&'static str> {
        (self == Self::None && case.is(Tag::Disruptive))
            .then_some("it may bring the target down: --allow-disruptive runs it")
    }
}
