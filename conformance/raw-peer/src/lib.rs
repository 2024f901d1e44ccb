//! A peer of raw verbs. It connects from either side, reports input, and follows a script.
//!
//! It uses the backend seam directly and follows no rule of the protocol by itself, so that it can
//! misbehave. Nothing here blocks: the driver waits on [`Connecting::events`], [`Session::events`]
//! and [`Session::completions`], in real or in virtual time. A deviation is a list of [`Step`]s.

mod connecting;

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;

use rdma_backend::{
    Access, Backend, CmEvent, CmEventKind, Completed, Completion, CompletionQueue, CompletionStatus,
    ConnectParams, Domain, EventChannel, Identifier, QueuePair, QueuePairLimits, RecvRequest, Region,
    RnrTimer, SendOp, SendRequest, Slice,
};
use rdma_proto::wire::Window;

pub use connecting::{Candidate, Connecting, Progress, no_way};

/// Bytes of each receive: enough to see all of a message that is too long.
pub const SLOT: usize = 64;

/// Work request ids of receives have this bit; the rest is the slot.
const RECEIVE: u64 = 1 << 32;

/// The sizes of a session.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Depth of the send queue.
    pub sends: u32,
    /// Depth of the receive queue, and places for receives.
    pub receives: u32,
    /// Bytes of memory that the peer may access.
    pub window: usize,
    /// The permitted access: writes, in Valkey over RDMA.
    pub access: Access,
    /// Bytes that may be in flight.
    pub outbox: usize,
}

/// A peer's offer in its connect request or in its acceptance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its parameters.
    pub params: ConnectParams,
    /// Its private data, with a transport's trailing zeros.
    pub private_data: Box<[u8]>,
}

/// Input from the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// The connection is established. The peer offered this.
    Established(Offer),
    /// A SEND, with its bytes.
    Message(Vec<u8>),
    /// A WRITE with this immediate.
    Notified(u32),
    /// The answer to a READ.
    Read,
    /// Another request was acknowledged.
    Sent,
    /// A request or a receive failed.
    Failed(CompletionStatus),
    /// The connection has ended, or was not established.
    Gone(&'static str),
}

impl fmt::Display for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Established(_) => f.write_str("the connection"),
            Self::Message(bytes) => write!(f, "a SEND of {} bytes", bytes.len()),
            Self::Notified(immediate) => write!(f, "a WRITE with immediate {immediate}"),
            Self::Read => f.write_str("the answer to a READ"),
            Self::Sent => f.write_str("an acknowledgement"),
            Self::Failed(status) => write!(f, "a failure, {status:?}"),
            Self::Gone(why) => f.write_str(why),
        }
    }
}

/// One step of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Posts a request with these bytes, or a READ of as many.
    Post(SendOp, Vec<u8>),
    /// Posts as many receives, while there are places.
    Receive(usize),
    /// Deregisters the memory that the peer may access.
    Withdraw,
    /// Registers other memory in its place.
    Register(usize),
    /// Ends the connection.
    Disconnect,
    /// Destroys the queue pair without a disconnect, like a host that loses power.
    LoseQueuePair,
}

/// The reason for which a step failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused<E> {
    /// The queue pair is gone.
    NoQueuePair,
    /// More bytes are in flight than the outbox holds.
    NoRoom,
    /// The backend refused it.
    Backend(E),
}

impl<E: fmt::Display> fmt::Display for Refused<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoQueuePair => f.write_str("there is no queue pair"),
            Self::NoRoom => f.write_str("more is in flight than the outbox holds"),
            Self::Backend(error) => error.fmt(f),
        }
    }
}

impl<E> From<E> for Refused<E> {
    fn from(error: E) -> Self {
        Self::Backend(error)
    }
}

/// A connection, established or not yet. Fields are dropped in this order.
pub struct Session<B: Backend> {
    pair: Option<B::QueuePair>,
    completions: B::CompletionQueue,
    inbox: B::Region,
    outbox: B::Region,
    window: Option<B::Region>,
    id: B::Identifier,
    events: B::EventChannel,
    domain: B::Domain,
    shape: Shape,
    /// Bytes of the outbox used since nothing was in flight, and requests in flight.
    stowed: usize,
    outstanding: usize,
    unsuccessful: usize,
    /// Places for receives that are not posted.
    free: Vec<u64>,
    incoming: VecDeque<Incoming>,
    /// Whether a receive is posted again once it is used.
    pub reposts: bool,
}

