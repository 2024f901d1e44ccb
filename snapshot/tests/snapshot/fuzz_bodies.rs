//! The fuzz target `snapshot` as an ordinary test; see `rdma-proto/tests/fuzz_bodies.rs` for
//! others.

use std::path::Path;

use rdma_softsim::Random;

use crate::{body, spec};

/// VS-READ-002, VS-TABLE-002, VS-TABLE-003, VS-TIME-001: whatever a publisher sends, no wrong chunk
/// is passed on, no more is registered than allowed, and the session ends.
#[test]
fn publishers_that_say_anything() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/snapshot");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    files.sort();
    for file in &files {
        println!("{}", file.display());
        body::run(&std::fs::read(file).expect("a readable seed"));
    }
    for seed in 0..500 {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let input: Vec<u8> = (0..random.below(200)).map(|_| random.next() as u8).collect();
        body::run(&input);
    }
}

/// The corpus begins with the vectors.
#[test]
fn every_vector_is_a_seed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/snapshot");
    for vector in spec::read().vector {
        let seed = std::fs::read(folder.join(&vector.name))
            .unwrap_or_else(|error| panic!("{}: {error}", vector.name));
        assert_eq!(seed, vector.bytes(), "{}", vector.name);
    }
}
