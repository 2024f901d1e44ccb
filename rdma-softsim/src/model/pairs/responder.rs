//! The receiving half of a queue pair.

use std::collections::VecDeque;

use rdma_backend::{CompletionStatus, RnrTimer};

use super::datagram::Datagram;
use crate::faults::Fault;
use crate::model::regions::memory::Unreachable;
use crate::model::regions::parts::Parts;

#[derive(Clone)]
pub(in crate::model) struct ReceiveWork {
    pub(in crate::model) id: u64,
    pub(in crate::model) local: Parts,
}

pub(in crate::model) struct Responder {
    pub(in crate::model) receives: VecDeque<ReceiveWork>,
    /// The receive of a shared queue that a message's bytes are being moved to.
    pub(in crate::model) reserved: Option<ReceiveWork>,
    /// Datagrams that wait to be stored, and whether one is being stored.
    pub(in crate::model) arrived: VecDeque<Datagram>,
    pub(in crate::model) storing: bool,
    /// The sequence number of the next message; lower ones were executed.
    pub(in crate::model) expected: u64,
    pub(in crate::model) rnr_timer: RnrTimer,
    /// Whether an event has reported a first message that preceded the connection manager's event.
    pub(in crate::model) told: bool,
    /// Number of further notifications for which a fault hides the receives.
    pub(in crate::model) unready: u8,
}

/// Why a message cannot be executed: the answer to the requester, and the status of the consumed
/// receive.
pub(in crate::model) struct Refusal {
    pub(in crate::model) requester: CompletionStatus,
    pub(in crate::model) receive: CompletionStatus,
}

impl Refusal {
    /// The message's target memory is gone.
    pub(in crate::model) const MEMORY_GONE: Self =
        Self { requester: CompletionStatus::REM_OP_ERR, receive: CompletionStatus::LOC_PROT_ERR };
}

/// What is known of an arriving message.
#[derive(Default)]
pub(in crate::model) struct Arrival {
    /// The fault that strikes it, if decided.
    pub(in crate::model) struck: Option<Option<Fault>>,
    /// The outcome of moving its bytes, if they were moved.
    pub(in crate::model) moved: Option<Result<(), Unreachable>>,
    /// Its bytes for a capture, if they are not in this process.
    pub(in crate::model) seen: Option<Vec<u8>>,
    /// Whether its bytes were in flight already, so that they are not moved again.
    pub(in crate::model) carried: bool,
}

impl Responder {
    pub(in crate::model) const fn new() -> Self {
        Self {
            receives: VecDeque::new(),
            reserved: None,
            arrived: VecDeque::new(),
            storing: false,
            expected: 0,
            // The connection manager leaves it at 655 ms: case `verbs.rnr.timer-untouched`.
            rnr_timer: RnrTimer::SLOWEST,
            told: false,
            unready: 0,
        }
    }
}
