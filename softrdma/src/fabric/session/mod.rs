//! A session: one program's objects, and the requests about them.
//!
//! A program may send anything. Objects are looked up by name among its own only, the model checks
//! each request, and the number of objects is bounded.

mod manager;
mod posting;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rdma_backend::{IdentifierKey, QueuePair as _, QueuePairLimits, RnrTimer};
use rdma_softsim::{
    CompletionQueue, Device, Domain, Error, ForeignRegion, QueuePair, SharedReceives, Signal, SoftSim,
};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::Resource;
use softrdma_wire::{self as wire, MAX_INLINE, Name, Reply, Request};

use super::memory::{Process, ProgramMemory};
use super::pages::{Pages, Place, Posted, Shown};
use super::signals::{Backlog, Level, QueueSignal, Records};
use super::translate;
use super::vectors::Vectors;

/// The most channels of either kind, if the fabric may have enough descriptors.
const MOST_CHANNELS: u64 = 4096;
/// The most objects of any other kind.
const MOST_OBJECTS: usize = 1 << 16;

/// The answer to a request, and its descriptor.
pub(super) struct Answer {
    pub(super) reply: Reply,
    pub(super) descriptor: Option<OwnedFd>,
}

/// Why a request is refused: an `errno`.
pub(super) struct Refusal(i32);

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self(translate::errno(&error))
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

/// What `softrdma status` shows of a session.
pub(super) struct Info {
    pub(super) program: String,
    pub(super) process: Arc<Process>,
    pub(super) devices: Vec<Vec<IpAddr>>,
    /// The memory shared with the program.
    pages: Arc<Pages>,
    domains: AtomicU64,
    regions: AtomicU64,
    registered: AtomicU64,
    queues: AtomicU64,
    pairs: AtomicU64,
    identifiers: AtomicU64,
    requests: AtomicU64,
}

impl Info {
    pub(super) fn new(
        program: String,
        process: Arc<Process>,
        devices: Vec<Vec<IpAddr>>,
    ) -> Result<Self, Errno> {
        let zero = AtomicU64::default;
        let (domains, regions, registered, queues) = (zero(), zero(), zero(), zero());
        let (pairs, identifiers, requests) = (zero(), zero(), zero());
        Ok(Self {
            program,
            process,
            devices,
            pages: Pages::new()?,
            domains,
            regions,
            registered,
            queues,
            pairs,
            identifiers,
            requests,
        })
    }

    /// Makes the program post by requests that have an answer, from now on.
    pub(super) fn demand_answers(&self) {
        self.pages.notice().demand_answers();
    }

    pub(super) fn session(&self) -> wire::Session {
        let count = |value: &AtomicU64| value.load(Relaxed) as u32;
        wire::Session {
            program: self.program.clone(),
            pid: self.process.number(),
            devices: self.devices.clone(),
            domains: count(&self.domains),
            regions: count(&self.regions),
            registered_bytes: self.registered.load(Relaxed),
            completion_queues: count(&self.queues),
            queue_pairs: count(&self.pairs),
            identifiers: count(&self.identifiers),
            requests: self.requests.load(Relaxed),
        }
    }
}

/// One program's objects. They are dropped in this order when it has ended, as a kernel cleans up:
/// its peers are notified.
pub(super) struct Session {
    pairs: BTreeMap<Name, QueuePair>,
    identifiers: BTreeMap<Name, manager::Owned>,
    event_channels: BTreeMap<Name, manager::Channel>,
    shared: BTreeMap<Name, SharedReceives>,
    queues: BTreeMap<Name, OwnedQueue>,
    regions: BTreeMap<Name, (ForeignRegion, u64)>,
    domains: BTreeMap<Name, OwnedDomain>,
    completion_channels: BTreeMap<Name, Arc<Records>>,
    /// The channel for completion queues without one. It is never read, so their events are
    /// discarded. Made for the first such queue.
    unread: Option<Arc<Records>>,
    /// Readable when a channel has become full.
    backlog: Arc<Backlog>,
    /// The channels that were full at the last look.
    full: Vec<Arc<Records>>,
    /// The session's name of each identifier, by the model's key.
    keys: BTreeMap<IdentifierKey, Name>,
    devices: Vec<Opened>,
    info: Arc<Info>,
    pub(super) posts: Posted,
    names: Name,
    /// The completion vectors, if they have threads.
    vectors: Option<Arc<Vectors>>,
}

/// A completion queue, its page, and the program's channel that has its events.
struct OwnedQueue {
    queue: CompletionQueue,
    _page: Arc<Place>,
    channel: Option<Name>,
}

