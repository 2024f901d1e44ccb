use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;
use rdma_softsim::SoftSim;

use super::finish;
use crate::blackbox::case::Case;
use crate::blackbox::cases;
use crate::exit::{DONE, NOTHING};
use crate::requirements::{Requirement, Requirements, Role};
use suite::terminal;

/// Arguments of `explain`.
#[derive(Args, Clone, Debug)]
pub struct Explain {
    /// A case, such as close.clean, or a requirement, such as VR-CLOSE-001.
    id: String,
}

/// Prints the explanation.
pub fn explain(options: &Explain) -> ExitCode {
    let (cases, requirements) = (cases::<SoftSim>(), Requirements::built_in());
    let of_that_name: Vec<_> = cases.iter().filter(|case| case.id == options.id).collect();
    let told = match requirements.get(&options.id.to_ascii_uppercase()) {
        Some(requirement) => about_requirement(requirement, &cases),
        None if of_that_name.is_empty() => {
            let unknown = format!(
                "{} is neither a case nor a requirement: `list` and `reqs list` show what there is",
                options.id
            );
            return finish(Err((NOTHING, unknown)));
        }
        None => of_that_name.iter().map(|case| about_case(case, &requirements)).collect(),
    };
    let columns = terminal::columns();
    for line in told.lines() {
        println!("{}", terminal::fold(line, if line.starts_with(' ') { HANGING } else { 0 }, columns));
    }
    ExitCode::from(DONE)
}

fn about_case(case: &Case<'_, SoftSim>, requirements: &Requirements) -> String {
    let Case { id, intent, expectation, .. } = case;
    let role = case.role.map_or("client or server", Role::name);
    let tags: Vec<_> = case.tags.iter().map(|tag| tag.name()).collect();
    let mut told = format!("{id}, for a {role}\n\n  Shown:    {intent}.\n  Expected: {expectation}\n");
    if !tags.is_empty() {
        line(&mut told, "Tags", &tags.join(", "));
    }
    for requirement in case.requirements.iter().filter_map(|id| requirements.get(id)) {
        let Requirement { id, level, text, source, .. } = requirement;
        let _infallible = write!(told, "\n{id} ({level}): {text}\n");
        line(&mut told, "Source", source);
    }
    told.push('\n');
    told
}

fn about_requirement(requirement: &Requirement, cases: &[Case<'_, SoftSim>]) -> String {
    let Requirement { id, level, origin, profile, source, text, note, differs, .. } = requirement;
    let mut told = format!("{id} ({level}, {profile} profile)\n\n{text}\n\n");
    line(&mut told, "Origin", &origin.to_string());
    line(&mut told, "Source", source);
    if let Some(note) = note {
        line(&mut told, "Note", note);
    }
    if let Some(differs) = differs {
        line(&mut told, "Document", &differs.document);
        line(&mut told, "Programs", &differs.code);
    }
    let mut shown: Vec<_> =
        cases.iter().filter(|case| case.requirements.contains(&id.as_str())).map(|case| case.id).collect();
    shown.dedup();
    line(&mut told, "Cases", &if shown.is_empty() { "none of the suite".into() } else { shown.join(", ") });
    told
}

const HANGING: usize = 12;

fn line(told: &mut String, name: &str, text: &str) {
    let name = format!("{name}:");
    let _infallible = writeln!(told, "  {name:9} {text}");
}
