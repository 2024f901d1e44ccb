//! Is the suite blind? Every wrong implementation fails the case that is about its mistake, and the right one passes it.

use std::sync::Mutex;

use conformance::blackbox::verdict::Verdict;
use conformance::reqs::Role;
use trust::wrong::table::TABLE;
use trust::wrong::{Mistake, judge};

/// Most of the time of a mistake is spent waiting for what does not come.
const AT_ONCE: usize = 8;

/// Judges all of these, several at a time, and tells of those that `wanted` does not find right.
fn judge_all(lines: &[(Option<Mistake>, Role, &'static str)], wanted: fn(Verdict) -> bool) {
    let (next, surprises) = (Mutex::new(lines.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((mistake, role, case)) = { next.lock().unwrap().next() } {
                    let result = judge(*mistake, *role, case).unwrap();
                    let told = format!("{mistake:?} {role:?} {case}: {}, {}", result.verdict, result.reason);
                    println!("{told}");
                    if !wanted(result.verdict) {
                        surprises.lock().unwrap().push(told);
                    }
                }
            });
        }
    });
    let surprises = surprises.into_inner().unwrap();
    assert!(surprises.is_empty(), "{} of {}:\n{}", surprises.len(), lines.len(), surprises.join("\n"));
}

#[test]
fn every_mistake_is_noticed_by_the_right_case() {
    // What a mistake makes of a thread of the target is told by the case.
    std::panic::set_hook(Box::new(|_| {}));
    let lines: Vec<_> = TABLE.iter().map(|(mistake, role, case)| (Some(*mistake), *role, *case)).collect();
    judge_all(&lines, |verdict| verdict == Verdict::Fail);
}

#[test]
fn without_a_mistake_the_same_cases_pass() {
    let mut lines: Vec<_> = TABLE.iter().map(|(_, role, case)| (None, *role, *case)).collect();
    // It counts what the whole process holds.
    lines.retain(|(_, _, case)| *case != "res.nothing-left-of-the-vanished");
    lines.sort_by_key(|(_, role, case)| (format!("{role:?}"), *case));
    lines.dedup();
    judge_all(&lines, Verdict::is_pass);
}
