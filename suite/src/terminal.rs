//! Runs suites on a terminal, with a bar while a case runs, and a table at the end; folds lines to its width.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Instant;

use comfy_table::{Cell, ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use textwrap::{Options, WordSplitter};

use crate::exit::{DONE, FAILED, NO_ENVIRONMENT, NOTHING};
use crate::{Case, Report};

/// Returns the columns of the terminal that the output goes to. `None`: it goes elsewhere.
#[must_use]
pub fn columns() -> Option<usize> {
    Table::new().width().map(usize::from)
}

/// Returns the columns of the terminal that errors go to. `None`: they go elsewhere.
#[must_use]
pub fn error_columns() -> Option<usize> {
    Table::new().use_stderr().width().map(usize::from)
}

/// Folds a line between words, so that it fits into `columns`, if any; what follows is indented by `hanging`.
#[must_use]
pub fn fold(line: &str, hanging: usize, columns: Option<usize>) -> String {
    let Some(columns) = columns else { return line.into() };
    let indent = " ".repeat(hanging);
    // A word that is longer than a line is an address or a path, which is to be copied.
    let options = Options::new(columns)
        .subsequent_indent(&indent)
        .break_words(false)
        .word_splitter(WordSplitter::NoHyphenation);
    textwrap::fill(line, options)
}

/// Prints why nothing can be tried on this machine.
pub fn cannot_run(reason: &str) -> ExitCode {
    eprintln!("cannot run here: {reason}");
    ExitCode::from(NO_ENVIRONMENT)
}

/// Runs the cases whose id contains `select`, and reports.
pub fn run<S>(title: &str, cases: &[Case<S>], setting: &S, select: &str) -> ExitCode {
    run_judged(title, cases, setting, select, |_| {})
}

/// Runs cases and reports; `judge` may change reports before, where failures are expected.
pub fn run_judged<S>(
    title: &str,
    cases: &[Case<S>],
    setting: &S,
    select: &str,
    judge: impl FnOnce(&mut [Report]),
) -> ExitCode {
    let begun = Instant::now();
    let mut reports = crate::run(cases, setting, select, progress);
    judge(&mut reports);
    if reports.is_empty() {
        eprintln!(
            "no case matches; there are: {}",
            cases.iter().map(|case| case.id).collect::<Vec<_>>().join(", ")
        );
        return ExitCode::from(NOTHING);
    }
    let count = |is: fn(&Report) -> bool| reports.iter().filter(|report| is(report)).count();
    let failed = count(Report::is_failure);
    let deviate = count(|report| report.expected.is_some());
    let passed = reports.len() - failed - deviate;
    let deviate = if deviate > 0 { format!("{deviate} deviate, ") } else { String::new() };
    println!("{}", table(&reports));
    println!("{title}: {passed} passed, {deviate}{failed} failed, {:.1} s", begun.elapsed().as_secs_f64());
    ExitCode::from(if failed > 0 { FAILED } else { DONE })
}

fn table(reports: &[Report]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["case", "shows", "result", "time", "details"]);
    for report in reports {
        let verdict = match report.expected {
            _ if report.is_failure() => report.verdict().name().to_uppercase(),
            None => report.verdict().name().into(),
            Some(_) => "deviates".into(),
        };
        let shows = match report.source {
            "" => report.intent.into(),
            source => format!("{} [{source}]", report.intent),
        };
        let case = report.role.map_or_else(|| report.id.into(), |role| format!("{} ({role})", report.id));
        let time = format!("{:.1} s", report.took.as_secs_f64());
        table.add_row([case, shows, verdict, time, report.details()].map(Cell::new));
    }
    table
}

/// A progress bar on a terminal; nothing elsewhere.
fn progress(case: &'static str) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template("{msg:24} [{wide_bar}] {percent:>3} % {elapsed:>4}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(None, target).with_style(style).with_message(case)
}

#[cfg(test)]
mod tests {
    use super::fold;

    #[test]
    fn lines_fit_a_terminal_and_are_left_alone_elsewhere() {
        let line =
            "  Source:   RDMA.md, section valkey-over-rdma of https://example.org/a/path/of/some/length";
        assert_eq!(fold(line, 12, None), line);
        let folded = fold(line, 12, Some(40));
        let expected = "  Source:   RDMA.md, section
            valkey-over-rdma of
            https://example.org/a/path/of/some/length";
        assert_eq!(folded, expected);
        assert_eq!(fold("short", 12, Some(40)), "short");
    }
}
