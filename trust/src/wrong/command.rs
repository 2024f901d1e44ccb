//! `verdicts`: for each case, a mistake that fails it.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;

use clap::{Args, ValueEnum as _};
use glob::Pattern;
use rdma_softsim::SoftSim;

use super::table::{NO_MISTAKE, rows};
use super::{Target, Unresponsive, judge};
use conformance::blackbox::report::first_lines;
use conformance::blackbox::run::SANITY;
use conformance::blackbox::{self, results::CaseResult};
use conformance::requirements::Role;
use intercept::mistakes::Mistake;
use suite::Tag;
use suite::Verdict;
use suite::exit::{BROKEN, DONE, FAILED, NOTHING};
use suite::terminal;

/// How many run at the same time. A wrong target mostly waits for something that does not arrive.
const AT_ONCE: usize = 24;

/// A target, its role, and a case to judge it.
pub type Line = (Target, Role, &'static str);

/// Test the suite's verdicts: run each case against wrong targets.
#[derive(Args, Clone, Debug)]
pub struct Verdicts {
    /// Only cases whose id matches one of these.
    #[arg(long, value_name = "GLOB", value_delimiter = ',')]
    select: Vec<Pattern>,
    /// Instead of the table, list which mistakes fail each case and pass the sanity case.
    #[arg(long)]
    search: bool,
    /// Instead of the table, print the suite's first line for each mistake.
    #[arg(long, conflicts_with_all = ["search", "select"])]
    first: bool,
}

/// All cases of both roles.
pub fn all_cases() -> Vec<(Role, &'static str)> {
    blackbox::cases::<SoftSim>().iter().filter_map(|case| Some((case.role?, case.id))).collect()
}

/// Judges all of these, several at a time. The results have the same order.
///
/// # Errors
/// One cannot be set up.
pub fn judge_all(lines: &[Line]) -> Result<Vec<CaseResult>, String> {
    // The case reports what a mistake does to a thread of the target.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let judged = judge_quietly(lines);
    std::panic::set_hook(usual);
    judged
}

fn judge_quietly(lines: &[Line]) -> Result<Vec<CaseResult>, String> {
    // By number, because cases end in no order.
    let done = Mutex::new(BTreeMap::new());
    let case = |(_, (_, role, case)): &(usize, &Line)| (*role, *case);
    each(lines.iter().enumerate().collect(), case, AT_ONCE, |(number, (target, role, case))| {
        let judged = judge(*target, *role, case).map_err(|error| error.to_string());
        if let Ok(mut done) = done.lock() {
            done.insert(number, judged);
        }
    });
    done.into_inner().map_err(|error| error.to_string())?.into_values().collect()
}

/// Calls `work` for each line, of which `case` tells the case, `at_once` at the same time. A case
/// that looks at the whole process runs while no other does.
pub(crate) fn each<L: Send>(
    lines: Vec<L>,
    case: impl Fn(&L) -> (Role, &'static str),
    at_once: usize,
    work: impl Fn(L) + Sync,
) {
    let cases = blackbox::cases::<SoftSim>();
    let is_alone = |line: &L| {
        let (role, id) = case(line);
        cases.iter().any(|case| case.role == Some(role) && case.id == id && case.is(Tag::Local))
    };
    let (alone, together): (Vec<_>, Vec<_>) = lines.into_iter().partition(is_alone);
    for (lines, at_once) in [(together, at_once), (alone, 1)] {
        let next = Mutex::new(lines.into_iter());
        std::thread::scope(|scope| {
            for _ in 0..at_once {
                scope.spawn(|| {
                    // Locked to take a line, and not while it is judged.
                    let take = || next.lock().ok().and_then(|mut next| next.next());
                    while let Some(line) = take() {
                        work(line);
                    }
                });
            }
        });
    }
}

/// Prints the table.
pub fn run(options: &Verdicts) -> ExitCode {
    let done = match options {
        Verdicts { first: true, .. } => first(),
        Verdicts { search: true, .. } => search(options),
        _ => table(options),
    };
    done.unwrap_or_else(|problem| {
        terminal::complain(&problem, 4);
        ExitCode::from(BROKEN)
    })
}

fn wanted(options: &Verdicts, case: &str) -> bool {
    options.select.is_empty() || options.select.iter().any(|select| select.matches(case))
}

/// Returns all trials: each mistake with its case, each unresponsive target with every case, and
/// the right side with the cases of the mistakes.
pub fn lines() -> Vec<Line> {
    let mut right: Vec<Line> = rows().map(|(_, role, case)| (Target::Right, role, case)).collect();
    right.sort_by_key(|(_, role, case)| (*case, role.name()));
    // Once, however many mistakes a case notices.
    right.dedup();
    let mistaken = rows().map(|(mistake, role, case)| (Target::Mistaken(mistake), role, case));
    let unresponsive = all_cases().into_iter().flat_map(|(role, case)| {
        Unresponsive::ALL.map(|unresponsive| (Target::Unresponsive(unresponsive), role, case))
    });
    let mut lines: Vec<Line> = mistaken.chain(unresponsive).chain(right).collect();
    // The longest begin first.
    lines.sort_by_key(|(_, role, case)| (*case != "keep.vanished", *case, role.name()));
    lines
}

/// Returns whether a verdict is right for this target.
pub fn is_right(target: Target, verdict: Verdict) -> bool {
    match target {
        Target::Right => verdict.is_pass(),
        Target::Mistaken(_) => verdict == Verdict::Fail,
        Target::Unresponsive(_) => !verdict.is_pass(),
    }
}

fn table(options: &Verdicts) -> Result<ExitCode, String> {
    let mut lines = lines();
    lines.retain(|(_, _, case)| wanted(options, case));
    if lines.is_empty() {
        eprintln!("no case matches");
        return Ok(ExitCode::from(NOTHING));
    }
    let results = judge_all(&lines)?;
    let mut code = DONE;
    for ((target, role, case), result) in lines.iter().zip(&results) {
        let mark = if is_right(*target, result.verdict) { "" } else { "WRONG VERDICT " };
        if !mark.is_empty() {
            code = FAILED;
        }
        let line = format!("{mark}{case} {} | {target} | {}: {}", role.name(), result.verdict, result.reason);
        terminal::tell(&line, 4);
    }
    for (role, case, why) in NO_MISTAKE.iter().filter(|(_, case, _)| wanted(options, case)) {
        terminal::tell(&format!("{case} {} | no mistake | {why}", role.name()), 4);
    }
    Ok(ExitCode::from(code))
}

/// Returns each mistake of each side with the first case that it fails, where known: the sanity
/// case, or the first of those in the table.
///
/// # Errors
/// One cannot be set up.
pub fn firsts() -> Result<Vec<(Mistake, Role, CaseResult)>, String> {
    let order: Vec<_> = blackbox::cases::<SoftSim>().iter().map(|case| case.id).collect();
    let mut sides: Vec<(Mistake, Role)> = Vec::new();
    for (mistake, role, _) in rows() {
        if !sides.contains(&(mistake, role)) {
            sides.push((mistake, role));
        }
    }
    let line = |case: fn(&[&'static str], Mistake, Role) -> &'static str| {
        let order = &order;
        sides
            .iter()
            .map(move |&(mistake, role)| (Target::Mistaken(mistake), role, case(order, mistake, role)))
    };
    let lines: Vec<Line> = line(|_, _, _| SANITY)
        .chain(line(|order, mistake, role| {
            let place = |case: &str| order.iter().position(|one| *one == case);
            let of = rows().filter(|(one, side, _)| (*one, *side) == (mistake, role));
            of.map(|(.., case)| case).min_by_key(|case| place(case)).unwrap_or(SANITY)
        }))
        .collect();
    let mut results = judge_all(&lines)?;
    // The results of the sanity case come first, as in `lines`.
    let others = results.split_off(sides.len());
    let first = results.into_iter().zip(others).map(|(sane, other)| match sane.verdict {
        Verdict::Fail => sane,
        _ => other,
    });
    Ok(sides.into_iter().zip(first).map(|((mistake, role), result)| (mistake, role, result)).collect())
}

fn first() -> Result<ExitCode, String> {
    for (mistake, role, result) in firsts()? {
        let mistake =
            mistake.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default();
        terminal::tell(&format!("{mistake} {}: {}", role.name(), result.id), 4);
        terminal::tell(&first_lines(&result), 8);
    }
    Ok(ExitCode::from(DONE))
}

fn search(options: &Verdicts) -> Result<ExitCode, String> {
    let mistakes = |role, case| {
        Mistake::value_variants().iter().map(move |mistake| (Target::Mistaken(*mistake), role, case))
    };
    let sane: Vec<Line> =
        [Role::Server, Role::Client].into_iter().flat_map(|role| mistakes(role, SANITY)).collect();
    let passes = judge_all(&sane)?;
    let passes = |target, role| {
        let judged = sane.iter().zip(&passes).find(|((one, of, _), _)| (*one, *of) == (target, role));
        judged.is_some_and(|(_, result)| result.verdict.is_pass())
    };
    for (role, case) in all_cases().into_iter().filter(|(_, case)| wanted(options, case)) {
        let lines: Vec<Line> = mistakes(role, case).collect();
        let results = judge_all(&lines)?;
        let failed = lines.iter().zip(results).filter(|(_, result)| result.verdict == Verdict::Fail);
        // Marked with `!`: what fails the sanity case too says little about this one.
        let told: Vec<String> = failed
            .map(|((target, ..), _)| format!("{target}{}", if passes(*target, role) { "" } else { "!" }))
            .collect();
        terminal::tell(&format!("{case} {} | {}", role.name(), told.join(" ")), 4);
    }
    Ok(ExitCode::from(DONE))
}
