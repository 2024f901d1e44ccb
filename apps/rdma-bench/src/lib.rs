#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod predict;
mod prepare;
mod replies;
mod report;
mod schedule;
mod target;
mod worker;
mod workload;

use std::io;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use hdrhistogram::Histogram;
use rdma_server::{Address, ConnectionType};

pub use prepare::{CONNECTING, reachable};
pub use report::{Latency, Outcome, csv, table};
pub use target::{Carrier, Login, Target};
pub use workload::{Load, Test};

/// The interval between calls of `progress`.
const TICK: Duration = Duration::from_millis(100);

/// Runs one test against the server at `target`, over connections of the type that `with` creates
/// for each thread. Calls `progress` with the number of requests done so far, a few times a second.
///
/// # Errors
/// A client cannot connect or loses its connection, the server replies with an error, or nothing
/// arrives for [`Load::timeout`].
pub fn run<T: ConnectionType + Send>(
    test: Test,
    load: &Load,
    with: impl Fn() -> T,
    target: &Address,
    mut progress: impl FnMut(u64),
) -> io::Result<Outcome> {
    if matches!(test, Test::Get | Test::Mixed) {
        prepare::store(load, (&with(), target))?;
    }
    let shared = worker::Shared::new(load);
    let measured = thread::scope(|scope| {
        let threads: Vec<_> = (0..load.threads)
            .map(|number| {
                let clients = load.clients / load.threads + usize::from(number < load.clients % load.threads);
                let (with, shared) = (with(), &shared);
                scope.spawn(move || worker::run(test, load, clients, number as u64, (&with, target), shared))
            })
            .collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            thread::sleep(TICK);
            progress(shared.done.load(Ordering::Relaxed));
        }
        let join = |thread: thread::ScopedJoinHandle<'_, io::Result<worker::Measured>>| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread of the benchmark panicked")))
        };
        threads.into_iter().map(join).collect::<Vec<_>>()
    });
    // If one fails, the others stop. Its error is the one to report.
    let (measured, mut failures): (Vec<_>, Vec<_>) = measured.into_iter().partition(Result::is_ok);
    failures
        .sort_by_key(|failure| matches!(failure, Err(error) if error.kind() == io::ErrorKind::Interrupted));
    if let Some(Err(error)) = failures.into_iter().next() {
        return Err(error);
    }
    let measured: Vec<_> = measured.into_iter().flatten().collect();
    let mut latencies: Histogram<u64> = Histogram::new(3).map_err(io::Error::other)?;
    for thread in &measured {
        latencies.add(&thread.latencies).map_err(io::Error::other)?;
    }
    let begun = measured.iter().map(|thread| thread.begun).min();
    let ended = measured.iter().map(|thread| thread.ended).max();
    let seconds = match (begun, ended) {
        (Some(begun), Some(ended)) => ended.saturating_duration_since(begun).as_secs_f64(),
        _ => 0.0,
    };
    let requests = latencies.len();
    Ok(Outcome {
        test: test.to_string(),
        requests,
        seconds,
        rate: requests as f64 / seconds.max(f64::MIN_POSITIVE),
        latency: Latency::of(&latencies),
    })
}
