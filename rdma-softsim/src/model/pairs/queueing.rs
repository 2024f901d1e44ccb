//! Work requests on the queues of a queue pair, before a message arrives anywhere.

use rdma_backend::SendOp;

use super::Pairs;
use super::path::{Addressed, Path};
use super::queue_pair::{QueuePair, QueuePairState, Request};
use super::requester::{SendWork, Source};
use crate::error::Error;
use crate::failure_class::ClassSet;
use crate::model::base::environment::Environment;
use crate::model::base::event::Event;
use crate::model::base::ids::PairId;
use crate::model::hosts::Hosts;
use crate::model::regions::Regions;
use crate::model::regions::parts::Part;
use crate::request::Destination;
use crate::trace::{EntryKind, MESSAGE, Work};

pub(in crate::model) const MAX_MESSAGE: usize = 1 << 31;

impl QueuePair {
    /// Checks as a device does when posting: the slice is inside its region, and the region in the
    /// pair's domain.
    pub(in crate::model) fn check_part(&self, regions: &Regions, part: &Part) -> Result<(), Error> {
        let region = regions.get(part.region).ok_or(Error::Gone("region"))?;
        if region.domain != self.domain {
            return Err(Error::Argument("the region is of another protection domain"));
        }
        // The sum of a program's numbers may wrap.
        if part.offset.checked_add(part.len).is_none_or(|end| end > region.memory.len()) {
            return Err(Error::Argument("the slice is not inside its region"));
        }
        if part.len > MAX_MESSAGE {
            return Err(Error::Argument("a message is at most 2 GiB long"));
        }
        Ok(())
    }
}

impl SendWork {
    pub(in crate::model) fn describe(&self, regions: &Regions) -> Work {
        let Self { id, op, len, signaled, .. } = *self;
        let mut message = [0; MESSAGE];
        let short = matches!(op, SendOp::Send | SendOp::SendImmediate(_)) && len <= MESSAGE;
        // Oracles parse control messages: a trace has them whole, and nothing of longer ones.
        let read = short
            && match &self.source {
                Source::Inline(bytes) => {
                    message[..len].copy_from_slice(bytes);
                    true
                }
                Source::Memory(parts) => regions.gather(parts, &mut message[..len]),
            };
        Work { id, op, len, signaled, message: read.then_some(message) }
    }
}

impl Pairs {
    /// Checks whether a queue pair sends such messages, from that address.
    pub(in crate::model) fn check_destination(
        &self,
        hosts: &Hosts,
        id: PairId,
        to: Option<Destination>,
    ) -> Result<(), Error> {
        let pair = self.find(id)?;
        if pair.key.is_some() != to.is_some() {
            return Err(Error::Argument("queue pairs for datagrams send datagrams, and others do not"));
        }
        match to {
            Some(to) if !hosts.get(pair.host).is_some_and(|host| host.has(to.local)) => {
                Err(Error::NotLocal(to.local))
            }
            _ => Ok(()),
        }
    }

    pub(in crate::model) fn addressed(&self, hosts: &Hosts, pair: &QueuePair, to: Destination) -> Addressed {
        const OWN: u32 = 1 << 31;
        let Destination { local, remote, number, key } = to;
        // A number that no queue pair has is no error: the datagram is lost (`listening`).
        let peer = self.numbered(hosts, number, remote).unwrap_or(PairId::NONE);
        let loopback = self.get(peer).is_some_and(|peer| peer.host == pair.host);
        let key = pair.key.filter(|_| key & OWN != 0).unwrap_or(key);
        Addressed { path: Path { peer, local, remote, loopback }, key }
    }

    /// Checks whether the send queue takes such a request.
    pub(in crate::model) fn may_send(
        &self,
        id: PairId,
        op: SendOp,
        len: usize,
        inline: bool,
    ) -> Result<(), Error> {
        let pair = self.find(id)?;
        // In SQD it waits; in ERR it is flushed (case `verbs.fail.later-sends`).
        if !matches!(pair.state, QueuePairState::Ready | QueuePairState::Draining | QueuePairState::Error) {
            return Err(Error::State("the queue pair is not connected: it cannot send"));
        }
        // The bytes of a READ come with its answer: a request cannot contain them.
        if inline && (len > pair.limits.inline as usize || matches!(op, SendOp::Read(_))) {
            return Err(Error::Argument("inline data is for sends and writes of at most max_inline bytes"));
        }
        // Without a depth it would wait for ever. In ERR it is flushed like any other.
        if matches!(op, SendOp::Read(_))
            && pair.requester.read_depth == 0
            && pair.state != QueuePairState::Error
        {
            return Err(Error::Argument("the connection was made without RDMA READs (initiator_depth)"));
        }
        if pair.requester.is_full(pair.limits.send_depth) {
            return Err(Error::QueueFull { queue: "send", depth: pair.limits.send_depth });
        }
        Ok(())
    }

    /// Puts a request on the send queue. Returns whether it must be flushed.
    pub(in crate::model) fn enqueue(
        &mut self,
        env: &mut Environment,
        hosts: &Hosts,
        regions: &Regions,
        id: PairId,
        request: Request,
        (source, len): (Source, usize),
    ) -> bool {
        let Some(pair) = self.get(id) else { return false };
        let number = pair.number;
        let Request { id: work, op, atomic, signaled, solicited, to } = request;
        let to = to.map(|to| self.addressed(hosts, pair, to));
        let shows = ClassSet::EMPTY;
        let work =
            SendWork { id: work, op, atomic, source, len, to, signaled, solicited, shows, brought: None };
        let failed = pair.state == QueuePairState::Error;
        if env.is_observed() {
            let posted = work.describe(regions);
            env.note(|| EntryKind::Posted { pair: number, work: posted });
        }
        let Some(pair) = self.get_mut(id) else { return false };
        pair.requester.push(work);
        // From now on its bytes are the device's: a simulation notices changes.
        self.lend(env, regions, id);
        failed
    }

    /// The doorbell: sends posted work, one message at a time.
    pub(in crate::model) fn ring(&mut self, env: &mut Environment, id: PairId) {
        // In ERR, posted work is flushed instead (IBA 10.3.1.7). Before RTS there is none.
        if !self
            .get(id)
            .is_some_and(|pair| matches!(pair.state, QueuePairState::Ready | QueuePairState::Draining))
        {
            return;
        }
        while let Some((epoch, sequence)) = self.get_mut(id).and_then(|pair| pair.requester.launch()) {
            let travel = env.travel();
            let now = env.now();
            let Some(pair) = self.get_mut(id) else { return };
            let at = pair.requester.arrival(now.after(travel));
            env.schedule(at.since(now), Event::Arrive { from: id, epoch, sequence });
        }
    }
}
