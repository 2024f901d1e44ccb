//! The requirements compared with the workspace, their pages, and the text.

use std::path::Path;

use conformance::requirements::{Level, Origin, Profile, Requirement, Requirements, ids, workspace};
use trust::reqs::coverage::Coverage;
use trust::reqs::render;
use vector_check::Files;

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn every_must_is_shown_and_every_id_exists() {
    let coverage = Coverage::of(&workspace().unwrap()).unwrap();
    println!("{}", coverage.table());
    assert_none(&coverage.problems);
}

#[test]
fn every_requirement_stands_beside_code() {
    let coverage = Coverage::of(&workspace().unwrap()).unwrap();
    let unnamed: Vec<String> = coverage.without_code().iter().map(|one| one.id.clone()).collect();
    assert_none(&unnamed);
}

#[test]
fn a_must_that_nothing_shows_is_a_problem() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("coverage");
    let _from_an_earlier_run = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(root.join("spec")).unwrap();
    std::os::unix::fs::symlink(workspace().unwrap().join("spec/vectors"), root.join("spec/vectors")).unwrap();
    // In two parts, because this is no mention.
    let id = format!("VR-{}-901", "CTRL");
    let real = read(&workspace().unwrap().join("spec/requirements.toml"));
    let problems = |level: &str, more: &str, code: &str| -> Vec<String> {
        let fields = format!(
            "level = \"{level}\"\norigin = \"verbs\"\nprofile = \"wire\"\nsource = \"s\"\ntext = \"t\"\n{more}"
        );
        let file = format!("{real}\n[[requirement]]\nid = \"{id}\"\n{fields}");
        std::fs::write(root.join("spec/requirements.toml"), file).unwrap();
        std::fs::write(root.join("lib.rs"), code).unwrap();
        Coverage::of(&root).unwrap().problems.into_iter().filter(|problem| problem.contains(&id)).collect()
    };
    let gap = format!("{id}: no test, no vector, no reason for neither");
    let unseen =
        ["client", "server"].map(|role| format!("{id}, {role}: no vector, no case, no reason for neither"));
    let nothing = [&[gap][..], &unseen].concat();
    assert_eq!(problems("must", "", ""), nothing);
    assert_eq!(problems("must", "", &format!("// {id}\nfn meets() {{}}")), nothing, "code shows nothing");
    assert_eq!(problems("must", "", &format!("// {id}\n#[test]\nfn shows() {{}}")), unseen);
    assert_eq!(problems("must", "roles = [\"server\"]\ntests = [\"smoke.ping\"]", ""), unseen[1..]);
    assert_none(&problems("must", "untestable = \"u\"", ""));
    assert_none(&problems("should", "", ""));
    let missing = "tests = [\"smoke.nothing\"]";
    assert_eq!(
        problems("should", missing, ""),
        [format!("{id}: there is no test and no case smoke.nothing")]
    );
}

#[test]
fn every_must_about_messages_or_the_machine_has_a_vector() {
    let no_vector_can_show = [
        ("VR-CTRL-007", "the size of a receive is chosen by who posts it"),
        ("VR-MEM-015", "memory is below the machine"),
        ("VR-MEM-019", "memory is below the machine"),
        ("VR-XFER-003", "the byte order of an immediate is the device's business"),
        ("VR-XFER-011", "memory is below the machine"),
        ("VR-KEEP-008", "receives are posted below the machine"),
    ];
    let coverage = Coverage::of(&workspace().unwrap()).unwrap();
    let without: Vec<String> = Requirements::built_in()
        .iter()
        .filter(|one| one.level == Level::Must && !["CONN", "RES", "SEC"].contains(&one.area()))
        .filter(|one| coverage.shown(&one.id).is_none_or(|shown| shown.vectors.is_empty()))
        .map(|one| one.id.clone())
        .collect();
    assert_eq!(without, no_vector_can_show.map(|(id, _)| id));
}

/// The wire requirements ask for nothing that only a faulty peer makes necessary.
#[test]
fn the_wire_contract_has_no_hardening_in_it() {
    let both = |one: &&Requirement| one.profile == Profile::Wire && one.origin == Origin::Hardening;
    let wrong: Vec<String> = Requirements::built_in().iter().filter(both).map(|one| one.id.clone()).collect();
    assert_none(&wrong);
}

/// Rules name no products: their behavior belongs in `differs`, notes and spec/deployed.md.
#[test]
fn rules_name_no_products() {
    let names = |text: &str| {
        ["libvalkey", "valkey-cli", "Valkey 9", "Valkey server"].iter().any(|name| text.contains(name))
    };
    let all = Requirements::built_in();
    let mut wrong: Vec<String> =
        all.iter().filter(|one| names(&one.text)).map(|one| one.id.clone()).collect();
    let text = read(&workspace().unwrap().join("spec/protocol.md"));
    let rules = text.split("\n## 15. ").next().unwrap();
    wrong.extend(rules.lines().filter(|line| names(line)).map(str::to_string));
    assert_none(&wrong);
}

#[test]
fn the_pages_are_up_to_date() {
    let files = Files::read(&workspace().unwrap().join("spec/vectors")).unwrap();
    for (name, page) in render::pages(&Requirements::of(&workspace().unwrap()).unwrap(), &files) {
        let there = read(&workspace().unwrap().join("spec").join(name));
        assert!(page == there, "{name}: run `valkey-rdma-trust reqs render`");
    }
}

#[test]
fn the_text_and_the_requirements_agree() {
    let text = read(&workspace().unwrap().join("spec/protocol.md"));
    let requirements = Requirements::built_in();
    let named = ids(&text);
    let unknown: Vec<_> = named.iter().filter(|id| !requirements.has(id)).cloned().collect();
    assert_none(&unknown);
    let unexplained: Vec<_> =
        requirements.iter().map(|one| one.id.clone()).filter(|id| !named.contains(id)).collect();
    assert_none(&unexplained);
}
