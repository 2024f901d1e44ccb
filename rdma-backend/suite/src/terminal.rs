//! Runs suites on a terminal, with a bar and a table; wraps lines to its width.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Instant;

use comfy_table::{Cell, ContentArrangement, Table};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::termios::tcgetwinsize;
use textwrap::{Options, WordSplitter};

use crate::exit::{DONE, NO_ENVIRONMENT, NOTHING, worse};
use crate::{Case, Report};

/// The columns of output that is not to a terminal.
pub const PIPED: usize = 120;

/// Returns the columns of the output: those of its terminal, or [`PIPED`].
#[must_use]
pub fn columns() -> usize {
    columns_of(std::io::stdout())
}

/// Returns the columns of errors: those of their terminal, or [`PIPED`].
#[must_use]
pub fn error_columns() -> usize {
    columns_of(std::io::stderr())
}

fn columns_of(output: impl AsFd) -> usize {
    // A terminal whose size was never set reports no columns.
    tcgetwinsize(output).ok().filter(|size| size.ws_col > 0).map_or(PIPED, |size| size.ws_col.into())
}

/// Wraps a line between words to `columns`. Further lines are indented by `hanging`.
#[must_use]
pub fn fold(line: &str, hanging: usize, columns: usize) -> String {
    let indent = " ".repeat(hanging);
    // A word longer than a line is an address or a path, which people copy.
    let options = Options::new(columns)
        .subsequent_indent(&indent)
        .break_words(false)
        .word_splitter(WordSplitter::NoHyphenation);
    textwrap::fill(line, options)
}

/// Wraps each line of a text.
#[must_use]
pub fn fold_lines(text: &str, hanging: usize, columns: usize) -> String {
    text.lines().map(|line| fold(line, hanging, columns)).collect::<Vec<_>>().join("\n")
}

/// Prints a text, wrapped to the output. Further lines are indented by `hanging`.
pub fn tell(text: &str, hanging: usize) {
    println!("{}", fold_lines(text, hanging, columns()));
}

/// Prints an error, wrapped to the output of errors. Further lines are indented by `hanging`.
pub fn complain(text: &str, hanging: usize) {
    eprintln!("{}", fold_lines(text, hanging, error_columns()));
}

/// Returns an empty table, at most as wide as the output.
#[must_use]
pub fn table() -> Table {
    let mut table = Table::new();
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(u16::try_from(columns()).unwrap_or(u16::MAX));
    table
}

/// Prints why nothing can be run on this machine.
pub fn cannot_run(reason: &str) -> ExitCode {
    complain(&format!("cannot run here: {reason}"), 4);
    ExitCode::from(NO_ENVIRONMENT)
}

/// Runs the cases whose id contains `select`, and reports.
pub fn run<S>(title: &str, cases: &[Case<S>], setting: &S, select: &str) -> ExitCode {
    run_judged(title, cases, setting, select, |_| {})
}

/// Runs cases, lets `judge` change the reports, prints them, and returns the worst result.
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
        let ids: Vec<_> = cases.iter().map(|case| case.id).collect();
        complain(&format!("no case matches; there are: {}", ids.join(", ")), 4);
        return ExitCode::from(NOTHING);
    }
    let count = |is: fn(&Report) -> bool| reports.iter().filter(|report| is(report)).count();
    let deviate = count(|report| report.expected.is_some());
    let untried = count(is_untried);
    let failed = count(Report::is_failure) - untried;
    let passed = reports.len() - failed - deviate - untried;
    let deviate = if deviate > 0 { format!("{deviate} deviate, ") } else { String::new() };
    let untried = if untried > 0 { format!(", {untried} not tried") } else { String::new() };
    println!("{}", results(&reports));
    let seconds = begun.elapsed().as_secs_f64();
    tell(&format!("{title}: {passed} passed, {deviate}{failed} failed{untried}, {seconds:.1} s"), 4);
    ExitCode::from(code(&reports))
}

fn is_untried(report: &Report) -> bool {
    report.is_failure() && !report.verdict().is_tried()
}

/// Returns the exit code of a run. A case that was not run counts only if none was.
fn code(reports: &[Report]) -> u8 {
    if reports.iter().all(is_untried) {
        return NOTHING;
    }
    let of = |report: &Report| match &report.judged {
        Err(stop) if report.is_failure() && !is_untried(report) => stop.code(),
        _ => DONE,
    };
    reports.iter().map(of).fold(DONE, worse)
}

fn results(reports: &[Report]) -> Table {
    let mut table = table();
    table.load_preset(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header(["case", "shows", "result", "time", "details"]);
    for report in reports {
        let verdict = match report.expected {
            _ if report.is_failure() && !is_untried(report) => report.verdict().name().to_uppercase(),
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
    use std::time::Duration;

    use super::*;
    use crate::exit::{BROKEN, FAILED, LOST, UNDECIDED};
    use crate::verdict::pass;
    use crate::{Judged, Stop};

    #[test]
    fn a_run_comes_to_the_worst_of_its_cases() {
        let right = || Ok(pass(""));
        let case = Case::<()>::new("a.b", "", &[], |(), _| Ok::<_, Stop>(String::new()));
        let code = |all: Vec<Judged>| {
            let report = |judged| Report::new(&case, judged, Duration::ZERO);
            super::code(&all.into_iter().map(report).collect::<Vec<_>>())
        };
        assert_eq!(code(vec![right(), right()]), DONE);
        assert_eq!(code(vec![right(), Err(Stop::unmet("")), Err(Stop::undecided(""))]), FAILED);
        assert_eq!(code(vec![Err(Stop::unmet("")), Err(Stop::refused("")), right()]), LOST);
        assert_eq!(code(vec![right(), Err(Stop::broken("")), Err(Stop::undecided(""))]), BROKEN);
        assert_eq!(code(vec![right(), Err(Stop::undecided(""))]), UNDECIDED);
        assert_eq!(code(vec![right(), Err(Stop::not_applicable(""))]), DONE);
        assert_eq!(code(vec![Err(Stop::unsupported("")), Err(Stop::skipped(""))]), NOTHING);
    }

    #[test]
    fn what_was_expected_is_no_failure() {
        let case = Case::<()>::new("a.b", "", &[], |(), _| Ok::<_, Stop>(String::new()));
        let report = Report::new(&case, Err(Stop::died("")), Duration::ZERO);
        assert_eq!(super::code(&[Report { expected: Some("so it is"), ..report }]), DONE);
    }

    #[test]
    fn lines_are_folded_between_words() {
        let line =
            "  Source:   RDMA.md, section valkey-over-rdma of https://example.org/a/path/of/some/length";
        assert_eq!(fold(line, 12, PIPED), line);
        let folded = fold(line, 12, 40);
        let expected = "  Source:   RDMA.md, section
            valkey-over-rdma of
            https://example.org/a/path/of/some/length";
        assert_eq!(folded, expected);
        assert_eq!(fold("short", 12, 40), "short");
        assert_eq!(fold_lines("one two\n\n  three four", 2, 8), "one two\n\n  three\n  four");
    }
}
