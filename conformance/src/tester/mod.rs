//! The suite's peer: correct unless told otherwise, so that each case deviates in one thing.
//!
//! It uses the backend seam directly, to be able to misbehave. [`Peer::handshake`],
//! [`Peer::send_bytes`] and [`Peer::receive_bytes`] are correct. Everything else sends what it is
//! told. Every wait has a deadline.

mod connecting;
mod deadline;
mod said;
mod seen;
mod stream;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use raw_peer::{Incoming as Came, Offer, Refused, Session, Step};
use rdma_backend::{
    CompletionStatus, ConnectParams, ErrorKind, Failure as _, Immediate, RNR_RETRY_INFINITE, Region,
    RemoteAddress, RnrTimer, SendOp,
};
use rdma_conn::Descriptors;
use rdma_proto::wire::{Message, Window};
use suite::hex;

use crate::client::Failure;

pub use connecting::{Listener, way};
pub use deadline::{Deadline, wrong};
use said::Said;
pub use seen::{Breach, Seen};

/// The first words about a wait in vain, a request without a receive, a refused request, and a
/// connection that the target ended: [`crate::blackbox::hints`] examines these further.
pub(crate) const SILENCE: &str = "nothing came within ";
pub(crate) const UNACKNOWLEDGED: &str = "no acknowledgement within ";
pub(crate) const REFUSED_REQUEST: &str = "the suite's request failed: ";
pub(crate) const ENDED: &str = "the connection ended: ";
/// The words about bytes that came without an immediate.
pub(crate) const UNTOLD: &str = "in its window that no immediate told of";

/// How long the peer waits: enough for a software device on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// The parameters of a peer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Depth of the send queue.
    pub sends: u32,
    /// Receives, each posted again once used, unless [`Peer::set_reposts`] says otherwise.
    pub receives: u32,
    /// How many of these receives are posted at first.
    pub posted: u32,
    /// Bytes of memory for windows.
    pub window: u32,
    /// What it offers when it connects.
    pub params: ConnectParams,
    /// The private data that it sends with them.
    pub private_data: &'static [u8],
    /// How long it waits.
    pub patience: Duration,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            sends: 512,
            receives: 1024,
            posted: u32::MAX,
            window: 64 << 10,
            params: ConnectParams {
                responder_resources: 1,
                initiator_depth: 1,
                // Soft-RoCE treats 7 as endless.
                retry_count: 6,
                rnr_retry_count: RNR_RETRY_INFINITE,
            },
            private_data: &[],
            patience: PATIENCE,
        }
    }
}

impl Shape {
    /// Sets the length of the memory for windows.
    #[must_use]
    pub const fn window(self, window: u32) -> Self {
        Self { window, ..self }
    }

    /// Returns a small shape, for cases with many connections.
    pub fn small() -> Self {
        Self { sends: 16, ..Self::default().receives(64) }
    }

    /// Sets the number of receives posted.
    #[must_use]
    pub const fn receives(self, receives: u32) -> Self {
        Self { receives, ..self }
    }

    /// Posts only this many of its receives at first.
    #[must_use]
    pub const fn posting(self, posted: u32) -> Self {
        Self { posted, ..self }
    }

    /// Makes the target's device give up at once without a receive, as for a client of Valkey's.
    #[must_use]
    pub const fn without_rnr_retries(self) -> Self {
        Self { params: ConnectParams { rnr_retry_count: 0, ..self.params }, ..self }
    }
}

/// Input from the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A SEND, with its bytes.
    Message(Vec<u8>),
    /// A WRITE with this immediate.
    Notified(u32),
    /// The answer to a READ.
    Read,
    /// A work request failed, not as a consequence of another failure.
    Failed(CompletionStatus),
    /// The connection has ended, or was not established.
    Gone(&'static str),
}

impl Incoming {
    /// Returns whether it is a keepalive.
    pub fn is_keepalive(&self) -> bool {
        matches!(self, Self::Message(bytes) if matches!(Message::decode(bytes), Ok(Message::Keepalive)))
    }
}

