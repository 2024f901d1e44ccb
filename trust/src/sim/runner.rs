//! The command line: many seeds, on all processors.

use std::io::IsTerminal;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rdma_softsim::{DeviceKind, FailureClass, FailureCounts, FaultPlan};

use super::shrink::{attempt, shrink, violates};
use super::{Scenario, Violation, timeline};

/// Arguments of `sim`.
#[derive(Args, Debug)]
pub struct Options {
    /// Seeds, as A..B: A and all up to B, without B.
    #[arg(long, default_value = "0..1000", value_parser = seeds)]
    pub seeds: Range<u64>,
    /// ibta, rxe, mlx5, hostile-but-legal, or all.
    #[arg(long, default_value = "all", value_parser = device_kinds)]
    pub device_kind: DeviceKinds,
    /// Runs at the same time; by default, the number of processors.
    #[arg(long)]
    pub jobs: Option<NonZeroUsize>,
    /// Shrink the fault plan of the first run that fails, and show the events of that run.
    #[arg(long)]
    pub shrink: bool,
    /// Run every seed twice and compare.
    #[arg(long)]
    pub twice: bool,
    /// A fault plan, as JSON, in place of the one that the seed draws.
    #[arg(long, value_parser = plan)]
    pub plan: Option<Plan>,
    /// Continue after a run that fails, and list all that fail.
    #[arg(long)]
    pub keep_going: bool,
    /// Show all events of the first run, whether it fails or not.
    #[arg(long)]
    pub trace: bool,
}

/// A given fault plan.
#[derive(Clone, Debug)]
pub struct Plan(FaultPlan);

/// The kinds of devices.
#[derive(Clone, Debug)]
pub struct DeviceKinds(Vec<DeviceKind>);

impl DeviceKinds {
    /// All kinds.
    #[must_use]
    pub fn all() -> Self {
        Self(DeviceKind::ALL.to_vec())
    }
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let numbers = text.split_once("..").and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    match numbers.map(|(from, to)| from..to) {
        None => Err("two numbers with .. between them".to_owned()),
        Some(none) if none.is_empty() => {
            Err("there is no seed in it: the second number is not run".to_owned())
        }
        Some(seeds) => Ok(seeds),
    }
}

fn device_kinds(text: &str) -> Result<DeviceKinds, String> {
    let all = DeviceKind::ALL.into_iter();
    let chosen: Vec<_> = all.filter(|device_kind| text == "all" || device_kind.name() == text).collect();
    if chosen.is_empty() {
        return Err("ibta, rxe, mlx5, hostile-but-legal or all".to_owned());
    }
    Ok(DeviceKinds(chosen))
}

fn plan(text: &str) -> Result<Plan, String> {
    serde_json::from_str(text).map(Plan).map_err(|error| error.to_string())
}

/// A run that broke a rule.
#[allow(missing_docs)] // the others are plain
#[derive(Clone, Debug)]
pub struct Failure {
    /// Together with the kind, it reproduces the run.
    pub seed: u64,
    pub device_kind: DeviceKind,
    pub violation: Violation,
}

/// The results of many runs.
#[allow(missing_docs)] // the others are plain
#[derive(Debug, Default)]
pub struct Summary {
    pub runs: u64,
    pub events: u64,
    /// Bytes read by programs.
    pub bytes: u64,
    /// Windows registered before the last one was full.
    pub windows_ahead: u64,
    /// Faults that found no target.
    pub idle_faults: u64,
    pub failure_counts: FailureCounts,
    /// Each processor stops at its first.
    pub failures: Vec<Failure>,
}

impl Options {
    fn scenario(&self, seed: u64, device_kind: DeviceKind) -> Scenario {
        let mut scenario = Scenario::draw(seed, device_kind);
        if let Some(Plan(plan)) = &self.plan {
            scenario.plan.clone_from(plan);
        }
        scenario
    }
}

/// Runs all seeds, until one fails.
pub fn search(options: &Options, step: impl Fn() + Sync) -> Summary {
    let DeviceKinds(device_kinds) = &options.device_kind;
    let jobs = options.jobs.or_else(|| std::thread::available_parallelism().ok()).map_or(1, usize::from);
    let (next, failed) = (AtomicU64::new(options.seeds.start), AtomicBool::new(false));
    let summary = Mutex::new(Summary::default());
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                let mut own = Summary::default();
                while !failed.load(Ordering::Relaxed) {
                    // One by one, because runs differ much in length.
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= options.seeds.end {
                        break;
                    }
                    for device_kind in device_kinds {
                        if let Some(violation) = own.run(options, seed, *device_kind) {
                            own.failures.push(Failure { seed, device_kind: *device_kind, violation });
                            // Relaxed: other threads may first finish the seeds that they have
                            // begun.
                            failed.store(!options.keep_going, Ordering::Relaxed);
                        }
                    }
                    step();
                }
                // Once for each thread, and not for each run.
                if let Ok(mut sum) = summary.lock() {
                    sum.add(own);
                }
            });
        }
    });
    let mut summary = summary.into_inner().unwrap_or_default();
    // Threads end in no order, and the report must be the same each time.
    summary.failures.sort_by_key(|failure| failure.seed);
    summary
}

