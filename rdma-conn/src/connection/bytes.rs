//! Copies application bytes into the send buffer and out of the windows.

use std::io::IoSlice;
use std::time::Duration;

use rdma_backend::memory::SharedMemory;
use rdma_backend::{Backend, Region};
use rdma_proto::{ApiMisuse, Span};

use super::Connection;
use crate::arrived::Arrived;
use crate::error::Error;

/// How long after a refusal the full send buffer is requested again.
const GROWTH_PAUSE: Duration = Duration::from_millis(100);

impl<B: Backend> Connection<B> {
    /// See [`Endpoint::read`](crate::Endpoint::read).
    pub(crate) fn try_read(&mut self, into: &mut [u8]) -> Result<Option<usize>, Error> {
        let mut read = 0;
        // At most three consecutive parts.
        while let Some(part) = self.machine.take(into.len() - read) {
            let end = read + part.len as usize;
            if !into.get_mut(read..end).is_some_and(|place| self.memory.read_window(part, place)) {
                return Err(Error::Protocol(rdma_proto::Error::Bug("readable bytes outside their window")));
            }
            read = end;
        }
        if read > 0 || into.is_empty() {
            self.memory.keep_landing(|| self.machine.is_landing());
            // Announce an emptied window at once. Most reads empty none.
            self.went_on();
            return Ok(Some(read));
        }
        // Only now: bytes that arrived before the end are read first (VR-CLOSE-002).
        if self.machine.has_ended() { self.end_of_stream() } else { Ok(None) }
    }

    /// Fast path: reads from the window being filled. `None`, unchanged: use `try_read`.
    #[inline]
    pub(crate) fn read_at_once(&mut self, into: &mut [u8]) -> Option<usize> {
        let part = self.machine.take_at_once(into.len())?;
        let len = part.len as usize;
        if !into.get_mut(..len).is_some_and(|place| self.memory.read_window(part, place)) {
            self.fail(Error::Protocol(rdma_proto::Error::Bug("readable bytes outside their window")));
            return None;
        }
        Some(len)
    }

    #[cold]
    fn end_of_stream(&self) -> Result<Option<usize>, Error> {
        self.check()?;
        Ok(Some(0))
    }

