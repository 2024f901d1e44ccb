//! Results for people and for programs.

mod html;
mod junit;
mod markdown;
mod tap;

use std::fmt::Write as _;
use std::time::{Duration, UNIX_EPOCH};

use clap::ValueEnum;
use serde_json::json;

use super::results::Teardown;
use super::results::{CaseResult, Run, Target};
use super::run::title;
use crate::requirements::Profile;
use suite::Verdict;

pub use html::html;
pub use markdown::markdown;

/// How to write results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For reading: the counts, and what did not pass.
    Pretty,
    /// All of it.
    Json,
    /// For CI systems.
    Junit,
    /// The Test Anything Protocol, version 14.
    Tap,
    /// One page that needs nothing else.
    Html,
    /// Tables of what did not pass.
    Markdown,
    /// Lines of a table, one for each run: how it came out, to be kept beside those of other
    /// versions.
    History,
    /// A badge, as shields.io's endpoint takes it.
    Badge,
}

/// Returns a run in a format, judged with or without `--strict`.
///
/// # Errors
/// It cannot be serialised.
pub fn text(run: &Run, format: Format, strict: bool) -> Result<String, String> {
    match format {
        Format::Pretty => Ok(format!("{}{}", failures(run, strict), summary(run))),
        Format::Json => run.json(),
        Format::Junit => junit::junit(run, strict),
        Format::Tap => Ok(tap::tap(run, strict)),
        Format::Html => html(std::slice::from_ref(run), None),
        Format::Markdown => Ok(markdown(std::slice::from_ref(run))),
        Format::History => Ok(history(std::slice::from_ref(run))),
        Format::Badge => Ok(format!("{:#}\n", badge(run))),
    }
}

/// Returns a line for each run: the day, the program, its place, its scores, and the suite.
pub fn history(runs: &[Run]) -> String {
    let line = |run: &Run| {
        let [wire, hardened] = run.scores().map(|score| format!("{} of {}", score.passed, score.decided));
        let Target { name, role, backend, .. } = &run.target;
        let (day, suite) = (day(run.begun), &run.suite.version);
        format!("| {day} | {name} | {role} | {backend} | {wire} | {hardened} | {suite} |\n")
    };
    runs.iter().map(line).collect()
}

/// Returns the day of a time in seconds since 1970, in ISO 8601.
fn day(seconds: u64) -> String {
    let time = humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds)).to_string();
    time.split('T').next().unwrap_or_default().into()
}

/// Returns the result of a run, in two lines.
pub fn summary(run: &Run) -> String {
    let [wire, hardened] = run.scores();
    format!("{}: {}\n{wire}, {hardened}\n", title(&run.target), run.summary())
}

/// Returns the cases that did not pass, counted failures last: each with the last events on the
/// wire, and a line that repeats it. Those of one cause, and those not run, are listed once.
pub fn failures(run: &Run, strict: bool) -> String {
    let results = Profile::ALL.into_iter().flat_map(|profile| run.of(profile));
    let (tried, untried): (Vec<_>, Vec<_>) =
        results.filter(|result| is_worth_telling(result, strict)).partition(|one| one.verdict.is_tried());
    let mut text = String::new();
    for alike in alike(untried) {
        let (first, cases) = (alike[0], named(&alike));
        // Writing to a string does not fail.
        let _ = writeln!(text, "– {} {cases}: {}", first.verdict, first.reason);
    }
    let mut tried = alike(tried);
    tried.sort_by_key(|alike| alike.iter().any(|one| one.is_scored_failure(strict)));
    for alike in tried {
        tell(&mut text, alike[0], strict);
        if alike.len() > 1 {
            let _ = writeln!(text, "    alike in {} more: {}", alike.len() - 1, named(&alike[1..]));
        }
    }
    text
}

fn alike(results: Vec<&CaseResult>) -> Vec<Vec<&CaseResult>> {
    let key = |result: &CaseResult| {
        let CaseResult { verdict, cause, expected, .. } = result;
        (*verdict, *cause, expected.clone(), result.cause_in_words())
    };
    let mut groups: Vec<Vec<&CaseResult>> = Vec::new();
    for result in results {
        match groups.iter_mut().find(|group| key(group[0]) == key(result)) {
            Some(group) => group.push(result),
            None => groups.push(vec![result]),
        }
    }
    groups
}

/// Returns the first lines of a failure: what the target was shown, its reaction, and the hint.
pub fn first_lines(result: &CaseResult) -> String {
    let CaseResult { intent, reason, hint, .. } = result;
    let hint = hint.as_ref().map(|hint| format!("\n    hint: {hint}")).unwrap_or_default();
    format!("    shown: {intent}\n    seen: {reason}{hint}")
}

