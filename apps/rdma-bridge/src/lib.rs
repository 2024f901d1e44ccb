#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod bridge;
mod channel;
mod counters;
mod error;
mod place;
mod pump;
mod relay;
mod tls;

pub use bridge::{Bridge, Settings};
pub use counters::{Counters, Snapshot};
pub use error::Error;
pub use place::{Carrier, Place};
pub use tls::TlsFiles;
