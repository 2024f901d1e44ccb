#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod memory;

use std::any::Any;
use std::io::{self, Write as _};
use std::panic::{self, AssertUnwindSafe, UnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches, value_parser};
use clap_complete::Shell;

pub use memory::{Memory, memory};

/// Success.
pub const DONE: u8 = 0;
/// Failure. The program has printed the reason.
pub const FAILED: u8 = 1;
/// Invalid command line (EX_USAGE of `sysexits.h`).
pub const USAGE: u8 = 64;
/// No RDMA on this machine (EX_UNAVAILABLE).
pub const NO_RDMA: u8 = 69;
/// A bug in the program (EX_SOFTWARE).
pub const INTERNAL: u8 = 70;
/// Interrupted (`SIGINT`). The results so far are written.
pub const INTERRUPTED: u8 = 130;
/// The output pipe is closed, as in `… | head`. A program that `SIGPIPE` ends has the same status.
pub const UNREAD: u8 = 141;

const STATUSES: &str = "\
Exit status:
    0 done                        69 no RDMA here
    1 failed                      70 a bug in this program
   64 wrong command line         141 the reader of the output is gone";

/// Runs `job` with the command line, unless that is `completions` or `man`, and returns the status.
pub fn run<T: CommandFactory + FromArgMatches>(job: impl FnOnce(T) -> ExitCode) -> ExitCode {
    let command = T::command();
    let after = command.get_after_help().map(|after| format!("{after}\n\n")).unwrap_or_default();
    run_as(command.after_help(after + STATUSES), job)
}

/// Like [`run`], for a command whose help names its exit statuses itself.
pub fn run_as<T: FromArgMatches>(command: Command, job: impl FnOnce(T) -> ExitCode) -> ExitCode {
    guarded(AssertUnwindSafe(|| {
        let command = if command.find_subcommand("man").is_some() { command } else { with_common(command) };
        let matches = match command.clone().try_get_matches() {
            Ok(matches) => matches,
            Err(error) => return misused(&error),
        };
        if let Some(code) = installed(command, &matches) {
            return code;
        }
        match T::from_arg_matches(&matches) {
            Ok(arguments) => job(arguments),
            Err(error) => misused(&error),
        }
    }))
}

/// Adds the commands that every program has.
#[must_use]
pub fn with_common(command: Command) -> Command {
    let has_others = command.has_subcommands();
    let shell = Arg::new("shell").required(true).value_parser(value_parser!(Shell)).help("The shell");
    let folder = Arg::new("folder").default_value(".").value_parser(value_parser!(PathBuf));
    let command = command
        .subcommand(
            Command::new("completions")
                .about("Prints what a shell needs to complete its command lines")
                .arg(shell),
        )
        .subcommand(
            Command::new("man")
                .about("Writes manual pages, one for each command")
                .arg(folder.help("The folder to write them into")),
        );
    match has_others {
        true => command,
        false => command
            .subcommand_negates_reqs(true)
            .args_conflicts_with_subcommands(true)
            .disable_help_subcommand(true),
    }
}

fn installed(mut command: Command, matches: &ArgMatches) -> Option<ExitCode> {
    match matches.subcommand()? {
        ("completions", matches) => {
            let shell: Shell = *matches.get_one("shell")?;
            let (name, mut script) = (command.get_name().to_string(), Vec::new());
            clap_complete::generate(shell, &mut command, name, &mut script);
            print!("{}", String::from_utf8_lossy(&script));
            Some(ExitCode::from(DONE))
        }
        ("man", matches) => {
            let folder: &PathBuf = matches.get_one("folder")?;
            Some(match manual(command, folder) {
                Ok(()) => ExitCode::from(DONE),
                Err(error) => {
                    eprintln!("{}: {error}", folder.display());
                    ExitCode::from(FAILED)
                }
            })
        }
        _ => None,
    }
}

