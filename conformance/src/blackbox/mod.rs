//! The suite for any implementation: it judges what a peer can see, on the wire and in RESP, and nothing else.
//!
//! A case ([`case::Case`]) has an id, says which requirements it is about and what it expects, and works on a
//! [`context::Context`]: a [`Peer`](crate::tester::Peer), correct but for the one thing the case is about, and
//! the target it meets, a server that the peer connects to or a client that connects to the peer. Most bodies
//! serve both roles: what differs is how bytes are got out of the target ([`session::Session`]).
//!
//! Around every case [`run`] watches the rules that can be watched in all of them, a bystander that was connected before,
//! and whether the target is still there.

#[macro_use]
pub mod case;

pub mod baseline;
pub mod builtin;
mod close;
pub mod command;
mod conn;
pub mod context;
mod ctrl;
pub mod environment;
mod feat;
mod flow;
pub mod hints;
mod keep;
mod mem;
pub mod process;
pub mod report;
mod res;
pub mod responder;
pub mod results;
pub mod run;
mod sec;
pub mod select;
pub mod session;
pub mod target;
mod xfer;

use rdma_conn::Descriptors;

use case::Case;

/// All cases, the sanity case first.
pub fn cases<'a, B: Descriptors>() -> Vec<Case<'a, B>> {
    [
        conn::cases(),
        ctrl::cases(),
        feat::cases(),
        mem::cases(),
        xfer::cases(),
        flow::cases(),
        keep::cases(),
        close::cases(),
        res::cases(),
        sec::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
