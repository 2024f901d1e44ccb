//! A seeded random number generator.

use core::ops::RangeInclusive;
use core::time::Duration;

/// A seeded generator (SplitMix64). It is small, fast, and the same on every machine and in every
/// version of this crate, so that a seed in a report always means the same run.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Returns the generator of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns an independent generator. What one part of a run draws from it never changes what
    /// another part draws.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        Self(self.next())
    }

    /// Returns any number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number less than `bound`, or 0 if that is 0.
    pub const fn below(&mut self, bound: u64) -> u64 {
        // The high half of the product: uniform up to a bias of 2⁻⁶⁴ · bound.
        ((self.next() as u128 * bound as u128) >> 64) as u64
    }

    /// Returns a number of `range`.
    pub fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// Returns true `times` in `of`.
    pub const fn chance(&mut self, times: u64, of: u64) -> bool {
        self.below(of) < times
    }

    /// Returns one of `choices`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Returns a duration of at most `longest`.
    pub fn duration(&mut self, longest: Duration) -> Duration {
        let nanos = u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.below(nanos.saturating_add(1)))
    }
}
