//! The program `valkey-rdma-conformance` from its users' point of view, and the files that come
//! with it.

mod exit_codes;
mod newcomers;
mod schema;
mod selection;
mod spec;
mod test_clients;
mod trace;
