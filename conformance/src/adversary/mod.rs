//! A raw peer: correct unless told otherwise, so that each case deviates in exactly one thing.
//!
//! It uses the backend seam directly, because the libraries above it would not let it misbehave. What it does right by
//! itself: [`Adversary::handshake`], [`Adversary::say`] and [`Adversary::hear`]. Everything else sends what it is told.
//! Whatever waits has a deadline.

mod connect;
mod seen;
mod talk;
mod wait;

use std::collections::VecDeque;
use std::time::Duration;

use rdma_conn::Descriptors;
use rdma_proto::backend::{
    Completed, Completion, CompletionQueue, CompletionStatus, ConnectParams, ErrorKind, EventChannel,
    Failure as _, Identifier, Immediate, QueuePair, RNR_RETRY_INFINITE, RecvRequest, Region, RemoteAddress,
    SendOp, SendRequest, Slice,
};
use rdma_proto::wire::{Message, Window};

use crate::client::Failure;

pub use connect::Lurker;
pub use seen::{Breach, Seen};
use wait::{Deadline, wrong};

/// How long the adversary waits for anything. Long enough for a device in software on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// Work request ids of receives have this bit; the rest is the slot.
const RECEIVE: u64 = 1 << 32;

/// How an adversary is built.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Depth of the send queue.
    pub sends: u32,
    /// Receives posted, each posted again once used, unless [`Adversary::reposts`] says otherwise.
    pub receives: u32,
    /// Bytes of memory to register windows in.
    pub window: u32,
    /// What it says when connecting.
    pub params: ConnectParams,
    /// What it says besides.
    pub private_data: &'static [u8],
    /// How long it waits for anything.
    pub patience: Duration,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            sends: 512,
            receives: 1024,
            window: 64 << 10,
            params: ConnectParams {
                responder_resources: 1,
                initiator_depth: 1,
                // Soft-RoCE takes 7 for endless.
                retry_count: 6,
                rnr_retry_count: RNR_RETRY_INFINITE,
            },
            private_data: &[],
            patience: PATIENCE,
        }
    }
}

impl Shape {
    /// With room for windows of this length.
    #[must_use]
    pub const fn window(self, window: u32) -> Self {
        Self { window, ..self }
    }

    /// With little of everything, where many are wanted.
    pub fn small() -> Self {
        Self { sends: 16, ..Self::default().receives(64) }
    }

    /// With this many receives posted.
    #[must_use]
    pub const fn receives(self, receives: u32) -> Self {
        Self { receives, ..self }
    }

    /// With a peer that gives up at once when it finds no receive, as one connected to a Valkey server does.
    #[must_use]
    pub const fn without_rnr_retries(self) -> Self {
        Self { params: ConnectParams { rnr_retry_count: 0, ..self.params }, ..self }
    }
}

/// Something that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A SEND, with its bytes.
    Message(Vec<u8>),
    /// A WRITE with this immediate.
    Notified(u32),
    /// The answer to a READ.
    Read,
    /// A work request failed, and not in the wake of another.
    Failed(CompletionStatus),
    /// The connection has ended, or did not come about.
    Gone(&'static str),
}

/// A raw peer with one connection.
pub struct Adversary<B: Descriptors> {
    /// Gone once [`Adversary::lose_queue_pair`] was called.
    pair: Option<B::QueuePair>,
    id: B::Identifier,
    queue: B::CompletionQueue,
    inbox: B::Region,
    outbox: B::Region,
    window: B::Region,
    events: B::EventChannel,
    shape: Shape,
    /// Bytes of the outbox used since it was last empty.
    stowed: usize,
    outstanding: u32,
    established: bool,
    incoming: VecDeque<Incoming>,
    /// Whether used receives are posted again.
    pub reposts: bool,
    /// Whether a window that was filled is registered anew.
    pub drains: bool,
    /// Parts of its memory (offset, length) to register in turn, each once the one before is full.
    pub plan: Vec<(u32, u32)>,
    turn: usize,
    /// Bytes taken out of the current part.
    taken: u32,
    heard: Vec<u8>,
    theirs: Option<Window>,
    used: u32,
    keepalives: u64,
    /// Whether it answers questions for features, as a server does.
    pub serves: bool,
    /// Whether it has given the peer a window.
    registered: bool,
    offered: Option<ConnectParams>,
    /// What the peer did so far.
    pub seen: Seen,
}

