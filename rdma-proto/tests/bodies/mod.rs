//! The bodies of the fuzz targets in `fuzz/`, as functions of bytes, so that tests run them, too.
//! Each reads its input, any, as a [`Script`]: settings, then steps to the end.

// Each test binary and each target uses some of them.
#![allow(dead_code)]

pub(crate) mod connection;
pub(crate) mod control_messages;
pub(crate) mod pair;
mod script;

pub(crate) use script::Script;
