//! The simulator: whole runs of clients and a server in virtual time, from one number.
//!
//! A run is a [`Scenario`], drawn from a seed: hosts with devices of a kind, programs that write
//! and read pseudo-random streams at their own pace, peers that break the rules, and a plan of
//! faults. `rdma-conn` runs in it unchanged, on [`rdma_softsim::Simulation`]. [`world`] advances
//! time as event loops do, and wakes only those whose descriptors or timers are due. After every
//! step [`oracle`] judges what happened.
//!
//! ```text
//! seed ─▶ Scenario ─▶ world::run ─▶ Outcome { violation, hash, failure_counts, trace }
//!            │                         ▲
//!            ├─ SimulationSettings, FaultPlan ─▶ rdma_softsim::Simulation ─ trace ─▶ Oracle
//!            └─ Options, Workload  ─▶ EventLoop { Endpoint, End { App } ... }
//! ```

pub mod app;
pub mod deviation;
pub mod end;
pub mod event_loop;
pub mod judge;
pub mod oracle;
pub mod rogue;
pub mod runner;
pub mod scenario;
pub mod shrink;
pub mod timeline;
pub mod world;

pub use oracle::Violation;
pub use scenario::Scenario;
pub use world::{Outcome, run};
