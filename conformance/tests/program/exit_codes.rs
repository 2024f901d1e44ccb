//! Every exit status that docs/adopt.md promises, as seen by a script. Targets that die, hang or
//! refuse need a device: lab/run test has them (`conformance-exits`).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use conformance::blackbox::baseline::Baseline;
use conformance::blackbox::report::{self, Format};
use conformance::blackbox::results::{CaseResult, Run};
use conformance::exit;
use conformance::requirements::{Level, Profile, workspace};
use suite::Verdict;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_valkey-rdma-conformance"))
}

#[track_caller]
fn exits(arguments: &[&str], code: u8) {
    let output = program().args(arguments).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code.into()), "{arguments:?}: {told}");
}

fn file(name: &str, text: &str) -> PathBuf {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&file, text).unwrap();
    file
}

fn came_to(verdict: &str, cause: &str) -> Run {
    let case = format!(
        r#"{{"id":"conn.plain","intent":"","expectation":"","requirements":["VR-CONN-001"],"level":"must","profile":"wire","tags":[],
            "verdict":"{verdict}","cause":"{cause}","reason":"","took":0,"repro":""}}"#
    );
    let text = format!(
        r#"{{"format":2,"target":{{"name":"","role":"server","how":"","backend":""}},"suite":{{"version":"","requirements":1}},
            "arguments":[],"begun":0,"took":0,"results":[{case}]}}"#
    );
    serde_json::from_str(&text).unwrap()
}

#[test]
fn all_is_as_it_should_be() {
    exits(&["run", "server", "--select", "conn.plain"], exit::DONE);
    exits(&["list"], exit::DONE);
    exits(&["list", "client", "--long"], exit::DONE);
    exits(&["explain", "close.quit"], exit::DONE);
    exits(&["explain", "vr-close-001"], exit::DONE);
    exits(&["--help"], exit::DONE);
}

#[test]
fn a_baseline_whose_failure_has_gone_or_that_gives_no_reason() {
    for (reason, code) in [("once", exit::FAILED), ("", exit::USAGE)] {
        let entry = format!("[[expected]]\ncase = \"conn.plain\"\nreason = \"{reason}\"\n");
        let baseline = file("stale.toml", &entry);
        let of = ["--baseline", baseline.to_str().unwrap()];
        exits(&[&["run", "server", "--select", "conn.plain"], &of[..]].concat(), code);
    }
}

#[test]
fn what_fails_and_what_is_lost() {
    for (verdict, cause, code) in [
        ("pass", "requirement", exit::DONE),
        ("skipped", "requirement", exit::NOTHING),
        ("fail", "requirement", exit::FAILED),
        ("fail", "bystander", exit::FAILED),
        ("fail", "died", exit::LOST),
        ("fail", "hung", exit::LOST),
        ("fail", "refused", exit::LOST),
        ("broken", "environment", exit::BROKEN),
        ("inconclusive", "requirement", exit::UNDECIDED),
    ] {
        assert_eq!(came_to(verdict, cause).code(false), code, "{verdict}, {cause}");
    }
}

#[test]
fn what_a_baseline_excuses() {
    for (verdict, cause, entry, stale, code) in [
        ("fail", "requirement", "", 0, exit::DONE),
        ("inconclusive", "requirement", "", 0, exit::DONE),
        ("fail", "died", "", 0, exit::LOST),
        ("fail", "died", "cause = \"died\"", 0, exit::DONE),
        ("fail", "requirement", "cause = \"died\"", 0, exit::FAILED),
        ("pass", "requirement", "", 1, exit::DONE),
        ("pass-lenient", "requirement", "", 1, exit::DONE),
        ("pass", "requirement", "sometimes = true", 0, exit::DONE),
        ("skipped", "requirement", "", 0, exit::NOTHING),
        // An undecided case excuses no failure.
        ("inconclusive", "requirement", "verdict = \"inconclusive\"", 0, exit::DONE),
        ("fail", "requirement", "verdict = \"inconclusive\"", 0, exit::FAILED),
        ("pass", "requirement", "verdict = \"inconclusive\"", 1, exit::DONE),
    ] {
        let entry = format!("[[expected]]\ncase = \"conn.plain\"\nreason = \"so it is\"\n{entry}\n");
        let baseline = Baseline::read(&file("excuses.toml", &entry)).unwrap();
        let mut run = came_to(verdict, cause);
        assert_eq!(baseline.apply(&mut run).len(), stale, "{verdict}, {cause}, {entry}");
        assert_eq!(run.code(false), code, "{verdict}, {cause}, {entry}");
    }
}

