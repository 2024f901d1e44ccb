//! The backend on a real device, by the addresses in `LAB_IP4` and `LAB_IP6`, which `lab/run test`
//! sets. Without one each test says that it is skipped; with `REQUIRE_RDMA=1` it fails instead.

mod connecting;
mod failing;
mod harness;
mod releasing;
mod transferring;
