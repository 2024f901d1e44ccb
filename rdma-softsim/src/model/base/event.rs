//! Scheduled events, and the channels that they make readable.

use super::ids::{ChannelId, ContextId, HostId, IdentifierId, PairId, QueueId};
use crate::model::manager::event_channel::NoticeKind;
use crate::model::manager::packet::Packet;
use crate::model::pairs::requester::Answer;
use crate::model::queues::completion::WorkQueue;

/// A channel that became readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wake {
    Events(ChannelId),
    Completions(QueueId),
    /// Asynchronous events of an opened device.
    Asynchronous(ContextId),
}

/// A scheduled event.
pub(in crate::model) enum Event {
    /// A message reaches the peer.
    Arrive { from: PairId, epoch: u32, sequence: u64 },
    /// An answer comes back.
    Answer { to: PairId, epoch: u32, sequence: u64, answer: Answer },
    /// The delay of an RNR NAK has passed.
    Again { pair: PairId, epoch: u32 },
    /// The acknowledgement timer ends.
    Timeout { pair: PairId, epoch: u32 },
    /// Look at messages whose bytes may be late.
    Sweep,
    /// A completion queue was overrun: its queue pairs fail, those behind `after`.
    Overrun { queue: QueueId, after: Option<PairId> },
    /// A host has joined, and further resolutions await one of its addresses.
    Joined(HostId),
    /// Address or route resolution ends.
    Resolved { id: IdentifierId, resolution: u64, how: NoticeKind },
    /// A message of the connection manager arrives.
    Packet(Box<Packet>),
    /// The timewait state ends.
    TimewaitExit(IdentifierId),
    /// A delayed completion reaches its queue.
    Report { pair: PairId, of: WorkQueue },
    /// A failed queue pair begins to flush.
    Flush(PairId),
    /// The link of a host is repaired.
    LinkUp(HostId),
    /// Messages of one queue pair pass again.
    PairUp(PairId),
}
