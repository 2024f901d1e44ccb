//! The program's output for a user without a device or an implementation.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use conformance::blackbox::results::Run;
use conformance::exit;
use suite::Verdict;

fn run(arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_valkey-rdma-conformance"));
    // No Valkey is found, so that the demo is the same on every machine.
    program.args(arguments).env("PATH", "").output().unwrap()
}

#[track_caller]
fn exits(arguments: &[&str], code: u8) -> String {
    let output = run(arguments);
    let told =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).join("\n");
    assert_eq!(output.status.code(), Some(code.into()), "{arguments:?}: {told}");
    told
}

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

const MISTAKE: [&str; 4] = ["run", "server", "--demo-mistake", "registers-early"];
const CASE: [&str; 2] = ["--select", "mem.not-before-full"];

/// Commands, the wire below each, and a verdict on a faulty server, in lines that fit a terminal.
#[test]
fn a_demo_without_a_device() {
    let recording = file("demo.jsonl");
    let told = exits(&["demo", "--record", recording.to_str().unwrap()], exit::DONE);
    let shown = exits(&["trace", "show", recording.to_str().unwrap()], exit::DONE);
    assert!(shown.contains("event: Disconnected") && shown.contains("took imm 38"), "{shown}");
    for part in [
        "PING -> PONG",
        "GET greeting -> hello",
        "server  took imm 38",
        "client  post RegisterXferMemory 16384 bytes",
        "fail mem.not-before-full [wire contract, must: VR-MEM-004 VR-MEM-010]",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    // Commands are copied unchanged, and the report shows the wire as wide as that.
    let said = String::from_utf8(run(&["demo"]).stdout).unwrap();
    let long = |line: &&str| {
        line.chars().count() > 80
            && !line.contains("valkey-rdma-conformance run")
            && !line.starts_with("    |")
            // Folded to a terminal's width, where there is one.
            && !line.starts_with("    right: ")
    };
    assert_eq!(said.lines().filter(long).collect::<Vec<_>>(), [""; 0]);
}

/// Piped output fits 120 columns, except commands and long words: its reader may have no terminal.
#[test]
fn what_is_piped_is_not_wide() {
    let recording = file("wide.jsonl");
    exits(&["demo", "--record", recording.to_str().unwrap()], exit::DONE);
    let long = "no-such-case.".repeat(20);
    for arguments in [
        &["list"][..],
        &["list", "--long"],
        &["list", "--select", &long],
        &["explain", "mem.not-before-full"],
        &["explain", "VR-MEM-004"],
        &["reqs", "list"],
        &["doctor"],
        &["smoke", "--select", "smoke.ping"],
        &["smoke", "--select", "no.such-case"],
        &["demo"],
        &["trace", "show", recording.to_str().unwrap()],
        &["trace", "show", "no such file"],
        &[&MISTAKE[..], &CASE].concat(),
        &["run", "server", "--demo-mistake", "little-endian-fields"],
        &["run", "server", "--target", "192.0.2.1:6379"],
        &["vectors", "check", "--select", "trace/", "--verbose"],
        &["--help"],
        &["run", "server", "--help"],
    ] {
        let output = run(arguments);
        for text in [output.stdout, output.stderr] {
            let text = String::from_utf8(text).unwrap();
            let wide = |line: &&str| {
                line.chars().count() > 120
                    && !line.contains("valkey-rdma-conformance run")
                    && line.trim().contains(' ')
            };
            assert_eq!(text.lines().find(wide), None, "{arguments:?}");
        }
    }
}

#[test]
fn what_a_failure_looks_like() {
    exits(&[&MISTAKE[..], &CASE].concat(), exit::FAILED);
    exits(&["run", "client", "--demo-mistake", "shifted", "--select", "conn.plain"], exit::FAILED);
    // Another program makes its own mistakes.
    exits(&[&MISTAKE[..], &["--target", "192.0.2.1:6379"]].concat(), exit::USAGE);
    let told = exits(&["run", "server", "--demo-mistake", "any"], exit::USAGE);
    assert!(told.contains("little-endian-immediates"), "{told}");
}

/// A baseline written by a run excuses its failures, keeps reasons, and notices fixes.
#[test]
fn a_baseline_is_written() {
    let known = file("written.toml");
    let known = known.to_str().unwrap();
    exits(&[&MISTAKE[..], &CASE, &["--write-baseline", known]].concat(), exit::FAILED);
    let text = std::fs::read_to_string(known).unwrap();
    assert!(text.contains("seen: it registered a window before the last byte had come"), "{text}");
    exits(&[&MISTAKE[..], &CASE, &["--baseline", known]].concat(), exit::DONE);

    std::fs::write(known, text.replace("seen: it registered", "issue 17: it registered")).unwrap();
    let renew = ["--baseline", known, "--write-baseline", known];
    exits(&[&MISTAKE[..], &CASE, &renew].concat(), exit::DONE);
    let kept = std::fs::read_to_string(known).unwrap();
    assert!(kept.contains("issue 17: it registered") && kept.matches("[[expected]]").count() == 1, "{kept}");
    // Cases that were not run stay; cases that pass are removed.
    exits(&[&["run", "server", "--select", "conn.plain"][..], &renew].concat(), exit::DONE);
    assert_eq!(std::fs::read_to_string(known).unwrap(), kept);
    exits(&[&["run", "server"][..], &CASE, &renew].concat(), exit::FAILED);
    assert!(!std::fs::read_to_string(known).unwrap().contains("mem.not-before-full"));
}

#[test]
fn results_say_where_they_are_from() {
    let out = file("environment");
    exits(&["run", "server", "--select", "conn.plain", "--out", out.to_str().unwrap()], exit::DONE);
    let environment = Run::read(&out.join("results.json")).unwrap().environment.unwrap();
    let kernel = environment.kernel.contains(std::env::consts::ARCH);
    assert!(environment.processors > 0 && kernel, "{environment:?}");
    assert!(environment.libraries.is_empty(), "softsim needs none: {environment:?}");
}

/// Our sides serve peers that do anything allowed, which find mistakes and name the seed.
#[test]
fn random_legal_peers() {
    for role in ["server", "client"] {
        let out = file(&format!("random-{role}"));
        exits(&["run", role, "--random", "12", "--seed", "1", "--out", out.to_str().unwrap()], exit::DONE);
        let results = std::fs::read_to_string(out.join("results.json")).unwrap();
        assert!(results.contains("12 of 12 traces, from seed 1 on"), "{results}");
    }
    for (mistake, told) in [
        ("first-window-for-ever", "random.seed-"),
        ("writes-behind", "of the suite's memory is not what the notifications said"),
        ("reserved-judged", "run server --demo-mistake reserved-judged --random 1 --seed 2"),
    ] {
        let arguments = ["run", "server", "--random", "8", "--seed", "1", "--demo-mistake", mistake];
        let seen = exits(&arguments, exit::FAILED);
        assert!(seen.contains(told), "{mistake}: {seen}");
    }
    // A run of minutes makes the first failure small, and says how to repeat it.
    let out = file("random-minutes");
    let long = ["--random", "8", "--seed", "1", "--minutes", "600", "--demo-mistake", "reserved-judged"];
    let long = [&["run", "server", "--out", out.to_str().unwrap()][..], &long].concat();
    exits(&long, exit::FAILED);
    let results = Run::read(&out.join("results.json")).unwrap().results;
    let failed = results.iter().find(|result| result.verdict == Verdict::Fail).unwrap();
    let again: Vec<_> = failed.repro.split(' ').skip(1).collect();
    let [fewer @ .., "--draws", draws] = &again[..] else { panic!("{again:?}") };
    exits(&again, exit::FAILED);
    let one_less = (draws.parse::<u64>().unwrap() - 1).to_string();
    exits(&[fewer, &["--draws", &one_less]].concat(), exit::DONE);
}

#[test]
fn replay_of_random_legal_peers() {
    let out = file("random-replay");
    let arguments = ["run", "server", "--random", "8", "--seed=1", "--demo-mistake", "first-window-for-ever"];
    exits(&[&arguments[..], &["--out", out.to_str().unwrap()]].concat(), exit::FAILED);
    let results = out.join("results.json");
    let failed = Run::read(&results).unwrap().results.iter().filter(|one| !one.verdict.is_pass()).count();
    let told = exits(&["replay", results.to_str().unwrap()], exit::FAILED);
    assert_eq!(told.matches("STILL-FAILING   random.seed-").count(), failed, "{told}");

    let mended = file("random-mended.json");
    let text = std::fs::read_to_string(&results).unwrap();
    let text =
        text.replace("\"--demo-mistake\"", "\"--patience\"").replace("\"first-window-for-ever\"", "\"5\"");
    std::fs::write(&mended, text).unwrap();
    let told = exits(&["replay", mended.to_str().unwrap()], exit::DONE);
    assert_eq!(told.matches("FIXED           random.seed-").count(), failed, "{told}");
}

fn commands() -> Vec<String> {
    let help = exits(&["--help"], exit::DONE);
    let lines = help.lines().take_while(|line| *line != "Options:");
    let names: Vec<_> = lines
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !name.is_empty())
        .map(str::to_string)
        .collect();
    assert!(names.len() > 10, "{help}");
    names
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = exits(&["completions", shell], exit::DONE);
        for name in commands() {
            assert!(script.contains(&name), "{shell} does not complete {name}");
        }
    }
    exits(&["completions", "no-shell"], exit::USAGE);
}

