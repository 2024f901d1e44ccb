//! Concludes a run: verdicts, files, exit code.

use std::path::Path;

use super::CommandError;
use super::options::Common;
use crate::blackbox::baseline::Baseline;
use crate::blackbox::report::{self, Format};
use crate::blackbox::results::Run;
use crate::exit::{BROKEN, FAILED, worse};
use suite::{Verdict, terminal};

pub(super) fn conclude(run: &mut Run, common: &Common, baseline: &Baseline) -> Result<u8, CommandError> {
    let code = judge(run, baseline, common.strict);
    if let Some(file) = &common.write_baseline {
        baseline.renewed(run).write(file).map_err(|reason| (BROKEN, reason))?;
    }
    let text = report::text(run, common.format, common.strict).map_err(|reason| (BROKEN, reason))?;
    tell(&text, common.format);
    if let Some(out) = &common.out {
        write_all(run, out, common.strict)?;
        eprintln!("written to {}", out.display());
    }
    Ok(code)
}

pub(super) fn tell(text: &str, format: Format) {
    match format {
        Format::Pretty => print!("{}", folded(text, terminal::columns())),
        _ => print!("{text}"),
    }
}

/// Wraps a report, except the lines that repeat cases: people copy them.
fn folded(text: &str, columns: usize) -> String {
    let mut folded = String::new();
    for line in text.lines() {
        match line.starts_with("    again: ") {
            true => folded += line,
            false => folded += &terminal::fold(line, 4, columns),
        }
        folded.push('\n');
    }
    folded
}

/// Returns a run's exit code without expected failures. Prints those that no longer occur.
pub(super) fn judge(run: &mut Run, baseline: &Baseline, strict: bool) -> u8 {
    let stale = baseline.apply(run);
    stale.iter().for_each(|stale| terminal::complain(stale, 4));
    let skipped = run.count(Verdict::Skipped);
    if skipped > 0 {
        eprintln!(
            "WARNING: {skipped} of the {} cases that are selected were NOT RUN; each says why",
            run.results.len()
        );
    }
    let code = run.code(strict);
    if stale.is_empty() { code } else { worse(code, FAILED) }
}

pub(super) fn write_all(run: &Run, out: &Path, strict: bool) -> Result<(), CommandError> {
    let told = |error: std::io::Error| (BROKEN, format!("{}: {error}", out.display()));
    std::fs::create_dir_all(out).map_err(told)?;
    for (file, format) in [
        ("results.json", Format::Json),
        ("junit.xml", Format::Junit),
        ("results.tap", Format::Tap),
        ("badge.json", Format::Badge),
        ("report.html", Format::Html),
    ] {
        let text = report::text(run, format, strict).map_err(|reason| (BROKEN, reason))?;
        std::fs::write(out.join(file), text).map_err(told)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::folded;

    #[test]
    fn a_line_to_copy_is_not_folded() {
        let text = "✗ fail mem.length\n    it is too short\n    again: run server --select mem.length\n";
        let expected =
            "✗ fail\n    mem.length\n    it is too\n    short\n    again: run server --select mem.length\n";
        assert_eq!(folded(text, 15), expected);
    }
}
