//! The correct part of the suite's peer: windows both ways, and byte streams through them.

use intercept::trace::words;
use rdma_backend::{Region, RemoteAddress};
use rdma_conn::Descriptors;
use rdma_proto::wire::{FeatureSet, Message, Window};
use suite::hex;

use super::{ENDED, Incoming, Peer, REFUSED_REQUEST};
use crate::client::Failure;

/// Bytes written at once.
const LONGEST: usize = 64 << 10;

impl<B: Descriptors> Peer<B> {
    /// Registers a window, and waits for the target's.
    pub fn handshake(&mut self) -> Result<(), Failure> {
        self.register()?;
        self.await_window().map(drop)
    }

    /// Registers the current part of its plan.
    pub fn register(&mut self) -> Result<(), Failure> {
        self.taken = 0;
        self.message(self.registration())
    }

    /// Returns the registration of the current part.
    pub fn registration(&self) -> Message {
        let (_, length) = self.part();
        let (region, offset) = self.place();
        let address = region.address() + u64::from(offset);
        Message::RegisterXferMemory(Window { address, length, rkey: region.rkey() })
    }

    /// Returns the number of bytes that came into the current window.
    pub const fn taken(&self) -> u32 {
        self.taken
    }

    /// Returns whether the target has filled the current window.
    pub fn is_full(&self) -> bool {
        self.taken == self.part().1
    }

    /// Returns the number of the current part.
    pub(super) fn turn(&self) -> usize {
        let parts = self.plan.len();
        if self.plan_ends { self.turn.min(parts - 1) } else { self.turn % parts }
    }

    pub(super) fn part(&self) -> (u32, u32) {
        self.plan[self.turn()]
    }

    fn place(&self) -> (&B::Region, u32) {
        let (offset, _) = self.part();
        match (&self.landing, offset.checked_sub(self.shape.window)) {
            (Some(landing), Some(offset)) => (landing, offset),
            _ => (self.window(), offset),
        }
    }

    /// Waits for the first window of the other side.
    pub fn await_window(&mut self) -> Result<Window, Failure> {
        loop {
            if let Some(window) = self.theirs {
                return Ok(window);
            }
            let incoming = self.receive()?;
            self.absorb(incoming)?;
        }
    }

