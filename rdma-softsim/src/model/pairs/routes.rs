//! The ends of a message whose bytes are moved without the fabric's lock.

use core::cmp::Ordering;
use std::sync::Arc;

use rdma_backend::{Access, SendOp};

use super::Pairs;
use super::datagram::MTU;
use super::delivery::check_receive;
use super::queue_pair::ATOMIC;
use super::requester::{SendWork, Source};
use crate::faults::Fault;
use crate::model::base::ids::PairId;
use crate::model::flights::bulk::Bulk;
use crate::model::hosts::Hosts;
use crate::model::regions::Regions;
use crate::model::regions::memory::Bytes;
use crate::model::regions::parts::{Part, Parts};

impl Pairs {
    /// Returns the responder of a message with an end in another process, whether it is a READ, the
    /// source of its bytes if not the request, their target if it can be executed, and their
    /// number. Those of a datagram are only read: its own queue pair is at both ends.
    #[inline]
    #[expect(clippy::type_complexity, reason = "taken apart at once")]
    pub(in crate::model) fn route(
        &self,
        hosts: &Hosts,
        regions: &Regions,
        captured: bool,
        from: PairId,
        (epoch, sequence): (u32, u64),
        struck: Option<Fault>,
    ) -> Option<(PairId, bool, Option<Parts>, Option<Parts>, usize)> {
        let pair = self.get(from)?;
        let work = pair.requester.flight(epoch, sequence)?;
        // Inside one process, which is the usual case, no more needs to be looked at.
        if !regions.has_foreign() && work.atomic.is_none() {
            return None;
        }
        let len = work.len;
        let to = match work.to {
            // `arrive_with` refuses it.
            Some(_) if len > MTU => return None,
            Some(_) => from,
            None => pair.path?.peer,
        };
        // The fault has decided, so no byte is moved.
        let refused = matches!(
            struck,
            Some(Fault::KeyRefused | Fault::RequestRefused | Fault::ReceiveGone | Fault::Lose)
        );
        let heard = !refused && self.listening(hosts, from, epoch, sequence) == Some(Ordering::Equal);
        if len == 0 || (work.reads_memory() && (!work.readable(regions) || struck == Some(Fault::SourceGone)))
        {
            return None;
        }
        let (reads, source, target) = match (work.op, &work.source) {
            (SendOp::Read(remote), Source::Memory(into)) => {
                let peer = self.get(to).filter(|_| heard)?;
                let (region, offset) = regions.remote(peer, remote, len, work.wanted())?;
                let done = work.atomic.is_some() && work.brought.is_some();
                let aligned = work.atomic.is_none() || remote.address.is_multiple_of(ATOMIC as u64);
                // Done before, or about to be refused: `execute` answers it without any move.
                if done || !aligned || !regions.allows(into, len, Access::LOCAL_WRITE) {
                    return None;
                }
                (true, Some(Parts::One(Part { region, offset, len })), Some(into.clone()))
            }
            (_, Source::Memory(parts)) if work.to.is_some() => (false, Some(parts.clone()), None),
            (_, Source::Inline(_)) if work.to.is_some() => return None,
            (_, Source::Memory(parts)) => {
                (false, Some(parts.clone()), heard.then(|| self.landing_place(regions, to, work)).flatten())
            }
            (_, Source::Inline(_)) => {
                (false, None, heard.then(|| self.landing_place(regions, to, work)).flatten())
            }
        };
        let foreign = |parts: &Parts| regions.is_any_foreign(parts);
        // Bytes without a target are read only for a capture, or as those of a datagram.
        let wanted = target.is_some() || captured || work.to.is_some();
        // An atomic operation is always moved: only a mover changes what it has read.
        let far = (wanted && source.as_ref().is_some_and(foreign))
            || target.as_ref().is_some_and(foreign)
            || work.atomic.is_some();
        far.then_some((to, reads, source, target, len))
    }

    /// Returns the target of a SEND or a WRITE, if it can be executed now.
    pub(in crate::model) fn landing_place(
        &self,
        regions: &Regions,
        to: PairId,
        work: &SendWork,
    ) -> Option<Parts> {
        let receive = self.next_receive(to).filter(|_| self.is_ready_for_receives(to));
        match work.op {
            SendOp::Write(remote) | SendOp::WriteImmediate(remote, _) => {
                // Without a receive the answer is an RNR NAK, and nothing is written.
                if matches!(work.op, SendOp::WriteImmediate(..)) {
                    receive?;
                }
                let peer = self.get(to)?;
                let (region, offset) = regions.remote(peer, remote, work.len, work.wanted())?;
                Some(Parts::One(Part { region, offset, len: work.len }))
            }
            SendOp::Send | SendOp::SendImmediate(_) => {
                check_receive(regions, receive?.clone(), work.len).ok().flatten()
            }
            SendOp::Read(_) => None,
        }
    }

    /// Returns the bytes of a message if they are many, no intermediate state of their copy is
    /// visible, and the message is valid.
    pub(in crate::model) fn bulk(
        &self,
        regions: &Regions,
        from: PairId,
        to: PairId,
        epoch: u32,
        sequence: u64,
    ) -> Option<Bulk> {
        let work = self.get(from)?.requester.flight(epoch, sequence)?;
        let remote = match work.op {
            SendOp::Write(remote) => remote,
            // Without a receive the answer is an RNR NAK, and nothing is written.
            SendOp::WriteImmediate(remote, _) if self.next_receive(to).is_some() => remote,
            _ => return None,
        };
        let Source::Memory(Parts::One(part)) = &work.source else { return None };
        let (region, offset) =
            regions.remote(self.get(to)?, remote, work.len, Access::REMOTE_WRITE.into())?;
        // Memory of another process is moved by a `Freight`.
        let (Bytes::Own(source), Bytes::Own(target)) =
            (regions.local(part.region, Access::NONE)?, regions.local(region, Access::LOCAL_WRITE)?)
        else {
            return None;
        };
        Some(Bulk {
            from,
            to,
            epoch,
            sequence,
            // Shared: they outlive their registration until the copy has ended.
            source: (Arc::clone(source), part.offset),
            target: (Arc::clone(target), offset),
            len: work.len,
        })
    }
}
