//! Objects of a device, made for an identifier or for a program that opened the device.

use rdma_backend::QueuePairLimits;

use super::completions::{CompletionQueue, PendingCompletions};
use super::memory::Domain;
use super::ownership::Ownership;
use super::queue_pair::{Owner, QueuePair, QueuePairState};
use super::requester::Requester;
use super::responder::Responder;
use super::{ContextId, DomainId, HostId, Model, PairId, QueueId, SharedId};
use crate::Error;
use crate::failure_class::FailureClass;
use crate::request::{Rights, Service};
use crate::trace::EntryKind;

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

impl Model {
    pub(super) fn make_domain(&mut self, host: HostId) -> Result<DomainId, Error> {
        if self.strikes_creation(host) {
            return Err(Error::Exhausted { what: "protection domains", limit: "", value: 0 });
        }
        Ok(self.domains.insert(Domain { host }))
    }

    pub(super) fn make_queue(
        &mut self,
        host: HostId,
        depth: u32,
        context: Option<(ContextId, u64)>,
    ) -> Result<QueueId, Error> {
        let limits = self.alive(host)?.limits;
        if depth == 0 || depth > limits.max_completions {
            return Err(Error::Argument("a completion queue holds 1 to Limits::max_completions completions"));
        }
        let value = limits.max_completion_queues;
        // Devices may make more room than requested (`ibv_create_cq(3)`).
        let rounds_up = self.behaviour().is_some_and(|behaviour| behaviour.rounds_up);
        let depth = if rounds_up { depth.next_power_of_two() } else { depth };
        if self.strikes_creation(host)
            || self.queues.iter().filter(|(_, queue)| queue.host == host).count() >= value as usize
        {
            let (what, limit) = ("completion queues", "max_completion_queues");
            return Err(Error::Exhausted { what, limit, value: value.into() });
        }
        Ok(self.queues.insert(CompletionQueue::new(host, depth, context)))
    }

    /// Makes a queue pair on the device of `host`, which reports to `owner`. Returns the pair, its
    /// number and its inline bytes.
    pub(super) fn make_pair(
        &mut self,
        host: HostId,
        attributes: &PairAttributes,
        owner: Owner,
    ) -> Result<(PairId, u32, usize), Error> {
        let &PairAttributes { domain, send_queue, receive_queue, shared, service, mut limits } = attributes;
        if let Some(shared) = shared
            && self.shared.get(shared).ok_or(Error::Gone("shared receive queue"))?.host != host
        {
            return Err(Error::Argument("the shared receive queue is of another device"));
        }
        let device = self.alive(host)?.limits;
        let domain_host = self.domains.get(domain).ok_or(Error::Gone("protection domain"))?.host;
        for queue in [send_queue, receive_queue] {
            let completions = self.queues.get(queue).ok_or(Error::Gone("completion queue"))?;
            if domain_host != host || completions.host != host {
                return Err(Error::Argument("the domain or the completion queue is of another device"));
            }
            if completions.is_lost() {
                return Err(Error::State("the completion queue was overrun"));
            }
        }
        if limits.send_depth.max(limits.recv_depth) > device.max_queue_depth {
            return Err(Error::Argument("a queue is at most Limits::max_queue_depth deep"));
        }
        let value = device.max_queue_pairs;
        if limits.inline > device.max_inline || limits.send_depth == device.max_queue_depth {
            self.count_injected(FailureClass::DeviceLimits);
            self.count_observed(FailureClass::DeviceLimits);
        }
        if self.strikes_creation(host)
            || self.pairs.iter().filter(|(_, pair)| pair.host == host).count() >= value as usize
        {
            let (what, limit) = ("queue pairs", "max_queue_pairs");
            return Err(Error::Exhausted { what, limit, value: value.into() });
        }
        limits.inline = limits.inline.min(device.max_inline);
        let rest = self.behaviour().map_or(0, |behaviour| behaviour.resting_numbers);
        let number = self.numbers.give(rest);
        let pair = self.pairs.insert(QueuePair {
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
                Service::Datagram => Some(0),
            },
            state: match owner {
                // rdma_create_qp(3) initialises it.
                Owner::Identifier(_) => QueuePairState::Idle,
                Owner::Context(..) => QueuePairState::Reset,
            },
            rights: Rights::ALL,
            path: None,
            requester: Requester::new(),
            responder: Responder::new(),
            held: PendingCompletions::default(),
            ownership: Ownership::default(),
            cut: false,
            bulks: 0,
        });
        self.numbers.assign(number, pair);
        let identifier = match owner {
            Owner::Identifier(id) => self.identifiers.get(id).map_or(0, |owner| owner.key.0),
            Owner::Context(..) => 0,
        };
        let on = host.index();
        self.note(|| EntryKind::Created { host: on, pair: number, identifier });
        Ok((pair, number, limits.inline as usize))
    }
}
