//! The server: one port for TCP and RDMA, addresses that change under load, who is let in, and how replies leave.

mod addresses;
mod admission;
mod harness;
mod replies;
