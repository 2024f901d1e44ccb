//! Ownership of bytes over time: of send buffers until their completion is polled, of window bytes
//! only after it.
//!
//! Only simulations check it. A device may read a send buffer again until the work's completion
//! says otherwise (`ibv_post_send(3)`). The bytes of a WRITE may land in any order until the
//! completion of a receive that came with or after it (`ibv_reg_mr(3)`). A program that writes the
//! former or reads the latter too early is detected here.

use core::hash::Hasher;
use std::collections::VecDeque;

use super::parts::{Part, Parts};
use super::requester::Source;
use super::{Model, PairId, RegionId};
use crate::failure_class::FailureClass;
use crate::trace::{Digest, EntryKind};

/// Ownership state of a queue pair's bytes, in a simulation.
#[derive(Default)]
pub(super) struct Ownership {
    lent: VecDeque<Lent>,
    /// Bytes of the peer's messages that have not landed.
    landing: VecDeque<Landing>,
}

struct Lent {
    /// The request, and its sequence number.
    id: u64,
    sequence: u64,
    parts: Parts,
    hash: u64,
}

struct Landing {
    sequence: u64,
    target: Parts,
    bytes: Vec<u8>,
}

impl Ownership {
    pub(super) fn lends(&self, region: RegionId) -> bool {
        self.lent.iter().any(|lent| lent.parts.touch(region))
    }
}

impl Model {
    fn hash_of(&self, parts: &Parts) -> Option<u64> {
        let mut digest = Digest::default();
        const CHUNK: usize = 4096;
        let mut chunk = [0; CHUNK];
        for &Part { region, mut offset, len } in parts.list() {
            let memory = &self.regions.get(region)?.memory;
            let end = offset + len;
            while offset < end {
                let part = &mut chunk[..CHUNK.min(end - offset)];
                if !memory.read(offset, part) {
                    return None;
                }
                digest.write(part);
                offset += part.len();
            }
        }
        Some(digest.finish())
    }

    /// Records posted work. Its bytes belong to the device from now on, unless it took a copy.
    pub(super) fn lend(&mut self, id: PairId) {
        if !self.is_observed() {
            return;
        }
        let Some(pair) = self.pairs.get(id) else { return };
        let sequence = pair.requester.next_sequence() - 1;
        let Some(work) = pair.requester.newest() else { return };
        let (id_of_work, Source::Memory(parts)) = (work.id, &work.source) else { return };
        let Some(hash) = self.hash_of(parts).filter(|_| work.len > 0) else { return };
        let lent = Lent { id: id_of_work, sequence, parts: parts.clone(), hash };
        if let Some(pair) = self.pairs.get_mut(id) {
            pair.ownership.lent.push_back(lent);
        }
    }

    /// Handles a polled completion: checks all lent bytes, and returns those that the owner may use
    /// again.
    pub(super) fn check_ownership(&mut self, id: PairId) {
        let Some(pair) = self.pairs.get(id) else { return };
        let (number, free_below) = (pair.number, pair.requester.given_back());
        let changed = pair
            .ownership
            .lent
            .iter()
            .find(|lent| self.hash_of(&lent.parts).is_some_and(|hash| hash != lent.hash));
        if let Some(work) = changed.map(|lent| lent.id) {
            self.note(|| EntryKind::Tampered { pair: number, id: work });
        }
        let Some(pair) = self.pairs.get_mut(id) else { return };
        let before = pair.ownership.lent.len();
        pair.ownership.lent.retain(|lent| lent.sequence >= free_below);
        if pair.ownership.lent.len() < before {
            self.count_observed(FailureClass::BufferOwnership);
        }
    }

    /// Decides whether the bytes of a message land late, and keeps them until then.
    pub(super) fn lands_late(&mut self, at: PairId, sequence: u64, bytes: Vec<u8>, target: Parts) {
        // Some pieces land at once, in no order.
        const PIECE: usize = 8;
        for (place, piece) in bytes.chunks(PIECE).enumerate() {
            if self.below(3) == 0 {
                let _inside = self.scatter(&target, place * PIECE, piece);
            }
        }
        self.count_injected(FailureClass::DataVisibility);
        if let Some(pair) = self.pairs.get_mut(at) {
            pair.ownership.landing.push_back(Landing { sequence, target, bytes });
        }
    }

    /// Handles the polled receive of message `sequence`: all bytes up to it land.
    pub(super) fn land(&mut self, id: PairId, sequence: u64) {
        while let Some(pair) = self.pairs.get_mut(id)
            && pair.ownership.landing.front().is_some_and(|first| first.sequence <= sequence)
            && let Some(landing) = pair.ownership.landing.pop_front()
        {
            let _inside = self.scatter(&landing.target, 0, &landing.bytes);
            self.count_observed(FailureClass::DataVisibility);
        }
    }

    /// Returns whether the device has reports about `pair` that it will never make, for the counts
    /// of failures.
    pub(super) fn ends_in_the_middle(&mut self, id: PairId) -> bool {
        self.pairs.get(id).is_some_and(|pair| pair.requester.has_work()) || self.has_unpolled(id)
    }
}
