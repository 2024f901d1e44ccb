//! The fuzz target `hostile` as a test. `rdma-proto/tests/fuzz_bodies.rs` has the others.

use std::path::Path;

use rdma_softsim::Random;

use crate::hostile;

#[test]
fn hostile_peers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/hostile");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} has no seeds", folder.display());
    for file in files {
        println!("{}", file.display());
        hostile::run(&std::fs::read(&file).expect("a readable seed"));
    }
    for seed in 0..3000 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let input: Vec<u8> = (0..random.below(600)).map(|_| random.next() as u8).collect();
        hostile::run(&input);
    }
}
