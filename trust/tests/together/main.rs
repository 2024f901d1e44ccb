//! Trials that other tests in the same process do not disturb.

// The bodies are those of the fuzz target.
#[path = "../bodies/hostile.rs"]
mod hostile;
mod hostile_peers;
#[path = "../bodies/passwords.rs"]
mod passwords;
#[path = "../bodies/peer.rs"]
mod peer;
mod reqs;
#[path = "../../../rdma-proto/tests/bodies/script.rs"]
#[allow(dead_code, reason = "other targets use the rest")]
mod script;
mod secrets;
mod sim;
mod user_errors;
