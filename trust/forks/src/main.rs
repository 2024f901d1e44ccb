//! A parent that forks, by each face in Rust: `forks ADDRESS PORT WAY WHEN FACE`. The parent
//! exchanges bytes with the server at the address, forks, waits for the end of the child, which
//! does as WAY says with what its parent has, and exchanges bytes again. WHEN is `idle`, or `busy`:
//! then another thread of the parent is in a call at the fork.
//!
//! The exit status is 0 if all that is right, and 77 if the face has no such way.
//! `trust/forks/run` runs it beside the faces in other languages.
#![allow(unsafe_code, reason = "fork(2), and a child that has what a thread of its parent uses")]

mod clients;
mod endpoints;
mod streams;
mod tasks;

use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdma_conn::{Connect, Error, Keepalive, Options};
use rdma_verbs::Verbs;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// Longer than a machine may stand still.
const LONG: Duration = Duration::from_secs(600);
/// How long a child may take.
const PATIENCE: Duration = Duration::from_secs(60);

const NO_SUCH_WAY: u8 = 77;

/// What a process has, of which its children have a copy.
trait Face: Sized + 'static {
    /// Whether the child has what the busy thread of its parent is in a call of, with its locks in
    /// any state. A tokio runtime of one thread in which another thread was is no child's to use.
    const SHARED: bool = true;
    /// Whether it can be closed, otherwise than by a drop.
    const CLOSES: bool = true;

    fn new(server: SocketAddr) -> Self;
    /// Sends a request and gets the reply.
    fn exchange(&mut self);
    /// Prepares `wait`.
    fn prepare(&mut self) {}
    /// Is in a call, or nearly always, until another one is told to `free` it.
    fn wait(&mut self) {
        while !FREE.load(Ordering::Relaxed) {
            self.exchange();
        }
    }
    fn free(&mut self) {
        FREE.store(true, Ordering::Relaxed);
    }
    fn close(&mut self) -> Result<(), Error> {
        Err(Error::Forked)
    }
    /// Each call of the interface fails.
    fn refuses(&mut self);
}

static FREE: AtomicBool = AtomicBool::new(false);

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["inherited", expected] => {
            assert_eq!(inherited(), expected);
            ExitCode::SUCCESS
        }
        [address, port, way, when @ ("idle" | "busy"), face] => {
            let server = format!("{address}:{port}").parse().expect("an address and a port");
            let run = match face {
                "stream" => run::<streams::Stream>,
                "listener" => run::<streams::Listener>,
                "endpoint" => run::<endpoints::Loop>,
                "async" => run::<tasks::Tasks>,
                "kv" => run::<clients::Kv>,
                "redis" => run::<clients::Redis>,
                _ => panic!("there is no face {face}"),
            };
            run(server, way, when == "busy")
        }
        _ => panic!("forks ADDRESS PORT WAY idle|busy FACE"),
    }
}

/// What the parent does. In a child that returns, it returns as well.
fn run<F: Face>(server: SocketAddr, way: &str, busy: bool) -> ExitCode {
    if way == "close" && !F::CLOSES {
        return ExitCode::from(NO_SUCH_WAY);
    }
    let inherited = inherited();
    let [one, other] = [(); 2].map(|()| Shared::new(F::new(server)));
    one.get().exchange();
    other.get().exchange();
    let (waits, frees) = if F::SHARED { (one, other) } else { (other, one) };
    let call = busy.then(|| {
        waits.get().prepare();
        in_a_call(move || waits.get().wait())
    });
    if !forked(way, one, &inherited) {
        return ExitCode::SUCCESS;
    }
    frees.get().exchange();
    if let Some(call) = call {
        frees.get().free();
        call.join().expect("the call ends");
    }
    one.get().exchange();
    other.get().exchange();
    one.free();
    other.free();
    ExitCode::SUCCESS
}

/// Forks. The child goes its way, and the parent waits for its end. Returns whether this is the
/// parent, unless the child has ended.
fn forked<F: Face>(way: &str, has: Shared<F>, inherited: &str) -> bool {
    // SAFETY: fork(2): the child calls what a child of a program with threads may not call in
    // general; that this does no harm is what is tested.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "no child");
    if child > 0 {
        let child = Pid::from_raw(child).expect("a process");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some((_, status)) = waitpid(Some(child), WaitOptions::NOHANG).expect("a child") {
                assert_eq!(status.exit_status(), Some(0), "the child that should {way}");
                return true;
            }
            if Instant::now() > deadline {
                kill_process(child, Signal::KILL).expect("it is there");
                panic!("the child that should {way} does not end");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // A child that hangs ends with its parent.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
    let done = std::panic::catch_unwind(AssertUnwindSafe(|| does(way, has, inherited)));
    if done.is_err() {
        // SAFETY: _exit(2) has no preconditions.
        unsafe { libc::_exit(101) };
    }
    false
}

/// Does what a child should do, and ends it unless it returns.
fn does<F: Face>(way: &str, has: Shared<F>, inherited: &str) {
    match way {
        // SAFETY: _exit(2) has no preconditions.
        "_exit" => unsafe { libc::_exit(0) },
        "exit" => {}
        "return" => return,
        "drop" => has.free(),
        "close" => {
            let closed = has.get().close();
            assert!(matches!(closed, Err(Error::Forked)), "{closed:?}");
        }
        "use" => {
            has.get().refuses();
            has.free();
        }
        "exec" => {
            use std::os::unix::process::CommandExt as _;
            let own = std::env::current_exe().expect("this program");
            panic!("{}", Command::new(own).args(["inherited", inherited]).exec());
        }
        other => panic!("there is no way {other}"),
    }
    std::process::exit(0);
}

/// Returns the numbers of the descriptors of this process that another program would inherit.
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

/// A handle that two threads have, one of which may be in a call of it when the process forks.
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

    fn free(self) {
        // SAFETY: from `new`, and its last use in this process.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Runs `call` in a thread, and returns once that sleeps in the kernel.
fn in_a_call(call: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let (send, receive) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        send.send(rustix::thread::gettid().as_raw_nonzero()).expect("is awaited");
        call();
    });
    let path = format!("/proc/self/task/{}/stat", receive.recv().expect("a thread"));
    let deadline = Instant::now() + PATIENCE;
    loop {
        let stat = std::fs::read_to_string(&path).expect("the call lasts");
        if stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S')) {
            return thread;
        }
        assert!(Instant::now() < deadline, "the thread does not wait");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn patient() -> Connect {
    let mut options = Options::default().handshake_timeout(LONG);
    options.protocol.keepalive = Some(Keepalive::NONE);
    Connect::default().timeout(LONG).options(options)
}

fn verbs() -> Verbs {
    Verbs::load().expect("librdmacm and libibverbs")
}

/// Requests, and how their replies end.
const PING: (&[u8], &[u8]) = (b"PING\r\n", b"+PONG\r\n");
const SUBSCRIBE: (&[u8], &[u8]) = (b"SUBSCRIBE forks\r\n", b":1\r\n");
const MESSAGE: &[u8] = b"freed\r\n";
const UNSUBSCRIBE: (&[u8], &[u8]) = (b"UNSUBSCRIBE forks\r\n", b":0\r\n");
const PUBLISH: (&[u8], &[u8]) = (b"PUBLISH forks freed\r\n", b":1\r\n");

/// Panics unless it is the error of a forked child.
fn is_forked(error: &std::io::Error) {
    let error = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
    assert!(matches!(error, Some(Error::Forked)), "{error:?}");
}
