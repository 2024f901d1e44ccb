//! The library that programs load. All of it is in `softrdma-abi`; see `build.rs` for what makes this a library.
#![no_main]

use softrdma_abi as _;
