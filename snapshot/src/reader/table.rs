//! The publisher's announced entries, checked: the reader's copy of the table, as far as still
//! needed.
//!
//! A table is a log. Entries come one after another and are read in that order. So an entry cannot
//! repeat, come out of order, or point backwards (VS-TABLE-002). Nothing here exceeds this side's
//! limits.

use std::collections::VecDeque;

use rdma_backend::RemoteAddress;

use crate::error::Error;
use crate::wire::{Digest, Entry, MOST_ENTRIES, Mapping, Mark, ReaderId, SnapshotId};

/// Bytes in a data area of the seed's table.
pub const AREA: u32 = 4 << 20;

/// Bytes of an address in its address area.
const ADDRESS: u64 = 8;

/// The most entries kept without a posted READ. A reader that has more reads no frames until some
/// are used.
const MOST_WAITING: usize = 8 * MOST_ENTRIES;

/// A reader's limits for a publisher's announcements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes in a chunk.
    pub chunk: u32,
    /// The most bytes of the snapshot. Later writes have no end.
    pub bytes: u64,
    /// The most chunks of the snapshot.
    pub chunks: u64,
    /// The most data areas of the seed's table.
    pub areas: u32,
}

impl Default for Limits {
    /// Chunks of 64 MiB, 2^20 of them, 1 TiB, and the seed's table of 256 GiB.
    fn default() -> Self {
        Self { chunk: 64 << 20, bytes: 1 << 40, chunks: 1 << 20, areas: 1 << 16 }
    }
}

/// A chunk to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Its index, from 0.
    pub index: u64,
    /// Its remote address.
    pub remote: RemoteAddress,
    /// Its length, at least 1.
    pub length: u32,
    /// Its digest, if the layout has one.
    pub digest: Option<Digest>,
}

/// The part of a snapshot that a reader has, after which the next attempt continues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Have {
    /// The snapshot's name; zero before it is known.
    pub snapshot: SnapshotId,
    /// The number of its first chunks.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The end of the snapshot, if known.
    pub mark: Option<Mark>,
    /// The reader's name in all of its sessions; zero before the first.
    pub reader: ReaderId,
}

/// The log of announced chunks.
#[derive(Debug)]
pub(crate) struct Table {
    limits: Limits,
    /// The publisher's own limit, within ours.
    chunk_size: u32,
    waiting: VecDeque<Chunk>,
    /// Announced chunks and bytes, including those before the first of this session.
    chunks: u64,
    bytes: u64,
    /// The end of the snapshot: chunks and bytes.
    marked: Option<(u64, u64)>,
    ended: bool,
}

impl Table {
    /// Returns a table after `have`.
    pub(crate) fn new(limits: Limits, have: &Have) -> Self {
        let (chunks, bytes) = (have.chunks, have.bytes);
        let marked = have.mark.map(|mark| (mark.chunks.get(), mark.bytes.get()));
        Self { limits, chunk_size: 0, waiting: VecDeque::new(), chunks, bytes, marked, ended: false }
    }

    pub(crate) fn set_chunk_size(&mut self, size: u32) -> Result<(), Error> {
        if size == 0 {
            return Err(Error::Misbehaved("chunks of no bytes"));
        }
        if size > self.limits.chunk {
            return Err(Error::TooMuch { what: "the length of a chunk", limit: self.limits.chunk.into() });
        }
        self.chunk_size = size;
        Ok(())
    }

