//! Zero-copy receiving: windows that lie in the application's memory.
//!
//! A side chooses where each window lies (VR-MEM-003). Only the length is fixed (VR-MEM-008). A
//! reader that knows how many bytes follow has whole windows written where they belong. Only bytes
//! before the first and after the last of these windows are copied. The peer sees ordinary windows.

use std::ops::Range;
use std::sync::Arc;

use rdma_backend::{Backend, Region};
use rdma_proto::{ApiMisuse, Error as ProtocolError, Readable, RegionAddress, State};

use crate::connection::Connection;
use crate::error::Error;
use crate::lend::{Landing, RegisteredBuffer};

/// Counts of landed and copied bytes of a [`Receiving`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Received {
    /// Bytes that the peer wrote to their final place.
    pub landed: u64,
    /// Bytes copied from an ordinary window.
    pub copied: u64,
}

/// A receive into a range of a [`RegisteredBuffer`], for the next unread bytes of the stream.
///
/// A receive places whole windows in the buffer, so that the peer writes bytes to their final
/// place. These bytes *land*. The bytes before the first and after the last of these windows are
/// copied.
///
/// [`Endpoint::receive`](crate::Endpoint::receive) continues it until the range is full. If it is
/// dropped earlier, bytes that have not arrived are left to the next read.
#[derive(Debug)]
pub struct Receiving<B: Backend> {
    buffer: Arc<RegisteredBuffer<B>>,
    range: Range<usize>,
    received: Received,
    begun: bool,
}

impl<B: Backend> Receiving<B> {
    /// Starts a receive of the next `range.len()` unread bytes into `range` of `buffer`.
    pub fn new(buffer: Arc<RegisteredBuffer<B>>, range: Range<usize>) -> Self {
        Self { buffer, range, received: Received::default(), begun: false }
    }

    /// Returns the counts of the bytes received so far, from the beginning of the range.
    pub const fn received(&self) -> Received {
        self.received
    }
}

impl<B: Backend> Connection<B> {
    /// Registers `len` bytes for zero-copy receiving, all zero at first. They can also be lent.
    ///
    /// Once this side has announced the first window in the buffer, the peer can write to any part
    /// of the buffer. It can do so until the buffer is deregistered. Dropping the buffer
    /// deregisters it. A correct peer writes only to announced windows, each byte once, and never
    /// to a full window (VR-SEC-005).
    ///
    /// # Errors
    /// Returns an error if `len` is zero or the memory cannot be registered.
    pub fn register_landing(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.registrar().register_landing(len)
    }

    /// See [`Endpoint::receive`](crate::Endpoint::receive).
    pub(crate) fn try_receive(&mut self, receiving: &mut Receiving<B>) -> Result<Option<Received>, Error> {
        if !receiving.begun {
            self.begin(receiving)?;
        }
        while !receiving.range.is_empty() {
            let Some(part) = self.machine.readable() else {
                self.check()?;
                // The missing bytes will not come any more.
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
            // After the copy: from now on the peer may overwrite these bytes.
            self.consume(len)?;
        }
        Ok(Some(receiving.received))
    }

    /// Tells the machine where windows may lie: nowhere while an earlier receive still lands.
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
        // Not before: a call after one of these errors begins again.
        receiving.begun = true;
        // Memory that the peer may not write to gets copies only.
        let Some(region) = receiving.buffer.landing() else { return Ok(()) };
        let address = region.address().saturating_add(start as u64);
        let memory = RegionAddress { address, rkey: region.rkey() };
        // The machine counts at most so many bytes; the rest lands later.
        let length = u32::try_from(end - start).unwrap_or(u32::MAX);
        if !self.machine.is_landing() && self.machine.land(memory, length)?.is_some() {
            self.memory.landing = Some(Landing { buffer: Arc::clone(&receiving.buffer), start });
            self.went_on();
        }
        Ok(())
    }

    /// Returns whether a receive into its range loses no byte. Bytes of an earlier receive in the
    /// same buffer can be received in place, elsewhere, or moved as a whole once all have arrived.
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

    fn is_in_place(&self, receiving: &Receiving<B>, part: Readable) -> bool {
        part.region == Readable::LANDED
            && self.memory.landing.as_ref().is_some_and(|landing| {
                let at = landing.start.saturating_add(part.offset as usize);
                Arc::ptr_eq(&landing.buffer, &receiving.buffer) && at == receiving.range.start
            })
    }

    pub(crate) fn stop_landing(&mut self) {
        // A window that was announced there is the peer's until it is full (VR-MEM-019).
        self.machine.stop_landing();
        self.memory.keep_landing(|| self.machine.is_landing());
        self.went_on();
    }

    /// Returns whether windows of this connection, or unread bytes, lie in application memory.
    /// While it is true, the connection keeps a clone of the buffer's [`Arc`].
    pub const fn is_landing(&self) -> bool {
        self.memory.landing.is_some()
    }
}
