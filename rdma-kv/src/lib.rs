#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod client;
mod error;
mod reply;
mod transport;

pub use client::{Client, Counts, Part};
pub use error::Error;
pub use transport::{Buffer, Transport};
