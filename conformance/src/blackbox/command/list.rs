use std::process::ExitCode;

use clap::Args;
use comfy_table::presets;
use rdma_conn::Descriptors;
use rdma_softsim::SoftSim;

use super::finish;
use crate::blackbox::case::Case;
use crate::blackbox::select::Select;
use crate::exit::{DONE, NOTHING};
use crate::requirements::{Requirements, Role};
use suite::terminal;

/// The kind of entries to list.
#[derive(Args, Clone, Debug)]
pub struct List {
    /// Only cases for servers, or for clients.
    role: Option<Role>,
    #[command(flatten)]
    select: Select,
    /// Also print what a target has to do, and the requirements.
    #[arg(long, conflicts_with = "json")]
    long: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Lists cases.
pub fn list(options: &List) -> ExitCode {
    let roles = options.role.map_or_else(|| vec![Role::Server, Role::Client], |role| vec![role]);
    let cases: Vec<Case<'_, SoftSim>> =
        roles.into_iter().flat_map(|role| options.select.cases(role)).collect();
    if cases.is_empty() {
        return finish(Err((NOTHING, "nothing is selected".into())));
    }
    let requirements = Requirements::built_in();
    if options.json {
        let all: Vec<_> = cases.iter().map(|case| described(case, &requirements)).collect();
        println!("{:#}", serde_json::Value::from(all));
    } else {
        let mut table = terminal::table();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        table.set_header(["case", "of", "level", "what the target is shown"]);
        for case in &cases {
            let role = case.role.map_or("", Role::name);
            let level = requirements.level(case.requirements).to_string();
            let tags: String = case.tags.iter().map(|tag| format!(" [{}]", tag.name())).collect();
            let told = if options.long {
                format!("{}. {} {}{tags}", case.intent, case.expectation, case.requirements.join(" "))
            } else {
                format!("{}{tags}", case.intent)
            };
            table.add_row([case.id, role, &level, &told]);
        }
        println!("{table}");
        let count = |role| cases.iter().filter(|case| case.role == Some(role)).count();
        println!(
            "{} cases: {} for servers, {} for clients. `explain CASE` says more of one",
            cases.len(),
            count(Role::Server),
            count(Role::Client)
        );
    }
    ExitCode::from(DONE)
}

fn described<B: Descriptors>(case: &Case<'_, B>, requirements: &Requirements) -> serde_json::Value {
    serde_json::json!({
        "id": case.id,
        "role": case.role,
        "level": requirements.level(case.requirements),
        "profile": requirements.profile(case.requirements),
        "intent": case.intent,
        "expectation": case.expectation,
        "requirements": case.requirements,
        "tags": case.tags.iter().map(|tag| tag.name()).collect::<Vec<_>>(),
    })
}
