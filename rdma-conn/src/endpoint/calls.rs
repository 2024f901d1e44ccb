//! Calls of an application on a connection of an endpoint: none of them waits.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

#[cfg(doc)]
use super::Event;
use super::{ConnectionId, Descriptors, Endpoint};
#[cfg(doc)]
use crate::connection::Connection;
use crate::error::Error;
use crate::land::{Received, Receiving};
use crate::lend::RegisteredBuffer;

impl<B: Descriptors> Endpoint<B> {
    /// Reads what has arrived; `None` when there is nothing now, `Some(0)` at the end of the stream. [`Event::Readable`] or
    /// [`Event::Ended`] follows.
    ///
    /// # Errors
    /// The error that ended the connection, once all that arrived before is read; or there is no such connection.
    #[inline]
    pub fn read(&mut self, id: ConnectionId, into: &mut [u8]) -> Result<Option<usize>, Error> {
        let connection = self.members.get_mut(id.0).and_then(|member| member.connection.as_mut());
        match connection.and_then(|connection| connection.read_at_once(into)) {
            Some(read) => Ok(Some(read)),
            None => self.read_in_steps(id, into),
        }
    }

    #[inline(never)]
    fn read_in_steps(&mut self, id: ConnectionId, into: &mut [u8]) -> Result<Option<usize>, Error> {
        let Some(member) = self.members.get_mut(id.0) else { return Err(Error::NoSuchConnection) };
        let read = member.live()?.try_read(into)?;
        member.note_sooner(id, &mut self.touched);
        Ok(read)
    }

    /// Receives into registered memory, see [`Connection::register_landing`]: carries `receiving` on with what has arrived, and has the
    /// windows to come written where they belong. Returns how the bytes came once all of them are there. After `None` follows
    /// [`Event::Readable`] or [`Event::Ended`].
    ///
    /// # Errors
    /// The connection has ended before all of them arrived; or the range is not inside of the buffer, or is where bytes that an earlier
    /// call left unread still land ([`ApiMisuse::LandingUnderWay`](rdma_proto::ApiMisuse::LandingUnderWay)); or the buffer belongs to
    /// another protection domain; or there is no such connection.
    pub fn receive(
        &mut self,
        id: ConnectionId,
        receiving: &mut Receiving<B>,
    ) -> Result<Option<Received>, Error> {
        let received = self.member(id)?.live()?.try_receive(receiving);
        self.touch(id);
        received
    }

    /// Has no further window lie in registered memory. One that was announced there stays until it is full, and its bytes are read as any
    /// others.
    ///
    /// # Errors
    /// There is no such connection.
    pub fn stop_landing(&mut self, id: ConnectionId) -> Result<(), Error> {
        let Some(member) = self.members.get_mut(id.0) else { return Err(Error::NoSuchConnection) };
        member.live()?.stop_landing();
        member.note_sooner(id, &mut self.touched);
        Ok(())
    }

    /// Gives bytes back that were used where they lie, see [`Connection::arrived`].
    ///
    /// # Errors
    /// More than have arrived, and none is consumed then; or there is no such connection.
    pub fn consume(&mut self, id: ConnectionId, bytes: usize) -> Result<(), Error> {
        let Some(member) = self.members.get_mut(id.0) else { return Err(Error::NoSuchConnection) };
        member.live()?.consume(bytes)?;
        member.note_sooner(id, &mut self.touched);
        Ok(())
    }

    /// Takes as many bytes as there is room for, and sends them as one notification. If that is not all, or `None` because
    /// there is no room, [`Event::Writable`] follows.
    ///
    /// # Errors
    /// The error that ended the connection, or there is no such connection.
    #[inline]
    pub fn write(&mut self, id: ConnectionId, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        let Some(member) = self.members.get_mut(id.0) else { return Err(Error::NoSuchConnection) };
        let connection = member.live()?;
        let written = connection.write(from)?;
        if connection.take_more() {
            self.follow_up(id)?;
        }
        Ok(written)
    }

