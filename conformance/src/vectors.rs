//! `valkey-rdma-conformance vectors …`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;

use crate::blackbox::hints;
use crate::exit::{BROKEN, DONE, FAILED, NOTHING};
use crate::requirements::Requirements;
use suite::terminal;
use vector_check::ours::Ours;
use vector_check::protocol::Implementation;
use vector_check::shim::Shim;
use vector_check::{Files, check, lint};

/// Commands on the vectors.
#[derive(Subcommand)]
pub enum Command {
    /// Runs them against an implementation.
    Check {
        /// Shell command that starts it; it speaks the protocol of spec/vectors/README.md. Ours, if
        /// absent.
        #[arg(long)]
        shim: Option<String>,
        /// Only vectors whose id contains this.
        #[arg(long, default_value = "")]
        select: String,
        /// Seconds it may take for an answer.
        #[arg(long, default_value_t = 10)]
        timeout: u64,
        /// What is done against a *should* is a failure, too.
        #[arg(long)]
        strict: bool,
        /// Also name the skipped ones.
        #[arg(long)]
        verbose: bool,
        /// Draws other addresses and keys for the windows of each trace; 0 leaves them.
        #[arg(long, value_name = "S", default_value_t = 0)]
        seed: u64,
        /// A folder with vectors; those that this program was built with, if absent.
        #[arg(long)]
        vectors: Option<PathBuf>,
    },
    /// Checks the vectors themselves.
    Lint {
        /// A folder with vectors; those that this program was built with, if absent.
        #[arg(long)]
        vectors: Option<PathBuf>,
    },
    /// Serves the protocol with our own implementation, on standard input and output.
    Shim,
}

/// Runs a command.
pub fn run(command: Command) -> ExitCode {
    let result = match command {
        Command::Check { shim, select, timeout, strict, verbose, seed, vectors } => {
            let mut ours = Ours::default();
            let mut theirs;
            let implementation: &mut dyn Implementation = match shim {
                Some(command) => {
                    theirs = Shim::new(command, Duration::from_secs(timeout));
                    &mut theirs
                }
                None => &mut ours,
            };
            read(vectors).and_then(|mut files| {
                files.move_windows(seed);
                run_check(&files, implementation, &select, strict, verbose)
            })
        }
        Command::Lint { vectors } => read(vectors).map(|files| run_lint(&files)),
        Command::Shim => Ours::default()
            .serve(std::io::stdin().lock(), std::io::stdout().lock())
            .map(|()| ExitCode::SUCCESS)
            .map_err(|error| error.to_string()),
    };
    result.unwrap_or_else(|problem| {
        terminal::complain(&problem.to_string(), 4);
        ExitCode::from(BROKEN)
    })
}

fn read(vectors: Option<PathBuf>) -> Result<Files, String> {
    vectors.map_or_else(Files::built_in, |folder| Files::read(&folder))
}

fn run_check(
    files: &Files,
    implementation: &mut dyn Implementation,
    select: &str,
    strict: bool,
    verbose: bool,
) -> Result<ExitCode, String> {
    let report = check::run(files, implementation, select)?;
    for (id, reason) in report.skipped.iter().filter(|_| verbose) {
        terminal::tell(&format!("skipped {id}: {reason}"), 4);
    }
    for (id, reason) in &report.lenient {
        terminal::tell(&format!("should {id}: {reason}"), 4);
    }
    // Failures of one cause are grouped: most implementations have one mistake.
    let mut causes: Vec<(String, Vec<&(String, String)>)> = Vec::new();
    for failed in &report.failed {
        let cause = hints::cause(without_step(&failed.1));
        match causes.iter_mut().find(|(known, _)| *known == cause) {
            Some((_, alike)) => alike.push(failed),
            None => causes.push((cause, vec![failed])),
        }
    }
    for (_, alike) in &causes {
        let [(id, reason), more @ ..] = &alike[..] else { continue };
        terminal::tell(&format!("FAILED {id}: {reason}"), 4);
        if !more.is_empty() {
            let shown = if verbose { more.len() } else { ALIKE };
            let ids: Vec<_> = more.iter().take(shown).map(|(id, _)| id.as_str()).collect();
            let rest = if more.len() > shown { " … (--verbose names all)" } else { "" };
            terminal::tell(&format!("    alike in {} more: {}{rest}", more.len(), ids.join(" ")), 4);
        }
    }
    let (passed, skipped, failed) = (report.passed, report.skipped.len(), report.failed.len());
    println!("{}: {passed} passed, {skipped} skipped, {failed} failed", report.who);
    Ok(match (passed, failed) {
        (0, 0) => {
            eprintln!("no vector was run");
            ExitCode::from(NOTHING)
        }
        (_, 0) if report.lenient.is_empty() || !strict => ExitCode::SUCCESS,
        _ => ExitCode::from(FAILED),
    })
}

/// How many failures of one cause are named.
const ALIKE: usize = 5;

fn without_step(reason: &str) -> &str {
    reason.split_once("}: ").map_or(reason, |(_, what)| what)
}

fn run_lint(files: &Files) -> ExitCode {
    let requirements = Requirements::built_in();
    let problems = lint::problems(files, |id| requirements.is_must(id));
    for problem in &problems {
        terminal::complain(&problem.to_string(), 4);
    }
    let control: usize = files.control.iter().map(|(_, file)| file.vectors.len()).sum();
    let traces: usize = files.traces.iter().map(|(_, file)| file.traces.len()).sum();
    println!("{control} control messages, {traces} traces, {} problems", problems.len());
    ExitCode::from(if problems.is_empty() { DONE } else { FAILED })
}
