//! Whole runs, between files and between Valkeys; the vectors of the specification; and inputs of
//! the fuzz target.

mod between_processes;
mod body;
mod compression;
mod damage;
mod files;
mod fuzz_bodies;
mod history;
mod keys;
mod renewals;
mod requirements;
mod runs;
#[path = "../../../rdma-proto/tests/bodies/script.rs"]
#[allow(dead_code, reason = "other targets use the rest")]
mod script;
mod server;
mod spec;
mod steady;
mod valkey;
mod windows;
