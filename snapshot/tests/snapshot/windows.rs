//! Snapshots larger than memory, in real time, on softsim.

use std::net::SocketAddr;
use std::sync::mpsc;

use rdma_snapshot::run::{Progress, Publish, Pull, publish};
use rdma_snapshot::wire::Content;
use rdma_snapshot::{FileSource, publisher};
use rdma_softsim::Fabric;

use crate::files::{folder, into_file};
use crate::runs::{Paced, address, ended, pulling};

const MEMORY: u64 = 1 << 20;

/// VS-TABLE-008: two readers get a snapshot of nine times the memory, although one of them pauses
/// until the window is full.
#[test]
fn a_snapshot_larger_than_memory_is_read_in_windows() {
    let (folder, bytes) = folder("windows", 9_000_001);
    let fabric = Fabric::new();
    let how = Publish {
        config: publisher::Config { memory: MEMORY, ..publisher::Config::default() },
        chunk_size: 64 << 10,
        window: Some(2),
        ..Publish::default()
    };
    let (allow, allowed) = mpsc::channel();
    let (sender, taken) = mpsc::channel();
    let (mut fast, mut slow) = (None, None);
    let bound = |bound: SocketAddr| {
        fast = Some(pulling(&fabric, 2, [bound], into_file(&folder, "fast"), Pull::default()));
        let (sink, how) = (Paced { allowed, taken: sender }, Pull { room: 2, ..Pull::default() });
        slow = Some(pulling(&fabric, 3, [bound], sink, how));
    };
    let (mut allow, mut most, mut before, mut stands) = (Some(allow), 0, 0, 0);
    let told = &mut |progress: &Progress| {
        most = most.max(fabric.resources(address(1)).registered_bytes);
        stands = if progress.bytes == before { stands + 1 } else { 0 };
        before = progress.bytes;
        // It is full, of what the slow reader does not have.
        if stands == 3 && progress.readers == 2 {
            allow = None;
        }
        if progress.done == 2 {
            how.withdraw.stop();
        }
    };
    let source = FileSource::open(&folder.join("source"), Content::Bytes).expect("a source");
    let published = publish(&fabric.host(&[address(1)]), (address(1), 0).into(), source, &how, bound, told);
    assert_eq!(published.expect("published").bytes, bytes.len() as u64);
    ended(fast.expect("begun"));
    ended(slow.expect("begun"));
    assert!(std::fs::read(folder.join("fast")).expect("a file") == bytes);
    assert!(taken.iter().flatten().eq(bytes.iter().copied()));
    // With what control streams take.
    assert!(most < 4 * MEMORY, "{most} bytes are registered");
    assert_eq!(fabric.resources(address(1)), rdma_softsim::Resources::default());
    std::fs::remove_dir_all(folder).expect("clean");
}
