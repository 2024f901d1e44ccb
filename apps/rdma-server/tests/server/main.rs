//! The server: one port for TCP and RDMA, addresses that change under load, who is let in, how
//! replies leave, and what clients cost.

mod addresses;
mod admission;
mod harness;
mod memory;
mod replies;
