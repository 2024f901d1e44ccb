//! False announcements that a publisher of this crate can be made to send. The fuzzer sends frames
//! that no publisher would send.

use rdma_conn::Descriptors;
use rdma_softsim::Random;
use zerocopy::byteorder::network_endian::{U32, U64};

use super::scenario::Scenario;
use crate::Error;
use crate::publisher::Store;
use crate::reader::Limits;
use crate::wire::Layout;

/// A forgery, and the chunk it is about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Forgery {
    pub(super) about: About,
    pub(super) chunk: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum About {
    /// An entry that was announced before: a loop.
    Again,
    Missing,
    Far,
    Empty,
    Long,
    Short,
    /// It reaches beyond the last address.
    Beyond,
    /// The chunk is elsewhere, with or without the key of that place.
    Elsewhere,
    OutOfBounds,
    Key,
    Chunk,
    MarkedBytes,
    MarkedChunks,
    Digest,
    /// More chunks or bytes than the reader accepts.
    Endless,
    Large,
    /// In the seed's table: too many areas or none, a start that wraps, an address of another area.
    Areas,
    NoArea,
    Start,
    Address,
}

use About::*;

const CHUNKS: [About; 16] = [
    Again,
    Missing,
    Far,
    Empty,
    Long,
    Short,
    Beyond,
    Elsewhere,
    OutOfBounds,
    Key,
    Chunk,
    MarkedBytes,
    MarkedChunks,
    Digest,
    Endless,
    Large,
];
const RCP: [About; 7] = [Areas, NoArea, Start, Address, Key, MarkedBytes, Digest];

impl Forgery {
    pub(super) fn draw(scenario: &Scenario, random: &mut Random) -> Self {
        let about = random.pick(if scenario.layout == Layout::Rcp { &RCP[..] } else { &CHUNKS });
        // There is an earlier chunk to point at. It is full, so it can be shorter.
        let chunk = random.below(scenario.marked as u64 - 1).max(1) as usize;
        Self { about, chunk }
    }

    /// Returns limits of the reader that this forgery exceeds.
    pub(super) fn limits(self) -> Limits {
        match self.about {
            Endless => Limits { chunks: self.chunk as u64, ..Limits::default() },
            Large => Limits { bytes: self.chunk as u64 * 1000, ..Limits::default() },
            _ => Limits::default(),
        }
    }

    /// Falsifies the entry that was appended last, if it is the one.
    pub(super) fn announce<B: Descriptors>(self, store: &mut Store<B>) {
        let log = &mut store.log;
        if log.entries.len() != self.chunk + 1 {
            return;
        }
        let [first, .., entry] = log.entries.as_mut_slice() else { return };
        match self.about {
            Again => entry.index = U64::new(entry.index.get() - 1),
            Missing => entry.index = U64::new(entry.index.get() + 1),
            Far => entry.index = U64::new(u64::MAX),
            Empty => entry.length = U32::new(0),
            Long => entry.length = U32::new(super::CHUNK + 1),
            Short => entry.length = U32::new(entry.length.get().saturating_sub(1)),
            // However short the chunk is.
            Beyond => entry.address = U64::new(u64::MAX - u64::from(entry.length.get()) / 2),
            Elsewhere => (entry.address, entry.rkey) = (first.address, first.rkey),
            OutOfBounds => entry.address = U64::new(entry.address.get() + 1),
            Key => entry.rkey = U32::new(entry.rkey.get() ^ 0x0100_0000),
            // In either half of it.
            Chunk => entry.digest[7 + self.chunk % 2 * 24] ^= 1,
            _ => {}
        }
    }

    /// Falsifies the end of the snapshot and the seed's table, which are announced together.
    pub(super) fn mark<B: Descriptors>(self, store: &mut Store<B>) {
        let log = &mut store.log;
        if let Some(mark) = &mut log.mark {
            match self.about {
                MarkedBytes => mark.bytes = U64::new(mark.bytes.get() + 1),
                MarkedChunks => mark.chunks = U64::new(mark.chunks.get() - 1),
                Digest => mark.digest[7] ^= 1,
                _ => {}
            }
        }
        if let Some(mapping) = &mut log.mapping {
            match self.about {
                Areas => mapping.areas = U32::new(mapping.areas.get() + 1),
                NoArea => (mapping.areas, mapping.bytes) = (U32::new(0), U64::new(0)),
                Start => mapping.address = U64::new(u64::MAX - 8),
                Key => mapping.rkey = U32::new(mapping.rkey.get() ^ 0x0100_0000),
                _ => {}
            }
        }
        if self.about == Address {
            store.spoil_addresses();
        }
    }

    /// Returns whether the session of a reader that received this may end with `error`.
    pub(super) fn explains(self, error: &Error) -> bool {
        let chunk = self.chunk as u64;
        // A device that refuses a READ may take earlier ones with it, and the publisher's device
        // then ends the connection.
        let is_refused =
            matches!(error, Error::Read { .. } | Error::DataEnded(_) | Error::Ended | Error::Control(_));
        match self.about {
            Key => is_refused,
            // The end of the snapshot may come before the READ's answer.
            Short => {
                matches!(error, Error::Corrupt { chunk: at } if *at == chunk)
                    || matches!(error, Error::Misbehaved(_))
            }
            // It may still be inside the memory of that key.
            Elsewhere | OutOfBounds => {
                matches!(error, Error::Corrupt { chunk: at } if *at == chunk) || is_refused
            }
            Chunk => matches!(error, Error::Corrupt { chunk: at } if *at == chunk),
            Digest => matches!(error, Error::Digest),
            Endless | Large => matches!(error, Error::TooMuch { .. }),
            _ => matches!(error, Error::Misbehaved(_)),
        }
    }
}
