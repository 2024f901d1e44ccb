//! Any bytes as a control message. The body is in `rdma-proto/tests/bodies/control_messages.rs`.

#![no_main]

#[path = "../../rdma-proto/tests/bodies/mod.rs"]
mod bodies;
#[path = "../../rdma-proto/tests/pair/mod.rs"]
mod pair;

libfuzzer_sys::fuzz_target!(|input: &[u8]| bodies::control_messages::run(input));
