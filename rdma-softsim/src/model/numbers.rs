//! Queue pair numbers, which devices reuse.

use std::collections::VecDeque;

use super::PairId;

/// The first two numbers belong to the management queue pairs.
const FIRST: u32 = 2;

/// Numbers in use and free. A stale number soon names another queue pair.
#[derive(Default)]
pub(super) struct Numbers {
    /// The queue pair of each number from [`FIRST`] on.
    pairs: Vec<PairId>,
    /// Free numbers, the longest free one first.
    free: VecDeque<u32>,
}

impl Numbers {
    /// Returns a number that is not in use, and that was freed at least `rest` frees ago.
    pub(super) fn give(&mut self, rest: usize) -> u32 {
        if self.free.len() > rest
            && let Some(number) = self.free.pop_front()
        {
            return number;
        }
        // Memory runs out long before 24 bits do.
        self.pairs.push(PairId::NONE);
        FIRST + (self.pairs.len() - 1) as u32
    }

    /// Sets whose number this is.
    pub(super) fn assign(&mut self, number: u32, pair: PairId) {
        if let Some(place) = number.checked_sub(FIRST).and_then(|place| self.pairs.get_mut(place as usize)) {
            *place = pair;
        }
    }

    /// Returns the queue pair that has this number, or had it last.
    pub(super) fn pair(&self, number: u32) -> Option<PairId> {
        self.pairs.get(number.checked_sub(FIRST)? as usize).copied()
    }

    pub(super) fn take_back(&mut self, number: u32) {
        self.free.push_back(number);
    }
}
