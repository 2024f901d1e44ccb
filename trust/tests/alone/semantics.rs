//! The verbs semantics suite on the embedded fabric: what the simulator claims of RDMA is what the suite says.

use indicatif::ProgressBar;
use rdma_semantics::{cases, deviations};
use trust::semantics::embedded;

use crate::alone;

#[test]
fn the_embedded_fabric_keeps_to_the_book() {
    let _alone = alone();
    let (setting, cases) = (embedded(), cases());
    let mut reports = suite::run(&cases, &setting, "", |_| ProgressBar::hidden());
    deviations::judge(&setting.provider, &mut reports);
    let failed: Vec<_> = reports
        .iter()
        .filter(|report| report.is_failure())
        .map(|report| format!("{}: {}", report.id, report.details()))
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert_eq!(reports.len(), cases.len());
}