#[test]
fn bash_completes() {
    let script = file("completions.bash");
    std::fs::write(&script, run(&["completions", "bash"]).stdout).unwrap();
    let words = r#". "$1"; [[ $(complete -p valkey-rdma-conformance) =~ -F\ ([^\ ]+) ]]
        COMP_WORDS=(valkey-rdma-conformance rep) COMP_CWORD=1
        "${BASH_REMATCH[1]}" valkey-rdma-conformance rep valkey-rdma-conformance; echo "${COMPREPLY[*]}""#;
    let Ok(output) = Command::new("bash").args(["-c", words, "bash"]).arg(script).output() else {
        return println!("skipped: there is no bash");
    };
    assert_eq!(String::from_utf8_lossy(&output.stdout), "replay report\n", "{output:?}");
}

/// Every command has a manual page, which is shown without a warning, with the examples unchanged.
#[test]
fn manual_pages() {
    let folder = file("man");
    exits(&["man", folder.to_str().unwrap()], exit::DONE);
    for name in commands() {
        let page = folder.join(format!("valkey-rdma-conformance-{name}.1"));
        assert!(page.exists(), "{}", page.display());
    }
    let mut man = Command::new("man");
    man.args(["--warnings", "-l", "-Tutf8"]).env("MANWIDTH", "80").env("LC_ALL", "C.UTF-8");
    let Ok(output) = man.arg(folder.join("valkey-rdma-conformance.1")).output() else {
        return println!("skipped: there is no man");
    };
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let shown = String::from_utf8_lossy(&output.stdout);
    let help = exits(&["--help"], exit::DONE);
    let after = help.lines().skip_while(|line| *line != "Examples:").filter(|line| !line.is_empty());
    for line in after {
        assert!(shown.lines().any(|one| one.trim() == line.trim()), "{line}: {shown}");
    }
    // A file is in place of the folder.
    exits(&["man", folder.join("valkey-rdma-conformance.1").to_str().unwrap()], exit::FAILED);
}

