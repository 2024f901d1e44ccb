//! A snapshot publisher of any frames. The body is in `apps/rdma-snapshot/tests/snapshot/body.rs`.

#![no_main]

#[path = "../../rdma-proto/tests/bodies/script.rs"]
mod script;
#[path = "../../apps/rdma-snapshot/tests/snapshot/body.rs"]
mod snapshot;

libfuzzer_sys::fuzz_target!(|input: &[u8]| snapshot::run(input));
