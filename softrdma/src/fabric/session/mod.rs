//! A session: one program's objects, and the requests about them.
//!
//! A program may send anything. Objects are looked up by name among its own only, the model checks
//! each request, and each object is taken from the program's account before it is made.

mod manager;
mod objects;
mod posting;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rdma_backend::{IdentifierKey, QueuePairLimits};
use rdma_softsim::{Device, Error, Signal, SoftSim, footprint};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use softrdma_wire::{self as wire, Amounts, Exceeded, Name, Reply, Request};

use super::budget::{Program, Taken};
use super::memory::Process;
use super::pages::{Pages, Posted};
use super::signals::{Backlog, Level, Records};
use super::translate;
use super::vectors::Vectors;
use objects::{OwnedDomain, OwnedPair, OwnedQueue, OwnedReceives, OwnedRecords, OwnedRegion};

/// What a descriptor on which a program waits for events takes, with what has the events.
const LEVEL: Amounts = Amounts { memory: footprint::OBJECT, descriptors: 2, sessions: 0 };

/// The answer to a request, and its descriptor.
pub(super) struct Answer {
    pub(super) reply: Reply,
    pub(super) descriptor: Option<OwnedFd>,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal {
    /// An `errno`.
    Errno(i32),
    /// A bound is in the way.
    Exceeded(Exceeded),
}

impl From<Refusal> for Reply {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Errno(errno) => Self::Refused(errno),
            Refusal::Exceeded(exceeded) => Self::Exceeded(exceeded),
        }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Errno(translate::errno(&error))
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno.raw_os_error())
    }
}

