//! Programs with streams and endpoints on verbs, each a process of its own on a device of
//! softrdma's: a dead parent's child, and many connections in one process.
//!
//! A program here is this test itself, which `softrdma run` starts in a role.
#![allow(unsafe_code, reason = "fork(2)")]

mod children;
mod echo;
mod fabric;
mod many;
