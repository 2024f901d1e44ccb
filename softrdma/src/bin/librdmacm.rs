//! The library that programs load. Its code is in `softrdma-abi`; `build.rs` explains how this
//! binary becomes a library.
#![no_main]

use softrdma_abi as _;
