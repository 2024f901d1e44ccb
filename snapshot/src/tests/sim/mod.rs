//! The simulator of this crate: a publisher and readers that pull from it and from each other, in
//! virtual time, from one seed.
//!
//! A run is a [`scenario::Scenario`], drawn from a seed: devices, a source and sinks with a pace of
//! their own, and faults. The programs are this crate's [`Publisher`](crate::Publisher) and
//! [`Reader`](crate::Reader), driven as [`crate::run`] drives them. Oracles check every chunk,
//! every session that ends, and what is left at the end. A finding is one line, and its seed
//! repeats it.
//!
//! ```text
//! SNAPSHOT_SEEDS=0..100000 cargo test --release -p rdma-snapshot --lib seeds_break_no_rule -- --nocapture
//! ```

mod forgery;
mod origin;
mod replica;
mod rogue;
mod scenario;
mod simulation;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::{CHUNK, MOST_EVENTS, World, address, content, is_readable};
use scenario::Scenario;
use simulation::{Outcome, Simulation};

/// Findings after which the search ends.
const MOST_FINDINGS: usize = 20;

const SECRET: &str = "a secret";

/// A rule that a run has broken.
struct Violation {
    oracle: &'static str,
    what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}] {}", self.oracle, self.what)
    }
}

fn run(seed: u64) -> Result<Outcome, Violation> {
    let scenario = Scenario::draw(seed);
    let caught = catch_unwind(AssertUnwindSafe(|| Simulation::new(&scenario).run()));
    let said = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().cloned();
        let what =
            text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default();
        Violation { oracle: "panic", what }
    };
    caught.map_err(said).and_then(|outcome| outcome).map_err(|violation| {
        let Scenario { personality, layout, troubles, .. } = &scenario;
        let what = format!("{}; {}, {layout:?}, {troubles:?}", violation.what, personality.name());
        Violation { what, ..violation }
    })
}

/// Returns the seeds that `SNAPSHOT_SEEDS` names, as A..B, or these.
fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("SNAPSHOT_SEEDS") else { return 0..5000 };
    let numbers = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    numbers.unwrap_or_else(|| panic!("SNAPSHOT_SEEDS is A..B, not {text}"))
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// VS-READ-002, VS-READ-003, VS-TIME-001, VS-LEASE-001, VS-LEASE-002, VS-TABLE-001, VS-TABLE-003:
/// under all faults, no wrong byte is passed on, a lost connection wastes only READs in flight,
/// everything ends, and all resources are released.
#[test]
fn seeds_break_no_rule() {
    let seeds = seeds();
    let held = descriptors();
    let (next, failed) = (AtomicU64::new(seeds.start), AtomicUsize::new(0));
    let sum = Mutex::new((Outcome::default(), Vec::new()));
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while failed.load(Ordering::Relaxed) < MOST_FINDINGS {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    let outcome = run(seed);
                    let mut sum = sum.lock().expect("no panic is let out of a run");
                    match outcome {
                        Ok(outcome) => sum.0.add(&outcome),
                        Err(violation) => {
                            println!("seed {seed}: {violation}");
                            println!("reproduce: SNAPSHOT_SEEDS={seed}..{} cargo test -p rdma-snapshot --lib seeds_break_no_rule", seed + 1);
                            failed.fetch_add(1, Ordering::Relaxed);
                            sum.1.push(seed);
                        }
                    }
                }
            });
        }
    });
    let (sum, broken) = sum.into_inner().expect("no panic is let out of a run");
    let Outcome { events, bytes, cuts, whole, failed } = sum;
    let count = seeds.end - seeds.start;
    println!(
        "{count} runs, {events} events, {bytes} bytes; {cuts} sessions cut, {whole} pulls whole, {failed} failed"
    );
    assert!(broken.is_empty(), "seeds {broken:?}");
    // Other tests hold some at the same time. A leak in one run of ten would be more.
    assert!(descriptors() <= held + 100, "{held} descriptors before, {} after", descriptors());
    if count >= 1000 {
        assert!(
            whole > count && cuts * 4 > count && failed * 8 > count,
            "the runs do not show what they are for"
        );
    }
}

/// A seed always gives the same run.
#[test]
fn a_seed_is_one_run() {
    for seed in 0..60 {
        let [first, second] = [run(seed), run(seed)].map(|outcome| outcome.ok());
        assert_eq!(first, second, "seed {seed}");
    }
}
