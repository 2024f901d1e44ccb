//! JUnit's XML, as CI systems read it: a test suite for each profile, the wire contract first, with its score as a property. What was
//! not tried or could not be decided is skipped there, never passed, and so is a failure that the exit status does not count.

use std::time::Duration;

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use crate::blackbox::results::{CaseResult, Run, Score};
use crate::blackbox::run::title;
use suite::Verdict;

pub(super) fn junit(run: &Run, strict: bool) -> Result<String, String> {
    let mut report = Report::new("valkey-rdma-conformance");
    for score @ Score { profile, passed, decided } in run.scores() {
        let mut suite = TestSuite::new(format!("{}: {}", title(&run.target), profile.title()));
        for (name, value) in [
            ("profile", profile.to_string()),
            ("score", score.to_string()),
            ("passed", passed.to_string()),
            ("decided", decided.to_string()),
        ] {
            suite.add_property((name, value.as_str()));
        }
        suite.add_test_cases(run.of(profile).map(|result| case(result, strict)));
        report.add_test_suite(suite);
    }
    // It has a profile, which is not told.
    if let Some(reason) = run.unexcused() {
        let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
        status.set_message(reason);
        let mut suite = TestSuite::new(format!("{}: withheld", title(&run.target)));
        suite.add_test_case(TestCase::new("withheld", status));
        report.add_test_suite(suite);
    }
    report.to_string().map_err(|error| error.to_string())
}

fn case(result: &CaseResult, strict: bool) -> TestCase {
    let status = match result.verdict {
        Verdict::Broken => failed(result, NonSuccessKind::Error),
        _ if result.is_told_as_failure(strict) => failed(result, NonSuccessKind::Failure),
        Verdict::Pass | Verdict::PassLenient | Verdict::Informational => TestCaseStatus::success(),
        Verdict::Fail
        | Verdict::Unsupported
        | Verdict::NotApplicable
        | Verdict::Skipped
        | Verdict::Inconclusive => skipped(result),
    };
    let mut case = TestCase::new(result.id.clone(), status);
    case.set_classname(result.requirements.first().cloned().unwrap_or_default());
    case.set_time(Duration::try_from_secs_f64(result.took).unwrap_or_default());
    case
}

fn skipped(result: &CaseResult) -> TestCaseStatus {
    let mut status = TestCaseStatus::skipped();
    let excuse = result.excuse().map(|excuse| format!("{excuse}: ")).unwrap_or_default();
    status.set_message(format!("{}: {excuse}{}", result.verdict, result.reason));
    status
}

fn failed(result: &CaseResult, kind: NonSuccessKind) -> TestCaseStatus {
    let mut status = TestCaseStatus::non_success(kind);
    status.set_message(result.reason.clone());
    status.set_type(result.requirements.join(" "));
    let wire: String = result.last_on_the_wire().into_iter().map(|line| format!("| {line}\n")).collect();
    status.set_description(format!(
        "{}\nexpected: {}\n{wire}again: {}",
        result.intent, result.expectation, result.repro
    ));
    status
}
