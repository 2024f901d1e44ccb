//! `valkey-rdma-conformance run|demo|list|explain|replay|report|doctor`.

mod against;
mod demo;
mod doctor;
mod explain;
mod list;
mod options;
mod outcome;
mod pages;
mod pair;
mod replay;
mod whole;

use std::process::ExitCode;

use options::Common;

use super::baseline::Baseline;
use super::results::Run;
use crate::exit::{INTERRUPTED, NO_ENVIRONMENT, USAGE};
use suite::terminal;

pub use against::resolve;
pub use demo::{Demo, demo};
pub use doctor::{Doctor, doctor};
pub use explain::{Explain, explain};
pub use list::{List, list};
pub use options::TargetCommand;
pub use pages::{Report, make_report};
pub use replay::{Replay, replay};
pub use whole::whole;

/// The exit code and the reason of a run without results.
pub type CommandError = (u8, String);

fn no_environment(reason: impl std::fmt::Display) -> CommandError {
    (NO_ENVIRONMENT, format!("cannot run here: {reason}"))
}

fn device() -> Result<rdma_verbs::Verbs, CommandError> {
    crate::device().map_err(no_environment)
}

fn usage(reason: impl Into<String>) -> CommandError {
    (USAGE, reason.into())
}

/// Runs it. `arguments` is the command line after the program's name.
pub fn run(who: &TargetCommand, arguments: &[String]) -> ExitCode {
    finish(perform(who, arguments))
}

fn perform(who: &TargetCommand, arguments: &[String]) -> Result<u8, CommandError> {
    match who {
        TargetCommand::Server(one) => judged(&one.common, || against::server(one, arguments)),
        TargetCommand::Client(one) => judged(&one.common, || against::client(one, arguments)),
        TargetCommand::Pair(pair) => pair::run(pair),
    }
}

fn judged(common: &Common, run: impl FnOnce() -> Result<Run, CommandError>) -> Result<u8, CommandError> {
    // Read before the run, which may take minutes.
    let baseline = common.baseline.as_deref().map(Baseline::read).transpose().map_err(usage)?;
    let mut run = run()?;
    let code = outcome::conclude(&mut run, common, &baseline.unwrap_or_default())?;
    Ok(if run.is_interrupted() { INTERRUPTED } else { code })
}

/// Returns the exit code of the program. Prints the reason if nothing could be judged.
pub fn finish(outcome: Result<u8, CommandError>) -> ExitCode {
    let (code, reason) = match outcome {
        Ok(code) => return ExitCode::from(code),
        Err(trouble) => trouble,
    };
    terminal::complain(&reason, 4);
    ExitCode::from(code)
}
