//! Compares the requirements with their check, and the vectors with schemas and implementations.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use conformance::requirements::{Requirement, Requirements, workspace};
use serde_json::Value;
use vector_check::check::{self, Report};
use vector_check::ours::Ours;
use vector_check::protocol::{Implementation, Reply, Request};
use vector_check::shim::Shim;
use vector_check::{Files, lint};

use crate::schema::Schema;

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

fn schema(name: &str) -> Schema {
    Schema::new(json(&vectors().join("schema").join(name)))
}

fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

fn assert_passed(report: &Report) {
    println!("{}: {} passed, {} skipped", report.who, report.passed, report.skipped.len());
    let failures: Vec<String> = report.failed.iter().map(|(id, reason)| format!("{id}: {reason}")).collect();
    assert_none(&failures);
    assert_eq!(report.lenient, [], "against a should");
    assert!(report.passed > 0);
}

fn sum(requirement: &Requirement) -> String {
    let Requirement { level, origin, profile, source, text, differs, .. } = requirement;
    let row = differs.as_ref().map(|one| [&one.document, &one.code, &one.source].map(String::as_str));
    let mut read =
        vec![level.to_string(), origin.to_string(), profile.to_string(), source.clone(), text.clone()];
    read.extend(row.unwrap_or_default().map(str::to_string));
    format!("{:08x}", crc32fast::hash(read.join("\n").as_bytes()))
}

/// `spec/checked.md` has one row for each requirement, with the checksum of its present text.
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
    let requirements = Requirements::built_in();
    assert_none(&lint::problems(&files(), |id| requirements.is_must(id)));
}

#[test]
fn the_files_match_their_schemas() {
    for (folder, schema) in [("control", schema("control-1.json")), ("trace", schema("trace-1.json"))] {
        for entry in std::fs::read_dir(vectors().join(folder)).unwrap() {
            let file = entry.unwrap().path();
            println!("{}", file.display());
            assert_none(&schema.problems(&json(&file)));
        }
    }
}

#[test]
fn the_requirements_match_their_schema() {
    let file = read(&workspace().unwrap().join("spec/requirements.toml"));
    let file: toml::Value = toml::from_str(&file).unwrap();
    assert_none(&schema("requirements-2.json").problems(&serde_json::to_value(file).unwrap()));
}

/// Traces with one address and one key pass implementations that read half of a field.
#[test]
fn addresses_and_keys_of_traces_vary() {
    fn registrations(of: &Value, found: &mut Vec<(u64, u64, u64)>) {
        let number = |field: &Value| {
            let text = field.as_str().unwrap();
            u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
        };
        match of {
            Value::Object(fields) if fields.get("kind").is_some_and(|kind| kind == "RegisterXferMemory") => {
                let length = fields["length"].as_u64().unwrap();
                found.push((number(&fields["address"]), length, number(&fields["rkey"])));
            }
            Value::Object(fields) => fields.values().for_each(|of| registrations(of, found)),
            Value::Array(items) => items.iter().for_each(|of| registrations(of, found)),
            _ => {}
        }
    }
    let (mut bases, mut keys, mut rekeyed) = (BTreeSet::new(), BTreeSet::new(), 0);
    let (mut beyond_32, mut beyond_63, mut traces) = (0, 0, 0);
    for entry in std::fs::read_dir(vectors().join("trace")).unwrap() {
        for trace in json(&entry.unwrap().path())["traces"].as_array().unwrap() {
            let mut found = Vec::new();
            registrations(&trace["steps"], &mut found);
            traces += usize::from(!found.is_empty());
            for &(address, length, key) in &found {
                let crosses = |bits: u32| address >> bits != address.saturating_add(length - 1) >> bits;
                beyond_32 += usize::from(length > 0 && crosses(32));
                beyond_63 += usize::from(length > 0 && crosses(63));
                rekeyed += usize::from(found.iter().any(|one| one.0 == address && one.2 != key));
                bases.insert(address);
                keys.insert(key);
            }
        }
    }
    println!("{traces}: {} addresses, {} keys, {beyond_32} {beyond_63} {rekeyed}", bases.len(), keys.len());
    assert!(bases.len() > traces && keys.len() > traces, "not a draw for each trace");
    assert!(beyond_32 >= 10 && beyond_63 >= 10 && rekeyed >= 20);
    assert!([0, 0xffff_ffff, 0x8000_0000].iter().all(|key| keys.contains(key)));
}

