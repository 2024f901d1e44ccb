//! The requirements of `snapshot/spec/snapshot.toml` compared with the code, tests and cases.

use conformance::requirements::{Requirements, workspace};
use rdma_softsim::SoftSim;
use snapshot_suite::{publisher, reader};
use trust::reqs::cases::shows;
use trust::reqs::coverage::Coverage;

#[path = "../../../conformance/tests/program/schema.rs"]
mod schema;

use schema::Schema;

#[test]
fn they_match_their_schema() {
    let root = workspace().unwrap();
    let read = |file: &str| std::fs::read_to_string(root.join(file)).unwrap();
    let schema = serde_json::from_str(&read("spec/vectors/schema/requirements-2.json")).unwrap();
    let file: toml::Value = toml::from_str(&read("snapshot/spec/snapshot.toml")).unwrap();
    let problems = Schema::new(schema).problems(&serde_json::to_value(file).unwrap());
    assert_eq!(problems, [""; 0]);
}

/// Code names every requirement. A case shows it, or the requirement says why not.
#[test]
fn every_requirement_is_shown() {
    let root = workspace().unwrap();
    let requirements = Requirements::read(&root.join("snapshot/spec/snapshot.toml")).unwrap();
    let vectors = requirements.vectors().map(|(name, ids)| (name.to_string(), ids.to_vec())).collect();
    let cases = [shows(&publisher::cases::<SoftSim>()), shows(&reader::cases::<SoftSim>())].concat();
    let coverage = Coverage::over(&root, "VS-", requirements, &cases, vectors).unwrap();
    println!("{}", coverage.table());
    assert_eq!(coverage.problems, [""; 0]);
    let named = |id: &str| id.to_string();
    let unnamed: Vec<String> = coverage.without_code().iter().map(|one| named(&one.id)).collect();
    assert_eq!(unnamed, [""; 0]);
    let is_shown = |id: &str| cases.iter().any(|case| case.1.contains(&id));
    let without_case: Vec<String> = coverage
        .requirements()
        .filter(|one| !is_shown(&one.id) && one.note.is_none())
        .map(|one| named(&one.id))
        .collect();
    assert_eq!(without_case, [""; 0]);
}
