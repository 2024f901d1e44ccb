//! The publisher's table, and its memory.
//!
//! Memory is written before its entry is in the table, and never after that. Readers have no right
//! to write it, and nothing here does (VS-TABLE-004).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdma_backend::Region;
use rdma_conn::Descriptors;
use zerocopy::byteorder::network_endian::U32;

use super::filler::{ENTRY, Filled, Filler, READ_ONLY, cost, register};
use super::session::Log;
use crate::digest::Whole;
use crate::error::Error;
use crate::reader::{AREA, Landed};
use crate::wire::{Digest, Entry, Mapping, Mark};

pub(crate) struct Store<B: Descriptors> {
    /// The state announced to readers.
    pub(crate) log: Log,
    regions: VecDeque<Arc<B::Region>>,
    /// The seed's table while it is built: its written bytes and its total.
    mapped: Option<Mapped<B>>,
    /// Fills memory, unless another thread does.
    filler: Option<Filler<B>>,
    domain: Arc<B::Domain>,
    whole: Whole,
    bytes: u64,
    /// What its memory takes of the limit, and the limit of its filler.
    taken: u64,
    limit: u64,
    /// What was released of it.
    released: Arc<AtomicU64>,
}

struct Mapped<B: Descriptors> {
    region: Arc<B::Region>,
    areas: u32,
    total: u64,
}

impl<B: Descriptors> Store<B> {
    pub(super) fn new(domain: Arc<B::Domain>, limit: u64) -> Self {
        Self {
            log: Log::default(),
            regions: VecDeque::new(),
            mapped: None,
            filler: None,
            domain,
            whole: Whole::default(),
            bytes: 0,
            taken: 0,
            limit,
            released: Arc::default(),
        }
    }

    pub(super) fn into_table(self) -> (Log, Vec<Arc<B::Region>>) {
        (self.log, self.regions.into())
    }

    /// Returns the memory of the table's chunks, in their order.
    pub(crate) const fn regions(&self) -> &VecDeque<Arc<B::Region>> {
        &self.regions
    }

    /// Releases the memory of chunks before `chunk`: whole regions, and their entries. The last
    /// region stays, because it may still be filled, but it may have many small chunks. Of their
    /// entries at least half are released at a time, so that few are moved for each. Returns
    /// whether there was anything.
    pub(crate) fn release(&mut self, chunk: u64) -> bool {
        let read = usize::try_from(chunk.saturating_sub(self.log.released)).unwrap_or(usize::MAX);
        let read = read.min(self.log.entries.len());
        let (mut gone, mut freed) = (0, 0);
        while let [first, _, ..] = self.regions.make_contiguous() {
            let (key, pages) = (first.rkey(), cost(first.len()));
            let own = self.log.entries.iter().skip(gone).take_while(|entry| entry.rkey.get() == key).count();
            if gone.saturating_add(own) > read {
                break;
            }
            self.regions.pop_front();
            gone += own;
            freed += pages;
        }
        if self.regions.len() == 1 && read.saturating_mul(2) >= self.log.entries.len() {
            gone = read;
        }
        self.log.entries.drain(..gone);
        self.log.released += gone as u64;
        freed += gone as u64 * ENTRY;
        self.taken = self.taken.saturating_sub(freed);
        self.released.fetch_add(freed, Ordering::Relaxed);
        freed > 0
    }

    pub(super) const fn domain(&self) -> &Arc<B::Domain> {
        &self.domain
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns what its memory takes of the limit.
    pub(crate) const fn taken(&self) -> u64 {
        self.taken
    }

    /// Begins the seed's table, for `total` bytes: one piece of memory that cannot grow
    /// (VS-RCP-001).
    pub(super) fn begin_mapping(&mut self, total: u64) -> Result<(), Error> {
        let too_much = || Error::TooMuch { what: "the length of the seed's table", limit: usize::MAX as u64 };
        let areas = u32::try_from(total.div_ceil(AREA.into())).map_err(|_| too_much())?;
        let length = total.checked_add(u64::from(areas) * 8).ok_or_else(too_much)?;
        let length = usize::try_from(length).map_err(|_| too_much())?;
        let taken = self.taken.saturating_add(cost(length));
        if taken > self.limit {
            return Err(Error::TooMuch { what: "the memory for the snapshot", limit: self.limit });
        }
        let region = register::<B>(&self.domain, length, READ_ONLY, "registering the table")?;
        let region = Arc::new(region);
        self.taken = taken;
        let (domain, slab) = (Arc::clone(&self.domain), Arc::clone(&region));
        self.filler = Some(Filler::fixed(domain, AREA as usize, slab, areas as usize * 8));
        self.mapped = Some(Mapped { region, areas, total });
        Ok(())
    }

    /// Returns a filler for this table, for chunks of at most `chunk` bytes.
    pub(crate) fn filler(&mut self, chunk: usize) -> Filler<B> {
        let new = || Filler::new(Arc::clone(&self.domain), chunk, self.limit, Arc::clone(&self.released));
        self.filler.take().unwrap_or_else(new)
    }

    /// Appends a chunk, or any bytes of the seed's table. No reader sees it before it is written.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let mut filler = self.filler(bytes.len().max(1));
        let appended = if self.mapped.is_some() {
            self.append_areas(&mut filler, bytes)
        } else {
            filler.reserve(bytes.len()).and_then(|()| {
                filler.write(bytes)?;
                filler.take().into_iter().for_each(|filled| self.publish(filled));
                Ok(())
            })
        };
        self.filler = Some(filler);
        appended
    }

