//! The whole suite on the embedded fabric, against this library's own server and client.

use std::path::Path;
use std::process::ExitCode;

use super::options::{Common, TargetCommand, parse};
use super::outcome::{tell, write_all};
use super::{CommandError, against, finish, usage};
use crate::blackbox::report::{self, Format};
use crate::blackbox::results::Run;
use crate::exit::{BROKEN, DONE, worse};

/// Runs it, prints the result, and writes the reports below `out`.
pub fn whole(out: &Path) -> ExitCode {
    finish(both(out))
}

fn both(out: &Path) -> Result<u8, CommandError> {
    let mut runs = Vec::new();
    let mut worst = DONE;
    for role in ["server", "client"] {
        let arguments = ["run", role, "--allow-disruptive"].map(str::to_string).to_vec();
        let (run, common): (Run, Common) = match parse(&arguments).map_err(usage)? {
            TargetCommand::Server(server) => (against::server(&server, &arguments)?, server.common),
            TargetCommand::Client(client) => (against::client(&client, &arguments)?, client.common),
            TargetCommand::Pair(_) => continue,
        };
        let text = report::summary(&run) + &report::failures(&run, common.strict);
        tell(&text, Format::Pretty);
        write_all(&run, &out.join(role), common.strict)?;
        worst = worse(worst, run.code(common.strict));
        runs.push(run);
    }
    let page = out.join("report.html");
    let html = report::html(&runs, None).map_err(|reason| (BROKEN, reason))?;
    std::fs::write(&page, html).map_err(|error| (BROKEN, format!("{}: {error}", page.display())))?;
    println!("report: {}", page.display());
    Ok(worst)
}
