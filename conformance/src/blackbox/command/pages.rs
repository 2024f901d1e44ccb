use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::{CommandError, finish, outcome, usage};
use crate::blackbox::baseline::Baseline;
use crate::blackbox::report::{self, Format};
use crate::blackbox::results::Run;
use crate::exit::{BROKEN, DONE, worse};

/// Reports from results.
#[derive(Args, Clone, Debug)]
pub struct Report {
    /// The format to write. HTML, Markdown and history take several runs; the others take one.
    #[arg(value_enum)]
    format: Format,
    /// results.json of runs.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// A file of expected failures, to judge them by: the exit code says what `run` would have
    /// said.
    #[arg(long)]
    baseline: Option<PathBuf>,
    /// Judge as `run --strict` does: what the report calls a failure, and, with --baseline, the
    /// exit code.
    #[arg(long)]
    strict: bool,
    /// Keep back what brings a target down or harms others: the ids of such cases, of those that
    /// may, and, if any did, of those that passed, so that nothing is told by elimination. They are
    /// counted. For results that are published.
    #[arg(long)]
    for_publication: bool,
    /// Where the specification lies as a page sees it (a URL or a relative path), for links of the
    /// HTML page; without it they stay on the page.
    #[arg(long, value_name = "URL")]
    spec: Option<String>,
    /// Where to write it, instead of printing it.
    #[arg(long, short)]
    out: Option<PathBuf>,
}

/// Creates a report.
pub fn make_report(options: &Report) -> ExitCode {
    let make = || -> Result<u8, CommandError> {
        let mut runs: Vec<Run> =
            options.files.iter().map(|file| Run::read(file)).collect::<Result<_, _>>().map_err(usage)?;
        let mut code = DONE;
        if let Some(baseline) = &options.baseline {
            let baseline = Baseline::read(baseline).map_err(usage)?;
            code =
                runs.iter_mut().map(|run| outcome::judge(run, &baseline, options.strict)).fold(DONE, worse);
        }
        if options.for_publication {
            runs.iter_mut().for_each(Run::withhold);
        }
        let text = match &runs[..] {
            runs if options.format == Format::Html => report::html(runs, options.spec.as_deref()),
            runs if options.format == Format::Markdown => Ok(report::markdown(runs)),
            runs if options.format == Format::History => Ok(report::history(runs)),
            [run] => report::text(run, options.format, options.strict),
            _ => return Err(usage("only HTML, Markdown and history take several runs")),
        };
        let text = text.map_err(|reason| (BROKEN, reason))?;
        match &options.out {
            None => outcome::tell(&text, options.format),
            Some(out) => {
                std::fs::write(out, text).map_err(|error| (BROKEN, format!("{}: {error}", out.display())))?;
            }
        }
        Ok(code)
    };
    finish(make())
}
