//! `verdicts`: for each case, a mistake that fails it.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;

use clap::Args;
use glob::Pattern;
use rdma_softsim::SoftSim;

use super::table::{NO_MISTAKE, TABLE};
use super::{Lifeless, Mistake, Target, judge};
use crate::blackbox::case::role_name;
use crate::blackbox::run::SANITY;
use crate::blackbox::verdict::Verdict;
use crate::blackbox::{self, results::CaseResult};
use crate::exit::{BROKEN, DONE, FAILED, NOTHING};
use crate::reqs::Role;

/// Most of the time of a wrong target is spent waiting for what does not come.
const AT_ONCE: usize = 24;

/// A target, its role, and a case to judge it.
pub type Line = (Target, Role, &'static str);

/// Mutates the runner's verdicts: runs each case against targets that are wrong.
#[derive(Args, Clone, Debug)]
pub struct Verdicts {
    /// Only cases whose id matches.
    #[arg(long, value_name = "GLOB")]
    select: Option<Pattern>,
    /// Instead of the table, tell which mistakes fail each case and pass the plainest.
    #[arg(long)]
    search: bool,
}

/// All cases of both roles.
pub fn all_cases() -> Vec<(Role, &'static str)> {
    blackbox::cases::<SoftSim>().iter().map(|case| (case.role, case.id)).collect()
}

/// Judges all of these, several at a time; the results in the same order.
///
/// # Errors
/// One cannot be set up.
pub fn judge_all(lines: &[Line]) -> Result<Vec<CaseResult>, String> {
    // What a mistake makes of a thread of the target is told by the case.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let judged = judge_quietly(lines);
    std::panic::set_hook(usual);
    judged
}

fn judge_quietly(lines: &[Line]) -> Result<Vec<CaseResult>, String> {
    let (next, done) = (Mutex::new(lines.iter().enumerate()), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let take = || next.lock().ok().and_then(|mut next| next.next());
                while let Some((number, (target, role, case))) = take() {
                    let judged = judge(*target, *role, case).map_err(|error| error.to_string());
                    if let Ok(mut done) = done.lock() {
                        done.insert(number, judged);
                    }
                }
            });
        }
    });
    done.into_inner().map_err(|error| error.to_string())?.into_values().collect()
}

/// Prints the table.
pub fn run(options: &Verdicts) -> ExitCode {
    let done = if options.search { search(options) } else { table(options) };
    done.unwrap_or_else(|problem| {
        eprintln!("{problem}");
        ExitCode::from(BROKEN)
    })
}

fn wanted(options: &Verdicts, case: &str) -> bool {
    options.select.as_ref().is_none_or(|select| select.matches(case))
}

fn table(options: &Verdicts) -> Result<ExitCode, String> {
    let mut lines: Vec<Line> =
        TABLE
            .iter()
            .map(|(mistake, role, case)| (Target::Mistaken(*mistake), *role, *case))
            .chain(all_cases().into_iter().flat_map(|(role, case)| {
                Lifeless::ALL.map(|lifeless| (Target::Lifeless(lifeless), role, case))
            }))
            .filter(|(_, _, case)| wanted(options, case))
            .collect();
    if lines.is_empty() {
        eprintln!("no case matches");
        return Ok(ExitCode::from(NOTHING));
    }
    lines.sort_by_key(|(_, role, case)| (*case, role_name(*role)));
    let results = judge_all(&lines)?;
    let mut code = DONE;
    for ((target, role, case), result) in lines.iter().zip(&results) {
        let noticed = match target {
            Target::Mistaken(_) => result.verdict == Verdict::Fail,
            _ => !result.verdict.is_pass(),
        };
        if !noticed {
            code = FAILED;
        }
        let mark = if noticed { "" } else { "NOT NOTICED " };
        println!("{mark}{case} {} | {target} | {}: {}", role_name(*role), result.verdict, result.reason);
    }
    for (role, case, why) in NO_MISTAKE.iter().filter(|(_, case, _)| wanted(options, case)) {
        println!("{case} {} | none | {why}", role_name(*role));
    }
    Ok(ExitCode::from(code))
}

fn search(options: &Verdicts) -> Result<ExitCode, String> {
    let mistakes =
        |role, case| Mistake::ALL.iter().map(move |mistake| (Target::Mistaken(*mistake), role, case));
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
        let told: Vec<String> = failed
            .map(|((target, ..), _)| format!("{target}{}", if passes(*target, role) { "" } else { "!" }))
            .collect();
        println!("{case} {} | {}", role_name(role), told.join(" "));
    }
    Ok(ExitCode::from(DONE))
}
