use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use glob::Pattern;

use super::options::{TargetCommand, parse};
use super::{CommandError, against, finish, usage};
use crate::blackbox::results::{CaseResult, Run, without};
use crate::blackbox::session::legal;
use crate::exit::{DONE, FAILED, NOTHING, UNDECIDED, worse};
use suite::{Verdict, terminal};

/// Runs the failures of an earlier run again.
#[derive(Args, Clone, Debug)]
pub struct Replay {
    /// Its results.json.
    file: PathBuf,
    /// Only these cases.
    #[arg(long, value_name = "GLOB")]
    select: Vec<Pattern>,
}

/// Reports for each failure whether it is fixed.
pub fn replay(options: &Replay) -> ExitCode {
    finish(again(options))
}

fn again(options: &Replay) -> Result<u8, CommandError> {
    let before = Run::read(&options.file).map_err(usage)?;
    let wanted: Vec<_> = before
        .results
        .iter()
        .filter(|result| result.verdict == Verdict::Fail)
        .filter(|result| {
            options.select.is_empty() || options.select.iter().any(|one| one.matches(&result.id))
        })
        .collect();
    if wanted.is_empty() {
        return Err((NOTHING, "nothing in it failed, or nothing that is selected".into()));
    }
    let now = results(&before.arguments, &wanted)?;
    let mut code = DONE;
    for result in wanted {
        let (came_to, told, reason) = match now.iter().find(|one| one.id == result.id) {
            Some(one) if one.verdict.is_pass() => (DONE, "FIXED", &one.reason),
            Some(one) if one.verdict == Verdict::Fail => (FAILED, "STILL-FAILING", &one.reason),
            Some(one) => (UNDECIDED, "NOT-REPRODUCED", &one.reason),
            None => (UNDECIDED, "NO-SUCH-CASE", &result.reason),
        };
        terminal::tell(&format!("{told:15} {}: {reason}", result.id), 16);
        code = worse(code, came_to);
    }
    Ok(code)
}

/// Runs the wanted cases: those of the suite in one run, and one run for each random peer.
fn results(arguments: &[String], wanted: &[&CaseResult]) -> Result<Vec<CaseResult>, CommandError> {
    let mut now = Vec::new();
    let arguments = &without(arguments, &["--select", "--skip"]);
    let mut cases = arguments.clone();
    for result in wanted {
        if let Some(seed) = legal::seed(&result.id) {
            let mut one = without(arguments, &["--random", "--seed", "--minutes"]);
            one.extend(["--random", "1", "--seed"].map(str::to_string));
            one.push(seed.to_string());
            // A random peer that now passes is summed up under another id.
            now.extend(run(&one)?.results.into_iter().map(|one| CaseResult { id: result.id.clone(), ..one }));
        } else {
            cases.extend(["--select".to_string(), Pattern::escape(&result.id)]);
        }
    }
    if cases.len() > arguments.len() {
        now.extend(run(&cases)?.results);
    }
    Ok(now)
}

fn run(arguments: &[String]) -> Result<Run, CommandError> {
    match parse(arguments).map_err(usage)? {
        TargetCommand::Server(server) => against::server(&server, arguments),
        TargetCommand::Client(client) => against::client(&client, arguments),
        TargetCommand::Pair(_) => Err(usage("runs of pairs have no cases")),
    }
}
