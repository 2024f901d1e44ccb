//! The program `valkey-rdma-conformance` and its files from its users' point of view.

mod exit_codes;
mod machines;
mod newcomers;
mod schema;
mod selection;
mod spec;
mod test_clients;
mod trace;
