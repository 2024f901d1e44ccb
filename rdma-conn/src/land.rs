//! Receiving without a copy: memory of the application in which windows lie for a while.
//!
//! A side chooses where its window lies each time it announces one (VR-MEM-003); only the length stays (VR-MEM-008). So a reader
//! that knows how many bytes follow has whole windows of them written where they belong, and copies no more than what comes
//! before the first of those and after the last. The peer sees ordinary windows.

use std::ops::Range;
use std::sync::Arc;

use rdma_backend::{Access, Backend, Region};
use rdma_proto::{ApiMisuse, Error as ProtocolError, Readable, RegionAddress, State};

use crate::connection::Connection;
use crate::error::Error;
use crate::lend::{Landing, RegisteredBuffer};

/// Counts of how the bytes of a [`Receiving`] came to where they belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Received {
    /// Bytes that the peer wrote where they belong.
    pub landed: u64,
    /// Bytes that were copied from an ordinary window.
    pub copied: u64,
}

/// A part of the stream on its way into a [`RegisteredBuffer`]: the next bytes that are not read yet, as many as a range of the buffer
/// has. [`Endpoint::receive`](crate::Endpoint::receive) carries it on until all of them are there.
///
/// One that is dropped before leaves the bytes that have not arrived to whoever reads next.
#[derive(Debug)]
pub struct Receiving<B: Backend> {
    buffer: Arc<RegisteredBuffer<B>>,
    /// Where the bytes belong that are still to come.
    range: Range<usize>,
    received: Received,
    begun: bool,
}

impl<B: Backend> Receiving<B> {
    /// Returns the next `range.len()` unread bytes of a stream, which belong into `range` of `buffer`.
    pub fn new(buffer: Arc<RegisteredBuffer<B>>, range: Range<usize>) -> Self {
        Self { buffer, range, received: Received::default(), begun: false }
    }

    /// Returns how the bytes came that are there already, from the beginning of the range on.
    pub const fn received(&self) -> Received {
        self.received
    }
}

impl<B: Backend> Connection<B> {
    /// Registers `len` bytes to receive into without a copy, all zero at first; they can be lent as well. Registering takes much longer
    /// than copying a few kilobytes, so keep what it returns and use it again.
    ///
    /// The peer can write to all of it, at any time, from when the first window in it is announced until it is deregistered, which
    /// dropping it does. A peer that obeys the protocol writes only to windows, each byte once, and to none that is full
    /// (VR-SEC-005).
    ///
    /// # Errors
    /// `len` is zero, or no memory can be registered.
    pub fn register_landing(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.memory.registrar().buffer(len, Access::REMOTE_WRITE)
    }

    /// Carries `receiving` on with what has arrived, and has the windows to come written where they belong. Returns how the bytes came
    /// once all of them are there; `None` while some are not.
    ///
    /// # Errors
    /// The connection has ended before all of them arrived; or the range is not inside of the buffer, or is where bytes that an earlier
    /// call left unread still land ([`ApiMisuse::LandingUnderWay`]); or the buffer belongs to another protection domain.
    pub(crate) fn try_receive(&mut self, receiving: &mut Receiving<B>) -> Result<Option<Received>, Error> {
        if !receiving.begun {
            self.begin(receiving)?;
        }
        while !receiving.range.is_empty() {
            let Some(part) = self.machine.readable() else {
                self.check()?;
                return if self.machine.state() == State::Closed { Err(self.end()) } else { Ok(None) };
            };
            // At most `part.len`, a u32.
            let len = receiving.range.len().min(part.len as usize);
            if self.is_in_place(receiving, part) {
                receiving.received.landed += len as u64;
            } else {
                if !self.memory.copy(part, len, &receiving.buffer, receiving.range.start) {
                    return Err(ProtocolError::Bug("readable bytes outside their window").into());
                }
                receiving.received.copied += len as u64;
            }
            receiving.range.start += len;
            self.consume(len)?;
        }
        Ok(Some(receiving.received))
    }

    /// Says where the windows to come may lie. Where an earlier part of the stream still lands, they lie in ordinary memory.
    fn begin(&mut self, receiving: &mut Receiving<B>) -> Result<(), Error> {
        let Range { start, end } = receiving.range;
        let len = receiving.buffer.len();
        if start > end || end > len {
            return Err(ApiMisuse::ReceiveBeyondBuffer { end, len }.into());
        }
        if receiving.buffer.domain() != self.memory.domain() {
            return Err(Error::ForeignBuffer);
        }
        if !self.may_go_there(receiving) {
            return Err(ApiMisuse::LandingUnderWay.into());
        }
        receiving.begun = true;
        // Into memory that the peer may not write to, everything is copied.
        let Some(region) = receiving.buffer.landing() else { return Ok(()) };
        let address = region.address().saturating_add(start as u64);
        let memory = RegionAddress { address, rkey: region.rkey() };
        // What is longer lands as far as the machine counts.
        let length = u32::try_from(end - start).unwrap_or(u32::MAX);
        if !self.machine.is_landing() && self.machine.land(memory, length)?.is_some() {
            self.memory.landing = Some(Landing { buffer: Arc::clone(&receiving.buffer), start });
            self.went_on();
        }
        Ok(())
    }

    /// Returns whether no byte is lost by receiving there. In the buffer in which an earlier part of the stream still lands, bytes can be
    /// received where they lie, elsewhere, or moved as a whole when all of them are there.
    fn may_go_there(&self, receiving: &Receiving<B>) -> bool {
        let Some(landing) = self.memory.landing.as_ref() else { return true };
        if !Arc::ptr_eq(&landing.buffer, &receiving.buffer) {
            return true;
        }
        let Range { start, end } = self.machine.landing_in_use();
        let (begin, end) = (landing.start + start as usize, landing.start + end as usize);
        let apart = receiving.range.end <= begin || end <= receiving.range.start;
        let [before, ..] = self.machine.all_readable();
        // Bytes in an ordinary window come first.
        let before = before.map_or(0, |part| part.len as usize);
        let in_place = receiving.range.start.checked_add(before) == Some(begin);
        let as_a_whole = before == 0 && !self.machine.may_land() && receiving.range.len() >= end - begin;
        apart || in_place || as_a_whole
    }

    /// Returns whether these bytes lie where they belong.
    fn is_in_place(&self, receiving: &Receiving<B>, part: Readable) -> bool {
        part.region == Readable::LANDED
            && self.memory.landing.as_ref().is_some_and(|landing| {
                let at = landing.start.saturating_add(part.offset as usize);
                Arc::ptr_eq(&landing.buffer, &receiving.buffer) && at == receiving.range.start
            })
    }

    /// Has no further window lie in memory of the application. One that was announced there stays until it is full, and its bytes are
    /// read as any others.
    pub(crate) fn stop_landing(&mut self) {
        self.machine.stop_landing();
        self.memory.keep_landing(|| self.machine.is_landing());
        self.went_on();
    }

    /// Returns whether windows of this connection lie in memory of the application now, or unread bytes do. While they do, the
    /// connection keeps a clone of its [`Arc`].
    pub const fn is_landing(&self) -> bool {
        self.memory.landing.is_some()
    }
}