#[test]
fn every_schema_has_an_id() {
    for (name, text) in valkey_rdma_vectors::SCHEMAS {
        let schema: Value = serde_json::from_str(text).unwrap();
        assert_eq!(schema["$id"], format!("urn:valkey-rdma:schema:{name}"));
    }
}

/// Between the id of a requirement and the id before it, the text has its level, and no other.
#[test]
fn the_text_says_each_level() {
    let text = read(&workspace().unwrap().join("spec/protocol.md"));
    let rules = text.split("\n## 15. ").next().unwrap();
    let mut said = std::collections::BTreeSet::new();
    let mut problems = Vec::new();
    let mut segment = String::new();
    let mut is_code = false;
    for line in rules.lines() {
        is_code ^= line.starts_with("```");
        // A paragraph, an item or a table begins.
        if is_code
            || line.is_empty()
            || line.starts_with('|')
            || line.starts_with("```")
            || line.starts_with("- ")
            || line.starts_with(|c: char| c.is_ascii_digit())
        {
            segment.clear();
        }
        if is_code || line.starts_with('|') {
            continue;
        }
        let mut rest = line;
        while let Some((before, after)) = rest.split_once("VR-") {
            let end = |c: char| !c.is_ascii_alphanumeric() && c != '-';
            let id = format!("VR-{}", after.split(end).next().unwrap());
            segment.push_str(before);
            let levels: std::collections::BTreeSet<&str> = segment
                .split(|c: char| !c.is_ascii_alphabetic())
                .filter(|word| ["MUST", "SHOULD", "MAY"].contains(word))
                .collect();
            let level = Requirements::built_in().get(&id).map(|one| one.level.to_string().to_uppercase());
            if levels.into_iter().collect::<Vec<_>>() != level.iter().map(String::as_str).collect::<Vec<_>>()
            {
                problems.push(format!("{id} is {level:?}, and the text before it says otherwise: {segment}"));
            }
            said.insert(id.clone());
            segment.clear();
            rest = &after[id.len() - 3..];
        }
        segment.push_str(rest);
        segment.push(' ');
    }
    assert_none(&problems);
    let requirements = Requirements::built_in();
    let unsaid = requirements.iter().map(|one| one.id.clone()).filter(|id| !said.contains(id));
    assert_none(&unsaid.collect::<Vec<_>>());
}

#[test]
fn a_sentence_has_one_id() {
    let text = read(&workspace().unwrap().join("spec/protocol.md"));
    let mut problems = Vec::new();
    let mut is_code = false;
    let mut paragraph = String::new();
    for line in text.lines().chain([""]) {
        let fence = line.starts_with("```");
        is_code ^= fence;
        let item = line.starts_with("- ") || line.starts_with(|c: char| c.is_ascii_digit());
        if line.is_empty() || item || fence {
            let sentences = paragraph.split(". ").filter(|sentence| sentence.matches("VR-").count() > 1);
            problems.extend(sentences.map(|sentence| format!("more than one id: {sentence}")));
            paragraph.clear();
        }
        if !is_code && !fence && !line.starts_with('|') {
            paragraph.push_str(line.trim());
            paragraph.push(' ');
        }
    }
    assert_none(&problems);
}

/// A server may answer before it sees the event. What it sends then counts as sent at the event.
#[test]
fn an_answer_may_come_early() {
    if !have("python3", "--version") {
        return;
    }
    let right = read(&vectors().join("consumers/python/consumer.py"));
    let (from, to) = (
        "            self.answers.append(message[\"select\"])\n",
        "            self.answers.append(message[\"select\"])\n            if self.state == \"connecting\":\n                self.send(kind=\"GetServerFeature\", select=self.answers.pop(0))\n",
    );
    assert_eq!(right.matches(from).count(), 1);
    let early = Path::new(env!("CARGO_TARGET_TMPDIR")).join("early.py");
    std::fs::write(&early, right.replace(from, to)).unwrap();
    let command = format!("python3 '{}'", early.display());
    for select in ["trace/features/question-before-established", "trace/generated"] {
        assert_passed(&check::run(&files(), &mut shim(command.clone()), select).unwrap());
    }
}

