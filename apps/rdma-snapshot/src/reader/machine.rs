//! The reader's side of a session, without IO and clock: frames, events and time come in, frames and orders go out.
//!
//! ```text
//! Hello ─▶ Challenge ─▶ resolve ─▶ Proof ─▶ Welcome ─▶ connect ─▶ established ─▶ Chunks… READ… Mark … End ─▶ Done
//! ```
//!
//! Every state but the last has a time by which it ends (VS-TIME-001).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_backend::time::Instant;

use super::table::{Chunk, Have, Limits, Table};
use crate::auth::Secret;
use crate::error::Error;
use crate::wire::{
    Challenge, Content, Digest, Frame, Hello, Layout, MAGIC, Mapping, Mark, Nonce, Progress, Proof, Reason,
    VERSION, mapped,
};

/// How a reader behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// What it proves to have, and wants proven.
    pub secret: Secret,
    /// What it takes.
    pub limits: Limits,
    /// READs under way at the same time, at most; both devices' limits apply too.
    pub depth: u8,
    /// How long each step up to the first chunk may take.
    pub handshake: Duration,
    /// How long the publisher, or a READ, may say nothing.
    pub silence: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            secret: Secret::default(),
            limits: Limits::default(),
            depth: 16,
            handshake: Duration::from_secs(10),
            silence: Duration::from_secs(30),
        }
    }
}

/// What the machine wants done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Order {
    /// Sends a frame.
    Send(Frame),
    /// Finds the way to this port of the publisher, and says which local address that is from.
    Resolve(u16),
    /// Connects there.
    Connect,
    /// Reads the address area of the seed's table: `length` bytes from there.
    ReadAddresses(rdma_backend::RemoteAddress, u32),
}

/// What there is to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its layout.
    pub layout: Layout,
    /// What it is.
    pub content: Content,
    /// No chunk is longer.
    pub chunk_size: u32,
    /// Bytes that the snapshot will have, as far as the publisher knows.
    pub total: Option<u64>,
    /// Where in a primary's history an RDB was made.
    pub position: Option<Position>,
}

/// A place in the history of a primary: what `PSYNC` is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The id of the history: 40 hexadecimal digits.
    pub history: [u8; 40],
    /// Bytes of the history up to there.
    pub offset: u64,
}

#[derive(Clone, Debug)]
enum State {
    Greeting,
    Resolving(Challenge),
    Proving(Challenge),
    Connecting,
    Reading,
    /// Has everything, and has said so.
    Done,
}

/// See the module.
pub(crate) struct Machine {
    config: Config,
    state: State,
    hello: Hello,
    have: Have,
    table: Table,
    offer: Option<Offer>,
    mapping: Option<Mapping>,
    /// Whether the addresses of the seed's table are on their way.
    awaits_addresses: bool,
    orders: VecDeque<Order>,
    depth: usize,
    /// READs under way, of chunks.
    reading: usize,
    /// When this state fails.
    by: Instant,
    renew: Duration,
    renew_at: Instant,
}

impl Machine {
    pub(crate) fn new(config: Config, have: Have, nonce: Nonce, now: Instant) -> Self {
        let hello = Hello {
            magic: MAGIC,
            version: VERSION.into(),
            reserved: [0; 6],
            snapshot: have.snapshot,
            first: have.chunks.into(),
            nonce,
        };
        Self {
            state: State::Greeting,
            hello,
            table: Table::new(config.limits, &have),
            have,
            offer: None,
            mapping: None,
            awaits_addresses: false,
            orders: VecDeque::from([Order::Send(Frame::Hello(hello))]),
            depth: 0,
            reading: 0,
            by: now.after(config.handshake),
            renew: config.silence,
            renew_at: now,
            config,
        }
    }

    /// What it has, for the next attempt.
    pub(crate) const fn have(&self) -> Have {
        self.have
    }

    /// What there is to read, once the publisher has said so.
    pub(crate) const fn offer(&self) -> Option<Offer> {
        self.offer
    }

    /// Whether it has everything. The publisher has heard so when it ends the control stream, or is not waited for any longer.
    pub(crate) const fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    pub(crate) fn poll_order(&mut self) -> Option<Order> {
        self.orders.pop_front()
    }

    /// Returns whether it has as many entries as it can keep.
    pub(crate) fn is_full(&self) -> bool {
        !self.table.has_room()
    }

