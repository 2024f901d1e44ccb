//! The requirements of the protocol: their pages, and what in the workspace shows each.

pub mod cases;
mod command;
pub mod coverage;
pub mod render;
pub mod scan;
pub mod seen;

pub use command::{Command, run};
