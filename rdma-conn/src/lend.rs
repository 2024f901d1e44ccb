//! Sending without a copy: memory of the application that is registered, and lent for as long as the device reads it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdma_proto::backend::{Backend, Region, Slice};
use rdma_proto::{ApiMisuse, Span};

use crate::connection::Connection;
use crate::error::Error;
use crate::memory::Booked;

/// Registered memory for sending on one connection, made by [`Connection::register`].
///
/// Fill it, put it into an [`Arc`], and lend parts of it with [`Connection::try_lend`] as often as you like, also several at the same time:
/// the device takes the bytes from here. While any part is lent the connection holds a clone of the `Arc`, so
/// [`Arc::get_mut`], which is what changing the bytes needs, gives them back only when the peer has them all.
///
/// The peer can neither read nor write it (VR-SEC-001). It counts as memory of its connection
/// ([`Limits::registered_bytes`](crate::Limits::registered_bytes)), and may outlive it.
pub struct RegisteredBuffer<B: Backend> {
    memory: Booked<B::Region>,
    /// Whose memory it is: its key means nothing in another connection's protection domain.
    owner: Owner,
}

/// Names the registered memory of one connection within this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(u64);

impl Owner {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl<B: Backend> RegisteredBuffer<B> {
    pub(crate) const fn new(memory: Booked<B::Region>, owner: Owner) -> Self {
        Self { memory, owner }
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.memory.region.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `from` to `offset` on. False, and nothing copied, if it does not all fit.
    #[must_use]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        self.memory.region.memory().write(offset, from)
    }

    /// Copies `into.len()` bytes from `offset` on. False, and nothing copied, if they are not all inside.
    #[must_use]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        self.memory.region.memory().read(offset, into)
    }
}

impl<B: Backend> std::fmt::Debug for RegisteredBuffer<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegisteredBuffer").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// Buffers of which the peer has not everything, oldest first.
pub(crate) struct Lendings<B: Backend> {
    under_way: VecDeque<Lending<B>>,
}

struct Lending<B: Backend> {
    buffer: Arc<RegisteredBuffer<B>>,
    /// Where in the buffer the part begins.
    offset: usize,
    /// How many bytes of the stream must have arrived for it to come back.
    until: u64,
}

impl<B: Backend> Lendings<B> {
    pub(crate) const fn new() -> Self {
        Self { under_way: VecDeque::new() }
    }

    /// A part of what was lent last. The machine lends only one at a time that is not all posted.
    pub(crate) fn latest(&self, span: Span) -> Option<Slice<'_, B::Region>> {
        let latest = self.under_way.back()?;
        let offset = latest.offset + span.offset as usize;
        Some(Slice { region: &latest.buffer.memory.region, offset, len: span.len as usize })
    }

    /// Gives back what was only waiting for the first `confirmed` bytes of the stream to arrive. How many buffers.
    pub(crate) fn give_back(&mut self, confirmed: u64) -> u64 {
        let done = self.under_way.iter().take_while(|lending| lending.until <= confirmed).count();
        self.under_way.drain(..done);
        done as u64
    }
}

impl<B: Backend> Connection<B> {
    /// Registers `len` bytes to send from without a copy, all zero at first. Registering takes much longer than copying
    /// a few kilobytes, so keep what it returns and use it again.
    ///
    /// # Errors
    /// `len` is zero, or no memory can be registered.
    pub fn register(&self, len: usize) -> Result<RegisteredBuffer<B>, Error> {
        self.memory.lendable(len)
    }

    /// Sends as many bytes of `buffer`, from the beginning of `range`, as can be lent now; `None` if none can, because some
    /// that were lent before wait for the peer's window. They come behind all that was written before.
    ///
    /// # Errors
    /// What ended the connection; or `range` is not inside of the buffer; or the buffer belongs to another connection.
    pub fn try_lend(
        &mut self,
        buffer: &Arc<RegisteredBuffer<B>>,
        range: Range<usize>,
    ) -> Result<Option<usize>, Error> {
        self.check()?;
        self.machine.lend(0)?;
        if buffer.owner != self.memory.owner() {
            return Err(Error::ForeignBuffer);
        }
        let wanted = match range.end.checked_sub(range.start) {
            Some(len) if range.end <= buffer.len() => len,
            _ => return Err(ApiMisuse::LendBeyondLimit { bytes: range.end, lendable: buffer.len() }.into()),
        };
        let bytes = wanted.min(self.machine.lendable() as usize);
        if bytes == 0 && wanted > 0 {
            self.work.stalls += 1;
            return Ok(None);
        }
        self.machine.lend(bytes)?;
        if bytes > 0 {
            let until = self.machine.confirmed() + self.machine.unconfirmed();
            let buffer = Arc::clone(buffer);
            self.memory.lendings.under_way.push_back(Lending { buffer, offset: range.start, until });
            self.work.lent += bytes as u64;
            self.went_on();
        }
        Ok(Some(bytes))
    }

    /// Whether the peer may still miss some of what was lent of `buffer`.
    pub fn is_lent(&self, buffer: &RegisteredBuffer<B>) -> bool {
        let lent = &self.memory.lendings.under_way;
        lent.iter().any(|lending| std::ptr::eq(&raw const *lending.buffer, buffer))
    }

    /// Whether [`Connection::try_lend`] has an answer now: it would take a byte, or fail.
    pub(crate) const fn can_lend(&self) -> bool {
        self.machine.lendable() > 0
    }
}
