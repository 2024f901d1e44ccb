//! Verdicts on cases.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::exit;

/// The verdict on a target, or on whatever a case is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It does what the case asks for.
    Pass,
    /// It does what is allowed, but not what is best.
    PassLenient,
    /// It does not do what the case asks for.
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
    /// All values.
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

    /// Returns the name that is used in files and output.
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

    /// Returns whether the target was tested and passed.
    pub const fn is_pass(self) -> bool {
        matches!(self, Self::Pass | Self::PassLenient)
    }

    /// Returns whether the target was tested at all, whatever the result.
    pub const fn is_tried(self) -> bool {
        !matches!(self, Self::Unsupported | Self::NotApplicable | Self::Skipped)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The cause of a verdict other than a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// A requirement is not met.
    Requirement,
    /// Another connection was harmed.
    Bystander,
    /// The target's process ended.
    Died,
    /// The target's process exists, but is hung.
    Hung,
    /// The target takes no connection.
    Refused,
    /// The suite, its device or its system failed.
    Environment,
}

impl Cause {
    /// Returns the name that is used in files and output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requirement => "requirement",
            Self::Bystander => "bystander",
            Self::Died => "died",
            Self::Hung => "hung",
            Self::Refused => "refused",
            Self::Environment => "environment",
        }
    }

    /// Returns whether the target is gone, as far as a peer can tell.
    pub const fn is_loss(self) -> bool {
        matches!(self, Self::Died | Self::Hung | Self::Refused)
    }

    /// Returns whether more than the case's own connection was harmed.
    pub const fn is_harm(self) -> bool {
        self.is_loss() || matches!(self, Self::Bystander)
    }

    /// Returns the exit code of a run that ends with this cause.
    pub const fn code(self) -> u8 {
        match self {
            Self::Died | Self::Hung | Self::Refused => exit::LOST,
            Self::Requirement | Self::Bystander => exit::FAILED,
            Self::Environment => exit::BROKEN,
        }
    }
}

/// A case that passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    /// The verdict: one of the two kinds of pass.
    pub verdict: Verdict,
    /// A remark, which may be empty.
    pub note: String,
}

/// A case that did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stop {
    /// The verdict.
    pub verdict: Verdict,
    /// The cause.
    pub cause: Cause,
    /// The observation behind the verdict.
    pub reason: String,
}

/// The outcome of a case's body.
pub type Judged = Result<Pass, Stop>;

/// Creates a pass.
pub fn pass(note: impl Into<String>) -> Pass {
    Pass { verdict: Verdict::Pass, note: note.into() }
}

/// Creates a pass for an allowed reaction that is not the best.
pub fn lenient(note: impl Into<String>) -> Pass {
    Pass { verdict: Verdict::PassLenient, note: note.into() }
}

impl Stop {
    /// Returns the exit code of a run that ends with this.
    pub const fn code(&self) -> u8 {
        match self.verdict {
            Verdict::Pass | Verdict::PassLenient | Verdict::Informational => exit::DONE,
            Verdict::Fail | Verdict::Broken => self.cause.code(),
            Verdict::Inconclusive => exit::UNDECIDED,
            Verdict::Unsupported | Verdict::NotApplicable | Verdict::Skipped => exit::NOTHING,
        }
    }

    /// The requirement is not met.
    pub fn unmet(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Fail, cause: Cause::Requirement, reason: reason.into() }
    }

    /// The observations decide nothing.
    pub fn undecided(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Inconclusive, ..Self::unmet(reason) }
    }

    /// The case does not apply to such a target.
    pub fn not_applicable(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::NotApplicable, ..Self::unmet(reason) }
    }

    /// Not run.
    pub fn skipped(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Skipped, ..Self::unmet(reason) }
    }

    /// The target reported that it cannot do this.
    pub fn unsupported(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Unsupported, ..Self::unmet(reason) }
    }

    /// The target's process ended when it must not.
    pub fn died(reason: impl Into<String>) -> Self {
        Self { cause: Cause::Died, ..Self::unmet(reason) }
    }

    /// The target's process exists, but is hung.
    pub fn hung(reason: impl Into<String>) -> Self {
        Self { cause: Cause::Hung, ..Self::unmet(reason) }
    }

    /// The target takes no connection.
    pub fn refused(reason: impl Into<String>) -> Self {
        Self { cause: Cause::Refused, ..Self::unmet(reason) }
    }

    /// The case could not be run: nothing is known about the target.
    pub fn broken(reason: impl Into<String>) -> Self {
        Self { verdict: Verdict::Broken, cause: Cause::Environment, reason: reason.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_comes_to() {
        for (stop, code) in [
            (Stop::unmet(""), exit::FAILED),
            (Stop::died(""), exit::LOST),
            (Stop::hung(""), exit::LOST),
            (Stop::refused(""), exit::LOST),
            (Stop::broken(""), exit::BROKEN),
            (Stop::undecided(""), exit::UNDECIDED),
            (Stop::unsupported(""), exit::NOTHING),
            (Stop::not_applicable(""), exit::NOTHING),
            (Stop::skipped(""), exit::NOTHING),
        ] {
            assert_eq!(stop.code(), code, "{stop:?}");
            assert_eq!(stop.verdict.is_tried(), code != exit::NOTHING, "{stop:?}");
        }
    }
}
