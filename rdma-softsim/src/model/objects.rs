//! Hosts and the objects of their devices: made, listed and destroyed.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::hosts::context::AsyncNotice;
use super::pairs::queue_pair::{Owner, PairAttributes, QueuePair, QueuePairState};
use super::queues::completion_queue::CompletionQueue;
use super::regions::Registration;
use super::regions::memory::{Bytes, Memory};
use super::regions::parts::Parts;
use super::{ContextId, DomainId, Event, HostId, Model, PAUSE, PairId, QueueId, RegionId, SharedId, Wake};
use crate::error::Error;
use crate::failure_class::FailureClass;
use crate::request::{Rights, Sge};
use crate::settings::{Limits, Link, Resources};
use crate::state::{Connection, PairState};
use crate::trace::EntryKind;

impl Model {
    pub(super) fn make_queue(
        &mut self,
        host: HostId,
        depth: u32,
        context: Option<(ContextId, u64)>,
    ) -> Result<QueueId, Error> {
        let limits = self.hosts.alive(host)?.limits;
        if depth == 0 || depth > limits.max_completions {
            return Err(Error::Argument("a completion queue holds 1 to Limits::max_completions completions"));
        }
        let value = limits.max_completion_queues;
        // Devices may make more room than requested (`ibv_create_cq(3)`).
        let rounds_up = self.env.behaviour().is_some_and(|behaviour| behaviour.rounds_up);
        let depth = if rounds_up { depth.next_power_of_two() } else { depth };
        if self.env.strikes_creation(host) || self.queues.count_on(host) >= value as usize {
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
        let &PairAttributes { domain, send_queue, receive_queue, shared, mut limits, .. } = attributes;
        if let Some(shared) = shared
            && self.pairs.shared().find(shared)?.host != host
        {
            return Err(Error::Argument("the shared receive queue is of another device"));
        }
        let device = self.hosts.alive(host)?.limits;
        let domain_host = self.regions.domain_host(domain)?;
        for queue in [send_queue, receive_queue] {
            let completions = self.queues.find(queue)?;
            if domain_host != host || completions.host != host {
                return Err(Error::Argument("the domain or the completion queue is of another device"));
            }
            // Nothing would report the work of the queue pair.
            if completions.is_lost() {
                return Err(Error::State("the completion queue was overrun"));
            }
        }
        if limits.send_depth.max(limits.recv_depth) > device.max_queue_depth {
            return Err(Error::Argument("a queue is at most Limits::max_queue_depth deep"));
        }
        let value = device.max_queue_pairs;
        if limits.inline > device.max_inline || limits.send_depth == device.max_queue_depth {
            self.env.count_injected(FailureClass::DeviceLimits);
            self.env.count_observed(FailureClass::DeviceLimits);
        }
        if self.env.strikes_creation(host) || self.pairs.all().count_on(host) >= value as usize {
            let (what, limit) = ("queue pairs", "max_queue_pairs");
            return Err(Error::Exhausted { what, limit, value: value.into() });
        }
        // As far as the device goes, and no error: case `verbs.limits.inline`.
        limits.inline = limits.inline.min(device.max_inline);
        let rest = self.env.behaviour().map_or(0, |behaviour| behaviour.resting_numbers);
        let attributes = PairAttributes { limits, ..*attributes };
        let new = |number| QueuePair::new(host, &attributes, owner, number);
        let (pair, number) = self.pairs.insert(rest, new);
        for queue in [send_queue, receive_queue] {
            if let Some(queue) = self.queues.get_mut(queue) {
                queue.pairs.insert(pair);
            }
        }
        self.regions.enter_domain(domain);
        let identifier = match owner {
            Owner::Identifier(id) => self.manager.get(id).map_or(0, |owner| owner.key.0),
            Owner::Context(..) => 0,
        };
        let on = host.index();
        self.env.note(|| EntryKind::Created { host: on, pair: number, identifier });
        Ok((pair, number, limits.inline as usize))
    }

    pub(crate) fn create_domain_in(&mut self, id: ContextId) -> Result<DomainId, Error> {
        let host = self.contexts.host(id)?;
        self.regions.create_domain(&mut self.env, host)
    }

    pub(crate) fn create_queue_in(&mut self, id: ContextId, name: u64, depth: u32) -> Result<QueueId, Error> {
        let host = self.contexts.host(id)?;
        self.make_queue(host, depth, Some((id, name)))
    }

    pub(crate) fn create_pair_in(
        &mut self,
        id: ContextId,
        name: u64,
        attributes: &PairAttributes,
    ) -> Result<(PairId, u32, usize), Error> {
        let host = self.contexts.host(id)?;
        self.make_pair(host, attributes, Owner::Context(id, name))
    }

    pub(crate) fn open(&mut self, host: HostId) -> Result<ContextId, Error> {
        self.hosts.alive(host)?;
        Ok(self.contexts.open(host))
    }

    pub(crate) fn close(&mut self, id: ContextId) {
        self.contexts.close(id);
    }

    /// Takes the next asynchronous event, and returns whether it was the last.
    pub(crate) fn take_async(&mut self, id: ContextId) -> Result<(Option<AsyncNotice>, bool), Error> {
        self.contexts.take(id)
    }

    pub(crate) fn destroy_domain(&mut self, id: DomainId) {
        self.regions.destroy_domain(&mut self.env, id);
    }

    /// Checks that `len` more bytes may be registered, and returns the host. Called before the
    /// memory is allocated, without the fabric's lock.
    pub(crate) fn may_register(&self, domain: DomainId, len: u64) -> Result<HostId, Error> {
        self.regions.may_register(&self.hosts, domain, len)
    }

    pub(crate) fn register(
        &mut self,
        domain: DomainId,
        memory: Arc<Memory>,
        rights: impl Into<Rights>,
    ) -> Result<Registration, Error> {
        self.regions.register(&mut self.env, &mut self.hosts, domain, memory, rights)
    }

    /// Registers memory that peers access at `address`.
    pub(crate) fn register_at(
        &mut self,
        domain: DomainId,
        address: u64,
        memory: Bytes,
        rights: impl Into<Rights>,
    ) -> Result<Registration, Error> {
        self.regions.register_at(&mut self.env, &mut self.hosts, domain, address, memory, rights)
    }

    /// Returns the parts of regions that a work request names, in a queue pair's domain.
    pub(crate) fn named(&self, domain: Option<DomainId>, list: &[Sge]) -> Parts {
        list.iter().map(|sge| self.regions.named(domain, sge.address, sge.len, sge.lkey)).collect()
    }

    pub(crate) fn deregister(&mut self, id: RegionId) {
        // Only in simulations: it looks at all queue pairs.
        if self.env.is_observed()
            && self.pairs.use_region(id)
            && let Some(host) = self.regions.get(id).map(|region| region.host.index())
        {
            self.env.note(|| EntryKind::Busy { host, what: "region" });
        }
        let Some(rkey) = self.regions.remove(&mut self.hosts, id) else { return };
        // After the removal: the messages arrive, and must not find it.
        self.cut_short_into(id);
        self.env.remember_stale(rkey);
    }

    /// Adds a host. An address of another host moves here, as when a machine takes over for
    /// another. Resolutions that await one of the addresses find it.
    pub(crate) fn add_host(&mut self, addresses: &[IpAddr], limits: Limits) -> HostId {
        let host = self.hosts.insert(None, addresses, limits);
        self.find(host, addresses);
        host
    }

    pub(crate) fn add_device(&mut self, host: HostId, addresses: &[IpAddr], limits: Limits) -> HostId {
        let device = self.hosts.insert(Some(self.hosts.machine(host)), addresses, limits);
        self.find(device, addresses);
        device
    }

    /// Lets resolutions find a host. If they are many, the fabric's lock is given back in between.
    pub(super) fn find(&mut self, host: HostId, addresses: &[IpAddr]) {
        if !self.manager.found(&mut self.env, addresses) {
            self.env.schedule(PAUSE, Event::Joined(host));
        }
    }

    pub(crate) fn host_at(&self, ip: IpAddr) -> Option<HostId> {
        self.hosts.at(ip)
    }

    pub(crate) fn limits(&self, id: HostId) -> Result<Limits, Error> {
        Ok(self.hosts.alive(id)?.limits)
    }

    pub(crate) fn set_link(&mut self, ip: IpAddr, link: Link) {
        self.hosts.set_link(ip, link);
    }

    pub(crate) fn is_killed(&self, host: u32) -> bool {
        self.hosts.is_killed(host)
    }

    /// Ends the process on a host's machine. Its kernel closes everything it held, and notifies the
    /// peers as usual.
    pub(crate) fn kill_host(&mut self, id: HostId) {
        for device in self.hosts.devices(id) {
            self.kill_device(device);
        }
    }

    fn kill_device(&mut self, id: HostId) {
        if !self.hosts.kill(id) {
            return;
        }
        // Sleepers on descriptors wake up to the error.
        for channel in self.manager.channels().on(id) {
            self.env.wake(Wake::Events(channel));
        }
        for context in self.contexts.all().on(id) {
            self.env.wake(Wake::Asynchronous(context));
        }
        for queue in self.queues.on(id) {
            self.env.wake(Wake::Completions(queue));
        }
        // Users before what they use, as handles do it: a used object would be noted as busy.
        for pair in self.pairs.all().on(id) {
            self.destroy_pair(pair);
        }
        for shared in self.pairs.shared().on(id) {
            self.destroy_shared(shared);
        }
        for identifier in self.manager.identifiers().on(id) {
            self.destroy_identifier(identifier);
        }
        for channel in self.manager.channels().on(id) {
            self.destroy_channel(channel);
        }
        for queue in self.queues.on(id) {
            self.destroy_queue(queue);
        }
        for region in self.regions.all().on(id) {
            self.deregister(region);
        }
        for domain in self.regions.domains().on(id) {
            self.destroy_domain(domain);
        }
        for context in self.contexts.all().on(id) {
            self.close(context);
        }
    }

    pub(crate) fn resources(&self, id: HostId) -> Resources {
        Resources {
            event_channels: self.manager.channels().count_on(id),
            identifiers: self.manager.identifiers().count_on(id),
            domains: self.regions.domains().count_on(id),
            regions: self.regions.all().count_on(id),
            registered_bytes: self.hosts.get(id).map_or(0, |host| host.registered),
            completion_queues: self.queues.count_on(id),
            queue_pairs: self.pairs.all().count_on(id),
        }
    }

    pub(crate) fn create_shared(
        &mut self,
        context: ContextId,
        name: u64,
        domain: DomainId,
        depth: u32,
        limit: u32,
    ) -> Result<SharedId, Error> {
        let host = self.contexts.host(context)?;
        let most = self.hosts.alive(host)?.limits.max_queue_depth;
        if self.regions.domain_host(domain)? != host {
            return Err(Error::Argument("the domain is of another device"));
        }
        if depth == 0 || depth > most || limit > depth {
            return Err(Error::Argument("a shared queue holds 1 to Limits::max_queue_depth receives"));
        }
        if self.env.strikes_creation(host) {
            return Err(Error::Exhausted { what: "shared receive queues", limit: "", value: 0 });
        }
        Ok(self.pairs.create_shared(host, (context, name), depth, limit))
    }

    pub(crate) fn destroy_shared(&mut self, id: SharedId) {
        self.pairs.destroy_shared(id);
    }

    /// `ibv_modify_srq(3)`: sets when an event comes.
    pub(crate) fn set_shared_limit(&mut self, id: SharedId, limit: u32) -> Result<(), Error> {
        self.pairs.set_shared_limit(id, limit)
    }

    /// `ibv_query_srq(3)`: the limit, 0 once its event has come.
    pub(crate) fn shared_limit(&self, id: SharedId) -> Result<u32, Error> {
        self.pairs.shared_limit(id)
    }

    /// Destroys it. If its owner's memory may be being written, resets it and returns false.
    pub(crate) fn retire_pair(&mut self, id: PairId) -> bool {
        if self.lands_for(id) {
            let _gone = self.reset(id);
            return false;
        }
        self.destroy_pair(id);
        true
    }

    pub(crate) fn destroy_pair(&mut self, id: PairId) {
        // Before the removal: it finds its program by the queue pair.
        self.pairs.end_repeat(&mut self.env, &mut self.contexts, id);
        let Some(pair) = self.pairs.remove(id) else { return };
        // Its completions stay in their queue, as on soft-RoCE. Some devices remove them.
        for queue in [pair.send_queue, pair.receive_queue] {
            if let Some(queue) = self.queues.get_mut(queue) {
                queue.pairs.remove(&id);
            }
        }
        self.regions.leave_domain(pair.domain);
        self.capture_end(id);
        // Messages to it go unanswered, and those from it have no completion.
        self.cut_short_of(id);
        if let Some(identifier) = pair.identifier.and_then(|id| self.manager.get_mut(id)) {
            // An identifier whose queue pair is left is busy when it is destroyed.
            identifier.pair = None;
        }
        if pair.requester.has_work() || !pair.responder.receives.is_empty() {
            self.env.count_injected(FailureClass::TeardownOrder);
            if pair.state == QueuePairState::Error {
                // Flushed by destruction, unobserved.
                self.env.count_observed(FailureClass::Flush);
            }
        }
    }

    /// Returns at most `most` queue pairs with numbers from `from` on, and where further ones may
    /// begin. Looks at a bounded number of them.
    pub(crate) fn connections(&self, from: u32, most: usize) -> (Vec<Connection>, Option<u32>) {
        const MOST: u32 = 256;
        let (end, next) = (self.pairs.end_of_numbers(), from.saturating_add(MOST));
        let mut found = Vec::new();
        // By number: queue pairs that come and go between two calls do not move others.
        for number in from..next.min(end) {
            if found.len() >= most {
                return (found, Some(number));
            }
            found.extend(self.pairs.with_number(number).and_then(|id| self.connection(id)));
        }
        (found, (next < end).then_some(next))
    }

    fn connection(&self, id: PairId) -> Option<Connection> {
        let pair = self.pairs.get(id)?;
        let identifier = pair.identifier.and_then(|id| self.manager.get(id));
        let ends = pair.path.map(|path| (path.local, path.remote));
        let address = |managed: Option<SocketAddr>, ip: Option<IpAddr>| {
            managed.or_else(|| ip.map(|ip| SocketAddr::new(ip, 0)))
        };
        Some(Connection {
            pair: pair.number,
            host: self.hosts.addresses(pair.host),
            state: PairState::from(pair.state),
            local: address(identifier.and_then(|id| id.local), ends.map(|(local, _)| local)),
            remote: address(identifier.and_then(|id| id.remote), ends.map(|(_, remote)| remote)),
            peer: pair.path.map(|path| self.pairs.number(path.peer)),
        })
    }
}