/// An implementation whose lines are validated with the protocol's schema.
struct Validated<I> {
    inner: I,
    schema: Schema,
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
            assert!(flat && self.schema.problems(&line).is_empty(), "not a line of the protocol: {line}");
        }
        Ok(replies)
    }
}

#[test]
fn our_implementation() {
    let mut ours = Validated { inner: Ours::default(), schema: schema("protocol-1.json") };
    let report = check::run(&files(), &mut ours, "").unwrap();
    assert_passed(&report);
    assert_eq!(report.skipped, []);
}

/// Returns whether the program exists and prints its version.
pub(crate) fn have(program: &str, version: &str) -> bool {
    let there = Command::new(program).arg(version).output().is_ok_and(|output| output.status.success());
    if !there {
        println!("skipped: there is no {program} here");
    }
    there
}

fn shim(command: String) -> Shim {
    Shim::new(command, Duration::from_secs(30))
}

/// The example in C is a whole machine: it passes all of them and skips none.
#[test]
fn the_c_example() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("c-example");
    let check = workspace().unwrap().join("spec/examples/c/check");
    let built = Command::new(check).arg(&target).output().unwrap();
    print!("{}", String::from_utf8_lossy(&built.stdout));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let program = target.join("shim");
    if !program.exists() {
        return; // It has said why.
    }
    let report = check::run(&files(), &mut shim(format!("'{}'", program.display())), "").unwrap();
    assert_passed(&report);
    assert_eq!(report.skipped, []);
}

#[test]
fn the_python_consumer() {
    if !have("python3", "--version") {
        return;
    }
    let consumer = vectors().join("consumers/python/consumer.py");
    assert_passed(&check::run(&files(), &mut shim(format!("python3 '{}'", consumer.display())), "").unwrap());
}

#[test]
fn the_drawn_traces_are_up_to_date() {
    if !have("python3", "--version") {
        return;
    }
    let drawn = Command::new("python3").arg(vectors().join("generate.py")).output().unwrap();
    let there = read(&vectors().join("trace/generated.json"));
    let command = "python3 spec/vectors/generate.py > spec/vectors/trace/generated.json";
    assert!(drawn.stdout == there.as_bytes(), "run {command}");
}

