//! The bodies of the fuzz targets in `fuzz/`, as plain functions of bytes, so that the same code
//! runs in ordinary tests.
//!
//! Each reads its input as a [`Script`]: settings first, then steps to the end of the input. Any
//! input is a valid script.

// Each test binary and each target uses some of them.
#![allow(dead_code)]

pub(crate) mod connection;
pub(crate) mod control_messages;
pub(crate) mod pair;
mod script;

pub(crate) use script::Script;
