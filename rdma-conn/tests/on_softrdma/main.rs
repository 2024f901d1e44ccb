//! Programs with streams and endpoints on verbs, each a process of its own on a device of
//! softrdma's: their forked children, and many connections in one process.
//!
//! A program here is this test itself, which `softrdma run` starts in a role.
#![allow(unsafe_code, reason = "fork(2), and a child that has what a thread of its parent uses")]

mod children;
mod echo;
mod fabric;
mod many;
