//! The server: one port for TCP and RDMA, addresses that change under load, admission, delivery of
//! replies, and the cost of clients.

mod addresses;
mod admission;
mod harness;
mod memory;
mod replies;
