//! Forked children, and what they must not change for their parents: each kind of stream, each way
//! in which a child ends, with a parent that is idle and one that is in a call.
//!
//! `rdma-ffi/tests/c/forks.c` and `apps/python/tests/test_forks.py` are the same for C and Python,
//! and `rdma-conn/README.md` has the rules.

mod dead;
mod endpoints;
mod streams;
mod tasks;

use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rdma_conn::Error;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::echo;
use crate::fabric::{CLIENT, Home, PATIENCE, await_some, role};

/// What children do.
const DEEDS: [&str; 7] = ["_exit", "exit", "return", "drop", "close", "use", "exec"];

/// The numbers of the descriptors of this process that another program would inherit.
fn inherited() -> String {
    let entries = std::fs::read_dir("/proc/self/fdinfo").expect("descriptors");
    let mut numbers: Vec<_> = entries
        .filter_map(|entry| {
            let entry = entry.expect("an entry");
            let text = std::fs::read_to_string(entry.path()).ok()?;
            let flags = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
            let flags = i32::from_str_radix(flags.trim(), 8).expect("an octal number");
            (flags & libc::O_CLOEXEC == 0).then(|| entry.file_name().into_string().expect("a number"))
        })
        .collect();
    numbers.sort();
    numbers.join(" ")
}

/// Those of a parent before it used RDMA.
static INHERITED: OnceLock<String> = OnceLock::new();

/// A program that a child executes. It has the descriptors that the parent had inherited.
#[test]
fn inherits_nothing() {
    let Some(expected) = role("children::inherits_nothing") else { return };
    assert_eq!(inherited(), expected);
}

/// What a child does, of what its parent has.
trait Deed {
    fn close(&mut self) -> Result<(), Error>;
    /// Each call of the interface fails.
    fn refuses(&mut self);
}

/// Forks. The child does its deed, and the parent waits for its end. Returns `None` in a child that
/// returns.
fn forked<T: Deed>(deed: &str, has: T) -> Option<T> {
    let mut has = Some(has);
    // SAFETY: fork(2): the child calls what a child of a program with threads may not call in
    // general; that this does no harm is what is tested.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "no child");
    if child > 0 {
        let child = Pid::from_raw(child).expect("a process");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some((_, status)) = waitpid(Some(child), WaitOptions::NOHANG).expect("a child") {
                assert_eq!(status.exit_status(), Some(0), "the child that should {deed}");
                return has;
            }
            if Instant::now() > deadline {
                kill_process(child, Signal::KILL).expect("it is there");
                panic!("the child that should {deed} does not end");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // A child that hangs ends with its parent, whose test fails.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
    let done = std::panic::catch_unwind(AssertUnwindSafe(|| does(deed, has.take().expect("is there"))));
    if done.is_err() {
        // SAFETY: _exit(2) has no preconditions.
        unsafe { libc::_exit(101) };
    }
    // The child has one thread. It returns from the function that it began with, and the process
    // ends as by exit(3).
    None
}

/// Does what a child should do, and ends it unless it returns.
fn does<T: Deed>(deed: &str, mut has: T) {
    match deed {
        // SAFETY: _exit(2) has no preconditions.
        "_exit" => unsafe { libc::_exit(0) },
        "exit" => {
            // As a static, it is not dropped.
            std::mem::forget(has);
            std::process::exit(0);
        }
        // What it has is dropped either way.
        "return" => return,
        "drop" => drop(has),
        "close" => {
            let closed = has.close();
            assert!(matches!(closed, Err(Error::Forked)), "{closed:?}");
        }
        "use" => has.refuses(),
        "exec" => {
            use std::os::unix::process::CommandExt as _;
            let mut own = Command::new(std::env::current_exe().expect("this test"));
            own.args(["--exact", "children::inherits_nothing"])
                .env("TEST_ROLE", "children::inherits_nothing");
            own.env("TEST_ARGUMENT", INHERITED.get().expect("is known"));
            panic!("{}", own.exec());
        }
        other => panic!("{other}"),
    }
    std::process::exit(0);
}

/// A handle that a thread uses, too: it is in a call when the process forks, with its locks.
struct Shared<T: 'static>(*mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: only one thread of a process uses it at a time.
unsafe impl<T> Send for Shared<T> {}

impl<T> Shared<T> {
    fn new(has: T) -> Self {
        Self(Box::into_raw(Box::new(has)))
    }

    fn get(self) -> &'static mut T {
        // SAFETY: from `new`, and freed by no process before its last use. One thread of a process
        // uses it at a time: the caller joins the other before.
        unsafe { &mut *self.0 }
    }
}

/// Waits until this thread sleeps in the kernel.
fn await_sleep(thread: u32) {
    let path = format!("/proc/self/task/{thread}/stat");
    await_some("the sleep of a thread", || {
        let stat = std::fs::read_to_string(&path).expect("a thread");
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S')).then_some(())
    });
}

/// Runs `call` in a thread, and returns once it waits there.
fn in_a_call(call: impl FnOnce() + Send + 'static) -> std::thread::JoinHandle<()> {
    let (send, receive) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        send.send(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()).expect("is awaited");
        call();
    });
    await_sleep(receive.recv().expect("a thread"));
    thread
}

/// Returns what the child does, whether its parent is in a call, and the server's address.
fn parsed(argument: &str) -> (&str, bool, SocketAddr) {
    INHERITED.get_or_init(inherited);
    let mut parts = argument.split(' ');
    let mut part = || parts.next().expect("a part");
    (part(), part() == "busy", part().parse().expect("an address"))
}

fn run(role: &str) {
    let Some(home) = Home::new(&role.replace("::", "-")) else { return };
    let (server, address) = echo::server(&home);
    for deed in DEEDS {
        for parent in ["idle", "busy"] {
            let argument = format!("{deed} {parent} {address}");
            let (done, text) = home.program(CLIENT, role, &argument).finish();
            assert!(done && text.contains("done"), "{argument}: {text}");
        }
    }
    drop(server);
    home.is_left();
}
