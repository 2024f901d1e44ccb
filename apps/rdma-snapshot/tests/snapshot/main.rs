//! Whole runs, between files and between Valkeys; the vectors of the specification; and inputs of
//! the fuzz target.

mod between_processes;
mod body;
mod compression;
mod files;
mod fuzz_bodies;
mod history;
mod keys;
mod reading;
mod renewals;
mod requirements;
#[path = "../../../../rdma-proto/tests/bodies/script.rs"]
#[allow(dead_code, reason = "other targets use the rest")]
mod script;
mod server;
mod spec;
mod valkey;
mod windows;
