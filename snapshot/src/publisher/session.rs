//! The publisher's side of a session, without IO and clock.
//!
//! A reader learns of memory only after it has proven the secret, and after the connection from the
//! address in that proof is established (VS-AUTH-003). Every state has a deadline (VS-TIME-001).

use std::net::SocketAddr;
use std::time::Duration;

use rdma_backend::time::Instant;

use crate::auth::Secret;
use crate::reader::Offer;
use crate::wire::{
    Challenge, End, Entry, Frame, Hello, MAGIC, MOST_ENTRIES, Mapping, Mark, Nonce, ReaderId, Reason,
    Refused, SnapshotId, VERSION, Welcome,
};

/// The state announced to readers: a log of chunks, the end of the snapshot in it, and whether it
/// is complete.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// Those of the first chunks are gone with the chunks.
    pub(crate) entries: Vec<Entry>,
    pub(crate) mapping: Option<Mapping>,
    pub(crate) mark: Option<Mark>,
    pub(crate) ended: bool,
    /// The first chunks, which are no longer in memory.
    pub(crate) released: u64,
}

impl Log {
    pub(crate) fn chunks(&self) -> u64 {
        let chunks = self.released.saturating_add(self.entries.len() as u64);
        self.mapping.map_or(chunks, |mapping| mapping.areas.get().into())
    }
}

/// Settings of all sessions of a publisher.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub(crate) secret: Secret,
    pub(crate) snapshot: SnapshotId,
    pub(crate) offer: Offer,
    pub(crate) data_port: u16,
    pub(crate) lease: Duration,
    pub(crate) handshake: Duration,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Greeting,
    Proving(Hello, Challenge),
    /// The connection for READs may come, from this address.
    Connecting(SocketAddr),
    Serving,
    Done,
}

#[derive(Debug)]
pub(crate) struct Session {
    state: State,
    /// The snapshot that it reads, once it is chosen.
    pub(crate) snapshot: Option<SnapshotId>,
    /// Chunks announced to the reader.
    sent: u64,
    mapping_sent: bool,
    mark_sent: bool,
    end_sent: bool,
    /// The reader, by its proof.
    pub(crate) reader: ReaderId,
    /// Chunks that the reader has, by its proof and its reports.
    pub(crate) has: u64,
    by: Instant,
    alive_at: Instant,
}

impl Session {
    pub(crate) fn new(handshake: Duration, now: Instant) -> Self {
        Self {
            state: State::Greeting,
            snapshot: None,
            sent: 0,
            mapping_sent: false,
            mark_sent: false,
            end_sent: false,
            reader: ReaderId::default(),
            has: 0,
            by: now.after(handshake),
            alive_at: now,
        }
    }

    /// Handles a frame of the reader. Returns the answer, if one is due at once.
    ///
    /// # Errors
    /// The reason for which the session has ended.
    pub(crate) fn handle_frame(
        &mut self,
        frame: &Frame,
        terms: &Terms,
        log: &Log,
        nonce: Nonce,
        now: Instant,
    ) -> Result<Option<Frame>, Reason> {
        match (self.state, frame) {
            (State::Greeting, Frame::Hello(hello)) => {
                if hello.version.get() != VERSION {
                    return Err(Reason::Version);
                }
                if hello.snapshot != [0; 16] && hello.snapshot != terms.snapshot {
                    return Err(Reason::Snapshot);
                }
                let challenge = Challenge {
                    magic: MAGIC,
                    version: VERSION.into(),
                    data_port: terms.data_port.into(),
                    reserved: [0; 4],
                    snapshot: terms.snapshot,
                    nonce,
                };
                self.snapshot = Some(terms.snapshot);
                self.enter(State::Proving(*hello, challenge), terms.handshake, now);
                Ok(Some(Frame::Challenge(challenge)))
            }
            (State::Proving(hello, challenge), Frame::Proof(proof)) => {
                if !terms.secret.is_readers(&hello, &challenge, proof) {
                    return Err(Reason::Secret);
                }
                if hello.first.get() < log.released {
                    return Err(Reason::Snapshot);
                }
                // A replica that publishes may be behind the publisher that this reader had before.
                if hello.first.get() > log.chunks() && log.ended {
                    return Err(Reason::Misbehaved);
                }
                self.sent = hello.first.get();
                self.has = self.sent;
                self.reader = hello.reader();
                self.enter(State::Connecting(proof.peer()), terms.handshake, now);
                Ok(Some(Frame::Welcome(Welcome {
                    code: terms.secret.publisher_code(&hello, &challenge),
                    layout: terms.offer.layout.number(),
                    content: terms.offer.content.number(),
                    reserved: [0; 2],
                    chunk_size: terms.offer.chunk_size.into(),
                    lease: u32::try_from(terms.lease.as_millis()).unwrap_or(u32::MAX).into(),
                    total: terms.offer.total.unwrap_or(0).into(),
                    history: terms.offer.position.map_or([0; 40], |position| position.history),
                    offset: terms.offer.position.map_or(0, |position| position.offset).into(),
                })))
            }
            // A false claim would let a window go on (VS-LEASE-003).
            (State::Serving, Frame::Progress(progress)) if progress.chunks.get() <= self.sent => {
                self.has = progress.chunks.get();
                self.by = now.after(terms.lease);
                Ok(None)
            }
            (State::Serving, Frame::Done) if self.end_sent => {
                self.state = State::Done;
                Ok(None)
            }
            _ => Err(Reason::Misbehaved),
        }
    }

