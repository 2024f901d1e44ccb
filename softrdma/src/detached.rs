//! Starts a process that is in no program's process tree.
//!
//! A program that starts a fabric must not find it among its children: it may wait for all of them,
//! or count them. So a process in between starts the fabric's process and ends, as daemons are
//! started (`daemon(7)`). That process gives no signal at its end, and only `__WALL` waits for it
//! (`clone(2)`), so that the program, whose other threads may wait for any child, is not told of
//! it either.
//!
//! The new process has a process group of its own, which a terminal gives no signals, `/` as its
//! directory, no other descriptors than its standard streams, and default signals. It stays in its
//! starter's control group and namespaces, with the same resource limits.
//!
//! It also stays in its starter's session. Linux schedules each session as one group
//! (`sched(7)`, autogroup): a yield of the fabric's threads would not let the programs run, and
//! `ib_write_bw` at 4 KiB took five times as long.

#![allow(unsafe_code, reason = "clone(2) and execve(2) have no safe wrapper")]

use std::ffi::{CString, OsStr, OsString, c_char, c_int};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::ptr;

use libc::{pid_t, sigset_t};

/// The lowest descriptor that is no standard stream.
const FIRST: RawFd = 3;
/// Up to which descriptor each is closed by itself if the kernel cannot close all at once (before
/// Linux 5.9). More would take too long.
const MOST_CLOSED: RawFd = 1 << 16;
/// Up to which number signals exist (`signal(7)`).
const LAST_SIGNAL: c_int = 64;

/// A program's file, its arguments and its environment, as `execve(2)` takes them.
struct Image {
    words: Vec<CString>,
    variables: Vec<CString>,
}

/// Starts a program with these arguments, without these variables of the environment.
///
/// `streams` are its standard streams. Returns once it is started; whether its file can be
/// executed shows in its standard error stream.
pub(crate) fn start(
    program: &OsStr,
    arguments: &[&OsStr],
    without: &[&OsStr],
    streams: [OwnedFd; 3],
) -> io::Result<()> {
    let word = |word: &OsStr| CString::new(word.as_bytes()).map_err(io::Error::from);
    let words =
        std::iter::once(&program).chain(arguments).map(|part| word(part)).collect::<Result<_, _>>()?;
    let variable = |(name, value): (OsString, OsString)| {
        word(&OsString::from_vec([name.as_bytes(), b"=", value.as_bytes()].concat()))
    };
    let kept = std::env::vars_os().filter(|(name, _)| !without.contains(&name.as_os_str()));
    let image = Image { words, variables: kept.map(variable).collect::<Result<_, _>>()? };
    // Above the standard streams, so that none is overwritten before it is in its place.
    let above = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), FIRST);
    let [input, output, error] = streams.each_ref().map(above);
    let streams = [input?, output?, error?];
    image.start(&streams)
}

