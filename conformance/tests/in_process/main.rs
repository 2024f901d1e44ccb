//! The suite from within: its runner, and its peer.

mod runner;
mod tester;
