//! The requirements of the protocol held against the workspace: rendered as pages, and what shows each.

pub mod cases;
mod command;
pub mod coverage;
pub mod render;
pub mod scan;

pub use command::{Command, run};
