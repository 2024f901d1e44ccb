//! Expected failures, each with its reason. Each must still fail.

use std::path::Path;

use rdma_softsim::SoftSim;
use serde::{Deserialize, Serialize};

use super::results::{CaseResult, Run};
use suite::{Cause, Verdict};

/// A file of expected failures.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    #[serde(default)]
    expected: Vec<Expected>,
    #[serde(skip_serializing_if = "Option::is_none")]
    withheld: Option<Withheld>,
}

/// Failures that are expected without names: those that bring the target down, keep it from
/// serving, or harm others.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Withheld {
    /// If a whole run has fewer of them, some are fixed.
    least: usize,
    /// If a run has more of them, none is excused: it is unknown which are new.
    most: usize,
    reason: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    case: String,
    reason: String,
    /// Another failure, for example of a process that now dies, is not the expected one.
    #[serde(default = "unmet")]
    cause: Cause,
    /// An undecided case does not excuse a failure.
    #[serde(default, skip_serializing_if = "Known::is_failure")]
    verdict: Known,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    sometimes: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Known {
    /// An undecided result is nothing new.
    #[default]
    Fail,
    Inconclusive,
}

impl Known {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
    fn is_failure(&self) -> bool {
        *self == Self::Fail
    }

    fn of(result: &CaseResult) -> Option<Self> {
        match result.verdict {
            Verdict::Fail => Some(Self::Fail),
            Verdict::Inconclusive => Some(Self::Inconclusive),
            _ => None,
        }
    }
}

impl Expected {
    /// Returns whether the result is the expected one, or less severe.
    fn excuses(&self, result: &CaseResult) -> bool {
        let known = Known::of(result)
            .is_some_and(|known| known == Known::Inconclusive || self.verdict == Known::Fail);
        known && result.id == self.case && result.cause == Some(self.cause)
    }
}

const fn unmet() -> Cause {
    Cause::Requirement
}

impl Baseline {
    /// Reads a file.
    ///
    /// # Errors
    /// It is no baseline, or has no reasons.
    pub fn read(file: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let baseline: Self = toml::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        if baseline.withheld.as_ref().is_some_and(|withheld| withheld.reason.trim().is_empty()) {
            return Err(format!("{}: [withheld] has no reason", file.display()));
        }
        for expected in &baseline.expected {
            if expected.reason.trim().is_empty() {
                return Err(format!("{}: {} has no reason", file.display(), expected.case));
            }
        }
        Ok(baseline)
    }

    /// Returns a baseline that expects the failures of `run`. An expected failure that occurred,
    /// occurs sometimes, or was not run keeps its reason. That of a new one is what was seen.
    #[must_use]
    pub fn renewed(&self, run: &Run) -> Self {
        let result = |case: &str| run.results.iter().find(|result| result.id == case);
        let tried = |case: &str| result(case).is_some_and(|result| result.verdict != Verdict::Skipped);
        let is_kept = |one: &&Expected| {
            let fails_so = result(&one.case).is_some_and(|result| one.excuses(result));
            one.sometimes || fails_so || !tried(&one.case)
        };
        let mut expected: Vec<_> = self.expected.iter().filter(is_kept).cloned().collect();
        // Withheld failures are expected without their names.
        let is_withheld = |result: &CaseResult| self.withheld.is_some() && result.is_kept_back();
        for result in run.results.iter().filter(|result| !is_withheld(result)) {
            let (Some(verdict), Some(cause)) = (Known::of(result), result.cause) else { continue };
            if !expected.iter().any(|one| one.excuses(result)) {
                let (case, reason) = (result.id.clone(), format!("seen: {}", result.reason));
                expected.push(Expected { case, reason, cause, verdict, sometimes: false });
            }
        }
        Self { expected, withheld: self.withheld.clone() }
    }

    /// Writes a file for [`Baseline::read`].
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), String> {
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let text = toml::to_string(self).map_err(|error| told(&error))?;
        std::fs::write(file, text).map_err(|error| told(&error))
    }

    /// Marks failures that this baseline expects, and no earlier one. Returns a message for each
    /// entry that was run and did not fail.
    pub fn apply(&self, run: &mut Run) -> Vec<String> {
        run.results.iter_mut().for_each(|result| result.expected = None);
        let mut stale = Vec::new();
        for one @ Expected { case, reason, sometimes, .. } in &self.expected {
            for result in run.results.iter_mut().filter(|result| result.id == *case) {
                match result.verdict {
                    _ if one.excuses(result) => result.expected = Some(reason.clone()),
                    Verdict::Pass | Verdict::PassLenient if !sometimes => stale.push(format!(
                        "{case} is expected to fail ({reason}), and passed: take it out of the baseline"
                    )),
                    _ => {}
                }
            }
        }
        stale.extend(self.withheld.as_ref().and_then(|withheld| withheld.apply(run)));
        stale
    }
}

impl Withheld {
    fn apply(&self, run: &mut Run) -> Option<String> {
        let unnamed = |result: &CaseResult| result.is_kept_back() && result.expected.is_none();
        let counted = run.results.iter().filter(|result| unnamed(result)).count() + run.withheld();
        let reason = (counted <= self.most).then(|| self.reason.clone());
        run.results
            .iter_mut()
            .filter(|result| unnamed(result))
            .for_each(|result| result.expected = reason.clone());
        if let Some(withheld) = &mut run.withheld {
            withheld.expected = reason;
        }
        let all = super::cases::<SoftSim>().iter().filter(|case| case.role == Some(run.target.role)).count();
        let tried = run.results.iter().filter(|result| result.verdict != Verdict::Skipped).count();
        (counted < self.least && tried == all).then(|| {
            format!(
                "{counted} cases bring the target down or harm others, and at least {} are expected ({}): lower `least`",
                self.least, self.reason
            )
        })
    }
}
