//! How the program exits: what a script can tell apart.

use std::panic::{UnwindSafe, catch_unwind};
use std::process::ExitCode;

/// All as it should be.
pub const DONE: u8 = 0;
/// A requirement is not met, or an expected failure has gone.
pub const FAILED: u8 = 1;
/// Nothing failed, and something could not be decided.
pub const UNDECIDED: u8 = 2;
/// The suite, or what it needs beside RDMA, could not do its work: nothing is known about the target.
pub const BROKEN: u8 = 3;
/// The target died, hung, or took no connection.
pub const LOST: u8 = 4;
/// Nothing is selected.
pub const NOTHING: u8 = 5;
/// The command line makes no sense.
pub const USAGE: u8 = 64;
/// There is no RDMA here.
pub const NO_ENVIRONMENT: u8 = 69;
/// A mistake of this program.
pub const INTERNAL: u8 = 70;

/// Does a job. A panic is a mistake of this program, whatever the target did, and says so.
pub fn guarded(job: impl FnOnce() -> ExitCode + UnwindSafe) -> ExitCode {
    catch_unwind(job).unwrap_or_else(|_| {
        eprintln!(
            "this is a mistake of this program, and says nothing about what was tested; please report it"
        );
        ExitCode::from(INTERNAL)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct() {
        let mut all =
            [DONE, FAILED, UNDECIDED, BROKEN, LOST, NOTHING, USAGE, NO_ENVIRONMENT, INTERNAL].to_vec();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn a_panic_is_an_internal_error() {
        let code = |job: fn() -> ExitCode| format!("{:?}", guarded(job));
        assert_eq!(code(|| panic!("a mistake")), format!("{:?}", ExitCode::from(INTERNAL)));
        assert_eq!(code(|| ExitCode::from(FAILED)), format!("{:?}", ExitCode::from(FAILED)));
    }
}
