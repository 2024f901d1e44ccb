//! Queue pair numbers, which devices reuse.

use std::collections::VecDeque;

use crate::model::base::ids::PairId;

/// The first two numbers belong to the management queue pairs.
const FIRST: u32 = 2;

/// Numbers in use and free. A stale number soon names another queue pair.
#[derive(Default)]
pub(in crate::model) struct Numbers {
    /// The queue pair of each number from [`FIRST`] on.
    pairs: Vec<PairId>,
    /// Free numbers, the longest free one first.
    free: VecDeque<u32>,
}

impl Numbers {
    /// Returns a number that is not in use, and that was freed at least `rest` frees ago.
    pub(in crate::model) fn give(&mut self, rest: usize) -> u32 {
        // The longest free one, after as many others as the kind of device lets rest.
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
    pub(in crate::model) fn assign(&mut self, number: u32, pair: PairId) {
        if let Some(place) = number.checked_sub(FIRST).and_then(|place| self.pairs.get_mut(place as usize)) {
            *place = pair;
        }
    }

    /// Returns the queue pair that has this number, or had it last.
    pub(in crate::model) fn pair(&self, number: u32) -> Option<PairId> {
        self.pairs.get(number.checked_sub(FIRST)? as usize).copied()
    }

    /// Returns the number behind the highest one.
    pub(in crate::model) fn end(&self) -> u32 {
        FIRST + self.pairs.len() as u32
    }

    pub(in crate::model) fn take_back(&mut self, number: u32) {
        self.free.push_back(number);
    }
}
