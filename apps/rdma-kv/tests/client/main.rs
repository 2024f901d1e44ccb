//! The client, over the embedded fabric and over TCP.

mod cluster;
mod errors;
mod login;
mod parts;
mod pipelines;
mod slices;
mod striped;
mod there_and_back;
mod world;
