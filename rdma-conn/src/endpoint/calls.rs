//! Calls on a connection of an endpoint. None of them waits.

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
    /// Reads what has arrived. Returns `None` if there is nothing now, and `Some(0)` at the end of
    /// the stream. After `None`, [`Event::Readable`] or [`Event::Ended`] follows.
    ///
    /// # Errors
    /// Returns the error that ended the connection, once everything that arrived before is read.
    /// Also returns an error if there is no such connection.
    #[inline]
    pub fn read(&mut self, id: ConnectionId, into: &mut [u8]) -> Result<Option<usize>, Error> {
        Error::unless_forked()?;
        let connection = self.members.get_mut(id.0).and_then(|member| member.connection.as_mut());
        // This empties no window, so nothing is posted and no due time comes nearer.
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

    /// Receives into registered memory; see [`Connection::register_landing`].
    ///
    /// Continues `receiving` with what has arrived, and places the next windows in the buffer.
    /// Returns the counts once all bytes have arrived, and `None` before. After `None`,
    /// [`Event::Readable`] or [`Event::Ended`] follows.
    ///
    /// # Errors
    /// Returns an error if the connection ended first, the range is outside the buffer, the buffer
    /// belongs to another protection domain, or there is no such connection. Returns
    /// [`LandingUnderWay`](rdma_proto::ApiMisuse::LandingUnderWay) if unread bytes of an earlier
    /// call would be overwritten.
    pub fn receive(
        &mut self,
        id: ConnectionId,
        receiving: &mut Receiving<B>,
    ) -> Result<Option<Received>, Error> {
        let received = self.member(id)?.live()?.try_receive(receiving);
        self.touch(id);
        received
    }

    /// Stops placing windows in registered memory. A window already announced there stays until it
    /// is full, and its bytes are read as usual.
    ///
    /// # Errors
    /// Returns an error if there is no such connection.
    pub fn stop_landing(&mut self, id: ConnectionId) -> Result<(), Error> {
        Error::unless_forked()?;
        let Some(member) = self.members.get_mut(id.0) else { return Err(Error::NoSuchConnection) };
        member.live()?.stop_landing();
        member.note_sooner(id, &mut self.touched);
        Ok(())
    }

    /// Marks arrived bytes as read, after their use in place. See [`Connection::arrived`].
    ///
    /// # Errors
    /// Returns an error, and consumes none, if fewer have arrived or there is no such connection.
    #[inline]
    pub fn consume(&mut self, id: ConnectionId, bytes: usize) -> Result<(), Error> {
        Error::unless_forked()?;
        let Some(member) = self.members.get_mut(id.0) else { return Err(Error::NoSuchConnection) };
        member.live()?.consume(bytes)?;
        member.note_sooner(id, &mut self.touched);
        Ok(())
    }

    /// Takes as many bytes as fit and sends them with one notification. Returns `None` if there is
    /// no room. If some bytes were not taken, [`Event::Writable`] follows.
    ///
    /// # Errors
    /// Returns the error that ended the connection, or an error if it has ended or this side has
    /// closed it, or if there is no such connection.
    #[inline]
    pub fn write(&mut self, id: ConnectionId, from: &[IoSlice<'_>]) -> Result<Option<usize>, Error> {
        Error::unless_forked()?;
        let Some(member) = self.members.get_mut(id.0) else { return Err(Error::NoSuchConnection) };
        let connection = member.live()?;
        let written = connection.write(from)?;
        if connection.take_more() {
            self.follow_up(id)?;
        }
        Ok(written)
    }

    /// If events are turned off, completions that are not polled yet may give waiting bytes room.
    #[inline(never)]
    fn follow_up(&mut self, id: ConnectionId) -> Result<(), Error> {
        let Some(member) = self.members.get_mut(id.0) else { return Ok(()) };
        member.note_sooner(id, &mut self.touched);
        let waits = member.connection.as_ref().is_some_and(|connection| !connection.is_flushed());
        if self.quiet && waits { self.look_at(id) } else { Ok(()) }
    }

    /// Sends bytes of `buffer` without a copy; see [`Connection::register_buffer`].
    ///
    /// Lends as many bytes as possible now, from the start of `range`, behind everything written.
    /// Returns `None` if it can lend none now: bytes lent before still wait for the peer, or too
    /// many are unconfirmed. If some bytes were not lent, [`Event::Writable`] follows.
    /// [`Event::Returned`] follows when memory comes back.
    ///
    /// # Errors
    /// Returns the error that ended the connection, or an error if it has ended or this side has
    /// closed it. Also returns an error if `range` is outside the buffer, the buffer belongs to
    /// another protection domain, or there is no such connection.
    pub fn lend(
        &mut self,
        id: ConnectionId,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        self.lend_framed(id, &[], buffer, range, &[])
    }

    /// Sends `before`, then bytes of `buffer` without a copy, then `after`.
    ///
    /// Takes as many bytes as possible now, from the start of `before`, and returns their number.
    /// They leave by one doorbell, and with one notification if the peer's window has room for all
    /// of them. So this costs less than [`Endpoint::write`], [`Endpoint::lend`] and another write.
    /// Otherwise it does what these do.
    ///
    /// # Errors
    /// The errors are those of [`Endpoint::lend`]. No byte is taken then.
    pub fn lend_framed(
        &mut self,
        id: ConnectionId,
        before: &[IoSlice<'_>],
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
        after: &[IoSlice<'_>],
    ) -> Result<Option<usize>, Error> {
        Error::unless_forked()?;
        let Some(member) = self.members.get_mut(id.0) else { return Err(Error::NoSuchConnection) };
        let (taken, waits) = member.live()?.try_lend(before, buffer, range, after)?;
        member.waits.lend = waits;
        self.follow_up(id)?;
        Ok(taken)
    }

    /// Returns `Some` once the device has all written bytes; see [`Connection::flushed`]. After
    /// `None`, [`Event::Writable`] or [`Event::Ended`] follows.
    ///
    /// # Errors
    /// Returns the error that ended the connection. Also returns an error if the connection ended
    /// before the device had all bytes, or if there is no such connection.
    pub fn flush(&mut self, id: ConnectionId) -> Result<Option<()>, Error> {
        let member = self.member(id)?;
        let flushed = member.live()?.flushed()?;
        member.waits.flush = flushed.is_none();
        Ok(flushed)
    }

    /// Returns `Some` once the peer has everything lent from `buffer`; see
    /// [`Connection::returned`]. After `None`, [`Event::Returned`] or [`Event::Ended`] follows.
    ///
    /// # Errors
    /// Returns an error if the connection ended first, or if there is no such connection.
    pub fn returned(&mut self, id: ConnectionId, buffer: &RegisteredBuffer<B>) -> Result<Option<()>, Error> {
        self.member(id)?.live()?.returned(buffer)
    }

    /// Begins a graceful end. Written bytes are delivered first, for at most `linger`.
    /// [`Event::Ended`] follows, and [`Endpoint::closed`] reports whether all bytes arrived.
    ///
    /// # Errors
    /// Returns an error if there is no such connection.
    pub fn close(&mut self, id: ConnectionId, linger: Duration) -> Result<(), Error> {
        let member = self.member(id)?;
        let was_closed = member.is_closed();
        member.close(linger);
        // Another close gives it no more time.
        if !was_closed {
            self.refused(id);
        }
        self.settle(id);
        Ok(())
    }

    /// Returns `Some` once a closed connection delivered all bytes. `None` before [`Event::Ended`].
    ///
    /// # Errors
    /// Returns the error that ended the connection. Also returns an error if some bytes did not
    /// arrive, or if there is no such connection.
    pub fn closed(&mut self, id: ConnectionId) -> Result<Option<()>, Error> {
        self.member(id)?.live()?.closed()
    }

    /// Closes a connection, reports no further events of it, and forgets it when it has ended.
    ///
    /// # Errors
    /// Returns an error if there is no such connection.
    pub fn abandon(&mut self, id: ConnectionId, linger: Duration) -> Result<(), Error> {
        // Before `close`, which then forgets a connection that has already ended.
        self.member(id)?.abandoned = true;
        self.close(id, linger)
    }

    /// Ends a connection at once, if it has not ended, and forgets it. Written bytes may be lost.
    pub fn abort(&mut self, id: ConnectionId) {
        // A child ends nothing of its parent's (VR-RES-010).
        if rdma_process::is_child() {
            return;
        }
        let Some(mut member) = self.members.remove(id.0) else { return };
        self.timers.set(id, &mut member.due, None);
        self.identifiers.remove(&member.key);
        self.newcomers.has_room();
        self.events.forget(member.key);
        let (queue, options) = (member.queue, member.options);
        let pair = member.connection.as_ref().map(|connection| connection.queue_pair_number());
        // The queue pair goes first (VR-RES-001): only then can no more of its completions come.
        drop(member);
        if let Some(queue) = queue {
            self.queues.leave(queue, pair, &options);
        }
    }

    /// Checks whether an error ended the connection.
    ///
    /// # Errors
    /// Returns that error, or an error if there is no such connection.
    pub fn check(&self, id: ConnectionId) -> Result<(), Error> {
        self.members.get(id.0).ok_or(Error::NoSuchConnection)?.check()
    }
}
