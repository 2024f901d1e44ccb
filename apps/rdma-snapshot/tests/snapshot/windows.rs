//! Snapshots larger than memory, in real time, on softsim.

use std::net::SocketAddr;
use std::sync::mpsc;

use rdma_snapshot::run::{Progress, Publish, Pull, publish, pull};
use rdma_snapshot::wire::Content;
use rdma_snapshot::{FileSource, publisher};
use rdma_softsim::Fabric;

use crate::files::{Paced, address, folder, into_file};

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
        let (backend, sink) = (fabric.host(&[address(2)]), into_file(&folder, "fast"));
        fast =
            Some(std::thread::spawn(move || pull(&backend, &[bound], sink, &Pull::default(), &mut |_| {})));
        let (backend, sink) = (fabric.host(&[address(3)]), Paced { allowed, taken: sender });
        slow = Some(std::thread::spawn(move || {
            pull(&backend, &[bound], sink, &Pull { room: 2, ..Pull::default() }, &mut |_| {})
        }));
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
    fast.expect("begun").join().expect("no panic").expect("pulled");
    slow.expect("begun").join().expect("no panic").expect("pulled");
    assert!(std::fs::read(folder.join("fast")).expect("a file") == bytes);
    assert!(taken.iter().flatten().eq(bytes.iter().copied()));
    // With what control streams take.
    assert!(most < 4 * MEMORY, "{most} bytes are registered");
    assert_eq!(fabric.resources(address(1)), rdma_softsim::Resources::default());
    std::fs::remove_dir_all(folder).expect("clean");
}
