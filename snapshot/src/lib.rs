#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod auth;
mod channel;
pub mod digest;
mod error;
pub mod publisher;
mod rdb;
pub mod reader;
pub mod run;
mod source;
#[cfg(test)]
mod tests;
pub mod valkey;
mod wait;
pub mod wire;

pub use auth::Secret;
pub use error::Error;
pub use publisher::Publisher;
pub use reader::{Have, Landed, Offer, Reader};
pub use source::{Again, FileSink, FileSource, Piece, QUIET, Sink, Source};
pub use wait::Stop;

fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::Source(std::sync::Arc::new(std::io::Error::other(error.to_string()))))?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
