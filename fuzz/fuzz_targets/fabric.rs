//! Programs that send the fabric of `softrdma` anything. The body is in `softrdma/tests/bodies/`.

#![no_main]

#[path = "../../softrdma/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(
    init: {
        // As in every program whose main function is Rust's, which the fuzzer's is not: the fabric writes to pipes that programs close.
        // SAFETY: signal(2): the signal is ignored, before there are threads.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    },
    |input: &[u8]| bodies::run(input)
);
