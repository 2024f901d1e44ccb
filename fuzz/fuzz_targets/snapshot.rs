//! A snapshot publisher of any frames. The body is in `snapshot/tests/snapshot/body.rs`.

#![no_main]

// It has more than this target uses.
#[allow(dead_code)]
#[path = "../../rdma-proto/tests/bodies/script.rs"]
mod script;
#[path = "../../snapshot/tests/snapshot/body.rs"]
mod snapshot;

libfuzzer_sys::fuzz_target!(|input: &[u8]| snapshot::run(input));
