//! Tests of measurements in the process, and of the program.

mod measure;
mod program;
