//! The fabric itself: one deterministic, single-threaded model.
//!
//! Nothing here reads a clock, starts a thread or opens a descriptor. Operations change the model
//! and schedule events on an [event queue](event_queue::EventQueue). [`Model::advance`] executes
//! what is due, in one total order, and [`Model::deadline`] returns the time of the next event.
//! Channels that may have sleepers are returned as [`Wake`]s. Two runs with the same calls at the
//! same times are the same.

mod arena;
mod bulk;
mod capture;
mod carried;
mod completions;
mod context;
mod datagrams;
mod event_queue;
mod events;
mod freight;
mod handshake;
mod host;
mod identifier;
mod memory;
mod mirror;
mod numbers;
mod objects;
mod ownership;
mod parts;
mod party;
mod queue_pair;
mod requester;
mod responder;
mod shared;
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use rdma_backend::AsyncEvent;
use rdma_backend::time::Instant;

use crate::settings::Parameters;
use arena::{Arena, Id};
pub(crate) use bulk::Bulk;
use completions::WorkQueue;
pub use completions::{Detail, Source};
use event_queue::EventQueue;
use numbers::Numbers;
use requester::Answer;

pub use context::About;
pub(crate) use events::NoticeKind;
pub(crate) use freight::Freight;
pub use memory::ForeignMemory;
pub(crate) use memory::{Bytes, Memory, Registration};
pub use mirror::{Arming, Calls, Look, Mirror};
pub(crate) use objects::PairAttributes;
pub(crate) use parts::{Part, Parts};
pub(crate) use queue_pair::{PostedReceive, PostedSend, QueuePairState, Request};
pub(crate) use simulation::SimulationState;

pub(crate) type HostId = Id<host::Host>;
pub(crate) type ContextId = Id<context::Context>;
pub(crate) type ChannelId = Id<events::EventChannel>;
pub(crate) type IdentifierId = Id<identifier::Identifier>;
pub(crate) type DomainId = Id<memory::Domain>;
pub(crate) type RegionId = Id<memory::Region>;
pub(crate) type QueueId = Id<completions::CompletionQueue>;
pub(crate) type SharedId = Id<shared::SharedQueue>;
pub(crate) type PairId = Id<queue_pair::QueuePair>;

/// A channel that became readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wake {
    Events(ChannelId),
    Completions(QueueId),
    /// Asynchronous events of an opened device.
    Asynchronous(ContextId),
}