/// Mistakes: text of the Python consumer, its replacement, and a vector that notices.
const MISTAKES: [(&str, &str, &str); 27] = [
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
    (r#" or message["select"] != 0"#, "", "trace/features/an-answer-with-another-select"),
    (
        "if value == 0:\n            return",
        "if value == 0:\n            self.prove(self.at_announce)\n            return",
        "trace/credits/nothing-is-proved-by-zero-in-the-next-window",
    ),
    ("if len(self.answers) > 1024:", "if False:", "trace/features/questions-without-end-while-open"),
    // What addresses and keys that differ show: a known address with another key, a sum of 32 bits,
    // and numbers that mean nothing special.
    (
        "        self.window, self.used = (address, length, rkey), 0\n",
        "        if self.window and self.window[0] == address:\n            rkey = self.window[2]\n        self.window, self.used = (address, length, rkey), 0\n",
        "trace/",
    ),
    ("hex(address + self.used)", "hex(address & ~0xffffffff | (address + self.used) & 0xffffffff)", "trace/"),
    ("if length == 0 or address", "if length == 0 or address == 0 or address", "trace/"),
    ("if length == 0 or address", "if length == 0 or rkey == 0 or address", "trace/"),
];

#[test]
fn mistakes_are_noticed() {
    if !have("python3", "--version") {
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

#[test]
fn a_should_fails_nothing() {
    if !have("python3", "--version") {
        return;
    }
    let files = files();
    let right = read(&vectors().join("consumers/python/consumer.py"));
    let pack = r#"REGISTRATION.pack(opcode, address, message["length"], rkey)"#;
    let reserved = format!(r#"{pack}[:2] + b"\1" + {pack}[3:]"#);
    let write = r#"            self.out.append(write | {"length": length, "immediate": length})"#;
    let empty = format!("{write}\n            self.out.append(write | {{\"length\": 0, \"immediate\": 0}})");
    let question = r#"self.send(kind="GetServerFeature")"#;
    for (from, to, vector, should) in [
        (pack, reserved.as_str(), "control/register-xfer-memory/", "VR-CTRL-005"),
        (pack, &reserved, "trace/stream/client-one-byte", "VR-CTRL-005"),
        (write, &empty, "trace/stream/client-one-byte", "VR-XFER-010"),
        (
            question,
            r#"self.send(kind="GetServerFeature", features="0x1")"#,
            "trace/features/client-asks",
            "VR-FEAT-012",
        ),
    ] {
        assert_eq!(right.matches(from).count(), 1, "{from}");
        let lenient = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lenient.py");
        std::fs::write(&lenient, right.replace(from, to)).unwrap();
        let command = format!("python3 '{}'", lenient.display());
        let report = check::run(&files, &mut shim(command.clone()), vector).unwrap();
        assert_eq!(report.failed, [], "{vector}");
        assert!(report.passed > 0 && !report.lenient.is_empty(), "{vector}");
        assert!(report.lenient.iter().all(|(_, reason)| reason.contains(should)), "{:?}", report.lenient);
        for (strict, code) in [(None, 0), (Some("--strict"), 1)] {
            let status = Command::new(env!("CARGO_BIN_EXE_valkey-rdma-conformance"))
                .args(["vectors", "check", "--shim", &command, "--select", vector])
                .args(strict)
                .output()
                .unwrap()
                .status;
            assert_eq!(status.code(), Some(code), "{vector} {strict:?}");
        }
    }
}

fn texts(folder: &Path) -> Vec<(String, String)> {
    let name = |path: &Path| path.file_stem().unwrap().to_string_lossy().into_owned();
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut texts: Vec<_> =
        entries.map(|one| one.unwrap().path()).map(|path| (name(&path), read(&path))).collect();
    texts.sort();
    texts
}

const FOLDERS: [(&str, &[(&str, &str)]); 3] = [
    ("control", valkey_rdma_vectors::CONTROL),
    ("schema", valkey_rdma_vectors::SCHEMAS),
    ("trace", valkey_rdma_vectors::TRACES),
];

/// The crate holds each file of the folder, and so does this program, which takes them from there.
#[test]
fn every_vector_is_in_the_crate() {
    for (folder, packed) in FOLDERS {
        let packed: Vec<_> =
            packed.iter().map(|(name, text)| ((*name).to_string(), (*text).to_string())).collect();
        assert_eq!(packed, texts(&vectors().join(folder)), "{folder}");
    }
}

/// So do the packages for other languages, once assembled, and those languages read them.
#[test]
fn every_vector_is_in_the_packages() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
    let assemble = workspace().unwrap().join("spec/packages/assemble");
    assert!(Command::new(assemble).arg(&folder).status().unwrap().success());
    for package in ["go", "python/src/valkey_rdma_vectors"] {
        for (kind, _) in FOLDERS {
            assert_eq!(texts(&folder.join(package).join("vectors").join(kind)), texts(&vectors().join(kind)));
        }
    }
    if have("python3", "--version") {
        let count = "import valkey_rdma_vectors as v; print(v.__version__, len(v.control()), len(v.traces()), len(v.schemas()))";
        let mut python = Command::new("python3");
        let said = python.args(["-c", count]).env("PYTHONPATH", folder.join("python/src")).output().unwrap();
        let [control, schemas, traces] = FOLDERS.map(|(_, files)| files.len());
        let expected = format!("{} {control} {traces} {schemas}", valkey_rdma_vectors::VERSION);
        assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), expected);
    }
    if have("go", "version") {
        let mut go = Command::new("go");
        let tested =
            go.arg("test").current_dir(folder.join("go")).env("GOFLAGS", "-mod=mod").output().unwrap();
        assert!(tested.status.success(), "{}", String::from_utf8_lossy(&tested.stdout));
    }
}
