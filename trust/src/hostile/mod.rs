//! The hostile suite: one peer breaks one rule, and nobody else notices.
//!
//! `hostile.server.*` attacks a server of ours (a [`Listener`](rdma_conn::Listener) with the store of [`kv_store`]),
//! `hostile.client.*` a client (a [`Stream`](rdma_conn::Stream) that echoes what it reads). The attacker is an
//! [`Adversary`](conformance::peer::Adversary) that is correct but for the deviation of the case. Every case checks:
//!
//! * our side ends with the error whose variant and text name the culprit, or goes on where the rule says so;
//! * it does so in bounded time;
//! * a neighbour, connected to the same listener before, still gets its answers, and so does a new connection;
//! * descriptors and registered memory are back to what they were, and never were beyond a cap.

mod scene;
#[macro_use]
mod table;

mod connecting;
mod control;
mod deviations;
mod features;
mod immediates;
mod memory;
mod stalls;
mod windows;

use std::net::{IpAddr, SocketAddr};

use rdma_conn::Descriptors;
use rdma_softsim::{Fabric, Limits, SoftSim};
use rdma_verbs::Verbs;

use crate::Case;
use deviations::Deviation;
use suite::held::Held as Ledger;

/// Bytes that our side may register in any case: room for three dozen connections of the suite's settings, and far less
/// than an adversary asks for. Enforced where the backend can.
const CAP: u64 = 10 << 20;

/// What the cases run on.
pub struct Setting<B> {
    /// RDMA as our side has it.
    pub ours: B,
    /// RDMA as the adversary has it.
    pub theirs: B,
    /// Where our side listens; port 0.
    pub our_address: SocketAddr,
    /// Where the adversary listens; port 0.
    pub their_address: SocketAddr,
    /// What the backend does otherwise than the specification says.
    deviations: &'static [Deviation],
    /// What our side's device holds.
    device: Box<dyn Fn() -> (usize, u64) + Send + Sync>,
}

impl Setting<SoftSim> {
    /// On an embedded fabric, with a host for each side.
    pub fn softsim() -> Self {
        let (ours, theirs) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 66]));
        let fabric = Fabric::new();
        let limits = Limits { locked_memory: CAP, ..Limits::default() };
        Self {
            ours: fabric.host_with(&[ours], limits),
            theirs: fabric.host(&[theirs]),
            our_address: (ours, 0).into(),
            their_address: (theirs, 0).into(),
            deviations: &[],
            device: Box::new(move || {
                let held = fabric.resources(ours);
                let objects = held.event_channels
                    + held.identifiers
                    + held.domains
                    + held.regions
                    + held.completion_queues
                    + held.queue_pairs;
                (objects, held.registered_bytes)
            }),
        }
    }
}

impl Setting<Verbs> {
    /// On a real device, both sides in this process. What the device holds shows in the process's descriptors and pinned
    /// memory.
    pub fn verbs(verbs: Verbs, address: SocketAddr) -> Self {
        let address = SocketAddr::new(address.ip(), 0);
        Self {
            ours: verbs.clone(),
            theirs: verbs,
            our_address: address,
            their_address: address,
            deviations: deviations::OF_DEVICES,
            device: Box::new(|| (0, 0)),
        }
    }
}

impl<B> Setting<B> {
    /// The deviation by which `seen` stands where `expected` should.
    fn deviation(&self, expected: &str, seen: &str) -> Option<&'static Deviation> {
        let explains =
            |deviation: &&Deviation| expected.contains(deviation.expected) && seen.contains(deviation.seen);
        self.deviations.iter().find(explains)
    }

    fn held(&self) -> Held {
        let (objects, registered) = (self.device)();
        Held { process: Ledger::now(), objects, registered }
    }
}

/// What our side holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    process: Ledger,
    objects: usize,
    registered: u64,
}

impl Held {
    fn exceeds(self, other: Self) -> bool {
        self.process.exceeds(other.process)
            || self.objects > other.objects
            || self.registered > other.registered
    }
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; {} RDMA objects, {} bytes registered", self.process, self.objects, self.registered)
    }
}

/// The suite.
pub fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    [
        control::cases(),
        features::cases(),
        windows::cases(),
        immediates::cases(),
        memory::cases(),
        stalls::cases(),
        connecting::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
