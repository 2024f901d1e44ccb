//! Programs that send the fabric of `softrdma` anything. The body is in `softrdma/tests/bodies/`.

#![no_main]

#[path = "../../softrdma/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|input: &[u8]| bodies::run(input));
