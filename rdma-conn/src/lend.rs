//! Memory of the application that is registered for a connection, and sending from it without a copy: it is lent for as long as the
//! device reads it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_backend::memory::SharedMemory;
use rdma_backend::{Access, Backend, Region, Slice};
use rdma_proto::Span;

use crate::budget::CountedRegion;
use crate::domain::ProtectionDomain;

/// Registered memory of one connection, or of those that share its [`ProtectionDomain`]: to send from, made by
/// [`Connection::register_buffer`](crate::Connection::register_buffer), or also to receive into, made by
/// [`Connection::register_landing`](crate::Connection::register_landing). Both allocate it;
/// [`Connection::register_memory`](crate::Connection::register_memory) takes memory that exists.
///
/// To send, fill it, put it into an [`Arc`], and lend parts of it with [`Endpoint::lend`](crate::Endpoint::lend) as often as you like, also several at the same time:
/// the device takes the bytes from here. While any part is lent the connection holds a clone of the `Arc`, so
/// [`Arc::get_mut`], which is what changing the bytes needs, gives them back only when the peer has them all.
///
/// The peer cannot read it, and write only what was registered to receive into (VR-SEC-001). So there is no `&[u8]` of it: copy what
/// you decide on, and decide on the copy (VR-SEC-005). It counts as memory of the connection that registered it
/// ([`Limits::registered_bytes`](crate::Limits::registered_bytes)), and may outlive it.
pub struct RegisteredBuffer<B: Backend> {
    memory: CountedRegion<B::Region>,
    /// Its key means nothing in another one.
    domain: ProtectionDomain<B>,
    access: Access,
    _counted: Counted,
}

/// Bytes of the buffers that were registered for a connection and still exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers(Arc<AtomicUsize>);

impl Buffers {
    /// Returns how many bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts a buffer of so many bytes, until what it returns is dropped.
    fn count(&self, bytes: usize) -> Counted {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Counted { buffers: self.clone(), bytes }
    }
}

/// A buffer's part of [`Buffers`], until it is dropped.
struct Counted {
    buffers: Buffers,
    bytes: usize,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.buffers.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl<B: Backend> RegisteredBuffer<B> {
    pub(crate) fn new(
        memory: CountedRegion<B::Region>,
        access: Access,
        domain: ProtectionDomain<B>,
        buffers: &Buffers,
    ) -> Self {
        let counted = buffers.count(memory.region.len());
        Self { memory, domain, access, _counted: counted }
    }

    /// Returns the region if the peer may write to it.
    pub(crate) fn landing(&self) -> Option<&B::Region> {
        self.access.allows(Access::REMOTE_WRITE).then_some(&self.memory.region)
    }

    /// Returns the protection domain that it was registered in: the connections of that one can use it.
    pub const fn domain(&self) -> &ProtectionDomain<B> {
        &self.domain
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.memory.region.len()
    }

    /// Returns whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns its bytes, as memory that a device or the peer may change.
    pub fn memory(&self) -> SharedMemory<'_> {
        self.memory.region.memory()
    }

    /// Copies `from` to `offset` on. False, and nothing copied, if it does not all fit.
    #[must_use]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        self.memory.region.write(offset, from)
    }

    /// Copies `into.len()` bytes from `offset` on. False, and nothing copied, if they are not all inside.
    #[must_use]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        self.memory.region.read(offset, into)
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

    /// Notes that some of `buffer`, from `offset` on, is lent until the first `until` bytes of the stream have arrived.
    pub(crate) fn add(&mut self, buffer: Arc<RegisteredBuffer<B>>, offset: usize, until: u64) {
        self.under_way.push_back(Lending { buffer, offset, until });
    }

    /// Returns whether some of `buffer` is lent.
    pub(crate) fn contain(&self, buffer: &RegisteredBuffer<B>) -> bool {
        self.under_way.iter().any(|lending| std::ptr::eq(&raw const *lending.buffer, buffer))
    }

    /// Returns a part of what was lent last. The machine lends only one at a time that is not all posted.
    pub(crate) fn latest(&self, span: Span) -> Option<Slice<'_, B::Region>> {
        let latest = self.under_way.back()?;
        let offset = latest.offset + span.offset as usize;
        Some(Slice { region: &latest.buffer.memory.region, offset, len: span.len as usize })
    }

    /// Returns whether nothing is lent.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Gives back what was only waiting for the first `confirmed` bytes of the stream to arrive. How many buffers.
    pub(crate) fn give_back(&mut self, confirmed: u64) -> u64 {
        let done = self.under_way.iter().take_while(|lending| lending.until <= confirmed).count();
        self.under_way.drain(..done);
        done as u64
    }
}

/// The memory of the application in which windows of a connection lie now.
pub(crate) struct Landing<B: Backend> {
    pub(crate) buffer: Arc<RegisteredBuffer<B>>,
    /// Where in the buffer `Machine::land` begins to count.
    pub(crate) start: usize,
}

impl<B: Backend> Landing<B> {
    /// Copies received bytes out. False if they are not inside.
    pub(crate) fn read(&self, offset: u32, into: &mut [u8]) -> bool {
        self.buffer.read(self.start.saturating_add(offset as usize), into)
    }

    /// Returns received bytes where they lie: the memory, and the offset in it.
    pub(crate) fn arrived(&self, offset: u32) -> (SharedMemory<'_>, usize) {
        (self.buffer.memory(), self.start.saturating_add(offset as usize))
    }
}
