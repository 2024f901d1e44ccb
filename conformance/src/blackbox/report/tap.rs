//! The Test Anything Protocol, version 14. A case that was not run is a SKIP. A failure that does
//! not count, such as an expected one, is a TODO.

use std::fmt::Write as _;

use serde_json::json;

use crate::blackbox::results::Run;
use suite::Verdict;

pub(super) fn tap(run: &Run, strict: bool) -> String {
    let unexcused = run.unexcused();
    let count = run.results.len() + usize::from(unexcused.is_some());
    let mut text = format!("TAP version 14\n1..{count}\n");
    for (number, result) in (1..).zip(&run.results) {
        let reason = result.reason.replace('#', "\\#").replace('\n', " ");
        let (ok, directive) = match result.verdict {
            _ if result.is_told_as_failure(strict) => ("not ok", String::new()),
            Verdict::Fail => {
                let excuse = result.excuse().unwrap_or_default();
                ("not ok", format!(" # TODO {}", excuse.replace('\n', " ")))
            }
            Verdict::Pass | Verdict::PassLenient | Verdict::Informational => ("ok", String::new()),
            verdict => ("ok", format!(" # SKIP {verdict}: {reason}")),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{ok} {number} - {}{directive}", result.id);
        let _ = writeln!(text, "  ---\n  verdict: {}\n  level: {}", result.verdict, result.level);
        let _ = writeln!(text, "  profile: {}", result.profile);
        let _ = writeln!(text, "  requirements: [{}]", result.requirements.join(", "));
        let quoted = serde_json::Value::from(result.why());
        let _ = writeln!(text, "  reason: {quoted}\n  ...");
    }
    if let Some(reason) = unexcused {
        let _ = writeln!(text, "not ok {count} - withheld\n  ---\n  reason: {}\n  ...", json!(reason));
    }
    text
}
