//! The fuzz targets as tests, on their committed seeds and on generated inputs, always the same.

mod bodies;
mod pair;

use std::path::Path;

fn on_seeds(target: &str, body: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} has no seeds", folder.display());
    for file in files {
        println!("{}", file.display());
        body(&std::fs::read(&file).expect("a readable seed"));
    }
}

/// A splitmix64: without outside randomness a failure repeats.
struct Generator(u64);

impl Generator {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn bytes(&mut self, length: u64) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }
}

fn on_generated(count: u64, longest: u64, body: fn(&[u8])) {
    // Miri is a thousand times as slow.
    for seed in 0..if cfg!(miri) { 3 } else { count } {
        let mut generator = Generator(seed);
        let length = generator.next() % (longest + 1);
        println!("seed {seed}");
        body(&generator.bytes(length));
    }
}

#[test]
fn control_messages() {
    on_seeds("control_messages", bodies::control_messages::run);
    on_generated(2000, 40, bodies::control_messages::run);
    let mut generator = Generator(0);
    for _ in 0..if cfg!(miri) { 10 } else { 10_000 } {
        let mut bytes = generator.bytes(32);
        bytes[0] = 0;
        bytes[1] %= 6;
        bodies::control_messages::run(&bytes);
    }
}

#[test]
fn connection() {
    on_seeds("connection", bodies::connection::run);
    on_generated(3000, 800, bodies::connection::run);
}

#[test]
fn pair() {
    on_seeds("pair", bodies::pair::run);
    on_generated(2000, 1200, bodies::pair::run);
}
