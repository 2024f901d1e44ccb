//! The tests of this crate, except `fuzz_bodies`, which needs the rest of the repository.

mod bodies;
mod connection;
mod links;
mod pair;
mod utilisation;
mod wire;
