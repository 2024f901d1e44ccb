//! The suite of hostile peers on the embedded fabric.

use std::sync::{Mutex, MutexGuard, PoisonError};

use indicatif::ProgressBar;
use rdma_softsim::SoftSim;
use trust::Case;
use trust::hostile::{self, Setting};

/// One suite at a time, from before it opens anything: they count the process's descriptors and its use of the processor.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs all cases and tells of all that fail.
fn run<S>(cases: &[Case<S>], setting: &S, select: &str) {
    let reports = suite::run(cases, setting, select, |_| ProgressBar::hidden());
    assert!(!reports.is_empty(), "no case has {select} in its name");
    let failed: Vec<String> = reports
        .iter()
        .filter_map(|report| Some(format!("{}: {}", report.id, report.outcome.as_ref().err()?)))
        .collect();
    assert!(failed.is_empty(), "{} of {} cases failed:\n{}", failed.len(), reports.len(), failed.join("\n"));
}

#[test]
fn hostile_clients() {
    let _alone = alone();
    run(&hostile::cases(), &Setting::softsim(), "hostile.server.");
}

#[test]
fn hostile_servers() {
    let _alone = alone();
    run(&hostile::cases(), &Setting::softsim(), "hostile.client.");
}

#[test]
fn every_case_has_a_name_of_its_own_and_requirements() {
    let cases = hostile::cases::<SoftSim>();
    let mut ids: Vec<_> = cases.iter().map(|case| case.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), cases.len());
    assert!(cases.iter().all(|case| case.requirements.iter().all(|id| id.starts_with("VR-"))));
}
