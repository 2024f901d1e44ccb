#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

mod completion;
pub mod time;

pub use completion::{CompletionError, CompletionStatus};

/// An address in the peer's memory, with its key. Any value is safe: the peer's device checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct RemoteAddress {
    /// The virtual address.
    pub address: u64,
    /// The key.
    pub rkey: u32,
}

/// The immediate as a number. The backend converts it, once, to big-endian (VR-XFER-003).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Immediate(pub u32);

/// `rnr_retry_count` for endless retries.
pub const RNR_RETRY_INFINITE: u8 = 7;
