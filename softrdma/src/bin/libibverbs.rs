//! The library that programs load above which their own librdmacm runs. Its code is in
//! `softrdma-abi`; `build.rs` explains how this binary becomes a library.
#![no_main]

/// The dynamic linker calls it before the program begins (System V ABI, `.init_array`).
#[used]
#[allow(unsafe_code, reason = "a section whose entries are called, as this function may be")]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = softrdma_abi::serve;
