//! The exit codes of programs, as scripts see them.

use std::any::Any;
use std::io::{self, Write as _};
use std::panic::{self, UnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

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
/// Nothing is selected, or nothing of what is selected was run.
pub const NOTHING: u8 = 5;
/// The command line makes no sense.
pub const USAGE: u8 = 64;
/// There is no RDMA here.
pub const NO_ENVIRONMENT: u8 = 69;
/// A mistake of this program.
pub const INTERNAL: u8 = 70;

/// The reader of the output is gone, as in `… | head`: the code of a program that is ended by `SIGPIPE`.
pub const UNREAD: u8 = 141;

/// The codes of runs, the worst first: several together come to the worst of them.
const RANKS: [u8; 6] = [LOST, FAILED, BROKEN, UNDECIDED, NOTHING, DONE];

/// Returns the worse of two codes.
pub fn worse(one: u8, other: u8) -> u8 {
    RANKS.into_iter().find(|code| [one, other].contains(code)).unwrap_or_else(|| one.max(other))
}

/// Returns whether this is the panic of the standard library's `print!` when the reader is gone; nothing else tells it.
fn is_unread(payload: &dyn Any) -> bool {
    let text = payload.downcast_ref::<String>();
    text.is_some_and(|text| text.starts_with("failed printing to std") && text.contains("Broken pipe"))
}

/// Does a job, and returns its exit code. A panic is a mistake of this program, whatever the target did, and is reported as one; a
/// reader of the output that is gone ends the program without a message.
pub fn guarded(job: impl FnOnce() -> ExitCode + UnwindSafe) -> ExitCode {
    static UNHEARD: AtomicBool = AtomicBool::new(false);
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        // What the standard library's `print!` says, in whatever thread; there is no other way to learn of it.
        let closed = is_unread(info.payload());
        if closed {
            UNHEARD.store(true, Ordering::Relaxed);
        } else if !UNHEARD.load(Ordering::Relaxed) {
            usual(info);
        }
    }));
    catch_unwind(job).unwrap_or_else(|payload| {
        // The job may have a hook of its own.
        if UNHEARD.load(Ordering::Relaxed) || is_unread(&*payload) {
            return ExitCode::from(UNREAD);
        }
        eprintln!(
            "this is a mistake of this program, and says nothing about what was tested; please report it"
        );
        ExitCode::from(INTERNAL)
    })
}

/// Prints why a command line makes no sense, or the help that it asks for, and returns the exit code. What stands before an `@` in a word of
/// it is not repeated: it may be a password.
pub fn misused(error: &clap::Error) -> ExitCode {
    let said = error.render().to_string();
    let told = without_logins(&said, std::env::args_os().map(|word| word.to_string_lossy().into_owned()));
    let _to_a_closed_terminal = if told == said { error.print() } else { write!(io::stderr(), "{told}") };
    ExitCode::from(if error.use_stderr() { USAGE } else { DONE })
}

fn without_logins(text: &str, words: impl Iterator<Item = String>) -> String {
    words.fold(text.into(), |text, word| {
        let Some((login, _)) = word.rsplit_once('@') else { return text };
        let login = login.split_once("://").map_or(login, |(_, login)| login);
        text.replace(&format!("{login}@"), "…@")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct() {
        let mut all =
            [DONE, FAILED, UNDECIDED, BROKEN, LOST, NOTHING, USAGE, NO_ENVIRONMENT, INTERNAL, UNREAD]
                .to_vec();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn the_worse_of_two() {
        assert_eq!(worse(FAILED, UNDECIDED), FAILED);
        assert_eq!(worse(NOTHING, LOST), LOST);
        assert_eq!(worse(DONE, NOTHING), NOTHING);
        assert_eq!(worse(DONE, DONE), DONE);
    }

    #[test]
    fn a_panic_is_an_internal_error() {
        let code = |job: fn() -> ExitCode| format!("{:?}", guarded(job));
        assert_eq!(code(|| panic!("a mistake")), format!("{:?}", ExitCode::from(INTERNAL)));
        assert_eq!(code(|| ExitCode::from(FAILED)), format!("{:?}", ExitCode::from(FAILED)));
    }
}