    fn enter(&mut self, state: State, limit: Duration, now: Instant) {
        self.state = state;
        self.by = now.after(limit);
    }

    /// Returns the address from which the connection for READs must come, while one is expected.
    pub(crate) const fn expects(&self) -> Option<SocketAddr> {
        if let State::Connecting(peer) = self.state { Some(peer) } else { None }
    }

    pub(crate) fn handle_established(&mut self, lease: Duration, now: Instant) {
        if matches!(self.state, State::Connecting(_)) {
            self.enter(State::Serving, lease, now);
            self.alive_at = now;
        }
    }

    /// Returns whether the reader has reported that it has everything.
    pub(crate) const fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Returns whether the reader has proven the secret, and is not done.
    pub(crate) const fn is_proven(&self) -> bool {
        matches!(self.state, State::Connecting(_) | State::Serving)
    }

    pub(crate) const fn is_serving(&self) -> bool {
        matches!(self.state, State::Serving)
    }

    /// Returns the next frame for a reader that can read, if there is news.
    pub(crate) fn announce(&mut self, log: &Log, lease: Duration, now: Instant) -> Option<Frame> {
        if !self.is_serving() {
            return None;
        }
        let frame = self.news(log);
        if frame.is_some() || now >= self.alive_at {
            self.alive_at = now.after(lease / 4);
            return frame.or(Some(Frame::Alive));
        }
        None
    }

    fn news(&mut self, log: &Log) -> Option<Frame> {
        if let Some(mapping) = log.mapping.filter(|_| !self.mapping_sent) {
            self.mapping_sent = true;
            self.sent = mapping.areas.get().into();
            return Some(Frame::Mapping(mapping));
        }
        // The end of the snapshot is announced between its last chunk and the next.
        let upto = log.mark.filter(|mark| self.sent <= mark.chunks.get() && !self.mark_sent);
        let upto = upto.map_or(log.chunks(), |mark| mark.chunks.get());
        let (from, to) = (self.sent.checked_sub(log.released)?, upto.checked_sub(log.released)?);
        let (from, to) = (usize::try_from(from).ok()?, usize::try_from(to).ok()?);
        let to = to.min(from.saturating_add(MOST_ENTRIES));
        if let Some(entries) = log.entries.get(from..to).filter(|entries| !entries.is_empty()) {
            self.sent = log.released.saturating_add(to as u64);
            return Some(Frame::Chunks(entries.to_vec()));
        }
        if let Some(mark) = log.mark.filter(|mark| !self.mark_sent && mark.chunks.get() == self.sent) {
            self.mark_sent = true;
            return Some(Frame::Mark(mark));
        }
        if log.ended && !self.end_sent && self.sent == log.chunks() {
            self.end_sent = true;
            return Some(Frame::End(End { chunks: self.sent.into() }));
        }
        None
    }

    /// Returns when [`Session::handle_timeout`] or [`Session::announce`] has something to do.
    pub(crate) fn next_timeout(&self) -> Instant {
        if self.is_serving() { self.by.min(self.alive_at) } else { self.by }
    }

    /// Handles the passing of time.
    ///
    /// # Errors
    /// The reason for which the session has ended (VS-LEASE-001).
    pub(crate) fn handle_timeout(&self, now: Instant) -> Result<(), Reason> {
        if now >= self.by && !self.is_done() { Err(Reason::Lease) } else { Ok(()) }
    }
}

pub(crate) fn refused(reason: Reason) -> Frame {
    Frame::Refused(Refused { reason: reason.number().into() })
}
