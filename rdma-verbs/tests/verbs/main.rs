//! What only a real device shows, by the addresses in `LAB_IP4` and `LAB_IP6`, which `lab/run test`
//! sets: addresses of the machine, the kernel's resources and limits, threads. The rules of verbs
//! are the cases of `rdma-semantics`. Without a device each test says that it is skipped; with
//! `REQUIRE_RDMA=1` it fails instead.

mod addresses;
mod asynchronous;
mod harness;
mod memory;
mod releasing;
