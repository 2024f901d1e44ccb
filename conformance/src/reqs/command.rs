//! `valkey-rdma-conformance reqs …`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Subcommand, ValueEnum};
use comfy_table::{ContentArrangement, Table, presets};

use super::coverage::Coverage;
use super::{Level, Origin, Requirement, Requirements, render, workspace};
use crate::exit::{DONE, FAILED, NOTHING};

/// What to do with the requirements.
#[derive(Subcommand)]
pub enum Command {
    /// Lists requirements.
    List {
        /// Only those of this area, for instance FLOW.
        #[arg(long)]
        area: Option<String>,
        /// Only those of this level.
        #[arg(long)]
        level: Option<Level>,
        /// Only those of this origin.
        #[arg(long)]
        origin: Option<Origin>,
        /// How to print them.
        #[arg(long, default_value = "table")]
        format: Format,
    },
    /// Counts what tests, cases and vectors show; fails for a must that nothing shows.
    Coverage {
        /// The workspace; that around the current directory, if absent.
        #[arg(long)]
        root: Option<PathBuf>,
        /// Also list what shows each requirement.
        #[arg(long)]
        verbose: bool,
    },
    /// Writes the pages spec/requirements.md and spec/differences.md from spec/requirements.toml.
    Render {
        /// The workspace; that around the current directory, if absent.
        #[arg(long)]
        root: Option<PathBuf>,
        /// Write nothing; fail if a page is out of date.
        #[arg(long)]
        check: bool,
    },
}

/// How to print a list.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For reading.
    Table,
    /// For programs.
    Json,
}

/// Does it.
pub fn run(command: Command) -> ExitCode {
    let result = match command {
        Command::List { area, level, origin, format } => {
            let all = Requirements::built_in();
            let wanted: Vec<&Requirement> = all
                .iter()
                .filter(|one| area.as_ref().is_none_or(|area| one.area().eq_ignore_ascii_case(area)))
                .filter(|one| level.is_none_or(|level| one.level == level))
                .filter(|one| origin.is_none_or(|origin| one.origin == origin))
                .collect();
            list(&wanted, format)
        }
        Command::Coverage { root, verbose } => cover(root, verbose),
        Command::Render { root, check } => write_pages(root, check),
    };
    result.unwrap_or_else(|problem| {
        eprintln!("{problem}");
        ExitCode::from(FAILED)
    })
}

fn list(wanted: &[&Requirement], format: Format) -> Result<ExitCode, String> {
    if format == Format::Json {
        println!("{}", serde_json::to_string_pretty(wanted).map_err(|error| error.to_string())?);
    } else {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_header(["id", "level", "origin", "requirement"]);
        for one in wanted {
            table.add_row([one.id.clone(), one.level.to_string(), one.origin.to_string(), one.text.clone()]);
        }
        println!("{table}");
    }
    if wanted.is_empty() {
        eprintln!("no requirement matches");
        return Ok(ExitCode::from(NOTHING));
    }
    Ok(ExitCode::SUCCESS)
}

fn cover(root: Option<PathBuf>, verbose: bool) -> Result<ExitCode, String> {
    let coverage = Coverage::of(&root.map_or_else(workspace, Ok)?)?;
    println!("{}", coverage.table());
    if verbose {
        for requirement in Requirements::built_in().iter() {
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
        eprintln!("{problem}");
    }
    Ok(ExitCode::from(if coverage.problems.is_empty() { DONE } else { FAILED }))
}

fn print_ids(title: &str, requirements: &[&Requirement]) {
    let ids: Vec<&str> = requirements.iter().map(|requirement| requirement.id.as_str()).collect();
    println!("{title}: {}", if ids.is_empty() { "none".to_string() } else { ids.join(" ") });
}

fn write_pages(root: Option<PathBuf>, check: bool) -> Result<ExitCode, String> {
    let root = root.map_or_else(workspace, Ok)?;
    for (name, page) in render::pages(&Requirements::of(&root)?) {
        let file = root.join("spec").join(name);
        if !check {
            std::fs::write(&file, page).map_err(|error| format!("{}: {error}", file.display()))?;
        } else if !std::fs::read_to_string(&file).is_ok_and(|now| now == page) {
            return Err(format!(
                "{} is out of date: run `valkey-rdma-conformance reqs render`",
                file.display()
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}
