//! What a publisher has for readers: the table, and the memory behind it.
//!
//! Memory is written before its entry is in the table, and by nobody after that: readers have no right to write it, and nothing
//! here does (VS-TABLE-004).

use std::sync::Arc;

use rdma_backend::{Access, Domain, Region};
use rdma_conn::Descriptors;
use sha2::{Digest as _, Sha256};
use zerocopy::byteorder::network_endian::U32;

use super::session::Log;
use crate::error::Error;
use crate::reader::{AREA, Landed};
use crate::wire::{Entry, Mapping, Mark};

/// The table of a publisher, with its memory.
pub(crate) struct Store<B: Descriptors> {
    /// What readers are told.
    pub(crate) log: Log,
    regions: Vec<B::Region>,
    /// The seed's table while it is built: what is written and what there will be.
    mapped: Option<Mapped<B>>,
    domain: Arc<B::Domain>,
    digest: Sha256,
    bytes: u64,
    /// Bytes that may be kept.
    limit: u64,
}

struct Mapped<B: Descriptors> {
    region: B::Region,
    areas: u32,
    total: u64,
}

/// Memory that a peer can read, and nobody write but this side.
const READ_ONLY: Access = Access::REMOTE_READ;

impl<B: Descriptors> Store<B> {
    pub(super) fn new(domain: Arc<B::Domain>, limit: u64) -> Self {
        Self {
            log: Log::default(),
            regions: Vec::new(),
            mapped: None,
            domain,
            digest: Sha256::new(),
            bytes: 0,
            limit,
        }
    }

    pub(super) const fn domain(&self) -> &Arc<B::Domain> {
        &self.domain
    }

    /// Bytes in the table.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Begins the seed's table, for `total` bytes: one piece of memory that cannot grow (VS-RCP-001).
    pub(super) fn begin_mapping(&mut self, total: u64) -> Result<(), Error> {
        self.room(total)?;
        let too_much = || Error::TooMuch { what: "the length of the seed's table", limit: usize::MAX as u64 };
        let areas = u32::try_from(total.div_ceil(AREA.into())).map_err(|_| too_much())?;
        let length = u64::from(areas) * 8 + total;
        let length = usize::try_from(length).map_err(|_| too_much())?;
        let region =
            self.domain.register(length, READ_ONLY).map_err(Error::backend("registering the table"))?;
        self.mapped = Some(Mapped { region, areas, total });
        Ok(())
    }

    fn room(&self, more: u64) -> Result<(), Error> {
        let within = self.bytes.checked_add(more).is_some_and(|sum| sum <= self.limit);
        if within {
            Ok(())
        } else {
            Err(Error::TooMuch { what: "the memory for the snapshot", limit: self.limit })
        }
    }

    /// Appends a chunk, which no reader sees before it is written.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.log.mark.is_none() {
            self.digest.update(bytes);
        }
        if let Some(mapped) = &self.mapped {
            let at = usize::try_from(u64::from(mapped.areas) * 8 + self.bytes).unwrap_or(usize::MAX);
            if !mapped.region.memory().write(at, bytes) {
                return Err(Error::TooMuch { what: "the length of the source", limit: mapped.total });
            }
            self.bytes += bytes.len() as u64;
            return Ok(());
        }
        self.room(bytes.len() as u64)?;
        let region =
            self.domain.register(bytes.len(), READ_ONLY).map_err(Error::backend("registering a chunk"))?;
        if !region.memory().write(0, bytes) {
            return Err(Error::DataEnded("a chunk's memory is too short"));
        }
        self.publish(region, bytes.len(), crc32fast::hash(bytes));
        Ok(())
    }

    /// Appends a chunk that was read from another publisher, in the memory that it was read into.
    pub(super) fn hand_on(&mut self, landed: Landed<B>) -> Result<(), Error> {
        self.room(landed.chunk.length.into())?;
        self.publish(landed.region, landed.chunk.length as usize, landed.crc);
        Ok(())
    }

    fn publish(&mut self, region: B::Region, length: usize, crc: u32) {
        self.log.entries.push(Entry {
            index: (self.log.entries.len() as u64).into(),
            address: region.address().into(),
            rkey: region.rkey().into(),
            length: U32::new(u32::try_from(length).unwrap_or(u32::MAX)),
            crc: crc.into(),
            reserved: U32::new(0),
        });
        self.regions.push(region);
        self.bytes += length as u64;
    }

    /// The snapshot is complete.
    pub(super) fn mark(&mut self) -> Result<(), Error> {
        let chunks = match &self.mapped {
            None => self.log.entries.len() as u64,
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
        let digest = std::mem::take(&mut self.digest).finalize().into();
        self.log.mark = Some(Mark { chunks: chunks.into(), bytes: self.bytes.into(), digest });
        Ok(())
    }
}

/// What readers must notice, and nobody does but tests.
#[cfg(test)]
impl<B: Descriptors> Store<B> {
    /// Changes what was published of a chunk; a second time, it is as it was. False if there is no such chunk.
    pub(crate) fn spoil(&self, chunk: usize) -> bool {
        let (region, at) = match &self.mapped {
            Some(mapped) if self.log.mapping.is_some() => {
                (&mapped.region, mapped.areas as usize * 8 + chunk * AREA as usize)
            }
            _ => match self.regions.get(chunk) {
                Some(region) => (region, 0),
                None => return false,
            },
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

    /// Bytes of its regions.
    pub(crate) fn registered(&self) -> u64 {
        let mapped = self.mapped.as_ref().map_or(0, |mapped| mapped.total + u64::from(mapped.areas) * 8);
        mapped + if self.mapped.is_some() { 0 } else { self.bytes }
    }

    /// Its regions.
    pub(crate) fn regions(&self) -> usize {
        self.regions.len()
    }
}