/// The suite's end of one connection.
pub struct Peer<B: Descriptors> {
    session: Session<B>,
    shape: Shape,
    established: bool,
    incoming: VecDeque<Incoming>,
    /// When a wait began in which only keepalives have come so far.
    waits_since: Option<Instant>,
    /// Whether a filled window is registered again.
    pub drains: bool,
    /// Parts (offset, length) of its memory to register in turn, each once the one before is full.
    /// Offsets beyond that memory are in that of [`Peer::lands`].
    pub plan: Vec<(u32, u32)>,
    /// Whether the last part is registered repeatedly, and not the first after it.
    pub plan_ends: bool,
    landing: Option<B::Region>,
    turn: usize,
    taken: u32,
    received: Vec<u8>,
    theirs: Option<Window>,
    used: u32,
    keepalives: u64,
    /// Whether it answers questions for features, as a server does.
    pub serves: bool,
    /// Whether it holds back the answers until [`Peer::answer_now`].
    pub answers_late: bool,
    owed: Vec<u16>,
    asked: u32,
    painted: bool,
    /// The expected contents of its memory for windows.
    mirror: Option<Vec<u8>>,
    registered: bool,
    offered: Option<Offer>,
    /// The RESP that it has sent; `None` if it forwards another program's bytes.
    said: Option<Said>,
    /// Whether the end was reported, and whether a request failed or could not be posted.
    left: bool,
    failed: bool,
    /// The record of the target's actions so far.
    pub seen: Seen,
}

