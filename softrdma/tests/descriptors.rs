//! The descriptors and mappings that programs cost the fabric. This test is alone in its process,
//! as it counts those of the process.

mod session;

use session::{ask, open};
use softrdma::fabric::Fabric;
use softrdma_wire::{Reply, Request};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

/// Counts the mappings of memory that is shared with a program.
fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("mappings");
    maps.lines().filter(|line| line.contains("/memfd:softrdma")).count()
}

/// Completion queues without a channel share a descriptor and a mapping, and both go with the
/// program.
#[test]
fn completion_queues_share_a_descriptor_and_a_mapping() {
    let fabric = Fabric::new().expect("a fabric");
    let at_first = descriptors();
    let mut program = open(&fabric, 1);
    let mut create = || {
        let reply =
            ask(&mut program, &Request::CreateQueue { device: 0, depth: 1, channel: None, vector: 0 });
        let Reply::Queue { name, .. } = reply else { panic!("{reply:?}") };
        // This answer shows that the fabric has closed the descriptor that it sent with the
        // previous one.
        assert_eq!(ask(&mut program, &Request::Poll(name)), Reply::Done);
    };
    create();
    let before = descriptors();
    for _ in 0..100 {
        create();
    }
    assert_eq!((descriptors(), mappings()), (before, 1));
    drop(program);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while (descriptors(), mappings()) != (at_first, 0) {
        assert!(std::time::Instant::now() < deadline, "{} and {} are left", descriptors(), mappings());
        std::thread::yield_now();
    }
}
