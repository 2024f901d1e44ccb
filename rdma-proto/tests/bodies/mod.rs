//! The bodies of the fuzz targets in `fuzz/`, as functions that read their bytes as a [`Script`].

// Each test binary and each target uses some of them.
#![allow(dead_code)]

pub(crate) mod connection;
pub(crate) mod control_messages;
pub(crate) mod pair;
mod script;

pub(crate) use script::Script;