/// A failed probe is a result in every file. The rest is skipped on one line, unless named.
#[test]
fn the_probe_is_a_result_as_any_other() {
    let probe = ["run", "server", "--demo-mistake", "little-endian-fields", "--patience", "1"];
    let out = file("probe");
    let told = exits(&[&probe[..], &["--out", out.to_str().unwrap()]].concat(), exit::FAILED);
    for part in ["✗ fail conn.plain [wire contract, must:", "    | client", "cases: conn.plain failed: "] {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert_eq!(told.matches("– skipped").count(), 1, "{told}");
    let results = Run::read(&out.join("results.json")).unwrap().results;
    let (first, rest) = results.split_first().unwrap();
    assert!(first.id == "conn.plain" && first.timeline.is_some() && !first.requirements.is_empty());
    assert!(rest.len() > 50 && rest.iter().all(|one| one.reason.starts_with("conn.plain failed: ")));
    for name in ["junit.xml", "results.tap", "report.html"] {
        let text = std::fs::read_to_string(out.join(name)).unwrap();
        assert!(text.contains("conn.plain failed: "), "{name}");
    }

    let told = exits(&[&probe[..], &["--select", "ctrl.first-message"]].concat(), exit::FAILED);
    // Both have one cause, which is reported once, and named.
    let (first, alike) = ("fail conn.plain [", "alike in 1 more: ctrl.first-message");
    assert!(told.contains(first) && told.contains(alike), "{told}");
    assert!(told.contains("with its bytes swapped: fields are big-endian"), "{told}");
    assert!(!told.contains("a new connection is not served"), "{told}");
}

#[test]
fn failed_vectors_are_told_as_json() {
    let program = env!("CARGO_BIN_EXE_valkey-rdma-conformance");
    let swaps = r#"sed -u -e 's/"state":"open"/"state":"closing"/' -e 's/"is":"invalid","reason":"length"/"is":"invalid","reason":"opcode"/'"#;
    let shim = format!("'{program}' vectors shim | {swaps}");
    let output = Command::new(program).args(["vectors", "check", "--shim", &shim]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(output.status.code(), Some(exit::FAILED.into()), "{told}");
    for part in [r#"{"do":"write","length":"#, r#"state is "closing", not "open""#, r#"not {"is":"invalid""#]
    {
        assert!(told.contains(part), "no {part} in {told}");
    }
    // As Rust's Debug writes structures.
    assert!(!told.contains(" { "), "{told}");
}