fn named(results: &[&CaseResult]) -> String {
    match results {
        [_, _, _, _, ..] if results.iter().all(|one| !one.verdict.is_tried()) => {
            format!("{} cases", results.len())
        }
        _ => results.iter().map(|one| one.id.as_str()).collect::<Vec<_>>().join(" "),
    }
}

fn tell(text: &mut String, result: &CaseResult, strict: bool) {
    let mark = if result.is_scored_failure(strict) { "✗" } else { "·" };
    let teardown = match result.teardown {
        Some(Teardown::Clean) | None => String::new(),
        Some(teardown) => format!(", teardown {}", teardown.name()),
    };
    let _ = writeln!(
        text,
        "{mark} {} {} [{}, {}: {}{teardown}]\n{}",
        result.verdict,
        result.id,
        result.profile.title(),
        result.level,
        result.requirements.join(" "),
        first_lines(result)
    );
    if let Some(expected) = &result.expected {
        let _ = writeln!(text, "    expected: {expected}");
    } else if result.verdict == Verdict::Fail {
        let _ = writeln!(text, "    right: {}", result.expectation);
        for line in result.last_on_the_wire() {
            let _ = writeln!(text, "    | {line}");
        }
        let _ = writeln!(text, "    again: {}", result.repro);
    }
}

fn is_worth_telling(result: &CaseResult, strict: bool) -> bool {
    match result.verdict {
        Verdict::Pass | Verdict::Informational => false,
        Verdict::PassLenient => strict,
        _ => true,
    }
}

/// Green is for a run in which nothing failed, expected or not.
fn badge(run: &Run) -> serde_json::Value {
    let passed = run.count(Verdict::Pass) + run.count(Verdict::PassLenient);
    let tried = passed + run.count(Verdict::Fail) + run.withheld();
    let any = |test: fn(&CaseResult) -> bool| run.results.iter().any(test);
    let harm = run.withheld() > 0 || any(CaseResult::is_harm);
    let color = if harm || any(|result| result.is_scored_failure(false)) {
        "red"
    } else if any(|result| result.verdict == Verdict::Fail) {
        "orange"
    } else if passed == 0 {
        "lightgrey"
    } else {
        "brightgreen"
    };
    json!({
        "schemaVersion": 1,
        "label": format!("Valkey over RDMA, {}", run.target.role),
        "message": format!("{passed}/{tried}"),
        "color": color,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn colour(results: &str) -> String {
        let run = format!(
            r#"{{"format":2,"target":{{"name":"","role":"server","how":"","backend":""}},"suite":{{"version":"","requirements":1}},
                "arguments":[],"begun":0,"took":0,"results":[{results}]}}"#
        );
        badge(&serde_json::from_str(&run).unwrap())["color"].to_string()
    }

    fn case(verdict: &str, cause: &str, expected: &str) -> String {
        format!(
            r#"{{"id":"a.b","intent":"","expectation":"","requirements":[],"level":"must","profile":"wire","tags":[],"verdict":"{verdict}",
                "cause":"{cause}",{expected}"reason":"","took":0,"repro":""}}"#
        )
    }

    #[test]
    fn a_line_of_history() {
        let mut run: Run = serde_json::from_str(
            r#"{"format":2,"target":{"name":"a server 1.0","role":"server","how":"","backend":"softsim"},"suite":{"version":"0.1.0",
                "requirements":1},"arguments":[],"begun":86400,"took":0,"results":[]}"#,
        )
        .unwrap();
        run.results = vec![
            serde_json::from_str(&case("pass", "requirement", "")).unwrap(),
            serde_json::from_str(&case("fail", "requirement", "")).unwrap(),
        ];
        let line = "| 1970-01-02 | a server 1.0 | server | softsim | 1 of 2 | 0 of 0 | 0.1.0 |\n";
        assert_eq!(history(&[run]), line);
    }

    #[test]
    fn a_badge_is_green_only_where_nothing_failed() {
        let known = r#""expected":"known","#;
        let pass = case("pass", "requirement", "");
        assert_eq!(colour(&pass), "\"brightgreen\"");
        assert_eq!(colour(&format!("{pass},{}", case("fail", "requirement", ""))), "\"red\"");
        assert_eq!(colour(&format!("{pass},{}", case("fail", "requirement", known))), "\"orange\"");
        assert_eq!(colour(&format!("{pass},{}", case("fail", "died", known))), "\"red\"");
        assert_eq!(colour(&case("skipped", "requirement", "")), "\"lightgrey\"");
    }
}