impl Summary {
    fn run(&mut self, options: &Options, seed: u64, device_kind: DeviceKind) -> Option<Violation> {
        let scenario = options.scenario(seed, device_kind);
        let outcome = attempt(&scenario, false);
        self.runs += 1;
        self.events += outcome.events;
        self.bytes += outcome.bytes;
        self.windows_ahead += outcome.windows_ahead;
        self.idle_faults += outcome.idle_faults as u64;
        self.failure_counts.add(&outcome.failure_counts);
        let differs = options.twice && attempt(&scenario, false).hash != outcome.hash;
        outcome.violation.or_else(|| {
            differs.then(|| Violation::new("determinism", "the second run of the seed was another one"))
        })
    }

    fn add(&mut self, other: Self) {
        self.runs += other.runs;
        self.events += other.events;
        self.bytes += other.bytes;
        self.windows_ahead += other.windows_ahead;
        self.idle_faults += other.idle_faults;
        self.failure_counts.add(&other.failure_counts);
        self.failures.extend(other.failures);
    }
}

/// The subcommand.
pub fn main(options: &Options) -> ExitCode {
    if options.trace {
        return show(options);
    }
    // A panic is reported as a failure. Thousands of backtraces would hide it.
    std::panic::set_hook(Box::new(|_| {}));
    let begun = Instant::now();
    let seeds = options.seeds.end.saturating_sub(options.seeds.start);
    let (bar, told) = (progress(seeds), AtomicU64::new(0));
    let summary = search(options, || {
        bar.inc(1);
        // Without a terminal, a line each minute shows in a log that it goes on.
        let minutes = begun.elapsed().as_secs() / 60;
        if bar.is_hidden() && told.fetch_max(minutes, Ordering::Relaxed) < minutes {
            eprintln!("{} of {seeds} seeds in {minutes} min", bar.position());
        }
    });
    bar.finish_and_clear();
    println!("{}", classes(&summary.failure_counts));
    let seconds = begun.elapsed().as_secs_f64();
    let Summary { runs, events, bytes, windows_ahead, idle_faults, failures, .. } = &summary;
    println!(
        "{runs} runs, {events} events, {bytes} bytes delivered, {windows_ahead} windows registered ahead, \
         {idle_faults} faults struck nothing\n{seconds:.1} s, {:.0} runs/s, {} violations",
        *runs as f64 / seconds,
        failures.len()
    );
    if options.keep_going {
        for Failure { seed, device_kind, violation } in &summary.failures {
            let what: String = violation.what.chars().take(160).collect();
            println!("{seed} {}: [{}] {what}", device_kind.name(), violation.oracle);
        }
    }
    let Some(Failure { seed, device_kind, violation }) = summary.failures.first() else {
        return ExitCode::SUCCESS;
    };
    println!("\nVIOLATION [{}] {}", violation.oracle, violation.what);
    println!(
        "reproduce: cargo run --release -p trust -- sim --seeds {seed}..{} --device-kind {} --shrink",
        seed + 1,
        device_kind.name()
    );
    if options.shrink {
        let scenario =
            shrink(options.scenario(*seed, *device_kind), |scenario| violates(scenario, violation.oracle));
        report(&scenario, 400);
    }
    ExitCode::FAILURE
}

fn show(options: &Options) -> ExitCode {
    let DeviceKinds(device_kinds) = &options.device_kind;
    let Some(device_kind) = device_kinds.first() else { return ExitCode::FAILURE };
    let scenario = options.scenario(options.seeds.start, *device_kind);
    println!("{scenario:#?}");
    report(&scenario, usize::MAX);
    ExitCode::SUCCESS
}

/// Returns the last `most` lines of a run, and what was wrong with it.
fn report(scenario: &Scenario, most: usize) {
    let outcome = attempt(scenario, true);
    println!("{}", timeline::render(&outcome.trace, most));
    let plan = serde_json::to_string(&scenario.plan).unwrap_or_default();
    println!("the smallest plan: --plan '{plan}'");
    if let Some(violation) = outcome.violation {
        println!("[{}] {}", violation.oracle, violation.what);
    }
}

fn classes(failure_counts: &FailureCounts) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    table.set_header(["class of failure", "brought about", "observed"]);
    for class in FailureClass::ALL {
        let counts =
            [failure_counts.injected(*class), failure_counts.observed(*class)].map(|count| count.to_string());
        table.add_row([&[class.words().to_owned()], &counts[..]].concat());
    }
    for column in [1, 2] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn progress(seeds: u64) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template("seeds [{wide_bar}] {pos}/{len} {per_sec} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(seeds), target).with_style(style)
}
