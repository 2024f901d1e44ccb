//! A queue pair, and the requests that are posted to it.

use rdma_backend::time::Instant;
use rdma_backend::{QueuePairLimits, SendOp};

use super::ownership::Ownership;
use super::path::Path;
use super::requester::{Requester, SendWork};
use super::responder::Responder;
use crate::model::base::arena::OnHost;
use crate::model::base::ids::{ContextId, DomainId, HostId, IdentifierId, QueueId, RegionId, SharedId};
use crate::model::queues::completion::{PendingCompletions, WorkQueue};
use crate::model::regions::parts::{Part, Parts};
use crate::request::{Atomic, Destination, Rights, Service};
use crate::state::PairState;

/// The bytes of an atomic operation.
pub(in crate::model) const ATOMIC: usize = 8;

pub(crate) struct QueuePair {
    pub(in crate::model) host: HostId,
    pub(in crate::model) domain: DomainId,
    pub(in crate::model) send_queue: QueueId,
    pub(in crate::model) receive_queue: QueueId,
    /// The shared receive queue, if any.
    pub(in crate::model) shared: Option<SharedId>,
    /// Who gets its events.
    pub(in crate::model) owner: Owner,
    pub(in crate::model) identifier: Option<IdentifierId>,
    pub(in crate::model) number: u32,
    pub(in crate::model) limits: QueuePairLimits,
    pub(in crate::model) state: QueuePairState,
    /// The Q_Key, of a queue pair for datagrams.
    pub(in crate::model) key: Option<u32>,
    /// What its peer may do.
    pub(in crate::model) rights: Rights,
    /// The other end, once connected.
    pub(in crate::model) path: Option<Path>,
    pub(in crate::model) requester: Requester,
    pub(in crate::model) responder: Responder,
    /// Completions that have not reached their queue.
    pub(in crate::model) held: PendingCompletions,
    pub(in crate::model) ownership: Ownership,
    /// Whether a fault blocks its messages.
    pub(in crate::model) cut: bool,
    /// Until when: the end of another fault before that has no effect.
    pub(in crate::model) cut_until: Instant,
    /// How often it was reset. Completions from before free no slots.
    pub(in crate::model) resets: u32,
    /// Copies of its long messages in progress.
    pub(in crate::model) bulks: u32,
}

impl OnHost for QueuePair {
    const NAME: &'static str = "queue pair";

    fn host(&self) -> HostId {
        self.host
    }
}

/// Who gets the events of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum Owner {
    /// The reader of this identifier's channel.
    Identifier(IdentifierId),
    /// Who opened the device, and its name for the object.
    Context(ContextId, u64),
}

impl QueuePair {
    /// Returns a queue pair whose attributes were checked.
    pub(in crate::model) fn new(
        host: HostId,
        attributes: &PairAttributes,
        owner: Owner,
        number: u32,
    ) -> Self {
        let &PairAttributes { domain, send_queue, receive_queue, shared, service, limits } = attributes;
        Self {
            host,
            domain,
            send_queue,
            receive_queue,
            shared,
            owner,
            identifier: None,
            number,
            limits,
            key: match service {
                Service::Connected => None,
                // Until `ibv_modify_qp(3)` sets another.
                Service::Datagram => Some(0),
            },
            state: match owner {
                // rdma_create_qp(3) initialises it.
                Owner::Identifier(_) => QueuePairState::Idle,
                // `ibv_create_qp(3)` does not.
                Owner::Context(..) => QueuePairState::Reset,
            },
            rights: Rights::ALL,
            path: None,
            requester: Requester::new(),
            responder: Responder::new(),
            held: PendingCompletions::default(),
            ownership: Ownership::default(),
            cut: false,
            cut_until: Instant::default(),
            resets: 0,
            bulks: 0,
        }
    }

    pub(in crate::model) const fn queue_of(&self, queue: WorkQueue) -> QueueId {
        match queue {
            WorkQueue::Send => self.send_queue,
            WorkQueue::Receive => self.receive_queue,
        }
    }

    /// Returns the path of a message.
    pub(in crate::model) fn path_of(&self, work: &SendWork) -> Option<Path> {
        work.to.map_or(self.path, |to| Some(to.path))
    }

    pub(in crate::model) fn is_ready(&self) -> bool {
        self.state == QueuePairState::Ready
    }

    /// Returns whether the device may still access a region for posted requests.
    pub(in crate::model) fn uses(&self, region: RegionId) -> bool {
        self.responder.receives.iter().any(|receive| receive.local.touch(region))
            || self.ownership.lends(region)
    }
}

/// The attributes that `ibv_create_qp(3)` is given.
pub(crate) struct PairAttributes {
    pub(crate) domain: DomainId,
    pub(crate) send_queue: QueueId,
    pub(crate) receive_queue: QueueId,
    /// The shared receive queue, if any.
    pub(crate) shared: Option<SharedId>,
    pub(crate) service: Service,
    pub(crate) limits: QueuePairLimits,
}

/// States that behave differently (`ibv_modify_qp(3)` has more).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueuePairState {
    Reset,
    /// INIT: receives may be posted.
    Idle,
    /// RTR: receives and cannot send.
    Receiving,
    Ready,
    /// SQD: requests in flight are completed, and no others leave.
    Draining,
    /// ERR: posted requests are flushed, and the device does not answer.
    Error,
}

impl QueuePairState {
    pub(in crate::model) const fn responds(self) -> bool {
        matches!(self, Self::Receiving | Self::Ready | Self::Draining)
    }
}

impl From<QueuePairState> for PairState {
    fn from(state: QueuePairState) -> Self {
        match state {
            QueuePairState::Reset => Self::Reset,
            QueuePairState::Idle => Self::Init,
            QueuePairState::Receiving => Self::Receiving,
            QueuePairState::Ready => Self::Ready,
            QueuePairState::Draining => Self::Draining,
            QueuePairState::Error => Self::Error,
        }
    }
}

/// A send request, wherever its bytes are.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) op: SendOp,
    /// The change that this READ makes, of an atomic operation.
    pub(crate) atomic: Option<Atomic>,
    pub(crate) signaled: bool,
    /// Whether its receive raises a solicited event.
    pub(crate) solicited: bool,
    /// Where a datagram goes.
    pub(crate) to: Option<Destination>,
}

impl Request {
    /// Returns a request of [`rdma_backend`], which has no others.
    pub(crate) const fn new(id: u64, op: SendOp, signaled: bool) -> Self {
        Self { id, op, atomic: None, signaled, solicited: false, to: None }
    }
}

/// The bytes of a send request.
pub(crate) enum Payload<'a> {
    /// In the request.
    Inline(&'a [u8]),
    /// In the request, copied from checked memory.
    Copied(Part),
    /// In memory. Parts may name no region: a device finds that out when it executes the work.
    Memory(Parts),
}

pub(crate) struct PostedReceive {
    pub(crate) id: u64,
    pub(crate) local: Parts,
}
