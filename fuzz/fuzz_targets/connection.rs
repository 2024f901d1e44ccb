//! One machine, any driver, application and peer: `rdma-proto/tests/bodies/connection.rs`.

#![no_main]

#[path = "../../rdma-proto/tests/bodies/mod.rs"]
mod bodies;
#[path = "../../rdma-proto/tests/pair/mod.rs"]
mod pair;

libfuzzer_sys::fuzz_target!(|input: &[u8]| bodies::connection::run(input));
