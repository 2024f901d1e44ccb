#![doc = include_str!("../README.md")]
// The exception is `memory`, which takes memory that the program owns.
#![deny(unsafe_code)]

mod client;
mod cluster;
mod error;
mod login;
mod memory;
mod parts;
mod pipeline;
mod registrations;
mod reply;
mod slices;
mod slots;
mod striped;
mod transport;

pub use client::{Client, Counts, MemoryUse, Part};
pub use cluster::{Cluster, ClusterBuffer, Routing};
pub use error::Error;
pub use login::Login;
pub use memory::Memory;
pub use registrations::Registrations;
pub use slices::Slices;
pub use striped::{Striped, StripedBuffer};
pub use transport::{Buffer, Deadline, Sent, Transport, Wait, options};
