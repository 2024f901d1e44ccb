//! What an arriving message may do at its receiver, and the storing of its bytes.

use rdma_backend::{Access, CompletionStatus, RemoteAddress, SendOp};

use super::Pairs;
use super::queue_pair::ATOMIC;
use super::requester::{Answer, SendWork, Source};
use super::responder::{ReceiveWork, Refusal};
use crate::failure_class::FailureClass;
use crate::model::base::environment::Environment;
use crate::model::base::ids::PairId;
use crate::model::regions::Regions;
use crate::model::regions::memory::Unreachable;
use crate::model::regions::parts::{Part, Parts};
use crate::request::Rights;
use crate::trace::EntryKind;

impl SendWork {
    /// Returns whether the sending device may read the message's bytes.
    pub(in crate::model) fn readable(&self, regions: &Regions) -> bool {
        match self.source {
            Source::Memory(ref parts) if self.reads_memory() => regions.allows(parts, self.len, Access::NONE),
            // Not done at the peer if its result cannot be stored.
            Source::Memory(ref parts) if self.atomic.is_some() => {
                regions.allows(parts, self.len, Access::LOCAL_WRITE)
            }
            _ => true,
        }
    }
}

impl Pairs {
    /// Returns the target of the peer's WRITE or READ. Without bytes only the queue pair must allow
    /// it (IBA: R_Key is not validated).
    pub(in crate::model) fn check_remote(
        &mut self,
        env: &mut Environment,
        regions: &Regions,
        at: PairId,
        remote: RemoteAddress,
        len: usize,
        wanted: Rights,
    ) -> Result<Option<Parts>, Refusal> {
        let invalid = CompletionStatus::REM_INV_REQ_ERR;
        let peer = self.get(at);
        // An invalid request to the queue pair; what its region forbids is none (IBA 9.7.4.1).
        if peer.is_some_and(|peer| !peer.rights.allow(wanted))
            || (wanted.atomics && !remote.address.is_multiple_of(ATOMIC as u64))
        {
            return Err(Refusal { requester: invalid, receive: CompletionStatus::LOC_ACCESS_ERR });
        }
        if len == 0 {
            return Ok(None);
        }
        let found = peer.and_then(|peer| regions.remote(peer, remote, len, wanted));
        if let Some((region, offset)) = found {
            return Ok(Some(Parts::One(Part { region, offset, len })));
        }
        if let Some(succeeds) = env.was_deregistered(remote.rkey) {
            // Requests in flight may succeed or fail; these bytes are discarded.
            env.count_injected(FailureClass::Deregistered);
            env.count_observed(FailureClass::Deregistered);
            if succeeds {
                return Ok(None);
            }
        }
        Err(Refusal { requester: env.bad_key(), receive: CompletionStatus::LOC_ACCESS_ERR })
    }

    /// Stores the bytes of a checked message: now, or as late as is allowed.
    pub(in crate::model) fn deliver(
        &mut self,
        env: &mut Environment,
        regions: &Regions,
        from: PairId,
        at: PairId,
        (epoch, sequence): (u32, u64),
        target: Parts,
    ) -> Result<(), Unreachable> {
        let Some(work) = self.flight(from, epoch, sequence) else {
            return Ok(());
        };
        if work.atomic.is_some() {
            // Done when its bytes were moved, or before its answer was lost.
            return match &work.brought {
                Some(Ok(_)) => Ok(()),
                Some(Err(end)) => Err(*end),
                None => Err(Unreachable::Source),
            };
        }
        // Only in simulations: a real program may poll its memory for bytes that would then never
        // land.
        if env.is_observed() && env.behaviour().is_some_and(|behaviour| behaviour.late_bytes) {
            let mut bytes = vec![0; work.len];
            let read = match &work.source {
                Source::Inline(inline) => {
                    bytes.copy_from_slice(inline);
                    true
                }
                Source::Memory(parts) => regions.gather(parts, &mut bytes),
            };
            if !read {
                return Err(Unreachable::Source);
            }
            self.lands_late(env, regions, at, sequence, bytes, target);
            return Ok(());
        }
        match &work.source {
            // Read now and not when it was posted: case `verbs.move.source-late`.
            Source::Inline(bytes) if regions.scatter(&target, 0, bytes) => Ok(()),
            Source::Inline(_) => Err(Unreachable::Target),
            Source::Memory(parts) => regions.copy_parts(parts, &target, work.len),
        }
    }

    /// Copies what the oldest work reads, if it is a READ: its bytes travel in the answer.
    pub(in crate::model) fn finish_read(
        &self,
        regions: &Regions,
        id: PairId,
    ) -> Result<(), CompletionStatus> {
        let Some(pair) = self.get(id) else { return Ok(()) };
        // Bytes that were `brought` came from another process: a mover has stored them.
        let Some(SendWork {
            op: SendOp::Read(remote),
            source: Source::Memory(parts),
            len,
            brought: None,
            ..
        }) = pair.requester.oldest()
        else {
            return Ok(());
        };
        let (remote, len) = (*remote, *len);
        // Without bytes neither key nor memory is checked (IBA 9.7.4.1.2).
        if len == 0 {
            return Ok(());
        }
        if !regions.allows(parts, len, Access::LOCAL_WRITE) {
            return Err(CompletionStatus::LOC_PROT_ERR);
        }
        // Read as late as is allowed without a fence; see the crate's documentation.
        let copied = || {
            let peer = self.get(pair.path?.peer)?;
            let (region, offset) = regions.remote(peer, remote, len, Access::REMOTE_READ.into())?;
            Some(regions.copy_parts(&Parts::One(Part { region, offset, len }), parts, len))
        };
        match copied() {
            Some(Ok(())) => Ok(()),
            Some(Err(Unreachable::Source)) => Err(CompletionStatus::REM_OP_ERR),
            Some(Err(Unreachable::Target)) => Err(CompletionStatus::LOC_PROT_ERR),
            // The region or the peer has gone since `execute` checked it.
            None => Err(CompletionStatus::REM_ACCESS_ERR),
        }
    }

    /// Handles a notification without a receive, or with hidden ones.
    pub(in crate::model) fn not_ready_for(
        &mut self,
        env: &mut Environment,
        from: PairId,
        at: PairId,
    ) -> Answer {
        let limited = self.get(from).is_some_and(|pair| pair.requester.gives_up_on_receives());
        let (sender, receiver) = (self.number(from), self.number(at));
        let Some(peer) = self.get_mut(at) else { return Answer::Ack };
        let injected = peer.responder.unready > 0;
        peer.responder.unready = peer.responder.unready.saturating_sub(1);
        let timer = peer.responder.rnr_timer;
        env.note(|| EntryKind::NotReady { from: sender, to: receiver, injected, limited });
        // An injected fault was counted when it struck.
        if !injected {
            env.count_injected(FailureClass::ReceiverNotReady);
        }
        Answer::RnrNak(timer)
    }
}

/// Returns where a receive stores a message of this length.
pub(in crate::model) fn check_receive(
    regions: &Regions,
    receive: ReceiveWork,
    len: usize,
) -> Result<Option<Parts>, Refusal> {
    if len > receive.local.len() {
        // Each side has a status of its own: cases `verbs.length.sender` and `receiver`.
        return Err(Refusal {
            requester: CompletionStatus::REM_INV_REQ_ERR,
            receive: CompletionStatus::LOC_LEN_ERR,
        });
    }
    if !regions.allows(&receive.local, len, Access::LOCAL_WRITE) {
        return Err(Refusal::MEMORY_GONE);
    }
    Ok((len > 0).then_some(receive.local))
}
