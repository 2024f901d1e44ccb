//! The oracle of ends: a side that saw an orderly end saw every byte. For random runs with a seed
//! each, here and in `rdma-bridge`.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Returns the byte of a side's stream at a position.
pub(crate) fn byte(side: u8, at: usize) -> u8 {
    (at ^ at >> 8 ^ at >> 16) as u8 ^ side
}

/// One side of a connection, as it ended up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) sent: usize,
    /// Whether it has ended in order.
    pub(crate) ended: bool,
    pub(crate) received: usize,
    /// Whether the peer ended in order, or broke. `None` if it did not look, or had ended itself.
    pub(crate) end: Option<bool>,
}

impl Seen {
    /// Takes received bytes, which must continue those of side `from`.
    pub(crate) fn receive(&mut self, from: u8, bytes: &[u8]) {
        for (at, got) in (self.received..).zip(bytes) {
            assert_eq!(*got, byte(from, at), "another byte at {at} from side {from}");
        }
        self.received += bytes.len();
    }

    /// Judges what a side saw of `peer`. `whole`: the peer's connection ends in both directions if
    /// one side ends it.
    pub(crate) fn judge(&self, peer: &Self, whole: bool, story: impl Fn() -> String) {
        if self.end == Some(true) {
            assert_eq!(self.received, peer.sent, "a side saw a whole that is none\n{}", story());
            assert!(peer.ended || whole, "a side was told an end that was none\n{}", story());
        }
    }
}

/// Runs `run` for each seed: the `usual` ones, or those of the environment variable, `17` or
/// `0..100000`. It returns how many orderly ends and how many others were seen.
pub(crate) fn for_seeds(variable: &str, usual: Range<u64>, mut run: impl FnMut(u64) -> [usize; 2]) {
    let seeds = std::env::var(variable).map_or(usual, |text| {
        let number = |text: &str| match text.parse::<u64>() {
            Ok(number) => number,
            Err(error) => panic!("{variable} is a number, or two with .. between them: {error}"),
        };
        match text.split_once("..") {
            Some((first, end)) => number(first)..number(end),
            None => number(&text)..number(&text) + 1,
        }
    });
    let mut ends = [0; 2];
    for seed in seeds {
        if seed % 1_000 == 0 {
            println!("seed {seed}: {ends:?} orderly ends and others so far");
        }
        match catch_unwind(AssertUnwindSafe(|| run(seed))) {
            Ok(seen) => ends = [ends[0] + seen[0], ends[1] + seen[1]],
            Err(panic) => {
                println!("seed {seed} failed; {variable}={seed} repeats it");
                resume_unwind(panic);
            }
        }
    }
    println!("{ends:?} orderly ends and others");
}