#[test]
fn an_undecided_case_is_written_down_as_one() {
    let undecided = came_to("inconclusive", "requirement");
    let known = Path::new(env!("CARGO_TARGET_TMPDIR")).join("undecided.toml");
    Baseline::default().renewed(&undecided).write(&known).unwrap();
    let known = Baseline::read(&known).unwrap();
    for (verdict, code) in [("inconclusive", exit::DONE), ("fail", exit::FAILED)] {
        let mut run = came_to(verdict, "requirement");
        assert_eq!((known.apply(&mut run).len(), run.code(false)), (0, code), "{verdict}");
    }
    // Renewed, it is a known failure.
    let failed = came_to("fail", "requirement");
    let known = known.renewed(&failed);
    let mut failed = failed;
    assert_eq!((known.apply(&mut failed).len(), failed.code(false)), (0, exit::DONE));
}

#[test]
fn reports_fail_what_the_exit_status_counts() {
    for verdict in Verdict::ALL.map(Verdict::name) {
        for cause in ["requirement", "bystander", "died", "environment"] {
            for (level, expected) in [
                (Level::Must, false),
                (Level::Should, false),
                (Level::May, false),
                (Level::Must, true),
                (Level::Should, true),
            ] {
                for strict in [false, true] {
                    let mut run = came_to(verdict, cause);
                    run.results[0].level = level;
                    run.results[0].expected = expected.then(|| "known".into());
                    assert_told(&run, strict, &format!("{verdict}, {cause}, {level}, {expected}, {strict}"));
                    // Also if it is only counted.
                    run.withhold();
                    let what = format!("withheld: {verdict}, {cause}, {level}, {expected}, {strict}");
                    assert_told(&run, strict, &what);
                }
            }
        }
    }
}

#[track_caller]
fn assert_told(run: &Run, strict: bool, what: &str) {
    let counts = [exit::FAILED, exit::LOST, exit::BROKEN].contains(&run.code(strict));
    let junit = report::text(run, Format::Junit, strict).unwrap();
    assert_eq!(junit.contains("<failure") || junit.contains("<error"), counts, "{what}: {junit}");
    let tap = report::text(run, Format::Tap, strict).unwrap();
    let fails = |line: &str| line.starts_with("not ok") && !line.contains("# TODO");
    assert_eq!(tap.lines().any(fails), counts, "{what}: {tap}");
    let plan =
        format!("1..{}", tap.lines().filter(|line| line.contains("ok ") && !line.starts_with(' ')).count());
    assert_eq!(tap.lines().nth(1), Some(plan.as_str()), "{what}: {tap}");
}

#[test]
fn a_case_that_is_gone_is_not_fixed() {
    let mut run = came_to("fail", "requirement");
    run.arguments = ["run", "server", "--select", "xfer.*"].map(String::from).to_vec();
    let gone = CaseResult { id: "conn.as-it-was".into(), ..run.results[0].clone() };
    run.results.push(gone);
    let results = file("replayed.json", &run.json().unwrap());
    let replay = ["replay", results.to_str().unwrap()];
    let output = program().args(replay).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(exit::UNDECIDED.into()), "{told}");
    assert!(
        told.contains("FIXED           conn.plain") && told.contains("NO-SUCH-CASE    conn.as-it-was"),
        "{told}"
    );
    exits(&[&replay[..], &["--select", "conn.plain"]].concat(), exit::DONE);
}

#[track_caller]
fn judge(results: &Path, baseline: &Path, code: u8) {
    let files = [results.to_str().unwrap(), "--baseline", baseline.to_str().unwrap()];
    exits(&[&["report", "json"], &files[..]].concat(), code);
}

#[test]
fn results_are_judged_again() {
    let results = file("lost.json", &came_to("fail", "died").json().unwrap());
    let known = "[[expected]]\ncase = \"conn.plain\"\ncause = \"died\"\nreason = \"so it is\"\n";
    let (known, none) = (file("known.toml", known), file("none.toml", ""));
    judge(&results, &known, exit::DONE);
    judge(&results, &none, exit::LOST);
    // A failure that an earlier baseline excused is not excused any more.
    let excused = Path::new(env!("CARGO_TARGET_TMPDIR")).join("excused.json");
    let judged = ["report", "json", results.to_str().unwrap(), "-o", excused.to_str().unwrap(), "--baseline"];
    exits(&[&judged[..], &[known.to_str().unwrap()]].concat(), exit::DONE);
    judge(&excused, &none, exit::LOST);
}

