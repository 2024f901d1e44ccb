//! Our client or server, with an arbitrary peer. The body is in `trust/tests/bodies/hostile.rs`.

#![no_main]

#[path = "../../trust/tests/bodies/hostile.rs"]
mod hostile;
#[path = "../../trust/tests/bodies/peer.rs"]
mod peer;
#[path = "../../rdma-proto/tests/bodies/script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| hostile::run(input));
