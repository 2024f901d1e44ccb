//! Registered memory for chunks, written once and then published.
//!
//! A [`Filler`] runs on another thread than the publisher. There, bytes go from a source into
//! registered memory, and are hashed on the way. A chunk's memory is not written after it was taken
//! (VS-TABLE-004).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rdma_backend::memory::{CallerMemory, SharedMemory};
use rdma_backend::{Access, Domain as _, Region as _};
use rdma_conn::Descriptors;
use zerocopy::FromZeros as _;

use crate::digest::Piecewise;
use crate::error::Error;
use crate::wire::{Digest, Entry};

/// The most bytes of a slab. Slabs grow, so that a small snapshot pins little and a large one takes
/// few registrations.
const LARGEST: usize = 64 << 20;

/// What a system registers at least.
const PAGE: usize = 4096;

/// What a chunk takes of the limit besides its bytes, in each table that has it: an entry, and as
/// much again, because a growing vector has room for twice its entries. So a limit also bounds
/// chunks of a byte each, as a peer's may be, and those of a log that is written to slowly.
pub(crate) const ENTRY: u64 = 2 * size_of::<Entry>() as u64;

/// Returns what a region of this length takes of the limit: whole pages.
pub(super) const fn cost(length: usize) -> u64 {
    (length as u64).div_ceil(PAGE as u64).saturating_mul(PAGE as u64)
}

/// Memory that a peer can read. Only this side can write it.
pub(super) const READ_ONLY: Access = Access::REMOTE_READ;

/// Pages of the kernel, zeroed at the first write.
struct Pages(Box<[AtomicU8]>);

impl CallerMemory for Pages {
    fn shared(&self) -> SharedMemory<'_> {
        SharedMemory::new(&self.0)
    }
}

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

/// A complete chunk, not yet published.
pub struct Filled<B: Descriptors> {
    pub(super) slab: Arc<B::Region>,
    pub(super) offset: usize,
    pub(super) length: usize,
    pub(super) digest: Digest,
}

/// Fills registered memory with chunks. See the module.
pub struct Filler<B: Descriptors> {
    domain: Arc<B::Domain>,
    /// The most bytes of a chunk.
    chunk: usize,
    slab: Option<Arc<B::Region>>,
    /// Where in the slab the current chunk begins, and its length.
    begun: usize,
    filled: usize,
    digest: Piecewise,
    /// Registered bytes.
    registered: u64,
    /// What they take of the limit, with what was released since, and the limit.
    taken: u64,
    limit: u64,
    released: Arc<AtomicU64>,
    /// The bytes of each slab of a window.
    window: Option<usize>,
    /// Whether the slab is the only one.
    is_fixed: bool,
}

impl<B: Descriptors> Filler<B> {
    /// Creates a filler for chunks of at most `chunk` bytes, which take at most `limit` bytes
    /// together, those `released` not counted.
    pub(super) fn new(domain: Arc<B::Domain>, chunk: usize, limit: u64, released: Arc<AtomicU64>) -> Self {
        Self {
            domain,
            chunk,
            slab: None,
            begun: 0,
            filled: 0,
            digest: Piecewise::default(),
            registered: 0,
            taken: 0,
            limit,
            released,
            window: None,
            is_fixed: false,
        }
    }

    /// Fills a window: slabs of at most a quarter of the limit, so that some are filled while
    /// others are read. One is not begun before there is room for all of it.
    ///
    /// # Errors
    /// A quarter of the limit has no room for a chunk.
    pub(crate) fn windowed(mut self) -> Result<Self, Error> {
        let quarter = usize::try_from(self.limit / 4).unwrap_or(usize::MAX).min(LARGEST);
        let taken = |chunks: usize| cost(chunks * self.chunk).saturating_add(chunks as u64 * ENTRY);
        let most = quarter.checked_div(self.chunk.saturating_add(ENTRY as usize)).unwrap_or(0);
        // The last page may be too much.
        let chunks = (0..=most).rev().find(|chunks| taken(*chunks) <= quarter as u64).unwrap_or(0);
        if chunks == 0 {
            return Err(Error::TooMuch { what: "the memory for four chunks", limit: self.limit });
        }
        self.window = Some(chunks.saturating_mul(self.chunk));
        Ok(self)
    }

