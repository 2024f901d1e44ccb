//! What programs cost the fabric in descriptors. Alone in its process, which it counts those of.

mod session;

use session::{ask, open};
use softrdma::fabric::Fabric;
use softrdma_wire::{Reply, Request};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

#[test]
fn completion_queues_without_a_channel_share_a_descriptor() {
    let fabric = Fabric::new().expect("a fabric");
    let mut program = open(&fabric, 1);
    let mut create = || {
        let reply =
            ask(&mut program, &Request::CreateQueue { device: 0, depth: 1, channel: None, vector: 0 });
        assert!(matches!(reply, Reply::Made(_)), "{reply:?}");
    };
    create();
    let before = descriptors();
    for _ in 0..100 {
        create();
    }
    assert_eq!(descriptors(), before);
}
