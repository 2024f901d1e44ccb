//! Queue pair numbers, which devices reuse.

use std::collections::VecDeque;

/// The first two numbers belong to the management queue pairs.
const FIRST: u32 = 2;

/// Numbers in use and free. A stale number soon names another queue pair.
#[derive(Default)]
pub(super) struct Numbers {
    /// Most numbers ever in use at once, including resting ones.
    known: u32,
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
        let number = FIRST + self.known;
        self.known += 1;
        number
    }

    pub(super) fn take_back(&mut self, number: u32) {
        self.free.push_back(number);
    }
}
