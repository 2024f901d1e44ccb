//! The client, over the embedded fabric and over TCP.

mod errors;
mod login;
mod striped;
mod there_and_back;
mod world;
