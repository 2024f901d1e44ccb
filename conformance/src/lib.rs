//! Is an implementation of Valkey over RDMA right?
//!
//! Suites of cases, each a function generic over the RDMA backend, so that the same body runs on the embedded fabric and on
//! a real device. The program `valkey-rdma-conformance` runs them; so does `cargo test`, on the embedded fabric.

pub mod adversary;
pub mod blackbox;
pub mod client;
pub mod crowd;
pub mod exit;
pub mod explore;
pub mod hostile;
#[path = "../../rdma-conn/examples/kv_server/kv.rs"]
pub mod kv; // the example server is the suite's embedded peer
pub mod ledger;
pub mod outage;
pub mod reqs;
#[path = "../../rdma-conn/examples/kv_server/resp.rs"]
pub mod resp;
pub mod semantics;
#[path = "../../rdma-conn/examples/kv_server/serve.rs"]
pub mod serve;
pub mod sim;
pub mod smoke;
pub mod suite;
pub mod trace;
pub mod vectors;
pub mod workload;
pub mod wrong;