/// A protection domain, and the device of the domain and its objects.
struct OwnedDomain {
    device: wire::Device,
    domain: Domain,
}

/// One of the machine's devices.
struct Opened {
    host: SoftSim,
    device: Device,
    events: Arc<Level>,
}

impl Opened {
    fn open(host: &SoftSim) -> Result<Self, Errno> {
        let events = Arc::new(Level::new()?);
        let signal: Arc<dyn Signal> = Arc::<Level>::clone(&events);
        let device = host.open(signal).map_err(|_| Errno::NODEV)?;
        Ok(Self { host: host.clone(), device, events })
    }
}

fn find<T>(objects: &BTreeMap<Name, T>, name: Name) -> Result<&T, Refusal> {
    objects.get(&name).ok_or(Refusal(Errno::INVAL.raw_os_error()))
}

fn room<K, T>(objects: &BTreeMap<K, T>, most: usize) -> Result<(), Refusal> {
    if objects.len() < most { Ok(()) } else { Err(Errno::NOMEM.into()) }
}

/// Returns how many channels of either kind a session may have.
///
/// A channel of one kind costs two descriptors, of the other one. So one program takes less than a
/// fifth of the fabric's descriptors.
fn most_channels() -> usize {
    let descriptors = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (descriptors / 16).min(MOST_CHANNELS) as usize
}

/// Removes an object that no other object uses.
fn take<T>(
    objects: &mut BTreeMap<Name, T>,
    name: Name,
    used: impl FnOnce(&T) -> bool,
) -> Result<Reply, Refusal> {
    if used(find(objects, name)?) {
        return Err(Errno::BUSY.into());
    }
    objects.remove(&name);
    Ok(Reply::Done)
}

impl Session {
    pub(super) fn new(
        machine: &[SoftSim],
        info: Arc<Info>,
        above: Name,
        vectors: Option<Arc<Vectors>>,
    ) -> Result<Self, Errno> {
        Ok(Self {
            pairs: BTreeMap::new(),
            identifiers: BTreeMap::new(),
            event_channels: BTreeMap::new(),
            shared: BTreeMap::new(),
            queues: BTreeMap::new(),
            regions: BTreeMap::new(),
            domains: BTreeMap::new(),
            completion_channels: BTreeMap::new(),
            unread: None,
            backlog: Arc::new(Backlog::new()?),
            full: Vec::new(),
            keys: BTreeMap::new(),
            devices: machine.iter().map(Opened::open).collect::<Result<_, _>>()?,
            posts: Posted::new(Arc::clone(&info.pages)),
            info,
            names: above,
            vectors,
        })
    }

    fn name(&mut self) -> Result<Name, Refusal> {
        self.names = self.names.checked_add(1).ok_or(Refusal(Errno::NOMEM.raw_os_error()))?;
        Ok(self.names)
    }

    pub(super) fn devices(&self) -> &[Vec<IpAddr>] {
        &self.info.devices
    }

