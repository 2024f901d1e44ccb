//! Tests implementations of Valkey over RDMA.
//!
//! Suites of cases, generic over the RDMA backend: the same bodies run on the embedded fabric and
//! on a real device. The program `valkey-rdma-conformance` and `cargo test` run them.

pub mod blackbox;
pub mod client;
pub mod requirements;
pub mod smoke;
pub mod tester;
pub mod trace;
pub mod vectors;
pub mod workload;

use rdma_backend::Backend as _;
use rdma_verbs::Verbs;

pub use suite::{exit, resources};

/// The result of a case: a remark if it passed, otherwise the fault.
pub type Outcome = Result<String, client::Failure>;

/// Returns this machine's RDMA.
///
/// # Errors
/// There is none. The text says what is missing.
pub fn device() -> Result<Verbs, String> {
    let verbs = Verbs::load().map_err(|error| error.to_string())?;
    // The libraries may exist without a device.
    verbs.event_channel().map_err(|error| error.to_string())?;
    Ok(verbs)
}