    /// Writes bytes correctly: as much as there is room for, with one notification each.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.send_bytes_in(bytes, bytes.len())
    }

    /// Writes bytes correctly, at most `piece` of them with one notification.
    pub fn send_bytes_in(&mut self, mut bytes: &[u8], piece: usize) -> Result<(), Failure> {
        self.says(bytes)?;
        while !bytes.is_empty() {
            let (to, room) = self.room()?;
            let (now, rest) = bytes.split_at(bytes.len().min(room as usize).min(piece).min(LONGEST));
            let count = u32::try_from(now.len()).unwrap_or(u32::MAX);
            self.write_immediate(to, now, count)?;
            self.used += count;
            bytes = rest;
        }
        Ok(())
    }

    /// Returns the place of the next byte and how many fit, once there is room.
    pub fn room(&mut self) -> Result<(RemoteAddress, u32), Failure> {
        loop {
            let Window { address, length, rkey } = self.await_window()?;
            if self.used < length {
                return Ok((
                    // The target's address. If it wraps, the device refuses it.
                    RemoteAddress { address: address.wrapping_add(u64::from(self.used)), rkey },
                    length - self.used,
                ));
            }
            let incoming = self.receive()?;
            self.absorb(incoming)?;
        }
    }

    /// Returns whether untaken bytes of the stream are there.
    pub const fn has_received(&self) -> bool {
        !self.received.is_empty()
    }

    /// Waits for `len` bytes of the stream, and returns them.
    pub fn receive_bytes(&mut self, len: usize) -> Result<Vec<u8>, Failure> {
        while self.received.len() < len {
            let incoming = self.receive()?;
            self.absorb(incoming)?;
        }
        Ok(self.received.drain(..len).collect())
    }

    /// Waits for the next message but keepalives and registrations, which may come any time.
    pub fn receive_message(&mut self) -> Result<Message, Failure> {
        loop {
            match self.receive()? {
                Incoming::Message(bytes) => match Message::decode(&bytes) {
                    Ok(other @ (Message::GetServerFeature { .. } | Message::SetClientFeature { .. })) => {
                        self.seen.message(&bytes);
                        return Ok(other);
                    }
                    _ => self.absorb(Incoming::Message(bytes))?,
                },
                other => self.absorb(other)?,
            }
        }
    }

    /// Asks a server for its features. The next wait takes the answer.
    pub fn ask_features(&mut self, select: u16) -> Result<(), Failure> {
        self.asked += 1;
        self.message(Message::GetServerFeature { select, features: FeatureSet::NONE })
    }

    /// Waits until all questions for features are answered.
    pub fn await_answers(&mut self) -> Result<(), Failure> {
        while self.asked > 0 {
            let incoming = self.receive()?;
            self.absorb(incoming)?;
        }
        Ok(())
    }

    /// Returns whether it has given the target a window.
    pub const fn has_registered(&self) -> bool {
        self.registered
    }

    /// Returns whether the target has registered a window.
    pub const fn has_window(&self) -> bool {
        self.theirs.is_some()
    }

    /// Returns the number of keepalives that came.
    pub const fn keepalives(&self) -> u64 {
        self.keepalives
    }

    /// Handles `incoming` correctly.
    pub fn absorb(&mut self, incoming: Incoming) -> Result<(), Failure> {
        match incoming {
            Incoming::Message(bytes) => match self.decode(&bytes)? {
                Message::Keepalive => self.keepalives += 1,
                Message::RegisterXferMemory(window) => {
                    self.seen.registration(window, self.theirs, self.used);
                    self.theirs = Some(window);
                    self.used = 0;
                }
                Message::GetServerFeature { select, .. } if self.serves => {
                    self.owed.push(select);
                    if !self.answers_late {
                        self.answer_now()?;
                    }
                }
                Message::SetClientFeature { .. } if self.serves => {}
                Message::GetServerFeature { .. } if self.asked > 0 => self.asked -= 1,
                other => {
                    let what = format!("{} came, which nothing had asked for", words::control(&other));
                    return Err(Failure::wrong(what));
                }
            },
            Incoming::Notified(count) => return self.take_bytes(count),
            Incoming::Read => {}
            Incoming::Failed(status) => {
                let what = format!("{REFUSED_REQUEST}{status:?}, {}", status.describe());
                return Err(Failure::wrong(what));
            }
            Incoming::Gone(why) => return Err(Failure::wrong(format!("{ENDED}{why}"))),
        }
        Ok(())
    }

    /// Answers the questions that were held back, and later ones.
    pub fn answer_now(&mut self) -> Result<(), Failure> {
        self.answers_late = false;
        std::mem::take(&mut self.owed).into_iter().try_for_each(|select| {
            self.message(Message::GetServerFeature { select, features: FeatureSet::NONE })
        })
    }

    /// Returns whether it has not answered all questions.
    pub const fn owes_answers(&self) -> bool {
        !self.owed.is_empty()
    }

    /// Waits for the end of the connection, whatever comes before it.
    pub fn await_end(&mut self) -> Result<(), Failure> {
        while !self.has_left() {
            self.receive()?;
        }
        Ok(())
    }

    /// Takes all received bytes of the stream so far.
    pub fn take_received(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.received)
    }

    /// Counts bytes that a case has written to the target's window itself.
    pub fn advance(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.says(bytes)?;
        self.used += u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        Ok(())
    }

    /// Checks bytes before they are sent. All bytes pass here.
    fn says(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let Some(said) = &mut self.said else { return Ok(()) };
        said.take(bytes)
            .map_err(|what| Failure::Environment(format!("what the suite itself says is no RESP: {what}")))
    }

    fn decode(&mut self, bytes: &[u8]) -> Result<Message, Failure> {
        self.seen.message(bytes);
        Message::decode(bytes)
            .map_err(|error| Failure::wrong(format!("it sent a message {error}: {}", hex::start(bytes))))
    }

    fn take_bytes(&mut self, count: u32) -> Result<(), Failure> {
        self.seen.notified(count);
        if !self.registered {
            let what = format!("{count} bytes were notified before a window was registered");
            self.seen.breach("VR-FLOW-003", what.clone());
            return Err(Failure::wrong(what));
        }
        let (_, length) = self.part();
        let taken = self.taken;
        let Some(end) = taken.checked_add(count).filter(|end| *end <= length) else {
            let what = format!("{count} bytes were notified when {taken} of {length} were used");
            self.seen.breach("VR-FLOW-002", what.clone());
            return Err(Failure::wrong(what));
        };
        let mut bytes = vec![0; count as usize];
        let (region, offset) = self.place();
        if !region.memory().read(offset as usize + taken as usize, &mut bytes) {
            return Err(Failure::wrong("the plan is not within its memory"));
        }
        if let Some(mirror) = &mut self.mirror {
            mirror[(offset + taken) as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        self.received.extend_from_slice(&bytes);
        self.taken = end;
        if end == length && self.drains {
            self.turn += 1;
            self.register()?;
        }
        Ok(())
    }
}
