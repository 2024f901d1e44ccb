//! A client or a server of ours, and a peer that does anything. The body is in `trust/tests/bodies/hostile.rs`.

#![no_main]

#[path = "../../trust/tests/bodies/hostile.rs"]
mod hostile;
#[path = "../../trust/tests/bodies/peer.rs"]
mod peer;
#[path = "../../rdma-proto/tests/bodies/script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| hostile::run(input));
