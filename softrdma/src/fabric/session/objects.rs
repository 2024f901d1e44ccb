//! Objects of the device: each is taken from the program's account, and then made.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rdma_backend::{QueuePair as _, QueuePairLimits, RnrTimer};
use rdma_softsim::{CompletionQueue, Domain, ForeignRegion, QueuePair, SharedReceives, footprint};
use rustix::io::Errno;
use softrdma_wire::{self as wire, Amounts, MAX_ELEMENTS, MAX_INLINE, Name, Reply};

use super::super::LIMITS;
use super::super::budget::{Program, Taken};
use super::super::memory::ProgramMemory;
use super::super::pages::{Place, Shown};
use super::super::signals::{Backlog, QueueSignal, Records};
use super::super::translate;
use super::{Refusal, Session, find};

/// A completion queue, its page, and the program's channel that has its events.
pub(super) struct OwnedQueue {
    pub(super) queue: CompletionQueue,
    _page: Arc<Place>,
    pub(super) channel: Option<Name>,
    _taken: Taken,
}

/// A queue pair, and the most elements of its sends and receives.
pub(super) struct OwnedPair {
    pub(super) pair: QueuePair,
    pub(super) elements: [u8; 2],
    _taken: Taken,
}

/// A shared receive queue, and the most elements of its receives.
pub(super) struct OwnedReceives {
    pub(super) queue: SharedReceives,
    pub(super) elements: u8,
    _taken: Taken,
}

/// A region, and its length.
pub(super) struct OwnedRegion {
    pub(super) region: ForeignRegion,
    pub(super) len: u64,
    _taken: Taken,
}

/// A completion channel.
pub(super) struct OwnedRecords {
    pub(super) records: Arc<Records>,
    _taken: Taken,
}

impl OwnedRecords {
    /// Makes a channel, and returns the program's end with it.
    pub(super) fn new(program: &Arc<Program>, backlog: &Arc<Backlog>) -> Result<(Self, OwnedFd), Refusal> {
        let amounts = Amounts { memory: footprint::OBJECT, descriptors: 1, sessions: 0 };
        let taken = program.take(amounts)?;
        let (records, end) = Records::new(backlog)?;
        Ok((Self { records: Arc::new(records), _taken: taken }, end))
    }
}

/// A protection domain, and the device of the domain and its objects.
pub(super) struct OwnedDomain {
    pub(super) device: wire::Device,
    pub(super) domain: Domain,
    _taken: Taken,
}

impl Session {
    pub(super) fn allocate_domain(&mut self, device: wire::Device) -> Result<Reply, Refusal> {
        let taken = self.take_memory(footprint::OBJECT)?;
        let domain = self.opened(device)?.device.create_domain()?;
        let name = self.name()?;
        self.domains.insert(name, OwnedDomain { device, domain, _taken: taken });
        Ok(Reply::Made(name))
    }

    pub(super) fn register(
        &mut self,
        domain: Name,
        (at, address, len): (u64, u64, u64),
        access: wire::Access,
    ) -> Result<Reply, Refusal> {
        let OwnedDomain { domain, .. } = find(&self.domains, domain)?;
        let access = translate::access(access).ok_or(Errno::INVAL)?;
        let bytes = usize::try_from(len).map_err(|_| Errno::NOMEM)?;
        let last = at.checked_add(len.checked_sub(1).ok_or(Errno::INVAL)?).ok_or(Errno::FAULT)?;
        address.checked_add(len).ok_or(Errno::INVAL)?;
        // Pinning would look at every page. Probing both ends finds a wrong address, and shows
        // whether the fabric may access this memory.
        self.info.process.probe([at, last])?;
        let taken = self.take_memory(footprint::OBJECT)?;
        let memory = Arc::new(ProgramMemory { process: Arc::clone(&self.info.process), at });
        let region = domain.register_foreign(address, bytes, memory, access)?;
        let key = region.key();
        let name = self.name()?;
        self.regions.insert(name, OwnedRegion { region, len, _taken: taken });
        self.info.registered.fetch_add(len, Relaxed);
        Ok(Reply::Region { name, key })
    }

    pub(super) fn deregister(&mut self, name: Name) -> Result<Reply, Refusal> {
        let OwnedRegion { region, len, .. } = find(&self.regions, name)?;
        region.deregister()?;
        self.info.registered.fetch_sub(*len, Relaxed);
        self.regions.remove(&name);
        Ok(Reply::Done)
    }

