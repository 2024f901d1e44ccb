#![doc = include_str!("../README.md")]

mod fork;
mod thread;

pub use fork::{FORKED, UnsharedFd, close_in_children, forget, forks, is_child, watch_forks};
pub use thread::spawn;