impl Image {
    fn start(&self, streams: &[OwnedFd; 3]) -> io::Result<()> {
        let pointers = |strings: &[CString]| -> Vec<*const c_char> {
            strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
        };
        let (words, variables) = (pointers(&self.words), pointers(&self.variables));
        let streams = streams.each_ref().map(|stream| stream.as_raw_fd());
        // An orphan becomes a child of the nearest ancestor that adopts orphans. That must not be
        // this process, which becomes the program.
        let _adopts = adopt_none();
        // A handler of this process must not run in the new ones.
        let blocked = Blocked::all();
        // SAFETY: nothing is called until `_exit(2)` but functions of signal-safety(7).
        let between = unsafe { split() };
        if between == 0 {
            // SAFETY: setpgid(2); as above.
            let started = unsafe {
                libc::setpgid(0, 0);
                split()
            };
            if started == 0 {
                // SAFETY: in a new process; both lists end with a null pointer.
                unsafe { become_program(&words, &variables, &streams) };
            }
            let failed = if started == -1 { last_errno() } else { 0 };
            // SAFETY: _exit(2).
            unsafe { libc::_exit(failed) };
        }
        let forked = io::Error::last_os_error();
        drop(blocked);
        if between == -1 {
            return Err(forked);
        }
        match ended(between)? {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Makes a copy of this process, like `fork(2)`, whose end gives no signal. Returns 0 in the copy.
///
/// # Safety
/// The copy calls only functions of signal-safety(7), as this process may have other threads.
unsafe fn split() -> pid_t {
    let none: libc::c_ulong = 0;
    // SAFETY: clone(2): without CLONE_VM the copy has memory and a stack of its own; without a
    // signal none is given at its end. The other arguments are not used.
    unsafe { libc::syscall(libc::SYS_clone, none, none, none, none, none) as pid_t }
}

/// Executes a program, in a new process.
///
/// # Safety
/// Only in a process that [`split`] has made. The lists consist of strings of C and end with a null
/// pointer.
unsafe fn become_program(words: &[*const c_char], variables: &[*const c_char], streams: &[RawFd; 3]) {
    const FAILED: &[u8] = b"softrdma: the fabric's program cannot be executed\n";
    // SAFETY: these are all functions of signal-safety(7) or system calls: signal(2) and
    // sigprocmask(2) with a set that sigemptyset(3) has written; dup2(2) and close(2) in a process
    // in which nothing else runs, and which owns its descriptors; execve(2) with lists that the
    // caller vouches for.
    unsafe {
        for signal in 1..=LAST_SIGNAL {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none = core::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        for (place, stream) in (0..).zip(streams) {
            libc::dup2(*stream, place);
        }
        if libc::syscall(libc::SYS_close_range, FIRST, c_int::MAX, 0) == -1 {
            for descriptor in FIRST..MOST_CLOSED {
                libc::close(descriptor);
            }
        }
        libc::chdir(c"/".as_ptr());
        // Its files are its user's alone.
        libc::umask(0o077);
        if let Some(program) = words.first() {
            libc::execve(*program, words.as_ptr(), variables.as_ptr());
        }
        libc::write(2, FAILED.as_ptr().cast(), FAILED.len());
        libc::_exit(1);
    }
}

/// Waits for the end of a process that [`split`] has made. Returns its exit status.
fn ended(process: pid_t) -> io::Result<c_int> {
    let mut status = 0;
    loop {
        // SAFETY: waitpid(2): a place for the status. `__WALL`, as its end gives no signal.
        if unsafe { libc::waitpid(process, &raw mut status, libc::__WALL) } != -1 {
            if libc::WIFSIGNALED(status) {
                let signal = libc::WTERMSIG(status);
                return Err(io::Error::other(format!("its process was killed by signal {signal}")));
            }
            return Ok(libc::WEXITSTATUS(status));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn last_errno() -> c_int {
    // SAFETY: errno(3): the calling thread's own.
    unsafe { *libc::__errno_location() }
}

/// Makes this process adopt orphans again when dropped.
struct Adopts;

/// Makes this process adopt no orphans (`PR_SET_CHILD_SUBREAPER(2const)`), until the result is
/// dropped. `None` if it adopted none before.
fn adopt_none() -> Option<Adopts> {
    let mut adopts: c_int = 0;
    // SAFETY: prctl(2): a place for the answer.
    let known = unsafe { libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut adopts) } == 0;
    (known && adopts != 0).then(|| {
        set_adopting(false);
        Adopts
    })
}

fn set_adopting(adopting: bool) {
    // SAFETY: prctl(2): takes a number.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, libc::c_ulong::from(adopting)) };
}

impl Drop for Adopts {
    fn drop(&mut self) {
        set_adopting(true);
    }
}

/// Restores a thread's signal mask when dropped.
struct Blocked(sigset_t);

impl Blocked {
    /// Blocks all signals for this thread.
    fn all() -> Self {
        // SAFETY: sigset_t consists of integers, which sigfillset(3) and pthread_sigmask(3) write.
        unsafe {
            let (mut all, mut before): (sigset_t, sigset_t) = (core::mem::zeroed(), core::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: pthread_sigmask(3): the set that it has written before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}
