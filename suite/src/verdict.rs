//! What can come of a case.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::exit;

/// Whether the target does what the case is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It does.
    Pass,
    /// It does what is allowed, but not what is best.
    PassLenient,
    /// It does not.
    Fail,
    /// It said that it cannot (a client under test exits with status 89).
    Unsupported,
    /// The case is not about such a target.
    NotApplicable,
    /// It was not tried, and the reason is told.
    Skipped,
    /// It was tried, and cannot be decided.
    Inconclusive,
    /// The case records what the target does; there is no right or wrong.
    Informational,
    /// The suite or its surroundings failed.
    Broken,
}

impl Verdict {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Pass,
        Self::PassLenient,
        Self::Fail,
        Self::Unsupported,
        Self::NotApplicable,
        Self::Skipped,
        Self::Inconclusive,
        Self::Informational,
        Self::Broken,
    ];

    /// As it is written everywhere.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::PassLenient => "pass-lenient",
            Self::Fail => "fail",
            Self::Unsupported => "unsupported",
            Self::NotApplicable => "not-applicable",
            Self::Skipped => "skipped",
            Self::Inconclusive => "inconclusive",
            Self::Informational => "informational",
            Self::Broken => "broken",
        }
    }

    /// Whether the target was tried and found right.
    pub const fn is_pass(self) -> bool {
        matches!(self, Self::Pass | Self::PassLenient)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where a verdict other than a pass comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// A requirement is not met.
    Requirement,
    /// Somebody else's connection came to harm.
    Bystander,
    /// The target's process ended.
    Died,
    /// The target's process is there and does nothing any more.
    Hung,
    /// The target takes no connection.
    Refused,
    /// The suite, its device or its system failed.
    Environment,
}

impl Cause {
    /// Whether there is no target any more, as far as a peer can tell.
    pub const fn is_loss(self) -> bool {
        matches!(self, Self::Died | Self::Hung | Self::Refused)
    }

    /// Whether more came to harm than the connection that the case is about.
    pub const fn is_harm(self) -> bool {
        self.is_loss() || matches!(self, Self::Bystander)
    }

    /// What a run that comes to nothing for this cause exits with.
    pub const fn code(self) -> u8 {
        match self {
            Self::Died | Self::Hung | Self::Refused => exit::LOST,
            Self::Requirement | Self::Bystander => exit::FAILED,
            Self::Environment => exit::BROKEN,
        }
    }
}

/// A case that was passed, one way or the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    /// How.
    pub verdict: Verdict,
    /// What there is to tell.
    pub note: String,
}

/// A case that was not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop {
    /// How it is to be judged.
    pub verdict: Verdict,
    /// Where it comes from.
    pub cause: Cause,
    /// What was seen.
    pub reason: String,
}

/// What a case's body says.
pub type Judged = Result<Pass, Stop>;

/// It is as it should be.
pub fn pass(note: impl Into<String>) -> Pass {
    Pass { verdict: Verdict::Pass, note: note.into() }
}

/// It is allowed.
pub fn lenient(note: impl Into<String>) -> Pass {
    Pass { verdict: Verdict::PassLenient, note: note.into() }
}

impl Stop {
    /// The requirement is not met.
    pub fn unmet(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Fail, cause: Cause::Requirement, reason: reason.into() }
    }

    /// It cannot be told from what was seen.
    pub fn undecided(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Inconclusive, ..Self::unmet(reason) }
    }

    /// Not about such a target.
    pub fn not_applicable(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::NotApplicable, ..Self::unmet(reason) }
    }

    /// Not tried.
    pub fn skipped(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Skipped, ..Self::unmet(reason) }
    }

    /// The target said that it cannot.
    pub fn unsupported(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Unsupported, ..Self::unmet(reason) }
    }

    /// The target's process ended where it must not.
    pub fn died(reason: impl Into<String>) -> Self {
        Self { cause: Cause::Died, ..Self::unmet(reason) }
    }

    /// The target's process is there and does nothing.
    pub fn hung(reason: impl Into<String>) -> Self {
        Self { cause: Cause::Hung, ..Self::unmet(reason) }
    }

    /// The target takes no connection.
    pub fn refused(reason: impl Into<String>) -> Self {
        Self { cause: Cause::Refused, ..Self::unmet(reason) }
    }

    /// It could not be tried: nothing is known about the target.
    pub fn broken(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Broken, cause: Cause::Environment, reason: reason.into() }
    }
}
