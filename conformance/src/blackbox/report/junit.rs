//! JUnit's XML, as CI systems read it. What was not tried or could not be decided is skipped there, never passed.

use std::time::Duration;

use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use crate::blackbox::results::{CaseResult, Run};
use crate::blackbox::run::title;
use suite::Verdict;

pub(super) fn junit(run: &Run) -> Result<String, String> {
    let mut suite = TestSuite::new(title(&run.target));
    suite.add_test_cases(run.results.iter().map(case));
    let mut report = Report::new("valkey-rdma-conformance");
    report.add_test_suite(suite);
    report.to_string().map_err(|error| error.to_string())
}

fn case(result: &CaseResult) -> TestCase {
    let status = match result.verdict {
        Verdict::Pass | Verdict::PassLenient | Verdict::Informational => TestCaseStatus::success(),
        Verdict::Fail if result.expected.is_some() => skipped(result),
        Verdict::Fail => failed(result, NonSuccessKind::Failure),
        Verdict::Broken => failed(result, NonSuccessKind::Error),
        Verdict::Unsupported | Verdict::NotApplicable | Verdict::Skipped | Verdict::Inconclusive => {
            skipped(result)
        }
    };
    let mut case = TestCase::new(result.id.clone(), status);
    case.set_classname(result.requirements.first().cloned().unwrap_or_default());
    case.set_time(Duration::try_from_secs_f64(result.took).unwrap_or_default());
    case
}

fn skipped(result: &CaseResult) -> TestCaseStatus {
    let mut status = TestCaseStatus::skipped();
    let expected =
        result.expected.as_ref().map(|reason| format!("expected ({reason}): ")).unwrap_or_default();
    status.set_message(format!("{}: {expected}{}", result.verdict, result.reason));
    status
}

fn failed(result: &CaseResult, kind: NonSuccessKind) -> TestCaseStatus {
    let mut status = TestCaseStatus::non_success(kind);
    status.set_message(result.reason.clone());
    status.set_type(result.requirements.join(" "));
    status.set_description(format!(
        "{}\nexpected: {}\nagain: {}",
        result.intent, result.expectation, result.repro
    ));
    status
}
