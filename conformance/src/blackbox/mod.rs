//! The suite for any implementation. It judges only what a peer can see, on the wire and in RESP.
//!
//! A case ([`case::Case`]) works on a [`context::Context`]: a [`Peer`](crate::tester::Peer),
//! correct but for the case's point, and the target, in either role ([`session::Session`]). Around
//! every case [`run`] checks the rules for all cases, an earlier bystander, and the target's
//! existence.

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