    /// Returns what the session waits for besides its program's requests: that a channel becomes
    /// full, and that a full one has room.
    pub(super) fn awaited(&self) -> impl Iterator<Item = PollFd<'_>> {
        let full = self.full.iter().map(|channel| PollFd::new(channel, PollFlags::OUT));
        std::iter::once(PollFd::new(&self.backlog, PollFlags::IN)).chain(full)
    }

    /// Writes the events for which there is room now.
    pub(super) fn catch_up(&mut self) {
        self.backlog.clear();
        let channels = self.completion_channels.values().chain(&self.unread);
        self.full = channels.filter(|channel| channel.is_full()).map(Arc::clone).collect();
        self.full.retain(|channel| {
            channel.flush();
            channel.is_full()
        });
    }

    fn opened(&self, device: wire::Device) -> Result<&Opened, Refusal> {
        self.devices.get(device as usize).ok_or(Refusal(Errno::NODEV.raw_os_error()))
    }

    pub(super) fn answer(&mut self, request: Request<'_>, brought: Option<OwnedFd>) -> Answer {
        let reply = match (request, brought) {
            (Request::OfferMemory { probe }, Some(socket)) => self.info.process.take_offer(probe, socket),
            (request, _) => return self.asked(request),
        };
        let reply = reply.map_or_else(|errno| Reply::Refused(errno.raw_os_error()), |()| Reply::Done);
        Answer { reply, descriptor: None }
    }

    fn asked(&mut self, request: Request<'_>) -> Answer {
        let mut descriptor = None;
        let reply = self.perform(request, &mut descriptor);
        self.info.requests.fetch_add(1, Relaxed);
        let reply = reply.unwrap_or_else(|Refusal(errno)| Reply::Refused(errno));
        Answer { reply, descriptor }
    }

    fn count(&self) {
        let set = |value: &AtomicU64, count: usize| value.store(count as u64, Relaxed);
        set(&self.info.domains, self.domains.len());
        set(&self.info.regions, self.regions.len());
        set(&self.info.queues, self.queues.len());
        set(&self.info.pairs, self.pairs.len());
        set(&self.info.identifiers, self.identifiers.len());
    }

    fn perform(&mut self, request: Request<'_>, descriptor: &mut Option<OwnedFd>) -> Result<Reply, Refusal> {
        match request {
            Request::Poll(name) => {
                find(&self.queues, name)?.queue.called()?;
                return Ok(Reply::Done);
            }
            Request::PostSend { pair, room, work } => return self.post_send(pair, room, &work),
            Request::PostReceive { pair, work } => return self.post_receive(pair, &work),
            Request::PostShared { queue, work } => return self.post_shared(queue, &work),
            _ => {}
        }
        let reply = match request {
            Request::Hello { .. }
            | Request::Status
            | Request::Pairs { .. }
            | Request::Inject { .. }
            | Request::Configure { .. }
            | Request::OfferMemory { .. }
            | Request::Doorbell
            | Request::Record => Err(Errno::INVAL.into()),
            Request::CreateCompletionChannel => {
                room(&self.completion_channels, most_channels())?;
                let (channel, end) = Records::new(&self.backlog)?;
                *descriptor = Some(end);
                let name = self.name()?;
                self.completion_channels.insert(name, Arc::new(channel));
                Ok(Reply::Made(name))
            }
            Request::DestroyCompletionChannel(name) => {
                if let Some(channel) = self.completion_channels.get(&name) {
                    self.full.retain(|full| !Arc::ptr_eq(full, channel));
                }
                // Not the channel's references: a vector's thread may hold one a little longer.
                let queues = &self.queues;
                let used = queues.values().any(|queue| queue.channel == Some(name));
                take(&mut self.completion_channels, name, |_| used)
            }
            Request::CreateQueue { device, depth, channel, vector } => {
                self.create_queue(device, depth, channel, vector).map(|(made, memory)| {
                    *descriptor = Some(memory);
                    made
                })
            }
            Request::CreateEventChannel => {
                let (made, end) = self.create_event_channel()?;
                *descriptor = Some(end);
                Ok(Reply::Made(made))
            }
            Request::DestroyEventChannel(name) => take(&mut self.event_channels, name, |_| false),
            Request::TakeEvent(channel) => self.take_event(channel),
            Request::AsyncEvents(device) => {
                *descriptor = Some(self.opened(device)?.events.end_for_program()?);
                Ok(Reply::Done)
            }
            Request::TakeAsyncEvent(device) => {
                let event = self.opened(device)?.device.next_event()?;
                Ok(Reply::AsyncEvent(event.map(translate::async_event)))
            }
            other => match self.perform_on_device(other) {
                Ok(done) => done,
                Err(other) => self.perform_on_identifier(&other),
            },
        };
        self.count();
        reply
    }

    /// Handles requests about objects of the device; returns any other request.
    fn perform_on_device<'a>(&mut self, request: Request<'a>) -> Result<Result<Reply, Refusal>, Request<'a>> {
        Ok(match request {
            Request::AllocateDomain(device) => self.allocate_domain(device),
            Request::FreeDomain(name) => take(&mut self.domains, name, |owned| owned.domain.is_used()),
            Request::Register { domain, at, address, len, access } => {
                self.register(domain, (at, address, len), access)
            }
            Request::Deregister(name) => {
                let len = self.regions.get(&name).map_or(0, |(_, len)| *len);
                let taken = take(&mut self.regions, name, |_| false);
                if taken.is_ok() {
                    self.info.registered.fetch_sub(len, Relaxed);
                }
                taken
            }
            Request::DestroyQueue(name) => take(&mut self.queues, name, |owned| owned.queue.is_used()),
            Request::CreatePair {
                domain,
                send_queue,
                receive_queue,
                shared,
                service,
                send_depth,
                receive_depth: recv_depth,
                inline,
            } => {
                let limits = QueuePairLimits { send_depth, recv_depth, inline };
                self.create_pair(domain, [send_queue, receive_queue], shared, service, limits)
            }
            Request::CreateShared { domain, depth, limit } => self.create_shared(domain, depth, limit),
            Request::DestroyShared(name) => take(&mut self.shared, name, SharedReceives::is_used),
            Request::SetSharedLimit { queue, limit } => find(&self.shared, queue)
                .and_then(|queue| Ok(queue.set_limit(limit).map(|()| Reply::Done)?)),
            Request::QueryShared(name) => {
                find(&self.shared, name).and_then(|queue| Ok(Reply::SharedLimit(queue.limit()?)))
            }
            Request::DestroyPair(name) => take(&mut self.pairs, name, |_| false),
            Request::SetTimeout { pair, timeout } => find(&self.pairs, pair)
                .and_then(|pair| Ok(pair.set_ack_timeout(timeout).map(|()| Reply::Done)?)),
            Request::SetAccess { pair, access } => find(&self.pairs, pair)
                .and_then(|pair| Ok(pair.set_rights(translate::rights(access)).map(|()| Reply::Done)?)),
            Request::SetKey { pair, key } => {
                find(&self.pairs, pair).and_then(|pair| Ok(pair.set_key(key).map(|()| Reply::Done)?))
            }
            Request::Modify { pair, to } => self.modify(pair, to),
            Request::QueryPair(name) => find(&self.pairs, name).and_then(|pair| {
                Ok(Reply::State { state: translate::state(pair.state()?), ends: pair.ends() })
            }),
            other => return Err(other),
        })
    }

    fn allocate_domain(&mut self, device: wire::Device) -> Result<Reply, Refusal> {
        room(&self.domains, MOST_OBJECTS)?;
        let domain = self.opened(device)?.device.create_domain()?;
        let name = self.name()?;
        self.domains.insert(name, OwnedDomain { device, domain });
        Ok(Reply::Made(name))
    }

    fn register(
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
        let memory = Arc::new(ProgramMemory { process: Arc::clone(&self.info.process), at });
        let region = domain.register_foreign(address, bytes, memory, access)?;
        let key = region.key();
        let name = self.name()?;
        self.regions.insert(name, (region, len));
        self.info.registered.fetch_add(len, Relaxed);
        Ok(Reply::Region { name, key })
    }

    fn create_queue(
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
        let records = match channel {
            Some(name) => Arc::clone(find(&self.completion_channels, name)?),
            None => Arc::clone(match &mut self.unread {
                Some(unread) => unread,
                none => none.insert(Arc::new(Records::new(&self.backlog)?.0)),
            }),
        };
        let pages = &self.info.pages;
        let (place, memory) = (Arc::new(pages.take()?), pages.descriptor()?);
        let queue = self.name()?;
        let signal = Arc::new(QueueSignal { queue, channel: records, vector });
        let device = &self.opened(device)?.device;
        let shown = Box::new(Shown::new(Arc::clone(&place)));
        let made = device.create_completion_queue(queue.into(), depth, signal, shown)?;
        let page = place.number;
        self.queues.insert(queue, OwnedQueue { queue: made, _page: place, channel });
        Ok((Reply::Queue { name: queue, page }, memory))
    }

    fn create_pair(
        &mut self,
        domain: Name,
        [sends, receives]: [Name; 2],
        shared: Option<Name>,
        service: wire::Service,
        mut limits: QueuePairLimits,
    ) -> Result<Reply, Refusal> {
        limits.inline = limits.inline.min(MAX_INLINE as u32);
        let name = self.name()?;
        let OwnedDomain { device, domain } = find(&self.domains, domain)?;
        let queues = [&find(&self.queues, sends)?.queue, &find(&self.queues, receives)?.queue];
        let shared = shared.map(|shared| find(&self.shared, shared)).transpose()?;
        let device = &self.opened(*device)?.device;
        let pair = device.create_queue_pair(
            name.into(),
            translate::service(service),
            domain,
            queues,
            shared,
            limits,
        )?;
        let (number, inline) = (pair.number(), pair.max_inline() as u32);
        self.pairs.insert(name, pair);
        Ok(Reply::Pair { name, number, inline })
    }

    fn modify(&self, pair: Name, to: wire::Transition) -> Result<Reply, Refusal> {
        let pair = find(&self.pairs, pair)?;
        if let wire::Transition::Timer(code) = to {
            pair.set_min_rnr_timer(RnrTimer::from_code(code).ok_or(Errno::INVAL)?)?;
        } else {
            pair.modify(translate::transition(to).ok_or(Errno::INVAL)?)?;
        }
        Ok(Reply::Done)
    }

    fn create_shared(&mut self, domain: Name, depth: u32, limit: u32) -> Result<Reply, Refusal> {
        room(&self.shared, MOST_OBJECTS)?;
        let name = self.name()?;
        let OwnedDomain { device, domain } = find(&self.domains, domain)?;
        let device = &self.opened(*device)?.device;
        let made = device.create_shared_receives(name.into(), domain, depth, limit)?;
        self.shared.insert(name, made);
        Ok(Reply::Made(name))
    }
}
