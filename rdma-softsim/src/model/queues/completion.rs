//! Completions, on their way to a queue and in it.

use std::collections::VecDeque;

use rdma_backend::time::Instant;
use rdma_backend::{Completed, Completion, CompletionError, CompletionStatus};

use crate::failure_class::{ClassSet, FailureClass};
use crate::model::base::ids::PairId;
use crate::request::Atomic;

/// What [`Completion`] does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Detail {
    /// The number of bytes of the message.
    pub bytes: u32,
    /// Where a received datagram came from. Its first 40 bytes are the network header.
    pub source: Option<Source>,
    /// The operation, if it was an atomic one and not a READ.
    pub atomic: Option<Atomic>,
}

/// The source of a datagram, beside the address in its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The number of the queue pair that sent it.
    pub number: u32,
    /// Whether its network header is that of IPv4, in the last 20 bytes.
    pub ip4: bool,
}

/// A completion, and the effects of polling it.
pub(in crate::model) struct Entry {
    pub(in crate::model) completion: Completion,
    pub(in crate::model) pair: PairId,
    /// For a send, the slots that polling it frees, unless the queue pair was reset since.
    pub(in crate::model) frees: Option<u32>,
    /// How often the queue pair had been reset.
    pub(in crate::model) resets: u32,
    pub(in crate::model) detail: Detail,
    pub(in crate::model) solicited: bool,
    /// The message after which the receive completed: the bytes of that and earlier ones have
    /// landed.
    pub(in crate::model) lands: Option<u64>,
    pub(in crate::model) shows: ClassSet,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum WorkQueue {
    Send,
    Receive,
}

/// Completions on their way from a queue pair to its completion queue. Those of one work queue keep
/// their order; between the two queues there is none (`ibv_poll_cq(3)`).
#[derive(Default)]
pub(in crate::model) struct PendingCompletions {
    pub(in crate::model) work_queues: [VecDeque<Entry>; 2],
    /// When the last one of each work queue comes.
    pub(in crate::model) last: [Instant; 2],
    pub(in crate::model) until: Instant,
}

pub(in crate::model) const fn failure(id: u64, queue_pair: u32, status: CompletionStatus) -> Completion {
    Completion { id, queue_pair, result: Err(CompletionError { status, vendor: 0 }) }
}

pub(in crate::model) const fn success(id: u64, queue_pair: u32, completed: Completed) -> Completion {
    Completion { id, queue_pair, result: Ok(completed) }
}

impl Entry {
    /// Returns the completion of a receive without bytes.
    pub(in crate::model) const fn new(completion: Completion, pair: PairId) -> Self {
        Self {
            completion,
            pair,
            frees: None,
            resets: 0,
            detail: Detail { bytes: 0, source: None, atomic: None },
            solicited: false,
            lands: None,
            shows: ClassSet::EMPTY,
        }
    }

    pub(in crate::model) const fn work_queue(&self) -> WorkQueue {
        if self.frees.is_some() { WorkQueue::Send } else { WorkQueue::Receive }
    }

    /// Returns the failure classes of its status.
    pub(in crate::model) fn classes(&self) -> ClassSet {
        let Err(error) = self.completion.result else { return ClassSet::EMPTY };
        let of_receive = self.work_queue() == WorkQueue::Receive;
        let class = match error.status {
            CompletionStatus::RNR_RETRY_EXC_ERR => Some(FailureClass::ReceiverNotReady),
            CompletionStatus::RETRY_EXC_ERR => Some(FailureClass::RetriesExceeded),
            CompletionStatus::REM_ACCESS_ERR | CompletionStatus::LOC_ACCESS_ERR => {
                Some(FailureClass::AccessRefused)
            }
            CompletionStatus::REM_INV_REQ_ERR | CompletionStatus::LOC_LEN_ERR => {
                Some(FailureClass::ReceiveTooSmall)
            }
            CompletionStatus::REM_OP_ERR => Some(FailureClass::ReceiveMemoryGone),
            // One status for two classes, which the work queue tells apart.
            CompletionStatus::LOC_PROT_ERR if of_receive => Some(FailureClass::ReceiveMemoryGone),
            CompletionStatus::LOC_PROT_ERR => Some(FailureClass::LocalProtection),
            CompletionStatus::WR_FLUSH_ERR => Some(FailureClass::Flush),
            _ => None,
        };
        let mut classes = ClassSet::EMPTY;
        // Every failure shows that only id, status and queue pair are reliable.
        classes.insert(FailureClass::ErrorContents);
        if let Some(class) = class {
            classes.insert(class);
        }
        classes
    }
}
