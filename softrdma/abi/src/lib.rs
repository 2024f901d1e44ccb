//! The C ABI of librdmacm and libibverbs on the fabric of `softrdma`.
//!
//! The functions here have the names, prototypes and structures of rdma-core's; a program that was
//! linked against it calls them instead. Each asks the fabric (`link`) over a socket. The inline
//! functions of the headers reach this library through the table of operations of the device's
//! context (`device`).
//!
//! An unimplemented function fails as verbs fails on a device that lacks the feature, and reports
//! that once on the standard error stream (`missing`).
//!
//! # Safety
//! Every exported function takes pointers from C. The demands of a manual page on them (alive, of
//! that type, made by the function that makes them) hold here too, and the proofs name the page.
//! Null is checked only where C code may pass it.
#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of each exported function is its manual page, as said above"
)]
#![allow(unreachable_pub, reason = "exported to C by name, which needs no path")]
#![allow(missing_docs, reason = "an exported function is documented by the manual page of its name")]

mod acknowledged;
mod address;
mod chain;
mod cm;
mod commands;
mod completion;
mod connecting;
mod device;
mod device_file;
mod endpoint;
mod event;
mod handles;
mod interfaces;
mod layout;
mod link;
mod locked;
mod missing;
mod names;
mod offer;
mod pair;
mod polling;
mod posting;
mod process;
mod reachable;
mod region;
mod resolve;
mod ring;
mod room;
mod shared;
mod strings;
mod view;

pub use device_file::serve;