    /// Returns whether there is room for another frame of entries.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.len() <= MOST_WAITING - MOST_ENTRIES
    }

    /// Adds entries (VS-TABLE-002, VS-TABLE-003).
    pub(crate) fn announce(&mut self, entries: &[Entry]) -> Result<(), Error> {
        for entry in entries {
            let chunk = Chunk {
                index: entry.index.get(),
                remote: RemoteAddress { address: entry.address.get(), rkey: entry.rkey.get() },
                length: entry.length.get(),
                digest: Some(entry.digest),
            };
            self.append(chunk)?;
        }
        Ok(())
    }

    fn append(&mut self, chunk: Chunk) -> Result<(), Error> {
        if self.ended {
            return Err(Error::Misbehaved("a chunk behind the end of the table"));
        }
        if chunk.index != self.chunks {
            return Err(Error::Misbehaved(
                "a chunk out of its place: it was announced before, or one is missing",
            ));
        }
        if chunk.length == 0 {
            return Err(Error::Misbehaved("a chunk of no bytes"));
        }
        if chunk.length > self.chunk_size {
            return Err(Error::Misbehaved("a chunk longer than its chunks are"));
        }
        if chunk.remote.address.checked_add(chunk.length.into()).is_none() {
            return Err(Error::Misbehaved("a chunk that reaches beyond all memory"));
        }
        // Later writes may follow for ever, so these limits hold only up to the mark. After it, no
        // publisher makes this side keep more: at most [`MOST_WAITING`] entries wait, and as many
        // chunks as the caller has room for are in memory (64 by default in a pull), those of
        // READs in flight included. No chunk is longer than its limit. A replica that hands on
        // keeps all of them, up to its own limit of memory.
        let (chunks, bytes) = match self.marked {
            None => (self.limits.chunks, self.limits.bytes),
            Some(_) => (u64::MAX, u64::MAX),
        };
        let too_many = Error::TooMuch { what: "the number of chunks", limit: chunks };
        self.chunks = self.chunks.checked_add(1).filter(|sum| *sum <= chunks).ok_or(too_many)?;
        let too_long = Error::TooMuch { what: "the length of the snapshot", limit: bytes };
        let sum = self.bytes.checked_add(chunk.length.into());
        self.bytes = sum.filter(|sum| *sum <= bytes).ok_or(too_long)?;
        self.waiting.push_back(chunk);
        Ok(())
    }

    /// Returns the remote place of the seed's addresses, and their length.
    pub(crate) fn addresses(&self, mapping: &Mapping) -> Result<(RemoteAddress, u32), Error> {
        let areas = mapping.areas.get();
        if areas > self.limits.areas {
            return Err(Error::TooMuch { what: "the number of data areas", limit: self.limits.areas.into() });
        }
        let bytes = mapping.bytes.get();
        if bytes.div_ceil(AREA.into()) != u64::from(areas) || areas == 0 {
            return Err(Error::Misbehaved("a table whose data areas are not as many as its bytes need"));
        }
        let length = u64::from(areas).saturating_mul(ADDRESS);
        let address = mapping.address.get();
        if address.checked_add(length).and_then(|end| end.checked_add(bytes)).is_none() {
            return Err(Error::Misbehaved("a table that reaches beyond all memory"));
        }
        let length = u32::try_from(length).map_err(|_| Error::Misbehaved("a table without end"))?;
        Ok((RemoteAddress { address, rkey: mapping.rkey.get() }, length))
    }

    /// Adds the seed's table. Each of its addresses must name its own data area (VS-RCP-002).
    pub(crate) fn map(&mut self, mapping: &Mapping, addresses: &[u8]) -> Result<(), Error> {
        let (start, length) = self.addresses(mapping)?;
        let (addresses, rest) = addresses.as_chunks::<8>();
        if !rest.is_empty() || addresses.len() != mapping.areas.get() as usize {
            return Err(Error::Misbehaved("an address area of another length"));
        }
        let first_area = start.address.saturating_add(length.into());
        let areas =
            (0_u64..).step_by(AREA as usize).map(|before| (before, first_area.saturating_add(before)));
        // All are checked before any is read from.
        if areas.clone().zip(addresses).any(|((_, expected), named)| u64::from_be_bytes(*named) != expected) {
            return Err(Error::Misbehaved("an address that does not name its data area"));
        }
        let have = usize::try_from(self.chunks).unwrap_or(usize::MAX);
        for (index, (before, address)) in (0_u64..).zip(areas).take(addresses.len()).skip(have) {
            let left = mapping.bytes.get().saturating_sub(before);
            let length = u32::try_from(left).unwrap_or(u32::MAX).min(AREA);
            let remote = RemoteAddress { address, rkey: start.rkey };
            self.append(Chunk { index, remote, length, digest: None })?;
        }
        Ok(())
    }

    /// Records the end of the snapshot (VS-TABLE-006).
    pub(crate) fn mark(&mut self, mark: &Mark) -> Result<(), Error> {
        let here = (self.chunks, self.bytes);
        if (mark.chunks.get(), mark.bytes.get()) != here {
            return Err(Error::Misbehaved("an end of the snapshot that is not where its chunks end"));
        }
        // After a lost connection the publisher cannot know whether it was received.
        if *self.marked.get_or_insert(here) != here {
            return Err(Error::Misbehaved("a second end of the snapshot"));
        }
        Ok(())
    }

    /// Records the end of the table (VS-TABLE-006).
    pub(crate) fn end(&mut self, chunks: u64) -> Result<(), Error> {
        if self.marked.is_none() || chunks != self.chunks {
            return Err(Error::Misbehaved("an end of the table that is not where its chunks end"));
        }
        self.ended = true;
        Ok(())
    }

    /// Returns the chunk to read next.
    pub(crate) fn peek(&self) -> Option<&Chunk> {
        self.waiting.front()
    }

    /// Records that its READ was posted.
    pub(crate) fn taken(&mut self) {
        self.waiting.pop_front();
    }

    /// Returns whether READs were posted for all chunks of a complete table.
    pub(crate) fn is_used_up(&self) -> bool {
        self.ended && self.waiting.is_empty()
    }
}