impl From<Exceeded> for Refusal {
    fn from(exceeded: Exceeded) -> Self {
        Self::Exceeded(exceeded)
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
    pairs: BTreeMap<Name, OwnedPair>,
    identifiers: BTreeMap<Name, manager::Owned>,
    event_channels: BTreeMap<Name, manager::Channel>,
    shared: BTreeMap<Name, OwnedReceives>,
    queues: BTreeMap<Name, OwnedQueue>,
    regions: BTreeMap<Name, OwnedRegion>,
    domains: BTreeMap<Name, OwnedDomain>,
    completion_channels: BTreeMap<Name, OwnedRecords>,
    /// The channel for completion queues without one. It is never read, so their events are
    /// discarded. Made for the first such queue.
    unread: Option<OwnedRecords>,
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

/// One of the machine's devices.
struct Opened {
    host: SoftSim,
    device: Device,
    events: Arc<Level>,
    _taken: Taken,
}

impl Opened {
    fn open(host: &SoftSim, program: &Arc<Program>) -> Result<Self, Refusal> {
        let taken = program.take(Amounts { memory: footprint::CONTEXT, ..LEVEL })?;
        let events = Arc::new(Level::new()?);
        let signal: Arc<dyn Signal> = Arc::<Level>::clone(&events);
        let device = host.open(signal).map_err(|_| Errno::NODEV)?;
        Ok(Self { host: host.clone(), device, events, _taken: taken })
    }
}

fn find<T>(objects: &BTreeMap<Name, T>, name: Name) -> Result<&T, Refusal> {
    Ok(objects.get(&name).ok_or(Errno::INVAL)?)
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
    ) -> Result<Self, Refusal> {
        let program = info.process.program();
        let devices = machine.iter().map(|host| Opened::open(host, program)).collect::<Result<_, _>>()?;
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
            devices,
            posts: Posted::new(Arc::clone(&info.pages)),
            info,
            names: above,
            vectors,
        })
    }

    fn name(&mut self) -> Result<Name, Refusal> {
        self.names = self.names.checked_add(1).ok_or(Errno::NOMEM)?;
        Ok(self.names)
    }

    /// Takes the program's memory for an object.
    fn take_memory(&self, bytes: u64) -> Result<Taken, Refusal> {
        Ok(self.info.process.program().take_memory(bytes)?)
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
        let channels = self.completion_channels.values().chain(&self.unread).map(|owned| &owned.records);
        self.full = channels.filter(|channel| channel.is_full()).map(Arc::clone).collect();
        self.full.retain(|channel| {
            channel.flush();
            channel.is_full()
        });
    }

    fn opened(&self, device: wire::Device) -> Result<&Opened, Refusal> {
        Ok(self.devices.get(device as usize).ok_or(Errno::NODEV)?)
    }

    pub(super) fn answer(&mut self, request: Request<'_>, brought: Option<OwnedFd>) -> Answer {
        let reply = match (request, brought) {
            (Request::ShowMemory { at, number }, _none) => self.info.process.show(at, number),
            (Request::OfferMemory, Some(socket)) => self.info.process.take_offer(socket),
            (request, _) => return self.asked(request),
        };
        let reply = reply.map_or_else(|errno| Reply::Refused(errno.raw_os_error()), |()| Reply::Done);
        Answer { reply, descriptor: None }
    }

    fn asked(&mut self, request: Request<'_>) -> Answer {
        let mut descriptor = None;
        let reply = self.perform(request, &mut descriptor);
        self.info.requests.fetch_add(1, Relaxed);
        let reply = reply.unwrap_or_else(Reply::from);
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
            | Request::ShowMemory { .. }
            | Request::OfferMemory
            | Request::Doorbell
            | Request::Record => Err(Errno::INVAL.into()),
            Request::CreateCompletionChannel => {
                let (channel, end) = OwnedRecords::new(self.info.process.program(), &self.backlog)?;
                *descriptor = Some(end);
                let name = self.name()?;
                self.completion_channels.insert(name, channel);
                Ok(Reply::Made(name))
            }
            Request::DestroyCompletionChannel(name) => {
                if let Some(channel) = self.completion_channels.get(&name) {
                    self.full.retain(|full| !Arc::ptr_eq(full, &channel.records));
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
            Request::Deregister(name) => self.deregister(name),
            Request::DestroyQueue(name) => take(&mut self.queues, name, |owned| owned.queue.is_used()),
            Request::CreatePair {
                domain,
                send_queue,
                receive_queue,
                shared,
                service,
                send_depth,
                receive_depth: recv_depth,
                elements,
                inline,
            } => {
                let limits = QueuePairLimits { send_depth, recv_depth, inline };
                self.create_pair(domain, [send_queue, receive_queue], shared, service, (limits, elements))
            }
            Request::CreateShared { domain, depth, limit, elements } => {
                self.create_shared(domain, depth, limit, elements)
            }
            Request::DestroyShared(name) => take(&mut self.shared, name, |owned| owned.queue.is_used()),
            Request::SetSharedLimit { queue, limit } => find(&self.shared, queue)
                .and_then(|owned| Ok(owned.queue.set_limit(limit).map(|()| Reply::Done)?)),
            Request::QueryShared(name) => {
                find(&self.shared, name).and_then(|owned| Ok(Reply::SharedLimit(owned.queue.limit()?)))
            }
            Request::DestroyPair(name) => self.pair(name).and_then(|pair| Ok(pair.destroy()?)).map(|()| {
                self.pairs.remove(&name);
                Reply::Done
            }),
            Request::SetTimeout { pair, timeout } => {
                self.pair(pair).and_then(|pair| Ok(pair.set_ack_timeout(timeout).map(|()| Reply::Done)?))
            }
            Request::SetAccess { pair, access } => self
                .pair(pair)
                .and_then(|pair| Ok(pair.set_rights(translate::rights(access)).map(|()| Reply::Done)?)),
            Request::SetKey { pair, key } => {
                self.pair(pair).and_then(|pair| Ok(pair.set_key(key).map(|()| Reply::Done)?))
            }
            Request::Modify { pair, to } => self.modify(pair, to),
            Request::QueryPair(name) => self.pair(name).and_then(|pair| {
                Ok(Reply::State { state: translate::state(pair.state()?), ends: pair.ends() })
            }),
            other => return Err(other),
        })
    }
}
