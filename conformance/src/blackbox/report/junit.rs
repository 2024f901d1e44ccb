//! JUnit's XML: a suite for each profile, the wire contract first, with its score as a property.
//! Cases not run or not decided, and failures that do not count, are skipped there.

use askama::Template;

use crate::blackbox::results::{CaseResult, Run, Score};
use crate::blackbox::run::title;
use suite::Verdict;

#[derive(Template)]
#[template(path = "junit.xml")]
struct Junit {
    suites: Vec<TestSuite>,
}

struct TestSuite {
    name: String,
    properties: Vec<(&'static str, String)>,
    cases: Vec<TestCase>,
}

struct TestCase {
    name: String,
    class: String,
    seconds: f64,
    told: Option<Told>,
}

struct Told {
    element: &'static str,
    message: String,
    details: Option<(String, String)>,
}

impl TestSuite {
    fn count(&self, element: &str) -> usize {
        let is_told = |case: &&TestCase| case.told.as_ref().is_some_and(|told| told.element == element);
        self.cases.iter().filter(is_told).count()
    }
}

impl Junit {
    fn tests(&self) -> usize {
        self.suites.iter().map(|suite| suite.cases.len()).sum()
    }

    fn count(&self, element: &str) -> usize {
        self.suites.iter().map(|suite| suite.count(element)).sum()
    }
}

pub(super) fn junit(run: &Run, strict: bool) -> Result<String, String> {
    let mut suites = Vec::new();
    for score @ Score { profile, passed, decided } in run.scores() {
        suites.push(TestSuite {
            name: format!("{}: {}", title(&run.target), profile.title()),
            properties: vec![
                ("profile", profile.to_string()),
                ("score", score.to_string()),
                ("passed", passed.to_string()),
                ("decided", decided.to_string()),
            ],
            cases: run.of(profile).map(|result| case(result, strict)).collect(),
        });
    }
    if let Some(reason) = run.unexcused() {
        let told = Told { element: "failure", message: plain(&reason), details: None };
        let case = TestCase { name: "withheld".into(), class: String::new(), seconds: 0.0, told: Some(told) };
        let name = format!("{}: withheld", title(&run.target));
        suites.push(TestSuite { name, properties: Vec::new(), cases: vec![case] });
    }
    Junit { suites }.render().map_err(|error| error.to_string())
}

fn case(result: &CaseResult, strict: bool) -> TestCase {
    let told = match result.verdict {
        Verdict::Broken => Some(failed(result, "error")),
        _ if result.is_told_as_failure(strict) => Some(failed(result, "failure")),
        Verdict::Pass | Verdict::PassLenient | Verdict::Informational => None,
        Verdict::Fail
        | Verdict::Unsupported
        | Verdict::NotApplicable
        | Verdict::Skipped
        | Verdict::Inconclusive => Some(skipped(result)),
    };
    let class = result.requirements.first().cloned().unwrap_or_default();
    TestCase { name: result.id.clone(), class, seconds: result.took, told }
}

fn skipped(result: &CaseResult) -> Told {
    let excuse = result.excuse().map(|excuse| format!("{excuse}: ")).unwrap_or_default();
    let message = plain(&format!("{}: {excuse}{}", result.verdict, result.reason));
    Told { element: "skipped", message, details: None }
}

fn failed(result: &CaseResult, element: &'static str) -> Told {
    let wire: String = result.last_on_the_wire().into_iter().map(|line| format!("| {line}\n")).collect();
    let CaseResult { intent, expectation, repro, requirements, .. } = result;
    let text = plain(&format!("{intent}\nexpected: {expectation}\n{wire}again: {repro}"));
    Told { element, message: plain(&result.why()), details: Some((requirements.join(" "), text)) }
}

/// Removes characters that XML does not allow, for instance from a target's last lines.
fn plain(text: &str) -> String {
    text.chars().filter(|one| !one.is_control() || matches!(one, '\n' | '\t')).collect()
}
