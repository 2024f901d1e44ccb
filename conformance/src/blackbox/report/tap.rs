//! The Test Anything Protocol, version 14. What was not tried is a SKIP, an expected failure a TODO.

use std::fmt::Write as _;

use crate::blackbox::results::Run;
use suite::Verdict;

pub(super) fn tap(run: &Run) -> String {
    let mut text = format!("TAP version 14\n1..{}\n", run.results.len());
    for (number, result) in (1..).zip(&run.results) {
        let reason = result.reason.replace('#', "\\#").replace('\n', " ");
        let (ok, directive) = match (result.verdict, &result.expected) {
            (Verdict::Fail, Some(expected)) => ("not ok", format!(" # TODO {}", expected.replace('\n', " "))),
            (Verdict::Fail | Verdict::Broken, _) => ("not ok", String::new()),
            (Verdict::Pass | Verdict::PassLenient | Verdict::Informational, _) => ("ok", String::new()),
            (verdict, _) => ("ok", format!(" # SKIP {verdict}: {reason}")),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{ok} {number} - {}{directive}", result.id);
        let _ = writeln!(text, "  ---\n  verdict: {}\n  level: {}", result.verdict, result.level);
        let _ = writeln!(text, "  profile: {}", result.profile);
        let _ = writeln!(text, "  requirements: [{}]", result.requirements.join(", "));
        let quoted = serde_json::Value::from(result.reason.as_str());
        let _ = writeln!(text, "  reason: {quoted}\n  ...");
    }
    text
}
