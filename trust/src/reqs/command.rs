use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use conformance::requirements::{Requirement, Requirements, workspace};
use suite::exit::{DONE, FAILED};
use suite::terminal;
use vector_check::Files;

use super::coverage::Coverage;
use super::render;

/// Commands on the requirements.
#[derive(Subcommand)]
pub enum Command {
    /// Count what tests, cases and vectors show. Fails for a MUST that nothing shows, and for one
    /// that neither a vector nor a case shows to a peer, unless there is a reason.
    Coverage {
        /// The workspace.
        #[arg(long)]
        root: Option<PathBuf>,
        /// Also list what shows each requirement.
        #[arg(long)]
        verbose: bool,
    },
    /// Write the pages spec/requirements.md, differences.md and coverage.md, from
    /// spec/requirements.toml, the vectors and the cases.
    Render {
        /// The workspace.
        #[arg(long)]
        root: Option<PathBuf>,
        /// Write nothing. Fail if a page is out of date.
        #[arg(long)]
        check: bool,
    },
}

/// Runs the command.
pub fn run(command: Command) -> ExitCode {
    let result = match command {
        Command::Coverage { root, verbose } => cover(root, verbose),
        Command::Render { root, check } => write_pages(root, check),
    };
    result.unwrap_or_else(|problem| {
        terminal::complain(&problem, 4);
        ExitCode::from(FAILED)
    })
}

fn cover(root: Option<PathBuf>, verbose: bool) -> Result<ExitCode, String> {
    let root = root.map_or_else(workspace, Ok)?;
    let coverage = Coverage::of(&root)?;
    println!("{}", coverage.table());
    if verbose {
        for requirement in coverage.requirements() {
            println!("{} ({})", requirement.id, requirement.level);
            let shown = coverage.shown(&requirement.id);
            for by in shown.iter().flat_map(|shown| shown.tests.iter().chain(&shown.vectors)) {
                println!("    {by}");
            }
        }
    }
    print_ids("open, and no musts", &coverage.open());
    print_ids("named by no code", &coverage.without_code());
    for problem in &coverage.problems {
        terminal::complain(problem, 4);
    }
    Ok(ExitCode::from(if coverage.problems.is_empty() { DONE } else { FAILED }))
}

fn print_ids(title: &str, requirements: &[&Requirement]) {
    let ids: Vec<&str> = requirements.iter().map(|requirement| requirement.id.as_str()).collect();
    let ids = if ids.is_empty() { "none".to_string() } else { ids.join(" ") };
    terminal::tell(&format!("{title}: {ids}"), 4);
}

fn write_pages(root: Option<PathBuf>, check: bool) -> Result<ExitCode, String> {
    let root = root.map_or_else(workspace, Ok)?;
    let files = Files::read(&root.join("spec/vectors"))?;
    for (name, page) in render::pages(&Requirements::of(&root)?, &files) {
        let file = root.join("spec").join(name);
        if !check {
            std::fs::write(&file, page).map_err(|error| format!("{}: {error}", file.display()))?;
        } else if !std::fs::read_to_string(&file).is_ok_and(|now| now == page) {
            return Err(format!("{} is out of date: run `valkey-rdma-trust reqs render`", file.display()));
        }
    }
    Ok(ExitCode::SUCCESS)
}
