use std::process::ExitCode;

use clap::{Subcommand, ValueEnum};
use comfy_table::presets;

use super::{Level, Origin, Profile, Requirement, Requirements};
use crate::exit::{FAILED, NOTHING};
use suite::terminal;

/// Commands on the requirements.
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
        /// Only those of this profile.
        #[arg(long)]
        profile: Option<Profile>,
        /// How to print them.
        #[arg(long, default_value = "table")]
        format: Format,
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

/// Runs a command.
pub fn run(command: Command) -> ExitCode {
    let result = match command {
        Command::List { area, level, origin, profile, format } => {
            let all = Requirements::built_in();
            let wanted: Vec<&Requirement> = all
                .iter()
                .filter(|one| area.as_ref().is_none_or(|area| one.area().eq_ignore_ascii_case(area)))
                .filter(|one| level.is_none_or(|level| one.level == level))
                .filter(|one| origin.is_none_or(|origin| one.origin == origin))
                .filter(|one| profile.is_none_or(|profile| one.profile == profile))
                .collect();
            list(&wanted, format)
        }
    };
    result.unwrap_or_else(|problem| {
        terminal::complain(&problem, 4);
        ExitCode::from(FAILED)
    })
}

fn list(wanted: &[&Requirement], format: Format) -> Result<ExitCode, String> {
    if format == Format::Json {
        println!("{}", serde_json::to_string_pretty(wanted).map_err(|error| error.to_string())?);
    } else {
        let mut table = terminal::table();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        table.set_header(["id", "level", "profile", "origin", "requirement"]);
        for one in wanted {
            let Requirement { id, level, origin, profile, text, .. } = one;
            table.add_row([id, &level.to_string(), &profile.to_string(), &origin.to_string(), text]);
        }
        println!("{table}");
    }
    if wanted.is_empty() {
        eprintln!("no requirement matches");
        return Ok(ExitCode::from(NOTHING));
    }
    Ok(ExitCode::SUCCESS)
}
