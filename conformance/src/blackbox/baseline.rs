//! Failures that are expected: each with its reason, and each must still be one.

use std::path::Path;

use serde::Deserialize;

use super::results::Run;
use super::verdict::{Cause, Verdict};

/// A file of expected failures.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    #[serde(default)]
    expected: Vec<Expected>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    /// The id of a case.
    case: String,
    /// Why it fails.
    reason: String,
    /// How: another failure, say of a process that now dies, is not the one that was expected.
    #[serde(default = "unmet")]
    cause: Cause,
    /// It need not fail each time.
    #[serde(default)]
    sometimes: bool,
}

const fn unmet() -> Cause {
    Cause::Requirement
}

impl Baseline {
    /// Reads a file.
    ///
    /// # Errors
    /// It is no such file, or says nothing about why.
    pub fn read(file: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let baseline: Self = toml::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        for expected in &baseline.expected {
            if expected.reason.trim().is_empty() {
                return Err(format!("{}: {} has no reason", file.display(), expected.case));
            }
        }
        Ok(baseline)
    }

    /// Marks what was expected; tells of entries that no failure answers to, among the cases that were tried.
    pub fn apply(&self, run: &mut Run) -> Vec<String> {
        let mut stale = Vec::new();
        for Expected { case, reason, cause, sometimes } in &self.expected {
            for result in run.results.iter_mut().filter(|result| result.id == *case) {
                match result.verdict {
                    Verdict::Fail | Verdict::Inconclusive if result.cause == Some(*cause) => {
                        result.expected = Some(reason.clone());
                    }
                    Verdict::Pass | Verdict::PassLenient if !sometimes => stale.push(format!(
                        "{case} is expected to fail ({reason}), and passed: take it out of the baseline"
                    )),
                    _ => {}
                }
            }
        }
        stale
    }
}
