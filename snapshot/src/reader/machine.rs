//! The reader's side of a session, without IO and clock. Input is frames, events and time; output
//! is frames and actions.
//!
//! ```text
//! Hello ─▶ Challenge ─▶ resolve ─▶ Proof ─▶ Welcome ─▶ connect ─▶ established ─▶ Chunks… READ… Mark … End ─▶ Done
//! ```
//!
//! Every state but the last has a deadline (VS-TIME-001).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use rdma_backend::time::Instant;

use super::table::{Chunk, Have, Limits, Table};
use crate::auth::Secret;
use crate::error::Error;
use crate::wire::{
    Challenge, Content, Digest, Frame, Hello, Layout, MAGIC, Mapping, Nonce, Progress, Proof, ReaderId,
    Reason, VERSION, mapped,
};

/// Settings of a reader.
#[derive(Clone, Debug)]
pub struct Config {
    /// The secret that both sides must prove.
    pub secret: Secret,
    /// What it accepts.
    pub limits: Limits,
    /// The most READs in flight. Both devices' limits apply too.
    pub depth: u8,
    /// How long each step of the handshake may take, up to the first chunk.
    pub handshake: Duration,
    /// How long the publisher or a READ may be silent.
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

/// An action requested by the machine.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Order {
    /// Send a frame.
    Send(Frame),
    /// Resolve this port of the publisher, and report the local address.
    Resolve(u16),
    /// Connect to it.
    Connect,
    /// Read the address area of the seed's table: `length` bytes from there.
    ReadAddresses(rdma_backend::RemoteAddress, u32),
}

/// A publisher's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The table's layout.
    pub layout: Layout,
    /// The kind of bytes.
    pub content: Content,
    /// The longest chunk.
    pub chunk_size: u32,
    /// Bytes of the whole snapshot, if the publisher knows.
    pub total: Option<u64>,
    /// The position in a primary's history at which an RDB was made.
    pub position: Option<Position>,
}

/// A position in the history of a primary, as in `PSYNC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The id of the history: 40 hexadecimal digits.
    pub history: [u8; 40],
    /// Bytes of the history up to this position.
    pub offset: u64,
}

#[derive(Clone, Debug)]
enum State {
    Greeting,
    Resolving(Challenge),
    Proving(Challenge),
    Connecting,
    Reading,
    /// It has everything, and has said so.
    Done,
}

pub(crate) struct Machine {
    config: Config,
    state: State,
    hello: Hello,
    have: Have,
    table: Table,
    offer: Option<Offer>,
    mapping: Option<Mapping>,
    /// Whether the READ of the seed's addresses is in flight.
    awaits_addresses: bool,
    orders: VecDeque<Order>,
    depth: usize,
    /// READs of chunks in flight.
    reading: usize,
    /// The deadline of this state.
    by: Instant,
    renew: Duration,
    renew_at: Instant,
}

impl Machine {
    pub(crate) fn new(config: Config, mut have: Have, mut nonce: Nonce, now: Instant) -> Self {
        // One that comes back has the same name (VS-READ-006).
        if let Some(reader) = nonce.first_chunk_mut() {
            if have.reader == ReaderId::default() {
                have.reader = *reader;
            }
            *reader = have.reader;
        }
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

    pub(crate) const fn have(&self) -> Have {
        self.have
    }

    pub(crate) const fn offer(&self) -> Option<Offer> {
        self.offer
    }

    /// Returns whether it has everything. The publisher knows when it ends the control stream;
    /// after a time-out it is not awaited any longer.
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

    /// Returns whether it takes another frame. It does not while it is full, nor between the seed's
    /// table and its addresses, without which no later frame can be checked (VS-RCP-002).
    pub(crate) fn listens(&self) -> bool {
        !self.is_full() && !self.awaits_addresses
    }

    fn enter(&mut self, state: State, now: Instant) {
        self.state = state;
        self.by = now.after(self.config.handshake);
    }

    pub(crate) fn handle_frame(&mut self, frame: Frame, now: Instant) -> Result<(), Error> {
        // It has everything. Messages that the publisher sent before it knew change nothing.
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
                // Valkey's offsets are signed, so no later one exceeds a `u64`.
                if i64::try_from(position.offset).is_err() {
                    return Err(Error::Misbehaved("an offset that no history has"));
                }
                self.offer = Some(Offer {
                    layout,
                    content,
                    chunk_size,
                    total: Some(welcome.total.get()).filter(|total| *total > 0),
                    position: Some(position).filter(|position| position.history != [0; 40]),
                });
                let lease = Duration::from_millis(welcome.lease.get().into());
                // A lease of zero would mean constant renewal.
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

    /// Returns whether there is nothing left to wait for, although the control stream exists.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.is_done() && now >= self.by
    }

    /// Handles a frame of the publisher while READs continue.
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

    /// Handles a resolved route to the publisher, from the address `local`.
    pub(crate) fn handle_resolved(&mut self, local: SocketAddr, now: Instant) {
        let State::Resolving(challenge) = self.state else { return };
        let mut proof =
            Proof { address: mapped(local.ip()), port: local.port().into(), reserved: [0; 6], code: [0; 32] };
        proof.code = self.config.secret.reader_code(&self.hello, &challenge, &proof);
        self.orders.push_back(Order::Send(Frame::Proof(proof)));
        self.enter(State::Proving(challenge), now);
    }

    /// Handles the established connection for READs. The devices allow `depth` at a time.
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

    /// Returns the chunk to read next, if a READ may be posted.
    pub(crate) fn next_read(&self) -> Option<Chunk> {
        if self.reading < self.depth { self.table.peek().copied() } else { None }
    }

    pub(crate) fn posted(&mut self, now: Instant) {
        self.table.taken();
        self.reading = self.reading.saturating_add(1);
        self.by = now.after(self.config.silence);
    }

    /// Handles the addresses of the seed's table.
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

    /// Handles a chunk with this digest. READs are answered in the order in which they were posted
    /// (VS-READ-002).
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
        // A publisher whose memory is a window may wait for this (VS-READ-005).
        if self.reading == 0 && self.table.peek().is_none() && !self.table.is_used_up() {
            self.orders.push_back(self.progress());
        }
        self.finish(now);
        Ok(())
    }

    /// Reports that it has everything, once it has.
    fn finish(&mut self, now: Instant) {
        if matches!(self.state, State::Reading) && self.table.is_used_up() && self.reading == 0 {
            self.orders.push_back(self.progress());
            self.orders.push_back(Order::Send(Frame::Done));
            self.enter(State::Done, now);
        }
    }

    /// Returns when [`Machine::handle_timeout`] has something to do.
    pub(crate) fn next_timeout(&self) -> Instant {
        if matches!(self.state, State::Reading) { self.by.min(self.renew_at) } else { self.by }
    }

    /// Handles the passing of time. `held` says that this side did not read frames or post, because
    /// its caller took no chunks.
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
}
