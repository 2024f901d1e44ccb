//! Repeats tables 1-1 and 1-2 of the paper: from a live Valkey's images to replicas that have
//! loaded them, with one, two and three replicas in one run. The rows are Valkey's own full sync
//! through a disk, without one, without compression, and with two channels; an RDB file over a
//! plain TCP stream; that file by READ from the paper's table; chunks by READ from the live Valkey,
//! as a star and as a chain.
//!
//! ```text
//! cargo run --release -p rdma-snapshot --example tables                                  # 8 MiB, to see that it works
//! cargo run --release -p rdma-snapshot --example tables -- --images 10000 --out snapshot/docs
//! ```
//!
//! RDMA is softsim, in this process, or, with `--rdma ADDRESS`, the device of that address:
//! `lab/run tables`. It needs a `valkey-server` (`VALKEY_SERVER` may name one).

mod place;
mod replicas;
#[path = "../../tests/snapshot/server.rs"]
mod server;

use std::collections::BTreeSet;
use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use rdma_conn::Descriptors;
use rdma_snapshot::{Publisher, publisher};
use rdma_softsim::Fabric;
use rdma_verbs::Verbs;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use place::{OnDevice, Place};
use replicas::Source;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Bytes of an image in base64: 10,000 of them are 1 GiB.
const IMAGE: usize = 107_374;

#[derive(Parser)]
struct Arguments {
    /// Images in the source.
    #[arg(long, default_value_t = 80)]
    images: usize,
    /// How often everything is done; the kinds take turns.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// To how many replicas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    replicas: Vec<usize>,
    /// Only these; everything by default.
    #[arg(long, value_delimiter = ',', value_enum)]
    kinds: Vec<Kind>,
    /// Seconds after which each replica follows the one before it; all come at once by default.
    #[arg(long, default_value_t = 0)]
    apart: u64,
    /// The address of an RDMA device; without it softsim.
    #[arg(long)]
    rdma: Option<IpAddr>,
    /// The source's address for its replicas and for TCP streams. What leaves it may be shaped, as
    /// `lab/run paper` does.
    #[arg(long, default_value = "127.0.0.1")]
    network: IpAddr,
    /// Gigabits in a second of the link that READs are to have: softsim has no rate. No more is
    /// published than that link would move to all readers, 97 % of its rate in all.
    #[arg(long)]
    gigabits: Option<f64>,
    /// The folder of the raw data.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Its name, without the extension; the name of what RDMA is done with by default.
    #[arg(long)]
    name: Option<String>,
}

/// How replicas get the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// REPLICAOF, through a file at both ends: what the paper compares with.
    Disk,
    /// REPLICAOF, without files.
    Diskless,
    /// The same with `rdbcompression no` at the source.
    Tuned,
    /// REPLICAOF, without files, the RDB over a connection of its own.
    DualChannel,
    /// A TCP stream for each replica.
    Tcp,
    /// The paper's table.
    Rcp,
    /// Chunks, all from one publisher.
    Star,
    /// Chunks, handed on.
    Chain,
}

/// The link of the source to its replicas.
#[derive(Clone, Copy)]
struct Link {
    /// The source's address.
    network: IpAddr,
    /// What READs have of it; no limit if `None`.
    gigabits: Option<f64>,
}

impl Link {
    /// Returns the bytes in a second that READs can move to each of the publisher's own readers.
    fn rate(self, readers: usize) -> Option<u64> {
        Some((self.gigabits? * 1e9 / 8.0 * 0.97 / readers as f64) as u64)
    }
}

/// A line of the raw data.
#[derive(Serialize)]
struct Figure {
    round: usize,
    kind: Kind,
    replicas: usize,
    /// Bytes of the images.
    bytes: u64,
    #[serde(flatten)]
    measured: Measured,
    /// Busy processor time of the whole machine meanwhile, in seconds: both ends, and other
    /// programs.
    machine_seconds: f64,
}

#[derive(Clone, Copy, Serialize)]
struct Measured {
    /// From the first request until the last replica has everything.
    seconds: f64,
    /// Processor time of the side that has the data: its Valkey with children, the threads that
    /// send or publish, and those that prepare the data.
    source_seconds: f64,
    /// Time to prepare an RDB file, which is part of `seconds`; 0 if preparing and moving overlap.
    making_seconds: f64,
}

