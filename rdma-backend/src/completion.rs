//! Outcomes of work requests.

use crate::{CompletionError, Immediate};

/// The outcome of a work request, `ibv_poll_cq(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Completion {
    /// The id of the work request.
    pub id: u64,
    /// The number of its queue pair.
    pub queue_pair: u32,
    /// The operation that succeeded, or the reason why it failed.
    pub result: Result<Completed, CompletionError>,
}

impl Completion {
    /// A value to fill arrays with before a poll.
    pub const EMPTY: Self = Self { id: 0, queue_pair: 0, result: Ok(Completed::Send) };
}

/// The operation of a successful work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Completed {
    /// A SEND left and was acknowledged by the peer's device.
    Send,
    /// A WRITE left and was acknowledged by the peer's device.
    Write,
    /// A READ has answered.
    Read,
    /// A receive took a SEND.
    Recv {
        /// Its length in bytes.
        len: u32,
        /// Its immediate, if it had one.
        immediate: Option<Immediate>,
    },
    /// A receive was consumed by a WRITE with immediate.
    RecvWrite {
        /// The immediate.
        immediate: Immediate,
    },
}