impl<B: Backend> Session<B> {
    /// Creates what a queue pair of `id` needs; its events come in `events`.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(id: B::Identifier, events: B::EventChannel, shape: Shape) -> Result<Self, B::Error> {
        let Shape { sends, receives, window, access, outbox } = shape;
        let domain = id.create_domain()?;
        let inbox = domain.register(receives as usize * SLOT, Access::LOCAL_WRITE)?;
        let outbox = domain.register(outbox, Access::LOCAL_WRITE)?;
        let window = domain.register(window, access)?;
        let completions = id.create_completion_queue(sends.saturating_add(receives), 0)?;
        Ok(Self {
            pair: None,
            shape,
            completions,
            inbox,
            outbox,
            window: Some(window),
            id,
            events,
            domain,
            stowed: 0,
            outstanding: 0,
            unsuccessful: 0,
            free: (0..u64::from(receives)).rev().collect(),
            incoming: VecDeque::new(),
            reposts: false,
        })
    }

    /// Creates the queue pair. Posts no receive.
    ///
    /// # Errors
    /// The backend's; the peer may have gone meanwhile.
    pub fn create_queue_pair(&mut self) -> Result<(), B::Error> {
        let Shape { sends, receives, .. } = self.shape;
        let limits = QueuePairLimits { send_depth: sends, recv_depth: receives, inline: 0 };
        self.pair = Some(self.id.create_queue_pair(&self.domain, &self.completions, limits)?);
        Ok(())
    }

    /// Returns the address that its connection comes from.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local_addr()
    }

    /// Returns the channel of connection events.
    pub const fn events(&self) -> &B::EventChannel {
        &self.events
    }

    /// Returns the completion queue.
    pub const fn completions(&self) -> &B::CompletionQueue {
        &self.completions
    }

    /// Sets how soon the other side may repeat a request that found no receive here. The connection
    /// must be established.
    ///
    /// # Errors
    /// The backend's.
    pub fn set_min_rnr_timer(&self, timer: RnrTimer) -> Result<(), B::Error> {
        self.pair.as_ref().map_or(Ok(()), |pair| pair.set_min_rnr_timer(timer))
    }

    /// Returns the number of requests that have not completed.
    pub const fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Returns how many requests completed with an error, flushed ones included.
    pub const fn unsuccessful(&self) -> usize {
        self.unsuccessful
    }

    /// Returns the region that the peer may access.
    pub const fn window(&self) -> Option<&B::Region> {
        self.window.as_ref()
    }

    /// Returns the region from which it sends.
    pub const fn outbox(&self) -> &B::Region {
        &self.outbox
    }

    /// Registers more memory that the other side may write to.
    ///
    /// # Errors
    /// The backend's.
    pub fn register(&self, len: usize) -> Result<B::Region, B::Error> {
        self.domain.register(len, Access::REMOTE_WRITE)
    }

    /// Returns the region that the peer may access, as a window.
    pub fn own_window(&self) -> Option<Window> {
        let region = self.window.as_ref()?;
        let length = u32::try_from(region.len()).unwrap_or(u32::MAX);
        Some(Window { address: region.address(), length, rkey: region.rkey() })
    }

    /// Requests an event for the next completion. Poll once more afterwards: one may be there.
    ///
    /// # Errors
    /// The backend's.
    pub fn arm(&self) -> Result<(), B::Error> {
        self.completions.take_events()?;
        self.completions.arm()
    }

    /// Returns the next incoming event, if there is one.
    ///
    /// # Errors
    /// The backend's.
    pub fn poll(&mut self) -> Result<Option<Incoming>, B::Error> {
        if self.incoming.is_empty() {
            self.collect()?;
        }
        Ok(self.incoming.pop_front())
    }

    /// Takes all input, completions before events: messages that the peer sent before its
    /// disconnect may have arrived since the queue was found empty (VR-CLOSE-002).
    fn collect(&mut self) -> Result<(), B::Error> {
        self.drain()?;
        while let Some(event) = self.events.next_event()? {
            self.drain()?;
            self.incoming.extend(told(event));
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), B::Error> {
        let mut batch = [Completion::EMPTY; 32];
        loop {
            let count = self.completions.poll(&mut batch)?;
            for completion in batch.iter().take(count) {
                self.completed(completion);
            }
            if count < batch.len() {
                return Ok(());
            }
        }
    }

    fn completed(&mut self, completion: &Completion) {
        let slot = completion.id.checked_sub(RECEIVE);
        if slot.is_none() {
            self.outstanding = self.outstanding.saturating_sub(1);
            self.unsuccessful += usize::from(completion.result.is_err());
        }
        self.incoming.push_back(match completion.result {
            Ok(Completed::Recv { len, .. }) => Incoming::Message(self.received(slot, len)),
            Ok(Completed::RecvWrite { immediate }) => Incoming::Notified(immediate.0),
            Ok(Completed::Read) => Incoming::Read,
            Ok(Completed::Send | Completed::Write) => Incoming::Sent,
            Err(error) => Incoming::Failed(error.status),
        });
        if let (Some(slot), Ok(_)) = (slot, completion.result) {
            self.free.push(slot);
            if self.reposts {
                // It fails when the connection has ended, which is reported otherwise.
                let _ended = self.receive(1);
            }
        }
    }

    fn received(&self, slot: Option<u64>, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let inside = slot.is_some_and(|slot| self.inbox.memory().read(slot as usize * SLOT, &mut bytes));
        if inside { bytes } else { Vec::new() }
    }

    /// Runs a step of a script.
    ///
    /// # Errors
    /// The reason for which it failed.
    pub fn take(&mut self, step: Step) -> Result<(), Refused<B::Error>> {
        match step {
            Step::Post(op, bytes) => self.post(&[(op, &bytes)])?,
            Step::Receive(count) => self.receive(count)?,
            Step::Withdraw => self.window = None,
            Step::Register(len) => self.window = Some(self.domain.register(len, self.shape.access)?),
            Step::Disconnect => self.disconnect()?,
            Step::LoseQueuePair => self.pair = None,
        }
        Ok(())
    }

    /// Posts requests with one doorbell, each with its bytes; a READ reads as many.
    ///
    /// # Errors
    /// The reason for which they were not posted.
    pub fn post(&mut self, requests: &[(SendOp, &[u8])]) -> Result<(), Refused<B::Error>> {
        let pair = self.pair.as_ref().ok_or(Refused::NoQueuePair)?;
        let mut offset = if self.outstanding == 0 { 0 } else { self.stowed };
        let mut chain = Vec::with_capacity(requests.len());
        for &(op, bytes) in requests {
            if !self.outbox.memory().write(offset, bytes) {
                return Err(Refused::NoRoom);
            }
            let local = Slice { region: &self.outbox, offset, len: bytes.len() };
            chain.push(SendRequest { id: 0, op, local, signaled: true, inline: false });
            offset += bytes.len();
        }
        let posted = pair.post_send(&chain).map_err(|error| (error.posted, error.error));
        self.stowed = offset;
        self.outstanding += posted.as_ref().map_or_else(|(posted, _)| *posted, |()| requests.len());
        Ok(posted.map_err(|(_, error)| error)?)
    }

    fn receive(&mut self, count: usize) -> Result<(), Refused<B::Error>> {
        let pair = self.pair.as_ref().ok_or(Refused::NoQueuePair)?;
        let slots = self.free.split_off(self.free.len().saturating_sub(count));
        let request = |slot: &u64| RecvRequest {
            id: RECEIVE | slot,
            local: Slice { region: &self.inbox, offset: *slot as usize * SLOT, len: SLOT },
        };
        let chain: Vec<_> = slots.iter().rev().map(request).collect();
        pair.post_recv(&chain).map_err(|error| error.error)?;
        Ok(())
    }

    /// Ends the connection.
    ///
    /// # Errors
    /// The backend's.
    pub fn disconnect(&self) -> Result<(), B::Error> {
        self.id.disconnect()
    }

    /// Asks the peer for a connection, with these parameters.
    ///
    /// # Errors
    /// The backend's.
    pub fn connect(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), B::Error> {
        self.id.connect(params, private_data)
    }

    /// Accepts the peer's request, with these parameters.
    ///
    /// # Errors
    /// The backend's.
    pub fn accept(&self, params: &ConnectParams, private_data: &[u8]) -> Result<(), B::Error> {
        self.id.accept(params, private_data)
    }
}

fn told<B: Backend>(event: CmEvent<B>) -> Option<Incoming> {
    let private_data = event.private_data;
    Some(match event.kind {
        CmEventKind::Established { peer: params } => Incoming::Established(Offer { params, private_data }),
        CmEventKind::Disconnected => Incoming::Gone("disconnected"),
        CmEventKind::Rejected { .. } => Incoming::Gone("rejected"),
        CmEventKind::Unreachable { .. } | CmEventKind::ConnectError { .. } => Incoming::Gone("no answer"),
        CmEventKind::DeviceRemoval => Incoming::Gone("the device was removed"),
        _ => return None,
    })
}