impl<B: Descriptors> Peer<B> {
    /// Sends bytes as one message.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.post(&[(SendOp::Send, bytes)])
    }

    /// Sends a control message.
    pub fn message(&mut self, message: Message) -> Result<(), Failure> {
        self.send(&message.encode())
    }

    /// Sends messages with one doorbell.
    pub fn burst(&mut self, messages: &[Message]) -> Result<(), Failure> {
        let bytes: Vec<_> = messages.iter().map(Message::encode).collect();
        let requests: Vec<_> = bytes.iter().map(|bytes| (SendOp::Send, &bytes[..])).collect();
        // At most half of the send queue, so that the next chunk has room.
        requests.chunks(self.shape.sends as usize / 2).try_for_each(|chunk| self.post(chunk))
    }

    /// Sends bytes as one message with an immediate.
    pub fn send_immediate(&mut self, bytes: &[u8], immediate: u32) -> Result<(), Failure> {
        self.post(&[(SendOp::SendImmediate(Immediate(immediate)), bytes)])
    }

    /// Writes without an immediate.
    pub fn write(&mut self, to: RemoteAddress, bytes: &[u8]) -> Result<(), Failure> {
        self.post(&[(SendOp::Write(to), bytes)])
    }

    /// Writes with an immediate.
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

    /// Returns its memory as a window, for a correct registration.
    pub fn own_window(&self) -> Window {
        let window = self.window();
        Window { address: window.address(), length: self.shape.window, rkey: window.rkey() }
    }

    /// Registers `len` more bytes, with a key of their own, for windows elsewhere.
    pub fn lands(&mut self, len: u32) -> Result<(), Failure> {
        self.landing = Some(self.session.register(len as usize).map_err(wrong("registering memory"))?);
        Ok(())
    }

    fn window(&self) -> &B::Region {
        self.session.window().expect("no step withdraws it")
    }

    /// Sets whether used receives are posted again.
    pub const fn set_reposts(&mut self, reposts: bool) {
        self.session.reposts = reposts;
    }

    /// Posts up to `count` more receives, within its shape.
    pub fn post_receives(&mut self, count: usize) {
        // It fails when the connection has ended, which is reported otherwise.
        let _ended = self.session.take(Step::Receive(count));
    }

    /// Makes a request that finds no receive come again soon.
    pub fn hurries(&self) -> Result<(), Failure> {
        self.session.set_min_rnr_timer(RnrTimer::MICROS_640).map_err(wrong("setting a timer"))
    }

    /// Forwards another program's bytes from now on, which are not checked.
    pub fn relays(&mut self) {
        self.said = None;
    }

    /// Returns the number of requests in flight.
    pub const fn outstanding(&self) -> usize {
        self.session.outstanding()
    }

    /// Returns whether the end of the connection was reported.
    pub const fn has_left(&self) -> bool {
        self.left
    }

    /// Returns whether the end was reported, or a request of the suite failed.
    pub const fn is_lost(&self) -> bool {
        self.left || self.failed
    }

    /// Returns memory of its own, without remote rights, as a window.
    pub fn locked_window(&self) -> Window {
        let outbox = self.session.outbox();
        Window { address: outbox.address(), length: self.shape.window, rkey: outbox.rkey() }
    }

    /// Returns the target's offer when the connection was established.
    pub const fn offered(&self) -> Option<&Offer> {
        self.offered.as_ref()
    }

    /// Records the offer in the target's request, which the later event does not repeat.
    pub(crate) fn was_offered(&mut self, offer: Offer) {
        self.offered = Some(offer);
    }

    /// Changes how long it waits for anything.
    pub const fn set_patience(&mut self, patience: Duration) {
        self.shape.patience = patience;
    }

    /// Returns whether these bytes are in a window before the current one.
    pub(crate) fn earlier_window_holds(&self, wanted: &[u8]) -> bool {
        let earlier = self.plan.iter().take(self.turn.min(self.plan.len()));
        let current = self.turn();
        earlier.enumerate().filter(|(number, _)| *number != current).any(|(_, (offset, length))| {
            let mut bytes = vec![0; *length as usize];
            let inside = self.window().memory().read(*offset as usize, &mut bytes);
            inside && !wanted.is_empty() && bytes.windows(wanted.len()).any(|here| here == wanted)
        })
    }

    /// Describes bytes in its first window that no immediate notified.
    pub(crate) fn untold(&self) -> String {
        let (offset, length) = self.part();
        let mut bytes = vec![0; length as usize];
        let is_first = self.turn == 0 && self.registered && !self.painted;
        if !is_first || !self.window().memory().read(offset as usize, &mut bytes) {
            return String::new();
        }
        let behind = bytes.get(self.taken as usize..).unwrap_or_default();
        match behind.iter().rposition(|byte| *byte != 0) {
            None => String::new(),
            Some(last) => format!(
                "; {} {UNTOLD}, from offset {}: {}",
                if last == 0 { "1 byte is".into() } else { format!("{} bytes are", last + 1) },
                self.taken,
                hex::start(&behind[..=last])
            ),
        }
    }

    /// Fills its memory for windows with one byte.
    pub fn paint(&mut self, byte: u8) {
        self.painted = true;
        let inside = self.window().memory().write(0, &vec![byte; self.window().len()]);
        debug_assert!(inside, "as long as the region");
    }

    /// Returns the end of the last byte that differs from this one in its memory for windows.
    pub fn painted_to(&self, byte: u8) -> usize {
        let mut bytes = vec![0; self.window().len()];
        let inside = self.window().memory().read(0, &mut bytes);
        debug_assert!(inside, "as long as the region");
        bytes.iter().rposition(|one| *one != byte).map_or(0, |last| last + 1)
    }

    /// Fills its memory for windows, and records its expected contents from now on.
    pub fn mirror(&mut self) {
        const PAINT: u8 = 0xa5;
        self.paint(PAINT);
        self.mirror = Some(vec![PAINT; self.window().len()]);
    }

    /// Returns the first byte that the notifications since [`Peer::mirror`] do not explain.
    pub fn strayed(&self) -> Option<usize> {
        let mirror = self.mirror.as_ref()?;
        let mut bytes = vec![0; mirror.len()];
        let inside = self.window().memory().read(0, &mut bytes);
        debug_assert!(inside, "as long as the region");
        mirror.iter().zip(&bytes).position(|(expected, found)| expected != found)
    }

    /// Ends the connection.
    pub fn disconnect(&self) -> Result<(), Failure> {
        self.session.disconnect().map_err(wrong("disconnecting"))
    }

    /// Destroys the queue pair without a disconnect, like a host that loses power.
    pub fn lose_queue_pair(&mut self) {
        let _done = self.session.take(Step::LoseQueuePair);
    }

    /// Waits for the next input, like [`Peer::receive_in_time`]. Silence is an error.
    pub fn receive(&mut self) -> Result<Incoming, Failure> {
        self.receive_in_time()?.ok_or_else(|| {
            Failure::wrong(if self.left {
                "the connection has ended".into()
            } else {
                format!("{SILENCE}{:?}{}", self.shape.patience, self.untold())
            })
        })
    }

    /// Waits for the next input, within its shape's patience. A call after a keepalive waits for
    /// the rest of the time.
    pub fn receive_in_time(&mut self) -> Result<Option<Incoming>, Failure> {
        let since = *self.waits_since.get_or_insert_with(Instant::now);
        let left = self.shape.patience.saturating_sub(since.elapsed());
        let came = self.receive_within(left)?;
        let in_time = came.filter(|incoming| !(left.is_zero() && incoming.is_keepalive()));
        if in_time.is_none() {
            self.waits_since = None;
        }
        Ok(in_time)
    }

    /// Waits for the next input, for at most `patience`.
    pub fn receive_within(&mut self, patience: Duration) -> Result<Option<Incoming>, Failure> {
        // Nothing comes after the end.
        let deadline = Deadline::after(if self.left { Duration::ZERO } else { patience });
        loop {
            if let Some(incoming) = self.incoming.pop_front() {
                if !incoming.is_keepalive() {
                    self.waits_since = None;
                }
                self.left |= matches!(incoming, Incoming::Gone(_));
                self.failed |= matches!(incoming, Incoming::Failed(_));
                return Ok(Some(incoming));
            }
            if !self.step(deadline)? {
                return Ok(None);
            }
        }
    }

    /// Waits until every request was acknowledged, or failed.
    pub fn settle(&mut self) -> Result<(), Failure> {
        let patience = self.shape.patience;
        let deadline = Deadline::after(patience);
        while self.session.outstanding() > 0 {
            if !self.step(deadline)? {
                return Err(Failure::wrong(format!("{UNACKNOWLEDGED}{patience:?}")));
            }
        }
        Ok(())
    }

    pub(crate) const fn all_succeeded(&self) -> bool {
        self.session.unsuccessful() == 0
    }

    fn post(&mut self, requests: &[(SendOp, &[u8])]) -> Result<(), Failure> {
        self.waits_since = None;
        for (op, bytes) in requests {
            let is_message = matches!(op, SendOp::Send | SendOp::SendImmediate(_));
            self.registered |=
                is_message && matches!(Message::decode(bytes), Ok(Message::RegisterXferMemory(_)));
        }
        if self.session.outstanding() + requests.len() > self.shape.sends as usize {
            self.settle()?;
        }
        match self.session.post(requests) {
            Err(Refused::NoRoom) => {
                self.settle()?;
                self.session.post(requests)
            }
            posted => posted,
        }
        .map_err(|refused| match refused {
            Refused::NoRoom => Failure::wrong("more to send than the outbox holds"),
            Refused::NoQueuePair => Failure::wrong("the suite lost its queue pair"),
            Refused::Backend(error) if error.kind() == ErrorKind::State => {
                self.failed = true;
                Failure::wrong("the connection ended before all was sent")
            }
            Refused::Backend(error) => wrong("posting")(error),
        })
    }

    fn step(&mut self, deadline: Deadline) -> Result<bool, Failure> {
        loop {
            self.session.arm().map_err(wrong("arming the completion queue"))?;
            if self.collect()? {
                return Ok(true);
            }
            if !deadline.wait(self.session.completions(), self.session.events())? {
                return Ok(false);
            }
        }
    }

    fn collect(&mut self) -> Result<bool, Failure> {
        let mut any = false;
        while let Some(came) = self.session.poll().map_err(wrong("looking for what has come"))? {
            any = true;
            self.incoming.extend(match came {
                Came::Established(offer) => {
                    self.established = true;
                    self.offered.get_or_insert(offer);
                    None
                }
                Came::Message(bytes) => Some(Incoming::Message(bytes)),
                Came::Notified(count) => Some(Incoming::Notified(count)),
                Came::Read => Some(Incoming::Read),
                Came::Sent | Came::Failed(CompletionStatus::WR_FLUSH_ERR) => None,
                Came::Failed(status) => Some(Incoming::Failed(status)),
                Came::Gone(why) => {
                    if why == "disconnected" {
                        // As every peer does, to end pending requests. Refused if we did first.
                        let _ended = self.session.disconnect();
                    }
                    Some(Incoming::Gone(why))
                }
            });
        }
        Ok(any)
    }
}
