//! Writes that never pause reach a target while they go on. Skipped, with a message, without
//! `valkey-server`.

use std::time::{Duration, Instant};

use rdma_snapshot::run::{Publish, Pull, Stop};
use rdma_snapshot::valkey::{LiveSink, LiveSource, Opening};
use rdma_softsim::Fabric;
use redis::{Connection, cmd};

use crate::runs::{ended, publishing, pulling};
use crate::server::Valkey;

/// Between two writes: 300 come in a second.
const APART: Duration = Duration::from_micros(3333);

/// Returns the count that a Valkey has; none while it loads.
fn count(valkey: &mut Connection) -> Option<u64> {
    cmd("GET").arg("count").query::<Option<u64>>(valkey).ok().map(Option::unwrap_or_default)
}

/// With `repl-timeout 10`, a pull follows 300 small writes a second for ten minutes, or as many as
/// `SNAPSHOT_MINUTES` says, over one connection. The target is never behind by what would be half a
/// minute of writes.
#[test]
#[ignore = "takes ten minutes; .ci/nightly runs it"]
fn a_pull_follows_for_minutes() {
    let minutes = std::env::var("SNAPSHOT_MINUTES").map_or(10, |minutes| minutes.parse().expect("a number"));
    let options = ["--repl-timeout", "10"];
    let (Some(source), Some(target)) = (Valkey::start_with(&options), Valkey::start_with(&options)) else {
        return;
    };
    let (fabric, stop) = (Fabric::new(), Stop::default());
    let opening = Opening { follow: true, ..Opening::default() };
    let live = LiveSource::open(source.server(), &opening).expect("a snapshot");
    let how = Publish { readers: Some(1), stop: stop.clone(), ..Publish::default() };
    let (at, publisher) = publishing(&fabric, 1, live, how);
    let sink = LiveSink::new(target.target(false));
    let pulled = pulling(&fabric, 2, [at], sink, Pull::default());
    let (mut source, mut target) = (source.connect(), target.connect());
    let begun = Instant::now();
    let end = begun + Duration::from_secs(60 * minutes);
    let (mut written, mut most, mut looked): (u64, _, _) = (0, 0, begun);
    while Instant::now() < end {
        written = cmd("INCR").arg("count").query(&mut source).expect("written");
        assert!(!pulled.is_finished(), "{:?}", pulled.join());
        if looked.elapsed() > Duration::from_secs(1) {
            looked = Instant::now();
            if let Some(has) = count(&mut target) {
                most = most.max(written - has);
            }
        }
        let due = begun + APART * u32::try_from(written).expect("days of writes");
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    println!("{written} writes in {minutes} minutes; the target was behind by at most {most}");
    assert!(most < 9000, "the target was {most} writes behind");
    stop.stop();
    ended(pulled);
    ended(publisher);
    assert_eq!(count(&mut source), count(&mut target));
    let info: String = cmd("INFO").arg("stats").query(&mut source).expect("text");
    assert!(info.contains("sync_full:1\r\n"), "{info}");
}
