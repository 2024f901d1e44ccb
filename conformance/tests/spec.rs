//! The requirements held against the record of their check; the vectors against their schemas, the requirements, and
//! implementations.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use conformance::reqs::{Requirement, Requirements, workspace};
use conformance::vectors::check::{self, Report};
use conformance::vectors::ours::Ours;
use conformance::vectors::protocol::{Implementation, Reply, Request};
use conformance::vectors::shim::Shim;
use conformance::vectors::{Files, lint};
use jsonschema::Validator;
use serde_json::Value;

fn vectors() -> PathBuf {
    workspace().unwrap().join("spec/vectors")
}

fn files() -> Files {
    Files::read(&vectors()).unwrap()
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn json(file: &Path) -> Value {
    serde_json::from_str(&read(file)).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn schema(name: &str) -> Validator {
    let schema = json(&vectors().join("schema").join(name));
    jsonschema::meta::validate(&schema).unwrap_or_else(|error| panic!("{name}: {error}"));
    jsonschema::validator_for(&schema).unwrap()
}

fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

fn assert_passed(report: &Report) {
    println!("{}: {} passed, {} skipped", report.who, report.passed, report.skipped.len());
    let failures: Vec<String> = report.failed.iter().map(|(id, reason)| format!("{id}: {reason}")).collect();
    assert_none(&failures);
    assert!(report.passed > 0);
}

/// The sum of what was read of a requirement when it was checked.
fn sum(requirement: &Requirement) -> String {
    let Requirement { level, origin, profile, source, text, differs, .. } = requirement;
    let row = differs.as_ref().map(|one| [&one.document, &one.code, &one.source].map(String::as_str));
    let mut read = vec![level.to_string(), origin.to_string(), profile.to_string(), source.clone(), text.clone()];
    read.extend(row.unwrap_or_default().map(str::to_string));
    format!("{:08x}", crc32fast::hash(read.join("\n").as_bytes()))
}

/// `spec/checked.md` has one row for each requirement, whose sum is that of what the requirement says now.
#[test]
fn every_requirement_was_checked_as_it_stands() {
    let page = read(&workspace().unwrap().join("spec/checked.md"));
    let rows = page.lines().filter(|line| line.starts_with("| VR-")).map(|line| {
        let [_, id, verdict, _, sum, _] = line.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("not a row: {line}");
        };
        assert!(verdict == "correct" || verdict.starts_with("mended: "), "{line}");
        format!("{id} {}", sum.trim_matches('`'))
    });
    let now = Requirements::built_in();
    let now = now.iter().map(|requirement| format!("{} {}", requirement.id, sum(requirement)));
    assert_eq!(rows.collect::<Vec<_>>(), now.collect::<Vec<_>>(), "checked, and as it is now");
}

#[test]
fn the_vectors_are_right() {
    assert_none(&lint::problems(&files(), &Requirements::built_in()));
}

#[test]
fn the_files_match_their_schemas() {
    for (folder, schema) in [("control", schema("control-1.json")), ("trace", schema("trace-1.json"))] {
        for entry in std::fs::read_dir(vectors().join(folder)).unwrap() {
            let file = entry.unwrap().path();
            let problems: Vec<String> = schema
                .iter_errors(&json(&file))
                .map(|error| format!("{}: {}: {error}", file.display(), error.instance_path()))
                .collect();
            assert_none(&problems);
        }
    }
}

/// An implementation whose lines are held against the protocol's schema.
struct Validated<I> {
    inner: I,
    schema: Validator,
}

impl<I: Implementation> Implementation for Validated<I> {
    fn ask(&mut self, request: &Request) -> Result<Vec<Reply>, String> {
        let replies = self.inner.ask(request)?;
        let lines =
            std::iter::once(serde_json::to_value(request)).chain(replies.iter().map(serde_json::to_value));
        for line in lines {
            let line = line.unwrap();
            let flat =
                line.as_object().unwrap().values().all(|value| !value.is_object() && !value.is_array());
            assert!(flat && self.schema.is_valid(&line), "not a line of the protocol: {line}");
        }
        Ok(replies)
    }
}

/// Ours passes all of them and skips none.
#[test]
fn our_implementation() {
    let mut ours = Validated { inner: Ours::default(), schema: schema("protocol-1.json") };
    let report = check::run(&files(), &mut ours, "").unwrap();
    assert_passed(&report);
    assert_eq!(report.skipped, []);
}

/// The program, if it is there and says something to `--version`.
fn have(program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !there {
        println!("skipped: there is no {program} here");
    }
    there
}

fn shim(command: String) -> Shim {
    Shim::new(command, Duration::from_secs(30))
}

#[test]
fn the_c_consumer() {
    if !have("cc") {
        return;
    }
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("c-consumer");
    let source = vectors().join("consumers/c/consumer.c");
    let flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O1", "-o"];
    let built = Command::new("cc").args(flags).args([&program, &source]).status().unwrap();
    assert!(built.success());
    assert_passed(&check::run(&files(), &mut shim(format!("'{}'", program.display())), "").unwrap());
}

#[test]
fn the_python_consumer() {
    if !have("python3") {
        return;
    }
    let consumer = vectors().join("consumers/python/consumer.py");
    assert_passed(&check::run(&files(), &mut shim(format!("python3 '{}'", consumer.display())), "").unwrap());
}

/// What is drawn is what its generator draws.
#[test]
fn the_drawn_traces_are_up_to_date() {
    if !have("python3") {
        return;
    }
    let drawn = Command::new("python3").arg(vectors().join("generate.py")).output().unwrap();
    let there = read(&vectors().join("trace/generated.json"));
    assert!(
        drawn.stdout == there.as_bytes(),
        "run python3 spec/vectors/generate.py > spec/vectors/trace/generated.json"
    );
}

/// Mistakes an implementer might make: what is changed in the Python consumer, into what, and a vector that must notice.
const MISTAKES: [(&str, &str, &str); 20] = [
    (
        r#"struct.Struct(">H14xQII")"#,
        r#"struct.Struct("<H14xQII")"#,
        "control/register-xfer-memory/every-byte",
    ),
    (
        r#"struct.Struct(">H14xQII")"#,
        r#"struct.Struct(">H14xqII")"#,
        "control/register-xfer-memory/every-byte-high",
    ),
    (
        r#"struct.Struct(">HH20xQ")"#,
        r#"struct.Struct(">HHQ20x")"#,
        "control/get-server-feature/features-bytes",
    ),
    ("len(raw) != 32", "len(raw) < 32", "control/invalid/33-bytes"),
    ("opcode > REGISTER", "opcode > 4", "control/invalid/opcode-0004"),
    ("self.used < self.window[1]", "False", "trace/refused/one-byte-early"),
    ("self.used < self.window[1]", "0 < self.used < self.window[1]", "trace/refused/unused-window-replaced"),
    ("length == 0 or", "", "trace/refused/client-empty-window"),
    ("address + length >= 1 << 64", "False", "trace/refused/window-beyond-the-address-space"),
    (r#"length > self.settings["window_limit"]"#, "False", "trace/refused/window-of-4-gib"),
    ("if value == 0:", "if False:", "trace/receive/zero"),
    (
        r#"> self.settings["window"]:"#,
        r#"> self.settings["window"] + 1:"#,
        "trace/refused/client-immediate-beyond-the-window",
    ),
    ("self.received + value >", "(self.received + value) % 2**32 >", "trace/refused/server-immediate-wraps"),
    (
        r#"if self.read == self.settings["window"]:"#,
        "if self.read == self.received:",
        "trace/receive/client-reads",
    ),
    (
        r#""length": length, "immediate": length"#,
        r#""length": length, "immediate": self.used + length"#,
        "trace/stream/writes-follow-each-other",
    ),
    ("hex(address + self.used)", "hex(address)", "trace/stream/writes-follow-each-other"),
    ("self.window[1] - self.used)", "self.window[1])", "trace/stream/client-one-more-than-the-window"),
    (
        "and self.server:\n            self.answers",
        "and False:\n            self.answers",
        "trace/features/question-0102",
    ),
    ("self.unproven + reserve <", "0 <", "trace/credits/never-more-than-the-peer-has-receives"),
    ("if self.patient:", "if True:", "trace/credits/never-more-than-the-peer-has-receives"),
];

#[test]
fn mistakes_are_noticed() {
    if !have("python3") {
        return;
    }
    let files = files();
    let right = read(&vectors().join("consumers/python/consumer.py"));
    for (number, (from, to, vector)) in MISTAKES.into_iter().enumerate() {
        assert_eq!(right.matches(from).count(), 1, "{from}");
        let wrong = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mistake-{number}.py"));
        std::fs::write(&wrong, right.replace(from, to)).unwrap();
        let report =
            check::run(&files, &mut shim(format!("python3 '{}' 2>&1", wrong.display())), vector).unwrap();
        assert!(!report.failed.is_empty(), "`{from}` became `{to}`, and {vector} did not notice");
    }
}

/// The vectors in the program are those of the folder.
#[test]
fn every_vector_is_built_in() {
    let (built_in, there) = (Files::built_in().unwrap(), files());
    let ids = |files: &Files| files.requirements().map(|(id, _)| id).collect::<Vec<_>>();
    assert_eq!(ids(&built_in), ids(&there));
}
