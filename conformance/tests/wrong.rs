//! Is the suite blind? Every wrong implementation fails the case that is about its mistake, the right one passes it, and every
//! case is failed by some mistake. `valkey-rdma-conformance verdicts` prints the table.

use conformance::blackbox::results::CaseResult;
use conformance::blackbox::verdict::Verdict;
use conformance::wrong::command::{Line, all_cases, judge_all};
use conformance::wrong::table::{NO_MISTAKE, TABLE};
use conformance::wrong::{Lifeless, Target};

/// Judges all of these, and tells of those that `wanted` does not find right.
fn all_come_to(lines: &[Line], wanted: impl Fn(&CaseResult) -> bool) {
    let results = judge_all(lines).unwrap();
    let surprises: Vec<String> = lines
        .iter()
        .zip(&results)
        .filter(|(_, result)| !wanted(result))
        .map(|((target, role, case), result)| {
            format!("{target} {role} {case}: {}, {}", result.verdict, result.reason)
        })
        .collect();
    assert!(surprises.is_empty(), "{} of {}:\n{}", surprises.len(), lines.len(), surprises.join("\n"));
}

#[test]
fn every_mistake_is_noticed_by_the_right_case() {
    let lines: Vec<Line> =
        TABLE.iter().map(|(mistake, role, case)| (Target::Mistaken(*mistake), *role, *case)).collect();
    all_come_to(&lines, |result| result.verdict == Verdict::Fail);
}

#[test]
fn every_case_is_failed_by_a_mistake() {
    let missing: Vec<_> = all_cases()
        .into_iter()
        .filter(|(role, case)| {
            let failed = TABLE.iter().any(|(_, of, one)| (of, one) == (role, case));
            let excused = NO_MISTAKE.iter().any(|(of, one, _)| (of, one) == (role, case));
            assert!(!(failed && excused), "{case}: there is a mistake that fails it");
            !failed && !excused
        })
        .collect();
    assert!(missing.is_empty(), "{} without a mistake: {missing:?}", missing.len());
}

#[test]
fn no_case_passes_what_does_nothing() {
    let lines: Vec<Line> = all_cases()
        .into_iter()
        .flat_map(|(role, case)| Lifeless::ALL.map(|how| (Target::Lifeless(how), role, case)))
        .collect();
    all_come_to(&lines, |result| !result.verdict.is_pass());
}

#[test]
fn without_a_mistake_the_same_cases_pass() {
    let mut lines: Vec<Line> = TABLE.iter().map(|(_, role, case)| (Target::Right, *role, *case)).collect();
    // They measure the whole process, in which others are at work.
    lines.retain(|(_, _, case)| !case.starts_with("res.nothing-left") && *case != "flow.held-quietly");
    lines.sort_by_key(|(_, role, case)| (role.to_string(), *case));
    lines.dedup();
    all_come_to(&lines, |result| result.verdict.is_pass());
}
