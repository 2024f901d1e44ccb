//! Our own side under the suite, by what it says of it, on the embedded fabric.

use indicatif::ProgressBar;
use rdma_softsim::SoftSim;
use suite::Role;
use trust::own::table::TABLE;
use trust::own::{self, Setting};

/// Runs the cases of a role, and reports all that fail.
fn run(role: Role) {
    let mut cases = own::cases();
    cases.retain(|case| case.role == Some(role));
    let reports = suite::run(&cases, &Setting::softsim(), "", |_| ProgressBar::hidden());
    assert!(reports.len() > 90, "{}", reports.len());
    let failed = reports.iter().filter(|report| report.is_failure());
    let failed: Vec<String> =
        failed.map(|report| format!("{} {role}: {}", report.id, report.details())).collect();
    assert!(failed.is_empty(), "{} of {} cases failed:\n{}", failed.len(), reports.len(), failed.join("\n"));
}

/// In one test, for cases count the process's descriptors and its use of the processor.
#[test]
fn our_server_and_client() {
    run(Role::Server);
    run(Role::Client);
}

#[test]
fn rows_are_about_cases_that_exist() {
    let cases = own::suite_cases::<SoftSim>();
    for row in TABLE {
        for role in [Role::Server, Role::Client].into_iter().filter(|role| row.role.includes(*role)) {
            let exists = cases.iter().any(|case| case.id == row.case && case.role == Some(role));
            assert!(exists, "{} {role}", row.case);
        }
    }
}

/// Every row of the suite that this one replaced has its place.
#[test]
fn nothing_of_the_hostile_suite_was_lost() {
    let cases = own::suite_cases::<SoftSim>();
    let page = include_str!("../../docs/hostile.md");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows.len(), 68);
    for row in rows {
        let [name, server, client] = row[..] else { panic!("{row:?}") };
        assert!(server != "–" || client != "–", "{name}");
        for (role, places) in [(Role::Server, server), (Role::Client, client)] {
            for place in places.split(", ").filter(|place| *place != "–") {
                let id = place.trim_matches('`');
                assert!(
                    cases.iter().any(|case| case.id == id && case.role == Some(role)),
                    "{name}, {role}: there is no case {id}"
                );
            }
        }
    }
}
