//! Two machines and an arbitrary scheduler. The body is in `rdma-proto/tests/bodies/pair.rs`.

#![no_main]

#[path = "../../rdma-proto/tests/bodies/mod.rs"]
mod bodies;
#[path = "../../rdma-proto/tests/pair/mod.rs"]
mod pair;

libfuzzer_sys::fuzz_target!(|input: &[u8]| bodies::pair::run(input));