/// Seconds of a clock.
fn spent(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Seconds that processors of this machine were busy since it started.
fn machine() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<f64> =
        stat.lines().next().unwrap_or_default().split(' ').filter_map(|word| word.parse().ok()).collect();
    // All columns but idle and waiting for a disk. The first two already include guests.
    ticks
        .iter()
        .enumerate()
        .filter(|(at, _)| !matches!(at, 3 | 4 | 8 | 9))
        .map(|(_, ticks)| ticks / 100.0)
        .sum()
}

/// Base64 text.
fn images(count: usize) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        DIGITS[(state >> 58) as usize]
    };
    (0..count * IMAGE).map(|_| next()).collect()
}

/// Joins threads, and returns the first error.
fn all<T>(threads: Vec<std::thread::JoinHandle<Result<T, Failure>>>) -> Result<Vec<T>, Failure> {
    threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked")?).collect()
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::parse();
    let mut into = None;
    if let Some(out) = &arguments.out {
        let device = if arguments.rdma.is_some() { "soft-roce" } else { "softsim" };
        let name = arguments.name.as_deref().unwrap_or(device);
        std::fs::create_dir_all(out)?;
        into = Some(std::fs::File::create(out.join(format!("{name}.jsonl")))?);
    }
    let mut figures = Vec::new();
    let keep = &mut |figure: Figure| -> Result<(), Failure> {
        let line = serde_json::to_string(&figure)?;
        println!("{line}");
        figures.push(figure);
        Ok(into.as_mut().map_or(Ok(()), |into| writeln!(into, "{line}"))?)
    };
    match arguments.rdma {
        Some(address) => measure(&arguments, &|| Ok(OnDevice::new(Verbs::load()?, address)), keep)?,
        None => measure(&arguments, &|| Ok(Fabric::new()), keep)?,
    }
    table(&figures);
    Ok(())
}

/// Measures every kind in turn, each at a place of its own.
fn measure<P: Place>(
    arguments: &Arguments,
    place: &dyn Fn() -> Result<P, Failure>,
    keep: &mut dyn FnMut(Figure) -> Result<(), Failure>,
) -> Result<(), Failure>
where
    P::Backend: Descriptors,
{
    // The first use of a device loads its driver, which is no part of any measurement.
    let first = place()?;
    drop(Publisher::bind(&first.backend(0), first.address(0), publisher::Config::default())?);
    let images = images(arguments.images);
    let Some(source) = Source::start(&images, arguments.network)? else { return Ok(()) };
    let link = Link { network: arguments.network, gigabits: arguments.gigabits };
    let apart = Duration::from_secs(arguments.apart);
    for round in 0..arguments.rounds {
        for &replicas in &arguments.replicas {
            let wanted = |kind: &&Kind| arguments.kinds.is_empty() || arguments.kinds.contains(kind);
            for &kind in Kind::value_variants().iter().filter(wanted) {
                let before = machine();
                let measured = source.measure(&place()?, kind, replicas, apart, link)?;
                let machine_seconds = machine() - before;
                let bytes = images.len() as u64;
                keep(Figure { round, kind, replicas, bytes, measured, machine_seconds })?;
            }
        }
    }
    Ok(())
}

type Column = fn(&Figure) -> f64;

/// Prints medians of the rounds, with the minimum and the maximum.
fn table(figures: &[Figure]) {
    println!("\n| kind | replicas | s | MB/s to each | source, processor s | machine, processor s |");
    println!("|---|--:|--:|--:|--:|--:|");
    let columns: [(Column, usize); 4] = [
        (|figure| figure.measured.seconds, 2),
        (|figure| figure.bytes as f64 / 1e6 / figure.measured.seconds, 0),
        (|figure| figure.measured.source_seconds, 2),
        (|figure| figure.machine_seconds, 1),
    ];
    let counts: BTreeSet<_> = figures.iter().map(|figure| figure.replicas).collect();
    for kind in Kind::value_variants() {
        for &replicas in &counts {
            let rounds = figures.iter().filter(|figure| (figure.kind, figure.replicas) == (*kind, replicas));
            let cells = columns.map(|(value, digits)| {
                let mut values: Vec<_> = rounds.clone().map(value).collect();
                values.sort_by(f64::total_cmp);
                let [least, .., most] = values[..] else {
                    return values.first().map_or_else(String::new, |one| format!("{one:.digits$}"));
                };
                format!("{:.digits$} ({least:.digits$}–{most:.digits$})", values[values.len() / 2])
            });
            if rounds.clone().next().is_some() {
                println!("| {kind:?} | {replicas} | {} |", cells.join(" | "));
            }
        }
    }
}