    /// Does what follows from a call that may have made bytes wait. Where nobody hears of room,
    /// completions that were not polled yet may let them go.
    #[inline(never)]
    fn follow_up(&mut self, id: ConnectionId) -> Result<(), Error> {
        let Some(member) = self.members.get_mut(id.0) else { return Ok(()) };
        member.note_sooner(id, &mut self.touched);
        let waits = member.connection.as_ref().is_some_and(|connection| !connection.is_flushed());
        if self.quiet && waits { self.look_at(id) } else { Ok(()) }
    }

    /// Sends from registered memory, see [`Connection::register_buffer`]: as many bytes of `buffer` as can be lent now, from the
    /// beginning of `range`, behind all that was written before. If that is not all, or `None` because some that were lent before wait
    /// for the peer's window, [`Event::Writable`] follows; [`Event::Returned`] when memory has come back.
    ///
    /// # Errors
    /// The error that ended the connection; or `range` is not inside of the buffer; or the buffer belongs to another protection domain;
    /// or there is no such connection.
    pub fn lend(
        &mut self,
        id: ConnectionId,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        let wanted = range.len();
        let Some(member) = self.members.get_mut(id.0) else { return Err(Error::NoSuchConnection) };
        let lent = member.live()?.try_lend(buffer, range)?;
        member.waits.lend = lent.unwrap_or(0) < wanted;
        self.follow_up(id)?;
        Ok(lent)
    }

    /// Returns whether everything written was handed to the device, see [`Connection::flushed`]. After `None` follows
    /// [`Event::Writable`] or [`Event::Ended`].
    ///
    /// # Errors
    /// As [`Connection::flushed`], or there is no such connection.
    pub fn flush(&mut self, id: ConnectionId) -> Result<Option<()>, Error> {
        let member = self.member(id)?;
        let flushed = member.live()?.flushed()?;
        member.waits.flush = flushed.is_none();
        Ok(flushed)
    }

    /// Returns whether the peer has all that was lent of `buffer`, see [`Connection::returned`]. After `None` follows
    /// [`Event::Returned`] or [`Event::Ended`].
    ///
    /// # Errors
    /// As [`Connection::returned`], or there is no such connection.
    pub fn returned(&mut self, id: ConnectionId, buffer: &RegisteredBuffer<B>) -> Result<Option<()>, Error> {
        self.member(id)?.live()?.returned(buffer)
    }

    /// Begins a graceful end: what was written is delivered first, for at most `linger`; [`Event::Ended`] follows, and
    /// [`Endpoint::closed`] says whether all of it arrived.
    ///
    /// # Errors
    /// There is no such connection.
    pub fn close(&mut self, id: ConnectionId, linger: Duration) -> Result<(), Error> {
        self.member(id)?.close(linger);
        self.settle(id);
        Ok(())
    }

    /// Returns whether a connection that was closed has ended in order, see [`Connection::closed`]. After `None` follows
    /// [`Event::Ended`].
    ///
    /// # Errors
    /// Not everything arrived, or there is no such connection.
    pub fn closed(&mut self, id: ConnectionId) -> Result<Option<()>, Error> {
        self.member(id)?.live()?.closed()
    }

    /// As [`Endpoint::close`], with nobody listening: nothing more is told of the connection, and it is forgotten when it has
    /// ended.
    ///
    /// # Errors
    /// There is no such connection.
    pub fn abandon(&mut self, id: ConnectionId, linger: Duration) -> Result<(), Error> {
        self.member(id)?.abandoned = true;
        self.close(id, linger)
    }

    /// Ends a connection at once, if it has not ended, and forgets it: what was written may be lost.
    pub fn abort(&mut self, id: ConnectionId) {
        let Some(mut member) = self.members.remove(id.0) else { return };
        self.timers.set(id, &mut member.due, None);
        self.identifiers.remove(&member.key);
        let (queue, options) = (member.queue, member.options);
        let pair = member.connection.as_ref().map(|connection| connection.queue_pair_number());
        drop(member);
        if let Some(queue) = queue {
            self.queues.leave(queue, pair, &options);
        }
    }

    /// Checks whether an error ended a connection.
    ///
    /// # Errors
    /// That error, or there is no such connection.
    pub fn check(&self, id: ConnectionId) -> Result<(), Error> {
        self.members.get(id.0).ok_or(Error::NoSuchConnection)?.check()
    }
}