    fn append_areas(&mut self, filler: &mut Filler<B>, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(filler.room().max(1).min(bytes.len()));
            filler.write(now)?;
            bytes = later;
            if filler.is_full() {
                filler.take().into_iter().for_each(|filled| self.publish(filled));
            }
        }
        Ok(())
    }

    /// Appends a chunk that was read from another publisher, in the memory that it was read into.
    pub(super) fn hand_on(&mut self, landed: Landed<B>) {
        let length = landed.chunk.length as usize;
        self.announce(Arc::new(landed.region), 0, length, landed.digest);
    }

    pub(crate) fn publish(&mut self, filled: Filled<B>) {
        if self.log.mark.is_none() {
            self.whole.add(&filled.digest);
        }
        if self.mapped.is_some() {
            self.bytes += filled.length as u64;
        } else {
            self.announce(filled.slab, filled.offset, filled.length, filled.digest);
        }
    }

    fn announce(&mut self, region: Arc<B::Region>, offset: usize, length: usize, digest: Digest) {
        self.log.entries.push(Entry {
            index: self.log.chunks().into(),
            address: region.address().saturating_add(offset as u64).into(),
            rkey: region.rkey().into(),
            length: U32::new(u32::try_from(length).unwrap_or(u32::MAX)),
            reserved: [0; 8],
            digest,
        });
        self.taken = self.taken.saturating_add(ENTRY);
        if self.regions.back().is_none_or(|last| !Arc::ptr_eq(last, &region)) {
            self.taken = self.taken.saturating_add(cost(region.len()));
            self.regions.push_back(region);
        }
        self.bytes += length as u64;
    }

    pub(crate) fn mark(&mut self) -> Result<(), Error> {
        // The last area may be partly filled.
        let last = self.filler.as_mut().and_then(Filler::take);
        last.into_iter().for_each(|filled| self.publish(filled));
        let chunks = match &self.mapped {
            None => self.log.chunks(),
            Some(mapped) => {
                if mapped.total != self.bytes {
                    return Err(Error::TooMuch {
                        what: "the announced length of the source",
                        limit: self.bytes,
                    });
                }
                let first = mapped.region.address() + u64::from(mapped.areas) * 8;
                for area in 0..u64::from(mapped.areas) {
                    let address = (first + area * u64::from(AREA)).to_be_bytes();
                    if !mapped
                        .region
                        .memory()
                        .write(usize::try_from(area * 8).unwrap_or(usize::MAX), &address)
                    {
                        return Err(Error::DataEnded("the table's memory is too short"));
                    }
                }
                self.log.mapping = Some(Mapping {
                    address: mapped.region.address().into(),
                    rkey: mapped.region.rkey().into(),
                    areas: mapped.areas.into(),
                    bytes: mapped.total.into(),
                });
                mapped.areas.into()
            }
        };
        let digest = self.whole.digest();
        self.log.mark = Some(Mark { chunks: chunks.into(), bytes: self.bytes.into(), digest });
        Ok(())
    }
}

/// Corruptions for tests, which readers must notice, and what tests compare.
#[cfg(test)]
impl<B: Descriptors> Store<B> {
    /// Returns the registered bytes.
    pub(crate) fn registered(&self) -> u64 {
        let mapped = self.mapped.as_ref().map(|mapped| &mapped.region);
        self.regions.iter().chain(mapped).map(|region| region.len() as u64).sum()
    }

    /// Changes the published bytes of a chunk; a second call restores them. False if there is no
    /// such chunk.
    pub(crate) fn spoil(&self, chunk: usize) -> bool {
        let (region, at) = match &self.mapped {
            Some(mapped) if self.log.mapping.is_some() => {
                (&mapped.region, mapped.areas as usize * 8 + chunk * AREA as usize)
            }
            _ => {
                let Some(entry) = self.log.entries.get(chunk) else { return false };
                // A forged entry may be elsewhere.
                let offset = |region: &Arc<B::Region>| {
                    let offset = entry.address.get().checked_sub(region.address())?;
                    usize::try_from(offset).ok().filter(|offset| *offset < region.len())
                };
                match self.regions.iter().find_map(|region| Some((region, offset(region)?))) {
                    Some(place) => place,
                    None => return false,
                }
            }
        };
        let mut byte = [0];
        region.memory().read(at, &mut byte) && region.memory().write(at, &[byte[0] ^ 0x10])
    }

    /// Changes the address of the first area of the seed's table.
    pub(crate) fn spoil_addresses(&self) {
        if let Some(mapped) = &self.mapped {
            assert!(mapped.region.memory().write(7, &[1]), "it has an address");
        }
    }
}
