//! Is an implementation of Valkey over RDMA right?
//!
//! Suites of cases, each a function generic over the RDMA backend, so that the same body runs on the embedded fabric and on
//! a real device. The program `valkey-rdma-conformance` runs them; so does `cargo test`, on the embedded fabric.

pub mod blackbox;
pub mod client;
pub mod intercept;
pub mod peer;
pub mod reqs;
pub mod smoke;
pub mod trace;
pub mod vectors;
pub mod workload;
pub mod wrong;

pub use suite::{exit, resources};

/// What a passed case has to tell, or what was wrong.
pub type Outcome = Result<String, client::Failure>;
