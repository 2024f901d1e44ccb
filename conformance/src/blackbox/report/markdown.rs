//! Two tables of the cases that did not pass for each run, the wire contract's first.

use std::fmt::Write as _;

use crate::blackbox::results::{CaseResult, Run};
use crate::blackbox::run::title;
use suite::Verdict;

/// The tables.
pub fn markdown(runs: &[Run]) -> String {
    let mut text = String::new();
    for run in runs {
        // Writing to a string does not fail.
        let _ = write!(text, "## {}\n\n{}\n", title(&run.target), run.summary());
        if let Some(told) = run.says_of_withheld() {
            let _ = write!(text, "\n{told}\n");
        }
        if run.withheld.as_ref().is_some_and(|withheld| withheld.untried.total() > 0) {
            text.push_str(
                "\nSkipped are also cases that were not run because the program was gone, and cases that may do harm and decided nothing. \
                 They are counted, and not listed.\n",
            );
        }
        for score in run.scores() {
            let _ = write!(text, "\n### {score}\n");
            let rest: Vec<_> =
                run.of(score.profile).filter(|result| result.verdict != Verdict::Pass).collect();
            if !rest.is_empty() {
                text.push_str("\n| case | verdict | requirements | what was seen |\n|---|---|---|---|\n");
                rest.into_iter().for_each(|result| add(&mut text, result));
            }
        }
        text.push('\n');
    }
    text
}

fn add(text: &mut String, result: &CaseResult) {
    let CaseResult { id, verdict, level, requirements, expected, .. } = result;
    let expected = expected.as_ref().map(|why| format!(". Known: {why}")).unwrap_or_default();
    let seen = format!("{}{expected}", result.why()).replace('|', "\\|").replace('\n', " ");
    let _ = writeln!(text, "| `{id}` | {verdict} ({level}) | {} | {seen} |", requirements.join(", "));
}
