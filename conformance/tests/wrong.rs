//! Is the suite blind? Every wrong implementation fails the case that is about its mistake, and the right one passes it.

use conformance::blackbox::verdict::Verdict;
use conformance::wrong::{judge, table::TABLE};

#[test]
fn every_mistake_is_noticed_by_the_right_case() {
    // What a mistake makes of a thread of the target is not this test's.
    std::panic::set_hook(Box::new(|_| {}));
    let mut blind = Vec::new();
    for (mistake, role, case) in TABLE {
        let wrong = judge(Some(*mistake), *role, case).unwrap();
        println!("{mistake:?} {role:?} {case}: {}, {}", wrong.verdict, wrong.reason);
        if wrong.verdict != Verdict::Fail {
            blind.push(format!("{mistake:?} of a {role:?} in {case}: {}, {}", wrong.verdict, wrong.reason));
        }
    }
    assert!(blind.is_empty(), "{} of {} not noticed:\n{}", blind.len(), TABLE.len(), blind.join("\n"));
}

#[test]
fn without_a_mistake_these_cases_pass() {
    let mut seen = Vec::new();
    for (_, role, case) in TABLE {
        if seen.contains(&(*role, *case)) {
            continue;
        }
        seen.push((*role, *case));
        let right = judge(None, *role, case).unwrap();
        assert!(right.verdict.is_pass(), "{role:?} in {case}: {}, {}", right.verdict, right.reason);
    }
}
