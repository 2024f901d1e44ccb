//! Bytes of an application, copied into the send buffer and out of the windows.

use std::io::IoSlice;
use std::slice;

use rdma_backend::{Backend, QueuePair};
use rdma_proto::ApiMisuse;

use super::Connection;
use crate::arrived::Arrived;
use crate::error::Error;
use crate::memory::{Pieces, notification_of};

impl<B: Backend> Connection<B> {
    /// Reads what has arrived; `None` when there is nothing now, `Some(0)` at the end of the stream.
    ///
    /// # Errors
    /// The error that ended the connection, once all that arrived before is read.
    pub fn try_read(&mut self, into: &mut [u8]) -> Result<Option<usize>, Error> {
        let mut read = 0;
        // No more than three parts, one behind the other.
        while let Some(part) = self.machine.take(into.len() - read) {
            let end = read + part.len as usize;
            if !into.get_mut(read..end).is_some_and(|place| self.memory.read_window(part, place)) {
                return Err(Error::Protocol(rdma_proto::Error::Bug("readable bytes outside their window")));
            }
            read = end;
        }
        if read > 0 || into.is_empty() {
            self.memory.keep_landing(|| self.machine.is_landing());
            // A window that was emptied is announced again at once. Most reads empty none.
            self.went_on();
            return Ok(Some(read));
        }
        if self.machine.has_ended() { self.end_of_stream() } else { Ok(None) }
    }

    /// Reads what has arrived, as most reads do: from the window that is being filled, and nothing follows from that. `None`, and nothing
    /// is done, if there may be more to do: [`Connection::try_read`] does it then.
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

    /// Returns all bytes that have arrived and were not consumed, in order, where the peer wrote them. Give them back with
    /// [`Connection::consume`].
    pub fn arrived(&self) -> impl Iterator<Item = Arrived<'_>> {
        self.machine.all_readable().into_iter().flatten().filter_map(|part| self.memory.arrived(part))
    }

    /// Gives the first `bytes` of [`Connection::arrived`] back to the peer: their memory may be written again.
    ///
    /// # Errors
    /// More than have arrived; none is consumed then.
    pub fn consume(&mut self, bytes: usize) -> Result<(), Error> {
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

    /// Takes as many bytes as there is room for and sends them as one notification; `None` when there is no room now.
    ///
    /// # Errors
    /// The error that ended the connection; or no memory can be registered for the send buffer, which ends nothing: a later call may
    /// find some.
    pub fn try_write(&mut self, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        if !self.machine.takes_bytes() {
            return self.refuse_bytes();
        }
        let mut pieces = Pieces::of(from);
        let mut written = 0;
        // Once, or twice around the end of the send buffer.
        while !pieces.is_empty() {
            let space = self.machine.space();
            if space.len == 0 {
                break;
            }
            if self.memory.send_buffer().is_none() {
                self.memory.add_send_buffer()?;
                self.sooner = true;
            }
            let filled = self.memory.fill(space, &mut pieces);
            self.machine.commit(filled)?;
            if filled == 0 {
                return Err(Error::Protocol(rdma_proto::Error::Bug("space outside the send buffer")));
            }
            written += filled;
        }
        if written > 0 {
            self.went_on();
            return Ok(Some(written));
        }
        if pieces.is_empty() {
            return Ok(Some(0));
        }
        self.work.stalls += 1;
        Ok(None)
    }

    /// Sends all bytes of `from` by one request, as most writes are, and returns how many. `None`, and nothing is done, if that is not
    /// all there is to do: [`Connection::try_write`] does it then. Room is left, and the connection's times have not come nearer.
    #[inline]
    pub(crate) fn write_at_once(&mut self, from: &[IoSlice<'_>]) -> Option<usize> {
        let bytes = match from {
            [all] => all.len(),
            pieces => total(pieces),
        };
        let send_buffer = self.memory.send_buffer()?;
        let notification = self.machine.write_at_once(bytes)?;
        self.used = true;
        self.work.doorbells += 1;
        self.work.requests += 1;
        let request = notification_of(send_buffer, from, notification, self.max_inline);
        if let Err(error) = self.pair.post_send(slice::from_ref(&request)) {
            self.refused("ibv_post_send", error.error);
            // The peer hears of the end.
            self.post(self.now());
        }
        Some(bytes)
    }

    #[cold]
    fn refuse_bytes(&mut self) -> Result<Option<usize>, Error> {
        self.check()?;
        self.machine.commit(0)?;
        Ok(None)
    }

    /// The application has done something by which something may be posted.
    #[inline]
    pub(crate) fn went_on(&mut self) {
        // The time is not asked for where nobody needs it.
        if !self.machine.is_settled() {
            self.used = true;
            self.post_due(self.now());
        }
    }
}

#[inline(never)]
fn total(pieces: &[IoSlice<'_>]) -> usize {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.len()))
}
