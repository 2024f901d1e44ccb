#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

mod completion;
pub mod time;

pub use completion::{CompletionError, CompletionStatus};

/// An address in the peer's memory, with its key. Any value is safe to use, because the peer's
/// device checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct RemoteAddress {
    /// The virtual address.
    pub address: u64,
    /// The key.
    pub rkey: u32,
}

/// The immediate of a work request or completion, as a number. On the wire it is big-endian
/// (VR-XFER-003). The backend converts it, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Immediate(pub u32);

/// `rnr_retry_count` for endless retries.
pub const RNR_RETRY_INFINITE: u8 = 7;