    /// Returns whether it takes another frame: not while it is full, and not between the seed's table and its addresses, without which
    /// nothing behind it can be judged (VS-RCP-002).
    pub(crate) fn listens(&self) -> bool {
        !self.is_full() && !self.awaits_addresses
    }

    fn enter(&mut self, state: State, now: Instant) {
        self.state = state;
        self.by = now.after(self.config.handshake);
    }

    pub(crate) fn handle_frame(&mut self, frame: Frame, now: Instant) -> Result<(), Error> {
        // It has everything. What the publisher said before it heard so changes nothing.
        if self.is_done() {
            return Ok(());
        }
        if let Frame::Refused(refused) = frame {
            return Err(match Reason::from_number(refused.reason.get()) {
                Reason::Snapshot => Error::OtherSnapshot,
                reason => Error::Refused(reason),
            });
        }
        match (&self.state, frame) {
            (State::Greeting, Frame::Challenge(challenge)) => self.challenged(challenge, now)?,
            (State::Proving(challenge), Frame::Welcome(welcome)) => {
                let challenge = *challenge;
                if !self.config.secret.is_publishers(&self.hello, &challenge, &welcome.code) {
                    return Err(Error::Secret);
                }
                let layout =
                    Layout::from_number(welcome.layout).ok_or(Error::Misbehaved("an unknown layout"))?;
                let content =
                    Content::from_number(welcome.content).ok_or(Error::Misbehaved("an unknown content"))?;
                let chunk_size = welcome.chunk_size.get();
                self.table.set_chunk_size(chunk_size)?;
                self.have.snapshot = challenge.snapshot;
                let position = Position { history: welcome.history, offset: welcome.offset.get() };
                if position.history != [0; 40] && !position.history.iter().all(u8::is_ascii_hexdigit) {
                    return Err(Error::Misbehaved("a replication id that is none"));
                }
                self.offer = Some(Offer {
                    layout,
                    content,
                    chunk_size,
                    total: Some(welcome.total.get()).filter(|total| *total > 0),
                    position: Some(position).filter(|position| position.history != [0; 40]),
                });
                let lease = Duration::from_millis(welcome.lease.get().into());
                // A lease of nothing would mean renewing all the time.
                self.renew = (lease / 4).max(Duration::from_millis(10)).min(self.config.silence);
                self.orders.push_back(Order::Connect);
                self.enter(State::Connecting, now);
            }
            (State::Reading, frame) => self.told(frame, now)?,
            (_, _) => return Err(Error::Misbehaved("a frame out of order")),
        }
        Ok(())
    }

    fn challenged(&mut self, challenge: Challenge, now: Instant) -> Result<(), Error> {
        if challenge.version.get() != VERSION {
            return Err(Error::Version { theirs: challenge.version.get() });
        }
        let wanted = self.have.snapshot;
        if wanted != [0; 16] && wanted != challenge.snapshot {
            return Err(Error::OtherSnapshot);
        }
        self.orders.push_back(Order::Resolve(challenge.data_port.get()));
        self.enter(State::Resolving(challenge), now);
        Ok(())
    }

