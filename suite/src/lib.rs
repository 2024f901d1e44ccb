//! What a suite is made of, and how one is run.

pub mod exit;
pub mod held;
pub mod terminal;

use std::time::{Duration, Instant};

use indicatif::ProgressBar;

/// What a passed case has to tell, or what was wrong.
pub type Outcome<F> = Result<String, F>;

/// One case, run in a setting `S`; `F` says what was wrong.
pub struct Case<S, F> {
    /// A stable name: `suite.intent`.
    pub id: &'static str,
    /// What it shows, in a few words.
    pub intent: &'static str,
    /// The requirements it is about.
    pub requirements: &'static [&'static str],
    /// Where else it is written, for instance a man page; empty if the requirements say it all.
    pub source: &'static str,
    /// The case itself. The bar is for those that take long.
    pub run: fn(&S, &ProgressBar) -> Outcome<F>,
}

impl<S, F> Case<S, F> {
    /// A case from its parts.
    pub const fn new(
        id: &'static str,
        intent: &'static str,
        requirements: &'static [&'static str],
        run: fn(&S, &ProgressBar) -> Outcome<F>,
    ) -> Self {
        Self { id, intent, requirements, source: "", run }
    }

    /// The same, with a source.
    #[must_use]
    pub const fn from_source(self, source: &'static str) -> Self {
        Self { source, ..self }
    }
}

/// What a report comes down to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is as it should be.
    Passed,
    /// It is not, in a way that is known, recorded and explained.
    Deviates,
    /// It is not.
    Failed,
}

/// A case that was run.
pub struct Report<F> {
    /// Which.
    pub id: &'static str,
    /// What it shows.
    pub intent: &'static str,
    /// Where else that is written.
    pub source: &'static str,
    /// What came of it.
    pub outcome: Outcome<F>,
    /// What that means.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
}

impl<F> Report<F> {
    /// The report on `case`; whatever is not a pass is a failure.
    pub const fn new<S>(case: &Case<S, F>, outcome: Outcome<F>, took: Duration) -> Self {
        let verdict = if outcome.is_ok() { Verdict::Passed } else { Verdict::Failed };
        Self { id: case.id, intent: case.intent, source: case.source, outcome, verdict, took }
    }
}

/// Runs the cases whose id contains `select`, in order, with a bar from `progress` for each. Ends early when the suite's
/// first case fails: it shows that there is something to test at all.
pub fn run<S, F>(
    cases: &[Case<S, F>],
    setting: &S,
    select: &str,
    mut progress: impl FnMut(&'static str) -> ProgressBar,
) -> Vec<Report<F>> {
    let mut reports = Vec::new();
    for (number, case) in cases.iter().enumerate().filter(|(_, case)| case.id.contains(select)) {
        let bar = progress(case.id);
        let begun = Instant::now();
        let outcome = (case.run)(setting, &bar);
        bar.finish_and_clear();
        let failed = outcome.is_err();
        reports.push(Report::new(case, outcome, begun.elapsed()));
        if failed && number == 0 {
            break;
        }
    }
    reports
}