    /// Creates a filler for consecutive chunks, from `offset` of this memory to its end.
    pub(super) fn fixed(domain: Arc<B::Domain>, chunk: usize, slab: Arc<B::Region>, offset: usize) -> Self {
        let new = Self::new(domain, chunk, 0, Arc::default());
        Self { slab: Some(slab), begun: offset, is_fixed: true, ..new }
    }

    pub(crate) const fn is_window(&self) -> bool {
        self.window.is_some()
    }

    /// Returns the bytes of the slab after the current chunk.
    fn left(&self) -> usize {
        let end = self.slab.as_ref().map_or(0, |slab| slab.len());
        end.saturating_sub(self.begun.saturating_add(self.filled))
    }

    /// Returns the bytes that the current chunk can still take; 0 if it is full, or if there is no
    /// memory for another.
    pub fn room(&self) -> usize {
        let left = match (self.filled, self.left()) {
            (0, 0) => self.allowed(),
            (0, left) if self.has_room_for_an_entry() => left,
            (0, _) => 0,
            (_, left) => left,
        };
        self.chunk.saturating_sub(self.filled).min(left)
    }

    /// Returns what is left of the limit.
    fn unused(&self) -> u64 {
        self.limit.saturating_add(self.released.load(Ordering::Relaxed)).saturating_sub(self.taken)
    }

    /// Returns whether another chunk is allowed, if there are bytes for it.
    fn has_room_for_an_entry(&self) -> bool {
        self.is_fixed || self.unused() >= ENTRY
    }

    /// Returns the most bytes of another slab, with a chunk in it.
    fn allowed(&self) -> usize {
        let left = usize::try_from(self.unused().saturating_sub(ENTRY)).unwrap_or(usize::MAX);
        left - left % PAGE
    }

    /// Returns whether the current chunk is full.
    pub fn is_full(&self) -> bool {
        self.filled > 0 && (self.filled >= self.chunk || self.left() == 0)
    }

    /// Makes room for a chunk of `length` bytes. There must be no current chunk.
    pub(super) fn reserve(&mut self, length: usize) -> Result<(), Error> {
        self.chunk = length.max(1);
        if self.left() < length { self.grow(length) } else { Ok(()) }
    }

    fn grow(&mut self, least: usize) -> Result<(), Error> {
        if self.is_fixed {
            let end = self.slab.as_ref().map_or(0, |slab| slab.len());
            return Err(Error::TooMuch { what: "the length of the source", limit: end as u64 });
        }
        // Doubles the memory, in whole chunks.
        let wanted = usize::try_from(self.registered).unwrap_or(LARGEST).min(LARGEST);
        let wanted = wanted.next_multiple_of(self.chunk).max(self.chunk).max(least);
        let (wanted, least) = self.window.map_or((wanted, least), |slab| (slab, slab));
        let length = wanted.min(self.allowed());
        if length < least {
            return Err(self.full());
        }
        let slab = register::<B>(&self.domain, length, READ_ONLY, "registering chunks")?;
        self.registered = self.registered.saturating_add(length as u64);
        self.taken = self.taken.saturating_add(cost(length));
        (self.slab, self.begun) = (Some(Arc::new(slab)), 0);
        Ok(())
    }

    fn full(&self) -> Error {
        Error::TooMuch { what: "the memory for the snapshot", limit: self.limit }
    }

    /// Appends at most [`Filler::room`] bytes to the current chunk.
    ///
    /// # Errors
    /// There are more bytes, or there is no memory for them.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.filled == 0 && !bytes.is_empty() {
            if self.left() == 0 {
                self.grow(bytes.len())?;
            } else if !self.has_room_for_an_entry() {
                return Err(self.full());
            }
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

    /// Completes and returns the current chunk. `None` if it is empty.
    pub fn take(&mut self) -> Option<Filled<B>> {
        let slab = self.slab.as_ref().filter(|_| self.filled > 0).map(Arc::clone)?;
        let (offset, length) = (self.begun, self.filled);
        (self.begun, self.filled) = (offset.saturating_add(length), 0);
        self.taken = self.taken.saturating_add(ENTRY);
        Some(Filled { slab, offset, length, digest: self.digest.take() })
    }
}