    /// Returns unread bytes in place, for a zero-copy read.
    ///
    /// Parts are in order. [`Endpoint::consume`](crate::Endpoint::consume) marks bytes as read.
    #[inline]
    pub fn arrived(&self) -> impl Iterator<Item = Arrived<'_>> {
        self.machine.all_readable().into_iter().flatten().filter_map(|part| self.memory.arrived(part))
    }

    /// Gives the first `bytes` of [`Connection::arrived`] back to the peer, which overwrites them.
    #[inline]
    pub(crate) fn consume(&mut self, bytes: usize) -> Result<(), Error> {
        let readable = usize::try_from(self.unread()).unwrap_or(usize::MAX);
        if bytes > readable {
            return Err(ApiMisuse::ConsumeBeyondReadable { bytes, readable }.into());
        }
        let mut left = bytes;
        while let Some(part) = self.machine.readable().filter(|_| left > 0) {
            // At most `part.len`, a u32.
            let now = left.min(part.len as usize);
            self.machine.consume(now as u32)?;
            left -= now;
        }
        self.memory.keep_landing(|| self.machine.is_landing());
        self.went_on();
        Ok(())
    }

    /// See [`Endpoint::write`](crate::Endpoint::write).
    #[inline]
    pub(crate) fn write(&mut self, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        let bytes = match from {
            [all] => all.len(),
            pieces => total(pieces),
        };
        if self.memory.can_grow() {
            self.grow_for(bytes);
        }
        let Some(place) = self.machine.put(bytes) else { return self.refuse_bytes(bytes) };
        fill(self.memory.send_buffer(), place, from, 0);
        // A mark, which `handle_time` turns into a time: a write reads no clock.
        self.used = true;
        let mut written = place.len as usize;
        // A single WRITE of all bytes leaves room.
        if !self.machine.is_one_write() {
            written += self.write_rest(from, written, bytes);
        }
        self.post(None);
        Ok(Some(written))
    }

    /// Takes what fits, and posts none of it. Returns whether that is all.
    pub(super) fn take_bytes(&mut self, from: &[IoSlice<'_>], taken: &mut usize) -> bool {
        let bytes = total(from);
        if self.memory.can_grow() {
            self.grow_for(bytes);
        }
        let mut here = 0;
        // A second part begins at the start of the send buffer.
        while here < bytes
            && let Some(place) = self.machine.put(bytes - here)
        {
            fill(self.memory.send_buffer(), place, from, here);
            here += place.len as usize;
        }
        if here < bytes {
            self.note_waits();
        }
        *taken += here;
        here == bytes
    }

    #[inline(never)]
    fn write_rest(&mut self, from: &[IoSlice<'_>], written: usize, bytes: usize) -> usize {
        // They wrap to the beginning of the send buffer.
        let place = self.machine.put(bytes - written);
        if let Some(place) = place {
            fill(self.memory.send_buffer(), place, from, written);
        }
        self.note_waits();
        place.map_or(0, |place| place.len as usize)
    }

    fn note_waits(&mut self) {
        self.lacks_room = !self.has_room();
        self.more = true;
    }

    /// Registers the full send buffer for a write that reaches the end of the small one. A
    /// connection that has sent so much sends more, and a short ring needs more completions.
    ///
    /// If it cannot be registered, the small one sends the bytes, more slowly. Memory that an idle
    /// connection has given back may be in use: that must not end the connection.
    #[inline(never)]
    fn grow_for(&mut self, bytes: usize) {
        let fits = bytes < self.machine.space().len as usize;
        let length = self.options.protocol.send_buffer;
        if fits || !self.machine.takes_bytes() || !self.machine.can_replace_send_buffer(length) {
            return;
        }
        let now = self.now();
        if now < self.grows_at {
            return;
        }
        match self.memory.add_send_buffer() {
            Ok(length) => {
                self.machine.replace_send_buffer(length);
                // The new buffer has a time of release, which a WRITE within the budget would not
                // report.
                (self.sooner, self.more) = (true, true);
            }
            Err(error) => {
                tracing::debug!(peer = %self.peer, %error, "no memory for the send buffer");
                self.grows_at = now.after(GROWTH_PAUSE);
            }
        }
    }

    /// Returns why no byte was taken: the connection ended, there is no room, or `bytes` is zero.
    #[cold]
    fn refuse_bytes(&mut self, bytes: usize) -> Result<Option<usize>, Error> {
        if !self.machine.takes_bytes() {
            self.check()?;
            // For its error: after a close, or an end in order, `check` finds none.
            self.machine.commit(0)?;
        }
        self.note_waits();
        if bytes == 0 {
            return Ok(Some(0));
        }
        self.work.stalls += 1;
        Ok(None)
    }

    /// Posts what a call of the application has made possible.
    #[inline]
    pub(crate) fn went_on(&mut self) {
        if !self.machine.is_settled() {
            self.used = true;
            self.post(None);
        }
    }
}

#[inline]
fn fill<R: Region>(send_buffer: &R, place: Span, from: &[IoSlice<'_>], taken: usize) {
    // Inside by construction.
    let (memory, offset, len) = (send_buffer.memory(), place.offset as usize, place.len as usize);
    if let [all] = from {
        if let Some(bytes) = all.get(taken..).and_then(|rest| rest.get(..len)) {
            _ = memory.write(offset, bytes);
        }
    } else if let Some(mut room) = memory.slice(offset, len) {
        fill_from(&mut room, from, taken);
    }
}

#[inline(never)]
fn fill_from(room: &mut SharedMemory<'_>, pieces: &[IoSlice<'_>], mut taken: usize) {
    let mut pieces = pieces.iter();
    for piece in &mut pieces {
        match piece.get(taken..) {
            Some(rest) => {
                room.put(rest);
                break;
            }
            None => taken -= piece.len(),
        }
    }
    for piece in pieces {
        room.put(piece);
    }
}

#[inline(never)]
fn total(pieces: &[IoSlice<'_>]) -> usize {
    // Pieces may name the same memory many times, so that their sum may overflow.
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.len()))
}
