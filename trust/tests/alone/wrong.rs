//! The suite notices mistakes, and fails nothing right: `valkey-rdma-trust verdicts` has the table.

use std::time::Duration;

use clap::ValueEnum as _;
use conformance::blackbox::hints::without_numbers;
use conformance::requirements::Role;
use intercept::mistakes::Mistake;
use rdma_softsim::DeviceKind;
use trust::right::command::try_all;
use trust::right::{Right, Who};
use trust::wrong::command::all_cases;
use trust::wrong::table::{NO_MISTAKE, rows};

use crate::{programs, rounds};

#[test]
fn every_verdict_is_right() {
    for round in rounds() {
        programs(&round.iter().map(|share| vec!["verdicts", "--select", share]).collect::<Vec<_>>());
    }
}

#[test]
fn every_case_is_failed_by_a_mistake() {
    let missing: Vec<_> = all_cases()
        .into_iter()
        .filter(|&(role, case)| {
            let failed = rows().any(|(_, of, one)| (of, one) == (role, case));
            let excused = NO_MISTAKE.iter().any(|&(of, one, _)| (of, one) == (role, case));
            assert!(!(failed && excused), "{case}: there is a mistake that fails it");
            !failed && !excused
        })
        .collect();
    assert!(missing.is_empty(), "{} without a mistake: {missing:?}", missing.len());
}

/// Lengths of windows for which the suite once failed a right side. `right --windows all` has more.
#[test]
fn windows_of_any_length_are_right() {
    let ours = ["right", "--who", "ours", "--windows", "17,1000,1000000", "--select"];
    let mut told = programs(&[vec!["right", "--who", "example", "--windows", "1000"]]).concat();
    for round in rounds() {
        let all = round.iter().map(|share| [&ours[..], &[share]].concat());
        told += &programs(&all.collect::<Vec<_>>()).concat();
    }
    // Without a C compiler there is no example.
    println!("{told}");
    let tried =
        told.lines().filter_map(|line| line.split_once("0 of ")?.1.split(' ').next()?.parse::<usize>().ok());
    assert!(tried.sum::<usize>() > 500);
}

/// What a right side may do otherwise than ours, on all devices and with latency.
#[test]
fn what_is_allowed_is_right() {
    const ACCUSED: &[(Who, &[Role], &str)] = &[
        (Who::EndsAtOnce, &[Role::Server, Role::Client], "mem.other-length"),
        (Who::EndsAtOnce, &[Role::Server, Role::Client], "ctrl.send-with-immediate"),
        (Who::EndsAtKeepalive, &[Role::Server, Role::Client], "ctrl.send-with-immediate"),
        (Who::AsksAgain, &[Role::Client], "feat.unasked"),
        (Who::Pipelines, &[Role::Client], "mem.written-from-start"),
        (Who::Ours, &[Role::Server], "close.quit"),
        (Who::Ours, &[Role::Server], "res.receives"),
        (Who::Ours, &[Role::Server], "sec.write-outside"),
        (Who::Ours, &[Role::Client], "sec.wrong-key"),
        (Who::Ours, &[Role::Server], "sec.stale-key"),
        (Who::Ours, &[Role::Server], "sec.read"),
    ];
    let mut lines = Vec::new();
    for seed in 0..3 {
        for kind in DeviceKind::ALL {
            for latency in [0, 3].map(Duration::from_millis) {
                lines.extend(ACCUSED.iter().flat_map(|(who, roles, case)| {
                    let right = Right { who: *who, kind, latency, seed, ..Right::ours() };
                    roles.iter().map(move |role| (right, *role, *case))
                }));
            }
        }
    }
    let surprises = try_all(&lines, 48).unwrap();
    let told: Vec<String> = surprises
        .iter()
        .map(|((right, role, case), told)| format!("{right} | {role} {case}: {told}"))
        .collect();
    assert!(told.is_empty(), "{}:\n{}", told.len(), told.join("\n"));
}

/// The suite's first line names the mistake, or its cause, for nine of ten (`docs/mistakes.md`).
#[test]
fn first_lines_name_the_mistake() {
    let page = include_str!("../../../docs/mistakes.md");
    let rows: Vec<Vec<_>> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |"))
        .map(|line| line.split(" | ").map(|cell| cell.trim_matches('`')).collect())
        .collect();
    let named = rows.iter().filter(|row| row[4] == "yes").count();
    assert!(10 * named >= 9 * rows.len(), "{named} of {}", rows.len());
    for mistake in Mistake::value_variants().iter().filter_map(Mistake::to_possible_value) {
        assert!(rows.iter().any(|row| row[0] == mistake.get_name()), "{} is not there", mistake.get_name());
    }
    // On a machine that stands still, the suite may report something else, but not each time.
    let mut wrong = Vec::new();
    for _ in 0..3 {
        wrong = told_otherwise(&rows);
        if wrong.is_empty() {
            return;
        }
    }
    panic!("{}", wrong.join("\n"));
}

/// Returns the rows whose text differs from the suite's present output.
fn told_otherwise(rows: &[Vec<&str>]) -> Vec<String> {
    let told = programs(&[vec!["verdicts", "--first"]]).concat();
    // The line after the program's command line.
    let mut blocks: Vec<String> = Vec::new();
    for line in told.lines().skip(1) {
        match blocks.last_mut() {
            Some(block) if line.starts_with(' ') => *block = format!("{block} {}", line.trim()),
            _ => blocks.push(line.into()),
        }
    }
    let mut wrong = Vec::new();
    for row in rows {
        // On a slow machine a mistake about time shows in an earlier case.
        let head = format!("{} {}: ", row[0], row[1]);
        let block = blocks.iter().find(|block| block.starts_with(&head)).cloned().unwrap_or_default();
        let says = |words: &str| without_numbers(&block).contains(&without_numbers(words));
        if !row[3].replace("\\|", "|").split(" — ").all(says) {
            wrong.push(format!("{}\n    now: {block}", row.join(" | ")));
        }
    }
    wrong
}
