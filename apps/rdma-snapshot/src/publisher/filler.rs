//! Registered memory that chunks are written to, once, and then published from.
//!
//! A [`Filler`] is for another thread than the publisher's: bytes go from a source into registered memory there, and are hashed on
//! the way. Nobody writes a chunk's memory after it was taken (VS-TABLE-004).

use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use rdma_backend::memory::{CallerMemory, SharedMemory};
use rdma_backend::{Access, Domain as _, Region as _};
use rdma_conn::Descriptors;
use zerocopy::FromZeros as _;

use crate::digest::Piecewise;
use crate::error::Error;
use crate::wire::Digest;

/// Bytes of a slab, at most. Slabs grow, so that a small snapshot pins little and a large one takes few registrations.
const LARGEST: usize = 64 << 20;

/// Memory that a peer can read, and nobody write but this side.
pub(super) const READ_ONLY: Access = Access::REMOTE_READ;

/// Pages of the kernel, which zeroes them when they are written to for the first time.
struct Pages(Box<[AtomicU8]>);

impl CallerMemory for Pages {
    fn shared(&self) -> SharedMemory<'_> {
        SharedMemory::new(&self.0)
    }
}

/// Registers new memory.
pub(crate) fn register<B: Descriptors>(
    domain: &B::Domain,
    length: usize,
    access: Access,
    doing: &'static str,
) -> Result<B::Region, Error> {
    let none = |_| Error::TooMuch { what: "the memory to be registered", limit: length as u64 };
    let pages = Pages(<[AtomicU8]>::new_box_zeroed_with_elems(length).map_err(none)?);
    domain.register_memory(pages, access).map_err(Error::backend(doing))
}

/// A chunk that is complete, and not published.
pub struct Filled<B: Descriptors> {
    pub(super) slab: Arc<B::Region>,
    pub(super) offset: usize,
    pub(super) length: usize,
    pub(super) digest: Digest,
}

/// See the module.
pub struct Filler<B: Descriptors> {
    domain: Arc<B::Domain>,
    /// Bytes of a chunk, at most.
    chunk: usize,
    slab: Option<Arc<B::Region>>,
    /// Where in the slab the chunk under way begins, and how long it is.
    begun: usize,
    filled: usize,
    digest: Piecewise,
    /// Bytes that were registered, and that may be.
    registered: u64,
    limit: u64,
    /// Whether the slab is all that there will be.
    is_fixed: bool,
}

impl<B: Descriptors> Filler<B> {
    /// Chunks of at most so many bytes, in slabs of at most `limit` bytes together.
    pub(super) fn new(domain: Arc<B::Domain>, chunk: usize, limit: u64) -> Self {
        Self {
            domain,
            chunk,
            slab: None,
            begun: 0,
            filled: 0,
            digest: Piecewise::default(),
            registered: 0,
            limit,
            is_fixed: false,
        }
    }

    /// Chunks one behind the other, from `offset` of this memory on to its end.
    pub(super) fn fixed(domain: Arc<B::Domain>, chunk: usize, slab: Arc<B::Region>, offset: usize) -> Self {
        Self { slab: Some(slab), begun: offset, is_fixed: true, ..Self::new(domain, chunk, 0) }
    }

    /// Bytes that the slab has behind the chunk under way.
    fn left(&self) -> usize {
        let end = self.slab.as_ref().map_or(0, |slab| slab.len());
        end.saturating_sub(self.begun.saturating_add(self.filled))
    }

    /// Bytes that the chunk under way can still take; none if it is full, or if there is no memory for another.
    pub fn room(&self) -> usize {
        let left = if self.filled == 0 && self.left() == 0 { self.allowed() } else { self.left() };
        self.chunk.saturating_sub(self.filled).min(left)
    }

    /// Bytes that may still be registered.
    fn allowed(&self) -> usize {
        usize::try_from(self.limit.saturating_sub(self.registered)).unwrap_or(usize::MAX)
    }

    /// Whether the chunk under way can take no more.
    pub fn is_full(&self) -> bool {
        self.filled > 0 && (self.filled >= self.chunk || self.left() == 0)
    }

    /// Sees to it that a chunk of so many bytes fits. There is none under way.
    pub(super) fn reserve(&mut self, length: usize) -> Result<(), Error> {
        self.chunk = length.max(1);
        if self.left() < length { self.grow(length) } else { Ok(()) }
    }

    fn grow(&mut self, least: usize) -> Result<(), Error> {
        if self.is_fixed {
            let end = self.slab.as_ref().map_or(0, |slab| slab.len());
            return Err(Error::TooMuch { what: "the length of the source", limit: end as u64 });
        }
        // As much again, in whole chunks.
        let wanted = usize::try_from(self.registered).unwrap_or(LARGEST).min(LARGEST);
        let wanted = wanted.next_multiple_of(self.chunk).max(self.chunk).max(least);
        let length = wanted.min(self.allowed());
        if length < least {
            return Err(Error::TooMuch { what: "the memory for the snapshot", limit: self.limit });
        }
        let slab = register::<B>(&self.domain, length, READ_ONLY, "registering chunks")?;
        self.registered = self.registered.saturating_add(length as u64);
        (self.slab, self.begun) = (Some(Arc::new(slab)), 0);
        Ok(())
    }

    /// Writes at most [`Filler::room`] bytes behind the others of the chunk under way.
    ///
    /// # Errors
    /// They are more, or there is no memory for them.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.filled == 0 && self.left() == 0 && !bytes.is_empty() {
            self.grow(bytes.len())?;
        }
        let at = self.begun.saturating_add(self.filled);
        let fits = bytes.len() <= self.chunk.saturating_sub(self.filled);
        let written =
            bytes.is_empty() || fits && self.slab.as_ref().is_some_and(|slab| slab.write(at, bytes));
        if !written {
            return Err(Error::DataEnded("a chunk's memory is too short"));
        }
        self.digest.update(bytes);
        self.filled = self.filled.saturating_add(bytes.len());
        Ok(())
    }

    /// The chunk under way, which is complete. None if it has no byte.
    pub fn take(&mut self) -> Option<Filled<B>> {
        let slab = self.slab.as_ref().filter(|_| self.filled > 0).map(Arc::clone)?;
        let (offset, length) = (self.begun, self.filled);
        (self.begun, self.filled) = (offset.saturating_add(length), 0);
        Some(Filled { slab, offset, length, digest: self.digest.take() })
    }
}
