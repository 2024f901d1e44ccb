//! Application memory registered for a connection, and zero-copy sending from it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdma_backend::memory::SharedMemory;
use rdma_backend::{Access, Backend, Region, Slice};
use rdma_proto::Span;

use crate::budget::CountedRegion;
use crate::domain::ProtectionDomain;

/// Registered memory, for use by the connections of its [`ProtectionDomain`].
///
/// [`register_buffer`](crate::Connection::register_buffer) allocates memory to send from.
/// [`register_landing`](crate::Connection::register_landing) allocates memory that can also
/// receive. [`register_memory`](crate::Connection::register_memory) registers existing memory.
///
/// To send, fill the buffer, put it into an [`Arc`], and lend parts of it with
/// [`Endpoint::lend`](crate::Endpoint::lend). The device reads them in place. A part may be lent
/// again while it is in flight. To change the bytes, use [`Arc::get_mut`]. It succeeds only when
/// the peer has all lent parts: until then the connection holds a clone of the `Arc`.
///
/// The peer cannot read the buffer. It can write to the buffer only if you registered it to receive
/// into (VR-SEC-001). So there is no `&[u8]` of it: copy bytes before you check them, and use the
/// copy (VR-SEC-005).
///
/// A buffer may outlive the connection that registered it. Until it is dropped, it counts as that
/// connection's memory ([`Limits::registered_bytes`](crate::Limits::registered_bytes)).
pub struct RegisteredBuffer<B: Backend> {
    memory: CountedRegion<B::Region>,
    /// The key is valid only in this domain.
    domain: ProtectionDomain<B>,
    access: Access,
    _counted: Counted,
}

/// Bytes of all existing buffers that were registered for a connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers(Arc<AtomicUsize>);

impl Buffers {
    pub(crate) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn count(&self, bytes: usize) -> Counted {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Counted { buffers: self.clone(), bytes }
    }
}

struct Counted {
    buffers: Buffers,
    bytes: usize,
}

impl Drop for Counted {
    fn drop(&mut self) {
        // Relaxed, as everywhere here: the number is only reported, and guards nothing.
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

    pub(crate) fn landing(&self) -> Option<&B::Region> {
        // A peer must not write to memory that was registered to send from (VR-SEC-001).
        self.access.allows(Access::REMOTE_WRITE).then_some(&self.memory.region)
    }

    /// Returns the protection domain. Only connections of this domain can use the buffer.
    pub const fn domain(&self) -> &ProtectionDomain<B> {
        &self.domain
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.memory.region.len()
    }

    /// Returns whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes as memory that a device or the peer may change.
    pub fn memory(&self) -> SharedMemory<'_> {
        self.memory.region.memory()
    }

    /// Copies `from` to `offset` in the buffer. Returns false, and copies none, if it does not fit.
    #[must_use]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        self.memory.region.write(offset, from)
    }

    /// Copies `into.len()` bytes from `offset`. If there are fewer, returns false and copies none.
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

/// Lent parts that the peer does not have yet, oldest first.
pub(crate) struct Lendings<B: Backend> {
    under_way: VecDeque<Lending<B>>,
}

struct Lending<B: Backend> {
    buffer: Arc<RegisteredBuffer<B>>,
    offset: usize,
    /// Position in the stream that must arrive before the part comes back.
    until: u64,
}

impl<B: Backend> Lendings<B> {
    pub(crate) const fn new() -> Self {
        Self { under_way: VecDeque::new() }
    }

    pub(crate) fn add(&mut self, buffer: Arc<RegisteredBuffer<B>>, offset: usize, until: u64) {
        self.under_way.push_back(Lending { buffer, offset, until });
    }

    pub(crate) fn contain(&self, buffer: &RegisteredBuffer<B>) -> bool {
        self.under_way.iter().any(|lending| std::ptr::eq(&raw const *lending.buffer, buffer))
    }

    /// Returns a part of the last buffer lent: the only one that is not completely posted.
    pub(crate) fn latest(&self, span: Span) -> Option<Slice<'_, B::Region>> {
        let latest = self.under_way.back()?;
        // Inside of the buffer: `try_lend` has checked the range.
        let offset = latest.offset + span.offset as usize;
        Some(Slice { region: &latest.buffer.memory.region, offset, len: span.len as usize })
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    pub(crate) fn give_back(&mut self, confirmed: u64) -> u64 {
        // Parts arrive in the order in which they were lent.
        let done = self.under_way.iter().take_while(|lending| lending.until <= confirmed).count();
        self.under_way.drain(..done);
        done as u64
    }
}

pub(crate) struct Landing<B: Backend> {
    pub(crate) buffer: Arc<RegisteredBuffer<B>>,
    /// Offset in the buffer that `Machine::land` counts from.
    pub(crate) start: usize,
}

impl<B: Backend> Landing<B> {
    pub(crate) fn read(&self, offset: u32, into: &mut [u8]) -> bool {
        self.buffer.read(self.start.saturating_add(offset as usize), into)
    }

    pub(crate) fn arrived(&self, offset: u32) -> (SharedMemory<'_>, usize) {
        (self.buffer.memory(), self.start.saturating_add(offset as usize))
    }
}
