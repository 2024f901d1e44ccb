//! Runs cases again that failed in an earlier run.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use glob::Pattern;

use super::options::{TargetCommand, parse};
use super::{CommandError, against, finish, usage};
use crate::blackbox::results::Run;
use crate::exit::{DONE, FAILED, NOTHING, UNDECIDED};
use suite::Verdict;

/// Runs the failures of an earlier run again.
#[derive(Args, Clone, Debug)]
pub struct Replay {
    /// Its results.json.
    file: PathBuf,
    /// Only these cases.
    #[arg(long, value_name = "GLOB")]
    select: Vec<Pattern>,
}

/// Says of each failure whether it is fixed.
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
    let mut arguments = before.arguments.clone();
    for result in &wanted {
        arguments.extend(["--select".to_string(), Pattern::escape(&result.id)]);
    }
    let now = match parse(&arguments).map_err(usage)? {
        TargetCommand::Server(server) => against::server(&server, &arguments)?,
        TargetCommand::Client(client) => against::client(&client, &arguments)?,
        TargetCommand::Pair(_) => return Err(usage("runs of pairs have no cases")),
    };
    let mut code = DONE;
    for result in wanted {
        let (told, reason) = match now.results.iter().find(|one| one.id == result.id) {
            Some(one) if one.verdict.is_pass() => ("FIXED", &one.reason),
            Some(one) if one.verdict == Verdict::Fail => {
                code = FAILED;
                ("STILL-FAILING", &one.reason)
            }
            Some(one) => {
                code = code.max(UNDECIDED);
                ("NOT-REPRODUCED", &one.reason)
            }
            None => ("NO-SUCH-CASE", &result.reason),
        };
        println!("{told:15} {}: {reason}", result.id);
    }
    // A failure outweighs what could not be decided.
    Ok(if code == UNDECIDED && now.count(Verdict::Fail) > 0 { FAILED } else { code })
}