    /// Whether there is nothing to wait for any more, although the control stream is there.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.is_done() && now >= self.by
    }

    /// Takes what the publisher says while READs go on.
    fn told(&mut self, frame: Frame, now: Instant) -> Result<(), Error> {
        self.by = now.after(self.config.silence);
        let layout = self.offer.map(|offer| offer.layout);
        match (layout, frame) {
            (Some(Layout::Chunks), Frame::Chunks(entries)) => self.table.announce(&entries)?,
            (Some(Layout::Rcp), Frame::Mapping(mapping)) if self.mapping.is_none() => {
                let (remote, length) = self.table.addresses(&mapping)?;
                self.mapping = Some(mapping);
                self.awaits_addresses = true;
                self.orders.push_back(Order::ReadAddresses(remote, length));
            }
            (_, Frame::Mark(mark)) => {
                self.table.mark(&mark)?;
                self.have.mark = Some(mark);
            }
            (_, Frame::End(end)) => self.table.end(end.chunks.get())?,
            (_, Frame::Alive) => {}
            _ => return Err(Error::Misbehaved("a frame out of order")),
        }
        self.finish(now);
        Ok(())
    }

    /// The way to the publisher is known, and leaves from `local`.
    pub(crate) fn handle_resolved(&mut self, local: SocketAddr, now: Instant) {
        let State::Resolving(challenge) = self.state else { return };
        let mut proof =
            Proof { address: mapped(local.ip()), port: local.port().into(), reserved: [0; 6], code: [0; 32] };
        proof.code = self.config.secret.reader_code(&self.hello, &challenge, &proof);
        self.orders.push_back(Order::Send(Frame::Proof(proof)));
        self.enter(State::Proving(challenge), now);
    }

    /// READs can go; the devices allow `depth` at a time.
    pub(crate) fn handle_established(&mut self, depth: u8, now: Instant) -> Result<(), Error> {
        if !matches!(self.state, State::Connecting) {
            return Err(Error::Misbehaved("a connection for READs out of order"));
        }
        if depth == 0 {
            return Err(Error::NoReads);
        }
        self.depth = depth.into();
        self.state = State::Reading;
        self.by = now.after(self.config.silence);
        self.renew_at = now.after(self.renew);
        Ok(())
    }

    /// The chunk to read next, if a READ may be posted.
    pub(crate) fn next_read(&self) -> Option<Chunk> {
        if self.reading < self.depth { self.table.peek().copied() } else { None }
    }

    /// The READ of that chunk was posted.
    pub(crate) fn posted(&mut self, now: Instant) {
        self.table.taken();
        self.reading = self.reading.saturating_add(1);
        self.by = now.after(self.config.silence);
    }

    /// The addresses of the seed's table have come.
    pub(crate) fn handle_addresses(&mut self, addresses: &[u8], now: Instant) -> Result<(), Error> {
        let Some(mapping) = self.mapping else { return Err(Error::Misbehaved("addresses without a table")) };
        self.table.map(&mapping, addresses)?;
        self.awaits_addresses = false;
        self.by = now.after(self.config.silence);
        Ok(())
    }

    fn progress(&self) -> Order {
        Order::Send(Frame::Progress(Progress { chunks: self.have.chunks.into() }))
    }

    /// A chunk has come that has this digest. READs are answered in the order in which they were posted (VS-READ-002).
    pub(crate) fn handle_chunk(&mut self, chunk: &Chunk, digest: &Digest, now: Instant) -> Result<(), Error> {
        self.reading = self.reading.saturating_sub(1);
        self.by = now.after(self.config.silence);
        if chunk.index != self.have.chunks {
            return Err(Error::Misbehaved("a READ answered out of order"));
        }
        if chunk.digest.is_some_and(|announced| announced != *digest) {
            return Err(Error::Corrupt { chunk: chunk.index });
        }
        self.have.chunks = self.have.chunks.saturating_add(1);
        self.have.bytes = self.have.bytes.saturating_add(chunk.length.into());
        self.finish(now);
        Ok(())
    }

    /// Says that it has everything, when it has.
    fn finish(&mut self, now: Instant) {
        if matches!(self.state, State::Reading) && self.table.is_used_up() && self.reading == 0 {
            self.orders.push_back(self.progress());
            self.orders.push_back(Order::Send(Frame::Done));
            self.enter(State::Done, now);
        }
    }

    /// When [`Machine::handle_timeout`] has something to do.
    pub(crate) fn next_timeout(&self) -> Instant {
        if matches!(self.state, State::Reading) { self.by.min(self.renew_at) } else { self.by }
    }

    /// Time has passed. `held` says that this side did not listen or post, because what it has was not taken from it.
    pub(crate) fn handle_timeout(&mut self, held: bool, now: Instant) -> Result<(), Error> {
        let reading = matches!(self.state, State::Reading);
        if reading && now >= self.renew_at {
            self.renew_at = now.after(self.renew);
            self.orders.push_back(self.progress());
        }
        if now < self.by || self.is_done() {
            return Ok(());
        }
        if held && reading && self.reading == 0 {
            self.by = now.after(self.config.silence);
            return Ok(());
        }
        let handshake = self.config.handshake;
        let (doing, after) = match self.state {
            State::Greeting => ("waiting for the publisher's greeting", handshake),
            State::Resolving(_) => ("finding the way to the publisher's memory", handshake),
            State::Proving(_) => ("waiting for the publisher's welcome", handshake),
            State::Connecting => ("connecting to the publisher's memory", handshake),
            State::Reading if self.reading > 0 => ("waiting for a READ", self.config.silence),
            State::Reading | State::Done => {
                ("waiting for the publisher to say anything", self.config.silence)
            }
        };
        Err(Error::TimedOut { doing, after })
    }

    /// Where the snapshot ends, if that is known.
    pub(crate) const fn mark(&self) -> Option<Mark> {
        self.have.mark
    }
}
