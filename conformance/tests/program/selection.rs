//! The suite's selection, output and exit statuses, from its users' point of view.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

use conformance::blackbox;
use conformance::blackbox::case::Case;
use conformance::blackbox::select::Select;
use conformance::requirements::{Requirements, Role};
use rdma_softsim::SoftSim;

fn run(arguments: &[&str]) -> Output {
    let output =
        Command::new(env!("CARGO_BIN_EXE_valkey-rdma-conformance")).args(arguments).output().unwrap();
    println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    output
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn cases_have_names_of_their_own_and_requirements_that_exist() {
    let requirements = Requirements::built_in();
    let cases = blackbox::cases::<SoftSim>();
    for role in [Role::Server, Role::Client] {
        let mut ids: Vec<_> =
            cases.iter().filter(|case| case.role == Some(role)).map(|case| case.id).collect();
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), all);
    }
    for case in &cases {
        assert!(!case.requirements.is_empty(), "{}", case.id);
        assert!(case.requirements.iter().all(|id| requirements.has(id)), "{}", case.id);
    }
    let mut ids: Vec<_> = cases.iter().map(|case| case.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert!(ids.len() >= 120, "{} cases", ids.len());
}

#[test]
fn our_server_and_client_pass_a_share() {
    for role in ["server", "client"] {
        let output =
            run(&["run", role, "--allow-disruptive", "--select", "flow.*", "--select", "VR-MEM-002"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output).contains(" pass"), "{}", text(&output));
    }
}

#[test]
fn quick_is_a_few_harmless_cases_of_each_area() {
    let quick = Select { quick: true, ..Select::default() };
    let areas = |cases: &[Case<'_, SoftSim>]| cases.iter().map(|case| case.area()).collect::<BTreeSet<_>>();
    for role in [Role::Server, Role::Client] {
        let cases = quick.cases::<SoftSim>(role);
        assert_eq!(cases.len(), 15);
        assert_eq!(areas(&cases), areas(&Select::default().cases(role)));
        assert!(cases.iter().all(|case| case.tags.is_empty()), "no case is slow, local or disruptive");
        let output = run(&["run", role.name(), "--quick", "--strict"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output).contains("15 pass"), "{}", text(&output));
    }
    let again = run(&["run", "server", "--quick", "--select", "conn.*", "--format", "json"]);
    let results: serde_json::Value = serde_json::from_str(&text(&again)).unwrap();
    assert_eq!(results["results"][0]["repro"], "valkey-rdma-conformance run server --select conn.plain");
    assert_eq!(results["results"].as_array().unwrap().len(), 1);
}

#[test]
fn it_travels() {
    let folder = std::env::temp_dir().join(format!("conformance-{}", std::process::id()));
    let empty = folder.join("empty");
    std::fs::create_dir_all(&empty).unwrap();
    let program = folder.join("program");
    std::fs::copy(env!("CARGO_BIN_EXE_valkey-rdma-conformance"), &program).unwrap();
    let built = env!("CARGO_MANIFEST_DIR").as_bytes();
    let bytes = std::fs::read(&program).unwrap();
    assert!(!bytes.windows(built.len()).any(|some| some == built), "{} is in it", env!("CARGO_MANIFEST_DIR"));
    let run =
        |arguments: &[&str]| Command::new(&program).args(arguments).current_dir(&empty).output().unwrap();
    for arguments in [&["vectors", "check"][..], &["vectors", "lint"], &["reqs", "list"]] {
        let output = run(arguments);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {told}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn every_format_says_the_same() {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("formats");
    let out_of = out.to_str().unwrap();
    let arguments = ["run", "client", "--select", "keep.[af]*", "--select", "ctrl.opcode-4", "--out", out_of];
    assert_eq!(run(&arguments).status.code(), Some(0));
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    let results: serde_json::Value = serde_json::from_str(&read("results.json")).unwrap();
    let count = results["results"].as_array().unwrap().len();
    assert_eq!(count, 4);
    let junit = read("junit.xml");
    assert!(junit.contains("tests=\"4\" failures=\"0\" errors=\"0\""));
    // A suite for each profile, with its score.
    let suite = |profile: &str| junit.split("<testsuite ").find(|suite| suite.contains(profile)).unwrap();
    let (wire, hardened) = (suite("wire contract: 3 of 3"), suite("hardening profile: 1 of 1"));
    assert!(wire.contains("\"keep.flood\"") && !wire.contains("\"ctrl.opcode-4\""), "{junit}");
    assert!(hardened.contains("\"ctrl.opcode-4\""), "{junit}");
    let tap = read("results.tap");
    assert!(["wire", "hardened"].iter().all(|name| tap.contains(&format!("profile: {name}"))));
    assert!(tap.starts_with("TAP version 14\n1..4\nok 1 - ctrl."));
    assert!(read("badge.json").contains("\"4/4\""));
    let page = read("report.html");
    // The table exists without JavaScript, and its rows link to the details.
    assert!(page.contains("<a href=\"#client-keep.flood\">") && page.contains("id=\"client-keep.flood\""));
    assert!(page.contains("wire contract: 3 of 3") && page.contains("hardening profile: 1 of 1"));
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http") && !page.contains("@import"));
}