/// Of cases that harm others only the number is published, and nothing that reveals which they are.
#[test]
fn what_is_withheld() {
    let mut run = came_to("fail", "died");
    for (id, verdict, cause) in [
        ("mem.of-0", "fail", "requirement"),
        ("xfer.kept", "pass", "requirement"),
        ("res.storm", "fail", "bystander"),
    ] {
        let of = came_to(verdict, cause).results.remove(0);
        let profile = if id == "mem.of-0" { Profile::Hardened } else { Profile::Wire };
        run.results.push(CaseResult { id: id.into(), profile, ..of });
    }
    let all = file("all.json", &run.json().unwrap());
    let baseline = |most: u32| {
        let named = "[[expected]]\ncase = \"mem.of-0\"\nreason = \"so it is\"\n";
        let withheld = format!("[withheld]\nleast = 1\nmost = {most}\nreason = \"SECURITY.md\"\n");
        file(&format!("withheld-{most}.toml"), &(withheld + named))
    };
    let (enough, too_few) = (baseline(2), baseline(1));
    judge(&all, &enough, exit::DONE);
    judge(&all, &too_few, exit::LOST);
    let published = Path::new(env!("CARGO_TARGET_TMPDIR")).join("published.json");
    let publish = ["report", "json", all.to_str().unwrap(), "--for-publication", "-o"];
    exits(&[&publish[..], &[published.to_str().unwrap()]].concat(), exit::DONE);
    judge(&published, &enough, exit::DONE);
    judge(&published, &too_few, exit::LOST);
    for format in ["json", "markdown", "html", "junit", "tap", "pretty", "badge"] {
        let output = program().args(["report", format, published.to_str().unwrap()]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        for told in ["conn.plain", "res.storm", "xfer.kept", "died"] {
            // The page has the texts of all requirements, some of which name cases.
            let told = if format == "html" { format!(">{told}<") } else { told.into() };
            assert!(!text.contains(&told), "{format}: {told}");
        }
        if ["markdown", "pretty"].contains(&format) {
            assert!(text.contains("1 pass") && text.contains("2 cases withheld"), "{text}");
        }
        // The scores include unlisted cases.
        if ["markdown", "pretty", "html", "junit"].contains(&format) {
            let scores = ["wire contract: 1 of 3", "hardening profile: 0 of 1"];
            assert!(scores.iter().all(|score| text.contains(score)), "{format}: {text}");
        }
    }
}

/// Nothing reveals the case after which the target was gone: no case not run, no command line.
#[test]
fn what_took_the_target_away_is_not_told() {
    let mut run = came_to("fail", "died");
    run.arguments = ["run", "server", "--select", "conn.plain", "--skip=conn.b"].map(String::from).to_vec();
    for id in ["conn.b", "conn.c"] {
        let behind = came_to("skipped", "refused").results.remove(0);
        let reason = "the target is gone since conn.plain (the suite did not start it, and cannot)".into();
        run.results.push(CaseResult { id: id.into(), reason, cause: None, ..behind });
    }
    let other = came_to("skipped", "requirement").results.remove(0);
    let reason = "it may bring the target down".into();
    run.results.push(CaseResult { id: "conn.d".into(), reason, ..other });
    let all = file("took-away.json", &run.json().unwrap());
    for format in ["json", "markdown", "html", "junit", "tap", "pretty", "badge"] {
        let output =
            program().args(["report", format, all.to_str().unwrap(), "--for-publication"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        for told in ["conn.plain", "conn.b", "conn.c", "gone since"] {
            let told = if format == "html" { format!(">{told}<") } else { told.into() };
            assert!(!text.contains(&told), "{format}: {told}: {text}");
        }
        if ["markdown", "pretty"].contains(&format) {
            assert!(text.contains("3 skipped") && text.contains("1 cases withheld"), "{text}");
        }
    }
    let strict = run.code(true);
    run.withhold();
    assert_eq!(run.code(true), strict);
}

/// A case that may do harm is never listed. A run that harmed nothing passes as before.
#[test]
fn what_may_harm_is_listed_for_no_target() {
    let mut run = came_to("pass", "requirement");
    for (id, verdict) in [("mem.of-0", "pass"), ("mem.wraps", "inconclusive"), ("xfer.kept", "pass")] {
        let mut of = came_to(verdict, "requirement").results.remove(0);
        if id != "xfer.kept" {
            of.tags.push("disruptive".into());
        }
        run.results.push(CaseResult { id: id.into(), ..of });
    }
    let scores = run.scores().map(|score| score.to_string());
    run.withhold();
    let left: Vec<&str> = run.results.iter().map(|one| one.id.as_str()).collect();
    assert_eq!(left, ["conn.plain", "xfer.kept"]);
    assert_eq!((run.withheld(), run.unexcused(), run.code(false)), (0, None, exit::DONE));
    assert_eq!(run.scores().map(|score| score.to_string()), scores);
    let withheld = run.withheld.clone();
    run.withhold();
    assert_eq!(run.withheld, withheld, "withheld once");
}

/// The published results and baselines of other people's programs withhold what brings these down.
#[test]
fn nothing_published_is_a_recipe() {
    let root = workspace().unwrap();
    let listed = |run: &Run| -> Vec<String> {
        let may_harm = |one: &&CaseResult| one.tags.iter().any(|tag| tag == "disruptive");
        run.results.iter().filter(may_harm).map(|one| one.id.clone()).collect()
    };
    // Ours as well: two lists of all cases, compared, would reveal the rest.
    for name in ["own-server", "own-client"] {
        let run = Run::read(&root.join(format!("docs/reports/{name}.json"))).unwrap();
        assert_eq!((listed(&run), run.withheld(), run.code(true)), (Vec::new(), 0, exit::DONE), "{name}");
    }
    for name in ["valkey-server", "valkey-cli", "valkey-benchmark"] {
        let mut run = Run::read(&root.join(format!("docs/reports/{name}.json"))).unwrap();
        assert!(run.withheld() > 0 && run.results.iter().all(|one| !one.is_harm() && !one.verdict.is_pass()));
        // If these were named, the others would be known by elimination.
        assert_eq!(listed(&run), Vec::<String>::new(), "{name}");
        let baseline = Baseline::read(&root.join(format!("conformance/baselines/{name}.toml"))).unwrap();
        assert_eq!((baseline.apply(&mut run), run.code(false)), (Vec::new(), exit::DONE), "{name}");
        let text = std::fs::read_to_string(root.join(format!("conformance/baselines/{name}.toml"))).unwrap();
        assert!(!text.contains("cause ="), "{name}");
    }
}

#[test]
fn the_suite_cannot_do_its_work() {
    let out = file("not-a-directory", "");
    exits(&["run", "server", "--select", "conn.plain", "--out", out.to_str().unwrap()], exit::BROKEN);
}

#[test]
fn nothing_is_selected() {
    exits(&["run", "server", "--select", "no.such-case"], exit::NOTHING);
    exits(&["list", "--select", "no.such-case"], exit::NOTHING);
    exits(&["explain", "no.such-case"], exit::NOTHING);
    exits(&["reqs", "list", "--area", "NONE"], exit::NOTHING);
    exits(&["vectors", "check", "--select", "no/such-vector"], exit::NOTHING);
    exits(&["smoke", "--select", "no.such-case"], exit::NOTHING);
}

/// A CI that forgets `--allow-disruptive` does not pass.
#[test]
fn what_was_selected_is_skipped() {
    let alone = program().args(["run", "server", "--select", "flow.wraps"]).output().unwrap();
    let told = String::from_utf8_lossy(&alone.stdout);
    assert_eq!(alone.status.code(), Some(exit::NOTHING.into()));
    assert!(told.contains("1 skipped") && told.contains("--allow-disruptive"), "{told}");
    let part = ["run", "server", "--select", "flow.wraps", "--select", "conn.plain"];
    exits(&part, exit::DONE);
    let output = program().args(part).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("1 of the 2 cases that are selected were NOT RUN"), "{told}");
    exits(&[&part[..], &["--strict"]].concat(), exit::UNDECIDED);
}

#[test]
fn a_target_without_an_address() {
    for target in ["nosuch.invalid:1", "no-port"] {
        exits(&["run", "server", "--target", target], exit::USAGE);
        exits(&["smoke", "--target", target], exit::USAGE);
    }
    // No server could send a keepalive by then.
    exits(&["smoke", "--idle", "3"], exit::USAGE);
}

/// As with `… | head`, once head has read enough.
#[test]
fn output_that_is_not_read() {
    let results = file("unread.json", &came_to("fail", "requirement").json().unwrap());
    for arguments in [
        &["list"][..],
        &["list", "--json"],
        &["reqs", "list"],
        &["vectors", "check"],
        &["vectors", "lint"],
        &["report", "markdown", results.to_str().unwrap()],
        &["run", "server", "--select", "conn.plain"],
        &["smoke", "--select", "smoke.ping"],
        &["explore", "--help"],
        &["sim", "--seeds", "0..2"],
        &["doctor"],
        &["completions", "bash"],
    ] {
        let mut child =
            program().args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        let ours = told.contains("panicked") || told.contains("bug in this program");
        assert!(!ours, "{arguments:?}: {told}");
        assert_ne!(output.status.code(), Some(exit::INTERNAL.into()), "{arguments:?}");
    }
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = program().arg("list").stdout(writer).status().unwrap();
    assert_eq!(status.code(), Some(exit::UNREAD.into()));
}

#[test]
fn the_command_line_makes_no_sense() {
    exits(&["run"], exit::USAGE);
    exits(&["run", "server", "--patience", "0"], exit::USAGE);
    exits(&["run", "server", "--exec", "server; other", "--listen", "192.0.2.1:1"], exit::USAGE);
    exits(&["run", "client", "--exec", "client && other", "--listen", "192.0.2.1:1"], exit::USAGE);
    exits(&["run", "server", "--baseline", "no such file"], exit::USAGE);
    exits(&["run", "server", "--backend", "softsim", "--listen", "192.0.2.1:1"], exit::USAGE);
    exits(&["replay", "no such file"], exit::USAGE);
    let output =
        program().args(["replay", file("old.json", r#"{"format":1}"#).to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(exit::USAGE.into()));
    assert!(String::from_utf8_lossy(&output.stderr).contains("format 1 is none"), "{output:?}");
    // Elsewhere, and given only once.
    exits(&["run", "server", "--target", "203.0.113.7:6379", "--allow-disruptive"], exit::USAGE);
}

#[test]
fn a_password_is_not_printed() {
    for target in ["valkey://user:hunter2@192.0.2.1:6379", ":hunter2@192.0.2.1:6379", "user:hunter2@@host"] {
        for arguments in [
            &["run", "server", "--target", target][..],
            &["run", "server", target],
            &["run", "server", "--listen", target],
            &["smoke", "--target", target],
            &["client", target],
        ] {
            let output = program().args(arguments).output().unwrap();
            let told = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            assert_eq!(output.status.code(), Some(exit::USAGE.into()), "{arguments:?}: {told:?}");
            assert!(!told.concat().contains("hunter2"), "{arguments:?}: {told:?}");
        }
    }
}

#[test]
fn there_is_no_rdma() {
    if Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut devices| devices.next().is_some()) {
        return println!("skipped: there is an RDMA device");
    }
    exits(&["run", "server", "--target", "192.0.2.1:6379"], exit::NO_ENVIRONMENT);
    exits(&["run", "server", "--exec", "false", "--listen", "192.0.2.1:6379"], exit::NO_ENVIRONMENT);
    exits(&["run", "client", "--exec", "false", "--listen", "192.0.2.1:6379"], exit::NO_ENVIRONMENT);
    exits(
        &["run", "pair", "--server", "false", "--client", "false", "--listen", "192.0.2.1:6379"],
        exit::NO_ENVIRONMENT,
    );
    for alone in [
        &["doctor"][..],
        &["client", "192.0.2.1:6379"],
        &["smoke", "--target", "192.0.2.1:6379"],
        &["smoke", "--listen", "192.0.2.1:6379"],
    ] {
        exits(alone, exit::NO_ENVIRONMENT);
    }
}

/// A panic, here because its output has no room.
#[test]
fn a_mistake_of_the_program() {
    let full = std::fs::File::create("/dev/full").unwrap();
    let status = program().arg("list").stdout(full).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(exit::INTERNAL.into()));
}