/// A scheduled event.
enum Event {
    /// A message reaches the peer.
    Arrive { from: PairId, epoch: u32, sequence: u64 },
    /// An answer comes back.
    Answer { to: PairId, epoch: u32, sequence: u64, answer: Answer },
    /// The delay of an RNR NAK has passed.
    Again { pair: PairId, epoch: u32 },
    /// The acknowledgement timer ends.
    Timeout { pair: PairId, epoch: u32 },
    /// Look for messages whose bytes are late.
    Sweep,
    /// A completion queue was overrun.
    Overrun(QueueId),
    /// Address or route resolution ends.
    Resolved { id: IdentifierId, resolution: u64, how: NoticeKind },
    /// A message of the connection manager arrives.
    Packet(Box<handshake::Packet>),
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

pub(crate) struct Model {
    parameters: Parameters,
    event_queue: EventQueue<Event>,
    hosts: Arena<host::Host>,
    down: BTreeSet<IpAddr>,
    contexts: Arena<context::Context>,
    channels: Arena<events::EventChannel>,
    identifiers: Arena<identifier::Identifier>,
    domains: Arena<memory::Domain>,
    regions: Arena<memory::Region>,
    queues: Arena<completions::CompletionQueue>,
    shared: Arena<shared::SharedQueue>,
    pairs: Arena<queue_pair::QueuePair>,
    wakes: Vec<Wake>,
    /// Bytes of long messages to copy.
    bulks: VecDeque<Bulk>,
    /// Bytes of messages with an end in another process to move.
    freights: VecDeque<Freight>,
    /// Whether a driver does either, so that it need not be done at once.
    carries: bool,
    /// Messages whose bytes are in flight, by number.
    carried: BTreeMap<u64, carried::Carried>,
    /// Number of all such messages.
    freight_count: u64,
    /// What they share.
    store: Arc<freight::Store>,
    /// When the next sweep for late ones is.
    sweep: Option<Instant>,
    /// Identifiers ever created: the next key.
    keys: u64,
    numbers: Numbers,
    /// Regions ever registered, modulo the width of the key.
    registrations: u8,
    /// Bytes of address space ever given to regions.
    address_space: u64,
    capture: Option<Box<dyn crate::Capture>>,
    simulation: Option<Box<SimulationState>>,
}

impl Model {
    pub(crate) fn new(parameters: Parameters) -> Self {
        Self {
            parameters,
            event_queue: EventQueue::new(),
            hosts: Arena::new(),
            down: BTreeSet::new(),
            contexts: Arena::new(),
            channels: Arena::new(),
            identifiers: Arena::new(),
            domains: Arena::new(),
            regions: Arena::new(),
            queues: Arena::new(),
            shared: Arena::new(),
            pairs: Arena::new(),
            wakes: Vec::new(),
            bulks: VecDeque::new(),
            freights: VecDeque::new(),
            carries: false,
            carried: BTreeMap::new(),
            freight_count: 0,
            store: Arc::default(),
            sweep: None,
            keys: 0,
            numbers: Numbers::default(),
            registrations: 0,
            address_space: 0,
            capture: None,
            simulation: None,
        }
    }

    /// Executes everything that is due at `now`, in order of time. Time does not go back: an
    /// earlier `now` counts as the latest one seen.
    pub(crate) fn advance(&mut self, now: Instant) {
        while let Some(event) = self.event_queue.next(now) {
            self.happen(event);
        }
    }

    fn happen(&mut self, event: Event) {
        self.count_event();
        match event {
            Event::Arrive { from, epoch, sequence } => self.arrive(from, epoch, sequence),
            Event::Answer { to, epoch, sequence, answer } => self.answered(to, epoch, sequence, answer),
            Event::Again { pair, epoch } => self.again(pair, epoch),
            Event::Timeout { pair, epoch } => self.timed_out(pair, epoch),
            Event::Sweep => self.sweep(),
            Event::Overrun(queue) => self.overrun(queue),
            Event::Resolved { id, resolution, how } => self.resolved(id, resolution, how),
            Event::Packet(packet) => self.packet(packet),
            Event::TimewaitExit(id) => self.notify(id, NoticeKind::TimewaitExit),
            Event::Report { pair, of } => self.report_held(pair, of),
            Event::Flush(pair) => {
                // If it was reset meanwhile, it has nothing to flush.
                if self.pairs.get(pair).is_some_and(|pair| pair.state == QueuePairState::Error) {
                    self.flush(pair);
                }
            }
            Event::PairUp(pair) => {
                if let Some(pair) = self.pairs.get_mut(pair) {
                    pair.cut = false;
                }
            }
            Event::LinkUp(host) => {
                for address in self.addresses(host) {
                    self.set_link(address, crate::settings::Link::Up);
                }
                self.tell_all(host, NoticeKind::Async(AsyncEvent::PortActive));
            }
        }
    }

    pub(crate) const fn now(&self) -> Instant {
        self.event_queue.now()
    }

    /// Executes what is due without moving the clock.
    pub(crate) fn settle(&mut self) {
        self.advance(self.event_queue.now());
    }

    /// Returns when [`Model::advance`] has something to do next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.event_queue.deadline()
    }

    pub(crate) fn wakes(&mut self) -> std::vec::Drain<'_, Wake> {
        self.wakes.drain(..)
    }
}