    pub(super) fn create_queue(
        &mut self,
        device: wire::Device,
        depth: u32,
        channel: Option<Name>,
        vector: u32,
    ) -> Result<(Reply, OwnedFd), Refusal> {
        let vector = match &self.vectors {
            Some(vectors) => Some(vectors.get(vector).ok_or(Errno::INVAL)?),
            None => None,
        };
        let channel_of = match channel {
            Some(name) => find(&self.completion_channels, name)?,
            None => match &mut self.unread {
                Some(unread) => unread,
                none => none.insert(OwnedRecords::new(self.info.process.program(), &self.backlog)?.0),
            },
        };
        let records = Arc::clone(&channel_of.records);
        // Its page is memory, too.
        let taken = self.take_memory(
            footprint::completion_queue(depth.min(LIMITS.max_completions)) + wire::PAGE as u64,
        )?;
        let pages = &self.info.pages;
        let (place, memory) = (Arc::new(pages.take()?), pages.descriptor()?);
        let queue = self.name()?;
        let signal = Arc::new(QueueSignal { queue, channel: records, vector });
        let device = &self.opened(device)?.device;
        let shown = Box::new(Shown::new(Arc::clone(&place)));
        let made = device.create_completion_queue(queue.into(), depth, signal, shown)?;
        let page = place.number;
        self.queues.insert(queue, OwnedQueue { queue: made, _page: place, channel, _taken: taken });
        Ok((Reply::Queue { name: queue, page }, memory))
    }

    pub(super) fn create_pair(
        &mut self,
        domain: Name,
        [sends, receives]: [Name; 2],
        shared: Option<Name>,
        service: wire::Service,
        (mut limits, elements): (QueuePairLimits, [u8; 2]),
    ) -> Result<Reply, Refusal> {
        let elements = elements.map(|most| most.min(MAX_ELEMENTS as u8));
        limits.inline = limits.inline.min(MAX_INLINE as u32);
        let name = self.name()?;
        let OwnedDomain { device, domain, .. } = find(&self.domains, domain)?;
        let queues = [&find(&self.queues, sends)?.queue, &find(&self.queues, receives)?.queue];
        let shared = shared.map(|shared| find(&self.shared, shared)).transpose()?.map(|owned| &owned.queue);
        let device = &self.opened(*device)?.device;
        let service = translate::service(service);
        // The model refuses deeper queues.
        let most = |depth: u32| depth.min(LIMITS.max_queue_depth);
        let (send_depth, recv_depth) = (most(limits.send_depth), most(limits.recv_depth));
        let bounded = QueuePairLimits { send_depth, recv_depth, ..limits };
        let taken = self.take_memory(footprint::queue_pair(service, &bounded, elements))?;
        let pair = device.create_queue_pair(name.into(), service, domain, queues, shared, limits)?;
        let (number, inline) = (pair.number(), pair.max_inline() as u32);
        self.pairs.insert(name, OwnedPair { pair, elements, _taken: taken });
        Ok(Reply::Pair { name, number, inline })
    }

    pub(super) fn pair(&self, name: Name) -> Result<&QueuePair, Refusal> {
        find(&self.pairs, name).map(|owned| &owned.pair)
    }

    pub(super) fn modify(&self, pair: Name, to: wire::Transition) -> Result<Reply, Refusal> {
        let pair = self.pair(pair)?;
        if let wire::Transition::Timer(code) = to {
            pair.set_min_rnr_timer(RnrTimer::from_code(code).ok_or(Errno::INVAL)?)?;
        } else {
            pair.modify(translate::transition(to).ok_or(Errno::INVAL)?)?;
        }
        Ok(Reply::Done)
    }

    pub(super) fn create_shared(
        &mut self,
        domain: Name,
        depth: u32,
        limit: u32,
        elements: u8,
    ) -> Result<Reply, Refusal> {
        let elements = elements.min(MAX_ELEMENTS as u8);
        let bytes = footprint::shared_receives(depth.min(LIMITS.max_queue_depth), elements);
        let taken = self.take_memory(bytes)?;
        let name = self.name()?;
        let OwnedDomain { device, domain, .. } = find(&self.domains, domain)?;
        let device = &self.opened(*device)?.device;
        let queue = device.create_shared_receives(name.into(), domain, depth, limit)?;
        self.shared.insert(name, OwnedReceives { queue, elements, _taken: taken });
        Ok(Reply::Made(name))
    }
}