impl<B: Descriptors> Adversary<B> {
    /// Sends bytes as one message.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.post(&[(SendOp::Send, bytes)])
    }

    /// Sends a message that is one.
    pub fn message(&mut self, message: Message) -> Result<(), Failure> {
        self.send(&message.encode())
    }

    /// Sends messages with one doorbell.
    pub fn burst(&mut self, messages: &[Message]) -> Result<(), Failure> {
        let bytes: Vec<_> = messages.iter().map(Message::encode).collect();
        let requests: Vec<_> = bytes.iter().map(|bytes| (SendOp::Send, &bytes[..])).collect();
        // At most half of the send queue at a time, so that there is room for the whole.
        requests.chunks(self.shape.sends as usize / 2).try_for_each(|chunk| self.post(chunk))
    }

    /// Sends bytes as one message that has an immediate.
    pub fn send_immediate(&mut self, bytes: &[u8], immediate: u32) -> Result<(), Failure> {
        self.post(&[(SendOp::SendImmediate(Immediate(immediate)), bytes)])
    }

    /// Writes, and says nothing about it.
    pub fn write(&mut self, to: RemoteAddress, bytes: &[u8]) -> Result<(), Failure> {
        self.post(&[(SendOp::Write(to), bytes)])
    }

    /// Writes, and says that it was `immediate` bytes.
    pub fn write_immediate(
        &mut self,
        to: RemoteAddress,
        bytes: &[u8],
        immediate: u32,
    ) -> Result<(), Failure> {
        self.post(&[(SendOp::WriteImmediate(to, Immediate(immediate)), bytes)])
    }

    /// Notifies `immediate` bytes without writing any.
    pub fn notify(&mut self, immediate: u32) -> Result<(), Failure> {
        self.write_immediate(RemoteAddress { address: 0, rkey: 0 }, &[], immediate)
    }

    /// Reads the peer's memory.
    pub fn read(&mut self, from: RemoteAddress, len: usize) -> Result<(), Failure> {
        self.post(&[(SendOp::Read(from), &vec![0; len])])
    }

    /// Its own memory as a window: what a correct registration says.
    pub fn own_window(&self) -> Window {
        Window { address: self.window.address(), length: self.shape.window, rkey: self.window.rkey() }
    }

    /// Memory of its own that nobody else may write to, as a window.
    pub fn locked_window(&self) -> Window {
        Window { address: self.outbox.address(), length: self.shape.window, rkey: self.outbox.rkey() }
    }

    /// What the peer offered when the connection was made.
    pub const fn offered(&self) -> Option<ConnectParams> {
        self.offered
    }

    /// Takes what the peer offered in its request, which the event of the connection does not repeat.
    pub(crate) const fn was_offered(&mut self, params: ConnectParams) {
        self.offered = Some(params);
    }

    /// Changes how long it waits for anything.
    pub const fn set_patience(&mut self, patience: Duration) {
        self.shape.patience = patience;
    }

    /// Fills its memory for windows with one byte.
    pub fn paint(&self, byte: u8) {
        let inside = self.window.memory().write(0, &vec![byte; self.window.len()]);
        debug_assert!(inside, "as long as the region");
    }

    /// Whether its memory for windows still has this byte everywhere from `offset` on.
    pub fn is_painted(&self, byte: u8, offset: usize) -> bool {
        let mut bytes = vec![0; self.window.len().saturating_sub(offset)];
        self.window.memory().read(offset, &mut bytes) && bytes.iter().all(|one| *one == byte)
    }

    /// Ends the connection.
    pub fn disconnect(&self) -> Result<(), Failure> {
        self.id.disconnect().map_err(wrong("disconnecting"))
    }

    /// Destroys the queue pair and tells nobody: as a host that has lost its memory.
    pub fn lose_queue_pair(&mut self) {
        self.pair = None;
    }

    /// What comes next.
    pub fn receive(&mut self) -> Result<Incoming, Failure> {
        let patience = self.shape.patience;
        self.receive_within(patience)?
            .ok_or_else(|| Failure::wrong(format!("nothing came within {patience:?}")))
    }

    /// What comes next within `patience`, if anything does.
    pub fn receive_within(&mut self, patience: Duration) -> Result<Option<Incoming>, Failure> {
        let deadline = Deadline::after(patience);
        loop {
            if let Some(incoming) = self.incoming.pop_front() {
                return Ok(Some(incoming));
            }
            if !self.step(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Waits until everything sent was acknowledged, or failed.
    pub fn settle(&mut self) -> Result<(), Failure> {
        let patience = self.shape.patience;
        let deadline = Deadline::after(patience);
        while self.outstanding > 0 {
            if !self.step(deadline)? {
                return Err(Failure::wrong(format!("no acknowledgement within {patience:?}")));
            }
        }
        Ok(())
    }

    fn post(&mut self, requests: &[(SendOp, &[u8])]) -> Result<(), Failure> {
        let bytes: usize = requests.iter().map(|(_, bytes)| bytes.len()).sum();
        let count = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        if self.stowed + bytes > self.outbox.len() || self.outstanding + count > self.shape.sends {
            self.settle()?;
        }
        if self.outstanding == 0 {
            self.stowed = 0;
        }
        let mut chain = Vec::with_capacity(requests.len());
        for (op, bytes) in requests {
            let is_message = matches!(op, SendOp::Send | SendOp::SendImmediate(_));
            self.registered |=
                is_message && matches!(Message::decode(bytes), Ok(Message::RegisterXferMemory(_)));
            let local = Slice { region: &self.outbox, offset: self.stowed, len: bytes.len() };
            if !self.outbox.memory().write(self.stowed, bytes) {
                return Err(Failure::wrong("more to send than the outbox holds"));
            }
            self.stowed += bytes.len();
            chain.push(SendRequest { id: 0, op: *op, local, signaled: true, inline: false });
        }
        let pair = self.pair.as_ref().ok_or_else(|| Failure::wrong("the adversary lost its queue pair"))?;
        pair.post_send(&chain).map_err(|error| match error.error.kind() {
            ErrorKind::State => Failure::wrong("the connection ended before all was sent"),
            _ => wrong("posting")(error.error),
        })?;
        self.outstanding += count;
        Ok(())
    }

    /// Takes what has come; waits for something if nothing has. False at the deadline.
    fn step(&mut self, deadline: Deadline) -> Result<bool, Failure> {
        loop {
            self.queue.arm().map_err(wrong("arming the completion queue"))?;
            if self.collect()? {
                return Ok(true);
            }
            if !deadline.wait(&self.queue, &self.events)? {
                return Ok(false);
            }
            self.queue.take_events().map_err(wrong("taking completion events"))?;
        }
    }

    /// Takes what has come, in the order in which it came. Whether there was anything.
    fn collect(&mut self) -> Result<bool, Failure> {
        let mut any = self.drain()?;
        while let Some(event) = self.events.next_event().map_err(wrong("reading connection events"))? {
            any = true;
            // What the peer sent before it disconnected may have come since the queue was found empty (VR-CLOSE-002).
            self.drain()?;
            self.take_event(event.kind);
        }
        Ok(any)
    }

    /// Takes all completions. Whether there were any.
    fn drain(&mut self) -> Result<bool, Failure> {
        let mut any = false;
        let mut batch = [Completion::EMPTY; 32];
        loop {
            let count = self.queue.poll(&mut batch).map_err(wrong("polling"))?;
            any |= count > 0;
            for completion in batch.iter().take(count) {
                self.take(completion)?;
            }
            if count < batch.len() {
                return Ok(any);
            }
        }
    }

    fn take(&mut self, completion: &Completion) -> Result<(), Failure> {
        let slot = completion.id.checked_sub(RECEIVE);
        if slot.is_none() {
            self.outstanding -= 1;
        }
        let incoming = match completion.result {
            Ok(Completed::Send | Completed::Write) => None,
            Ok(Completed::Read) => Some(Incoming::Read),
            Ok(Completed::Recv { len, .. }) => Some(Incoming::Message(self.received(slot, len))),
            Ok(Completed::RecvWrite { immediate }) => Some(Incoming::Notified(immediate.0)),
            Err(error) if error.status == CompletionStatus::WR_FLUSH_ERR => None,
            Err(error) => Some(Incoming::Failed(error.status)),
        };
        self.incoming.extend(incoming);
        match slot {
            Some(slot) if self.reposts && completion.result.is_ok() => self.post_receives(&[slot]),
            _ => Ok(()),
        }
    }

    fn received(&self, slot: Option<u64>, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let inside = slot.is_some_and(|slot| self.inbox.memory().read(inbox_offset(slot), &mut bytes));
        if inside { bytes } else { Vec::new() }
    }

    fn post_receives(&self, slots: &[u64]) -> Result<(), Failure> {
        let receive = |slot: &u64| RecvRequest {
            id: RECEIVE | slot,
            local: Slice { region: &self.inbox, offset: inbox_offset(*slot), len: INBOX_SLOT },
        };
        let chain: Vec<_> = slots.iter().map(receive).collect();
        let Some(pair) = &self.pair else { return Ok(()) };
        pair.post_recv(&chain).map_err(|error| wrong("posting receives")(error.error))
    }
}

/// Longer than any control message, so that a message that is too long is seen as it is.
const INBOX_SLOT: usize = 64;

const fn inbox_offset(slot: u64) -> usize {
    slot as usize * INBOX_SLOT
}
