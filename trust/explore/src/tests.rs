//! Every schedule of two machines in small settings; `valkey-rdma-trust explore` has large ones.

use super::{DEFECTS, SearchEnd, Violation, explore, line, small, with_defect};

const LIMIT: u64 = 3_000_000;

#[test]
fn every_schedule_delivers() {
    for scenario in small() {
        let (seen, end) = explore(&scenario, LIMIT);
        println!("{}", line(&scenario, &seen, &end));
        assert!(matches!(end, SearchEnd::Complete), "{}: {end:#?}", scenario.name);
    }
}

#[test]
fn every_defect_is_found() {
    for defect in DEFECTS {
        let scenario = with_defect(defect);
        let (seen, end) = explore(&scenario, LIMIT);
        println!("{}", line(&scenario, &seen, &end));
        let SearchEnd::Violated(Violation { what, .. }) = end else {
            panic!("{defect:?} was not found: {seen:?}")
        };
        assert!(what.contains(defect.shows_as()), "{defect:?} showed as {what}");
    }
}
