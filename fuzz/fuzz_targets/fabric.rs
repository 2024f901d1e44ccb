//! Programs that send arbitrary packets to softrdma. The body is in `softrdma/tests/bodies/`.

#![no_main]

#[path = "../../softrdma/tests/bodies/mod.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(
    init: {
        // Rust's main function does this. The fabric writes to pipes that programs close.
        // SAFETY: signal(2): the signal is ignored, before there are threads.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    },
    |input: &[u8]| bodies::run(input)
);
