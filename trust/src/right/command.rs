//! `right`: right implementations under the suite.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Duration;

use clap::Args;
use glob::Pattern;
use rdma_softsim::DeviceKind;
use suite::exit::{BROKEN, DONE, FAILED, NOTHING};

use super::{Right, WINDOWS, Who, example, is_right, is_tried, judge};
use crate::wrong::command::{all_cases, each};
use conformance::blackbox::results::CaseResult;
use conformance::client::Failure;
use conformance::requirements::Role;

/// Run the conformance suite against right implementations, each right in its own way. None may
/// fail.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Implementations to try; all, if none is named.
    #[arg(long, value_enum, value_delimiter = ',')]
    who: Vec<Who>,
    /// Lengths of their windows; `all` stands for twelve lengths and a random one.
    #[arg(long, default_value = "65536", value_delimiter = ',')]
    windows: Vec<String>,
    /// Kinds of devices: ibta, rxe, mlx5, hostile-but-legal; `all` stands for the four.
    #[arg(long, default_value = "ibta", value_delimiter = ',')]
    device_kinds: Vec<String>,
    /// How long messages travel, in milliseconds.
    #[arg(long, default_value = "0", value_delimiter = ',')]
    latency: Vec<u64>,
    /// How often each is tried.
    #[arg(long, default_value_t = 1)]
    times: u64,
    /// Seed of the first try.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How many are tried at the same time.
    #[arg(long, default_value_t = 16)]
    at_once: usize,
    /// Only cases whose id matches one of these.
    #[arg(long, value_name = "GLOB", value_delimiter = ',')]
    select: Vec<Pattern>,
    /// Only servers, or clients.
    #[arg(long)]
    role: Option<Role>,
}

/// The longest value that the example client stores; it requests at least as much.
const LONGEST: usize = 200_000;

/// A right implementation, its role, and a case.
pub type Line = (Right, Role, &'static str);

/// A line with a wrong verdict, and the text of the verdict.
pub type Surprise = (Line, String);

/// Tries all of these, `at_once` at the same time. Returns those that failed or were not judged.
///
/// # Errors
/// One cannot be set up.
pub fn try_all(lines: &[Line], at_once: usize) -> Result<Vec<Surprise>, String> {
    // By process, because two may run at once.
    let folder = std::env::temp_dir().join(format!("valkey-rdma-trust-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let tried = try_in(&folder, lines, at_once);
    // Something else may have removed it.
    let _removed = std::fs::remove_dir_all(&folder);
    tried
}

fn try_in(folder: &std::path::Path, lines: &[Line], at_once: usize) -> Result<Vec<Surprise>, String> {
    let mut examples = BTreeMap::new();
    for (right, ..) in lines.iter().filter(|(right, ..)| right.who == Who::Example) {
        // Built once for each length of windows, which decides how much it requests.
        if let Entry::Vacant(place) = examples.entry(right.window) {
            let long = (4 * right.window as usize + 1000).max(LONGEST);
            place.insert(example::build(folder, long)?);
        }
    }
    if examples.values().any(Option::is_none) {
        println!("skipped: there is no C compiler for the example client");
    }
    let surprises = Mutex::new(Vec::new());
    let case = |(_, role, case): &&Line| (*role, *case);
    each(lines.iter().collect(), case, at_once, |line| {
        let (right, role, case) = line;
        let example = examples.get(&right.window).and_then(Option::as_ref);
        if right.who == Who::Example && example.is_none() {
            return;
        }
        if let Some(told) = surprise(right, case, judge(right, *role, case, example))
            && let Ok(mut surprises) = surprises.lock()
        {
            surprises.push((*line, told));
        }
    });
    surprises.into_inner().map_err(|error| error.to_string())
}

fn surprise(right: &Right, case: &str, judged: Result<CaseResult, Failure>) -> Option<String> {
    match judged {
        Ok(result) if is_right(right, case, result.verdict) => None,
        Ok(result) => Some(format!("{}: {}", result.verdict, result.reason)),
        Err(failure) => Some(failure.to_string()),
    }
}

/// Returns the cases that this implementation is tried with.
#[must_use]
pub fn lines(right: Right) -> Vec<Line> {
    let cases = all_cases().into_iter();
    cases
        .filter(|(role, case)| right.who.plays(*role) && is_tried(&right, *role, case))
        .map(|(role, case)| (right, role, case))
        .collect()
}

/// Runs the command.
#[must_use]
pub fn run(arguments: &Arguments) -> ExitCode {
    match drawn(arguments) {
        Ok(lines) if lines.is_empty() => {
            eprintln!("no case matches");
            ExitCode::from(NOTHING)
        }
        // With no thread, nothing would be tried, and nothing would be wrong.
        Ok(lines) => told(&lines, arguments.at_once.max(1)),
        Err(problem) => broken(&problem),
    }
}

fn broken(problem: &str) -> ExitCode {
    eprintln!("{problem}");
    ExitCode::from(BROKEN)
}

fn told(lines: &[Line], at_once: usize) -> ExitCode {
    match try_all(lines, at_once) {
        Ok(surprises) => {
            for ((right, role, case), told) in &surprises {
                println!("WRONG VERDICT {case} {role} | {right} | {told}");
            }
            println!("{} of {} verdicts on right implementations were wrong", surprises.len(), lines.len());
            ExitCode::from(if surprises.is_empty() { DONE } else { FAILED })
        }
        Err(problem) => broken(&problem),
    }
}

fn drawn(arguments: &Arguments) -> Result<Vec<Line>, String> {
    let mut windows = Vec::new();
    for text in &arguments.windows {
        match text.as_str() {
            // Not drawn from the seed: a wrong verdict names the length (`Right`).
            "all" => windows.extend(WINDOWS.into_iter().chain([fastrand::u32(1..=1 << 20)])),
            text => windows.push(text.parse().map_err(|_| format!("{text} is no length of a window"))?),
        }
    }
    let mut kinds = Vec::new();
    for text in &arguments.device_kinds {
        match DeviceKind::ALL.into_iter().find(|kind| kind.name() == text) {
            Some(kind) => kinds.push(kind),
            None if text == "all" => kinds.extend(DeviceKind::ALL),
            None => return Err(format!("{text} is no kind of device")),
        }
    }
    let who = if arguments.who.is_empty() {
        <Who as clap::ValueEnum>::value_variants()
    } else {
        &arguments.who[..]
    };
    let mut all = Vec::new();
    for time in 0..arguments.times {
        let seed = arguments.seed.wrapping_add(time);
        for (who, window, kind, latency) in who.iter().flat_map(|who| {
            let (kinds, latencies) = (&kinds, &arguments.latency);
            windows.iter().flat_map(move |window| {
                kinds.iter().flat_map(move |kind| {
                    latencies.iter().map(move |latency| (*who, *window, *kind, *latency))
                })
            })
        }) {
            all.extend(lines(Right { who, window, kind, latency: Duration::from_millis(latency), seed }));
        }
    }
    let wanted = |case: &str| {
        arguments.select.is_empty() || arguments.select.iter().any(|select| select.matches(case))
    };
    all.retain(|(_, role, case)| wanted(case) && arguments.role.is_none_or(|one| one == *role));
    Ok(all)
}