fn manual(command: Command, folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    clap_mangen::generate_to(command, folder)
}

/// Whether this is the panic of `print!` when the reader is gone, which only the message shows.
fn is_unread(payload: &dyn Any) -> bool {
    let text = payload.downcast_ref::<String>();
    text.is_some_and(|text| text.starts_with("failed printing to std") && text.contains("Broken pipe"))
}

/// Runs a job, and returns its exit status. A panic is reported as a bug in the program. If the
/// reader of the output is gone, the program ends without a message.
pub fn guarded(job: impl FnOnce() -> ExitCode + UnwindSafe) -> ExitCode {
    static UNHEARD: AtomicBool = AtomicBool::new(false);
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let closed = is_unread(info.payload());
        if closed {
            UNHEARD.store(true, Ordering::Relaxed);
        } else if !UNHEARD.load(Ordering::Relaxed) {
            usual(info);
        }
    }));
    catch_unwind(job).unwrap_or_else(|payload| {
        // The job may have installed a panic hook of its own.
        if UNHEARD.load(Ordering::Relaxed) || is_unread(&*payload) {
            return ExitCode::from(UNREAD);
        }
        eprintln!(
            "this is a bug in this program, and says nothing about what it was used on; please report it"
        );
        ExitCode::from(INTERNAL)
    })
}

/// Prints why a command line is invalid, or the help that it requests, and returns the exit status.
/// The part of a word before an `@` is not repeated: it may be a password.
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

/// Returns the exit status of an error: [`NO_RDMA`] if it or a cause is [`io::Error`] of the kind
/// [`Unsupported`](io::ErrorKind::Unsupported), as of backends without a library or a device.
pub fn status(error: &(dyn std::error::Error + 'static)) -> u8 {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    let is_missing = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::Unsupported)
    };
    if causes.any(is_missing) { NO_RDMA } else { FAILED }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(command: Command, line: &[&str]) -> Result<ArgMatches, clap::Error> {
        command.try_get_matches_from([&["program"], line].concat())
    }

    #[test]
    fn common_commands_need_no_arguments_of_the_program() {
        let one = with_common(Command::new("program").arg(Arg::new("needed").long("needed").required(true)));
        assert!(matches(one.clone(), &["--needed", "x"]).expect("complete").subcommand().is_none());
        assert!(matches(one.clone(), &[]).is_err());
        for command in [&["completions", "bash"][..], &["man"], &["man", "folder"]] {
            matches(one.clone(), command).expect("needs no more");
        }
        assert!(matches(one.clone(), &["completions", "none"]).is_err());
        assert!(matches(one, &["--needed", "x", "man"]).is_err());
    }

    #[test]
    fn manual_pages_are_written() {
        let folder = std::env::temp_dir().join(format!("rdma-program-{}/man", std::process::id()));
        let command = with_common(Command::new("program").after_help(STATUSES));
        manual(command, &folder).expect("a folder");
        let page = std::fs::read_to_string(folder.join("program.1")).expect("a page");
        assert!(page.contains("no RDMA here"), "{page}");
        assert!(folder.join("program-man.1").is_file());
        std::fs::remove_dir_all(folder.parent().expect("made")).expect("removed");
    }

    #[test]
    fn a_missing_device_has_a_status_of_its_own() {
        let missing = || io::Error::new(io::ErrorKind::Unsupported, "no device");
        assert_eq!(status(&missing()), NO_RDMA);
        assert_eq!(status(&io::Error::other("no")), FAILED);
    }

    #[test]
    fn a_panic_is_an_internal_error() {
        let code = |job: fn() -> ExitCode| format!("{:?}", guarded(job));
        assert_eq!(code(|| panic!("a mistake")), format!("{:?}", ExitCode::from(INTERNAL)));
        assert_eq!(code(|| ExitCode::from(FAILED)), format!("{:?}", ExitCode::from(FAILED)));
    }
}
