//! Outcomes of work requests.

use crate::{CompletionError, Immediate};

/// The outcome of a work request, `ibv_poll_cq(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Completion {
    /// The id of the work request.
    pub id: u64,
    /// The number of its queue pair.
    pub queue_pair: u32,
    /// The operation that succeeded, or why it failed.
    pub result: Result<Completed, CompletionError>,
}

impl Completion {
    /// A placeholder to fill arrays with before a poll.
    pub const EMPTY: Self = Self { id: 0, queue_pair: 0, result: Ok(Completed::Send) };
}

/// The operation of a successful work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Completed {
    /// The peer's device acknowledged a SEND.
    Send,
    /// The peer's device acknowledged a WRITE.
    Write,
    /// The data of a READ has arrived.
    Read,
    /// A SEND consumed a receive.
    Recv {
        /// Its length in bytes.
        len: u32,
        /// Its immediate, if it had one.
        immediate: Option<Immediate>,
    },
    /// A WRITE with immediate consumed a receive.
    RecvWrite {
        /// The immediate.
        immediate: Immediate,
    },
}
