//! What is measured in the process, and the program.

mod measure;
mod program;
