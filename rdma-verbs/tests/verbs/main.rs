//! The backend on a real device. Without one each test says that it is skipped; with
//! `REQUIRE_RDMA=1` it fails instead. The address to use is in `LAB_IP4` (and `LAB_IP6`), which
//! `lab/run test` sets.

mod connecting;
mod failing;
mod harness;
mod releasing;
mod transferring;
