//! The numbers of queue pairs, which devices give again.

use std::collections::VecDeque;

/// The first two numbers are the management queue pairs'.
const FIRST: u32 = 2;

/// Numbers in use and free. Whoever holds on to the number of a queue pair that is gone soon means another.
#[derive(Default)]
pub(super) struct Numbers {
    /// How many were ever given at the same time, with those that rest.
    known: u32,
    /// The numbers of queue pairs that are gone, the one that has been free for longest in front.
    free: VecDeque<u32>,
}

impl Numbers {
    /// A number that no queue pair has, and which no queue pair had until `rest` others were given back since.
    pub(super) fn give(&mut self, rest: usize) -> u32 {
        if self.free.len() > rest
            && let Some(number) = self.free.pop_front()
        {
            return number;
        }
        // A queue pair takes more memory than there is long before 24 bits are used up.
        let number = FIRST + self.known;
        self.known += 1;
        number
    }

    /// The queue pair with this number is gone.
    pub(super) fn take_back(&mut self, number: u32) {
        self.free.push_back(number);
    }
}
