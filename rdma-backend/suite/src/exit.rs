//! Exit codes of programs.

pub use rdma_program::{
    DONE, FAILED, INTERNAL, INTERRUPTED, NO_RDMA as NO_ENVIRONMENT, UNREAD, USAGE, guarded, misused, run,
    run_as, with_common,
};

/// Nothing failed, but something could not be decided.
pub const UNDECIDED: u8 = 2;
/// The suite, or something that it needs beside RDMA, failed: nothing is known about the target.
pub const BROKEN: u8 = 3;
/// The target died, hung, or took no connection.
pub const LOST: u8 = 4;
/// No case is selected, or none of the selected was run.
pub const NOTHING: u8 = 5;

/// The codes of runs, the worst first. Several together result in the worst of them.
const RANKS: [u8; 6] = [LOST, FAILED, BROKEN, UNDECIDED, NOTHING, DONE];

/// Returns the worse of two codes.
pub fn worse(one: u8, other: u8) -> u8 {
    RANKS.into_iter().find(|code| [one, other].contains(code)).unwrap_or_else(|| one.max(other))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn codes_are_distinct() {
        let others = [USAGE, NO_ENVIRONMENT, INTERNAL, INTERRUPTED, UNREAD];
        let all: BTreeSet<_> = RANKS.iter().chain(&others).collect();
        assert_eq!(all.len(), RANKS.len() + others.len());
    }

    /// Programs decide by these numbers: docs/exit-statuses.md.
    #[test]
    fn codes_stay() {
        let codes = [UNDECIDED, BROKEN, LOST, NOTHING, USAGE, NO_ENVIRONMENT, INTERNAL, INTERRUPTED, UNREAD];
        assert_eq!(codes, [2, 3, 4, 5, 64, 69, 70, 130, 141]);
    }

    #[test]
    fn the_worse_of_two() {
        assert_eq!(worse(FAILED, UNDECIDED), FAILED);
        assert_eq!(worse(NOTHING, LOST), LOST);
        assert_eq!(worse(DONE, NOTHING), NOTHING);
        assert_eq!(worse(DONE, DONE), DONE);
    }
}
