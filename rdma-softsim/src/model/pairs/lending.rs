//! The bytes that posted work has lent to devices, and those of messages that land late.

use super::Pairs;
use super::ownership::{Landing, Lent};
use super::requester::Source;
use crate::failure_class::FailureClass;
use crate::model::base::environment::Environment;
use crate::model::base::ids::PairId;
use crate::model::regions::Regions;
use crate::model::regions::parts::Parts;
use crate::trace::EntryKind;

impl Pairs {
    /// Records posted work. Its bytes belong to the device from now on, unless it took a copy.
    pub(in crate::model) fn lend(&mut self, env: &mut Environment, regions: &Regions, id: PairId) {
        if !env.is_observed() {
            return;
        }
        let Some(pair) = self.get(id) else { return };
        // `enqueue` has just pushed it, so there is one.
        let sequence = pair.requester.next_sequence() - 1;
        let Some(work) = pair.requester.newest() else { return };
        let (id_of_work, Source::Memory(parts)) = (work.id, &work.source) else { return };
        let Some(hash) = regions.hash_of(parts).filter(|_| work.len > 0) else { return };
        let lent = Lent { id: id_of_work, sequence, parts: parts.clone(), hash };
        if let Some(pair) = self.get_mut(id) {
            pair.ownership.lent.push_back(lent);
        }
    }

    /// Handles a polled completion: checks all lent bytes, and returns those that the owner may use
    /// again.
    pub(in crate::model) fn check_ownership(&mut self, env: &mut Environment, regions: &Regions, id: PairId) {
        let Some(pair) = self.get(id) else { return };
        let (number, free_below) = (pair.number, pair.requester.given_back());
        // Before they are given back: a change since the last poll was one too early.
        // Bytes of a region that is gone have no hash: `Model::deregister` has noted it as busy.
        let changed = pair
            .ownership
            .lent
            .iter()
            .find(|lent| regions.hash_of(&lent.parts).is_some_and(|hash| hash != lent.hash));
        if let Some(work) = changed.map(|lent| lent.id) {
            env.note(|| EntryKind::Tampered { pair: number, id: work });
        }
        let Some(pair) = self.get_mut(id) else { return };
        let before = pair.ownership.lent.len();
        pair.ownership.lent.retain(|lent| lent.sequence >= free_below);
        if pair.ownership.lent.len() < before {
            env.count_observed(FailureClass::BufferOwnership);
        }
    }

    /// Decides whether the bytes of a message land late, and keeps them until then.
    pub(in crate::model) fn lands_late(
        &mut self,
        env: &mut Environment,
        regions: &Regions,
        at: PairId,
        sequence: u64,
        bytes: Vec<u8>,
        target: Parts,
    ) {
        // Some pieces land at once, in no order.
        const PIECE: usize = 8;
        for (place, piece) in bytes.chunks(PIECE).enumerate() {
            if env.below(3) == 0 {
                // It was checked before.
                let _inside = regions.scatter(&target, place * PIECE, piece);
            }
        }
        env.count_injected(FailureClass::DataVisibility);
        if let Some(pair) = self.get_mut(at) {
            pair.ownership.landing.push_back(Landing { sequence, target, bytes });
        }
    }

    /// Handles the polled receive of message `sequence`: all bytes up to it land.
    pub(in crate::model) fn land(
        &mut self,
        env: &mut Environment,
        regions: &Regions,
        id: PairId,
        sequence: u64,
    ) {
        while let Some(pair) = self.get_mut(id)
            && pair.ownership.landing.front().is_some_and(|first| first.sequence <= sequence)
            && let Some(landing) = pair.ownership.landing.pop_front()
        {
            // If the region is gone meanwhile, nothing can read them.
            let _inside = regions.scatter(&landing.target, 0, &landing.bytes);
            env.count_observed(FailureClass::DataVisibility);
        }
    }
}
