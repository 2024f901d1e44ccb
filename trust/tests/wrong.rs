//! Is the suite blind? Every wrong implementation fails the case that is about its mistake, the right one passes it, every case is
//! failed by some mistake, and none passes what does nothing. `valkey-rdma-trust verdicts` prints the table.

use trust::wrong::command::{all_cases, is_right, judge_all, lines};
use trust::wrong::table::{NO_MISTAKE, TABLE};

#[test]
fn every_verdict_is_right() {
    // All in one, for some cases look at the whole process.
    let lines = lines();
    let results = judge_all(&lines).unwrap();
    let surprises: Vec<String> = lines
        .iter()
        .zip(&results)
        .filter(|((target, ..), result)| !is_right(*target, result.verdict))
        .map(|((target, role, case), result)| {
            format!("{target} {role} {case}: {}, {}", result.verdict, result.reason)
        })
        .collect();
    assert!(surprises.is_empty(), "{} of {}:\n{}", surprises.len(), lines.len(), surprises.join("\n"));
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
