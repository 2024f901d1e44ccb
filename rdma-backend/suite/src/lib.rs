//! Parts of a suite: cases, verdicts, reports, and how programs run them and exit.

mod case;
pub mod exit;
pub mod hex;
pub mod resources;
pub mod terminal;
pub mod verdict;

use std::time::{Duration, Instant};

use indicatif::ProgressBar;

pub use case::{Body, Case, Role, Tag};
pub use verdict::{Cause, Judged, Pass, Stop, Verdict};

/// The result of a case.
pub struct Report {
    /// Its id.
    pub id: &'static str,
    /// Its role.
    pub role: Option<Role>,
    /// The intent of the case.
    pub intent: &'static str,
    /// The case's other source.
    pub source: &'static str,
    /// The verdict.
    pub judged: Judged,
    /// The reason for which it was expected to fail, if it was.
    pub expected: Option<&'static str>,
    /// How long it took.
    pub took: Duration,
}

impl Report {
    /// Returns the report on `case`, with no failure expected.
    #[must_use]
    pub const fn new<S>(case: &Case<S>, judged: Judged, took: Duration) -> Self {
        let Case { id, role, intent, source, .. } = case;
        Self { id, role: *role, intent, source, judged, expected: None, took }
    }

    /// Returns the verdict.
    #[must_use]
    pub const fn verdict(&self) -> Verdict {
        match &self.judged {
            Ok(passed) => passed.verdict,
            Err(stop) => stop.verdict,
        }
    }

    /// Returns whether it did not pass, and was not expected to fail.
    #[must_use]
    pub const fn is_failure(&self) -> bool {
        !self.verdict().is_pass() && self.expected.is_none()
    }

    /// Returns the remark or the reason.
    #[must_use]
    pub fn details(&self) -> String {
        let told = match &self.judged {
            Ok(passed) => &passed.note,
            Err(stop) => &stop.reason,
        };
        self.expected.map_or_else(|| told.clone(), |why| format!("{told}. {why}"))
    }
}

/// Runs the cases whose id contains `select`, in order, with a bar from `progress` for each. Ends
/// early if the suite's first case fails: it shows that there is something to test at all.
pub fn run<S>(
    cases: &[Case<S>],
    on: &S,
    select: &str,
    mut progress: impl FnMut(&'static str) -> ProgressBar,
) -> Vec<Report> {
    let mut reports = Vec::new();
    for (number, case) in cases.iter().enumerate().filter(|(_, case)| case.id.contains(select)) {
        let bar = progress(case.id);
        let begun = Instant::now();
        let judged = (case.run)(on, &bar);
        bar.finish_and_clear();
        let failed = judged.is_err();
        reports.push(Report::new(case, judged, begun.elapsed()));
        if failed && number == 0 {
            break;
        }
    }
    reports
}
