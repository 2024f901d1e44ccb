//! Forked children, and what they must not change for their parents: each kind of stream, each way
//! in which a child ends, with a parent that is idle and one that is in a call.
//!
//! `rdma-ffi/tests/c/forks.c` and `apps/python/tests/test_forks.py` are the same for C and Python,
//! and `rdma-conn/README.md` has the rules.
#![allow(unsafe_code, reason = "fork(2), and a child that has what a thread of its parent uses")]

mod common;

use std::io::{IoSlice, Read as _, Write as _};
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::{CLIENT, Home, PATIENCE, Running, SERVER, program, role};
use rdma_conn::{
    AsyncEndpoint, AsyncStream, Connect, ConnectionId, Endpoint, Error, Event, Keepalive, Limits, Listener,
    Options, Stream,
};
use rdma_verbs::Verbs;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// What children do.
const DEEDS: [&str; 7] = ["_exit", "exit", "return", "drop", "close", "use", "exec"];

/// Longer than a machine may stand still.
const LONG: Duration = Duration::from_secs(600);

fn patient() -> Connect {
    let mut options = Options::default().handshake_timeout(LONG);
    options.protocol.keepalive = Some(Keepalive::NONE);
    Connect::default().timeout(LONG).options(options)
}

fn verbs() -> Verbs {
    Verbs::load().expect("the libraries of softrdma")
}

/// A program that echoes what its clients send. It answers `wait!` when another client has sent
/// `free!`.
#[test]
fn echoes() {
    let Some(_) = role("echoes") else { return };
    let mut endpoint = Endpoint::new(&verbs(), Limits::default()).expect("an endpoint");
    let address = SocketAddr::new(SERVER.parse().expect("an address"), 0);
    let listener = endpoint.listen(address, patient().options).expect("a listener");
    println!("listens on {}", endpoint.local_addr(listener).expect("it listens"));
    let mut waiting = None;
    loop {
        endpoint.wait(None).expect("waits");
        while let Some(event) = endpoint.next_event() {
            match event {
                Event::Readable(id) => {
                    let mut bytes = [0; 64];
                    while let Ok(Some(count @ 1..)) = endpoint.read(id, &mut bytes) {
                        let bytes = &bytes[..count];
                        if bytes == b"wait!" {
                            waiting = Some(id);
                            continue;
                        }
                        if bytes == b"free!" {
                            let id = waiting.take().expect("one waits");
                            endpoint.write(id, &[IoSlice::new(b"freed")]).expect("writes");
                        }
                        endpoint.write(id, &[IoSlice::new(bytes)]).expect("writes");
                    }
                }
                Event::Ended(id) => {
                    println!("ended");
                    endpoint.abort(id);
                }
                _ => {}
            }
        }
    }
}

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
    let Some(expected) = role("inherits_nothing") else { return };
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
            own.args(["--exact", "inherits_nothing"]).env("SOFTRDMA_TEST_ROLE", "inherits_nothing");
            own.env("SOFTRDMA_TEST_ARGUMENT", INHERITED.get().expect("is known"));
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
        // SAFETY: from `new`, and never freed; one thread of a process uses it at a time.
        unsafe { &mut *self.0 }
    }
}

/// Waits until this thread sleeps in the kernel.
fn await_sleep(thread: u32) {
    let path = format!("/proc/self/task/{thread}/stat");
    common::await_some("the sleep of a thread", || {
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

fn echo(stream: &mut Stream<Verbs>, message: &[u8; 5]) {
    stream.write_all(message).expect("written");
    assert_eq!(&five(stream), message);
}

fn five(stream: &mut Stream<Verbs>) -> [u8; 5] {
    let mut back = [0; 5];
    stream.read_exact(&mut back).expect("read");
    back
}

impl Deed for Stream<Verbs> {
    fn close(&mut self) -> Result<(), Error> {
        Self::close(self, Duration::from_secs(1))
    }

    fn refuses(&mut self) {
        let forked = |error: std::io::Error| {
            let error = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
            assert!(matches!(error, Some(Error::Forked)), "{error:?}");
        };
        forked(self.write(b"child").expect_err("no write"));
        forked(self.read(&mut [0]).expect_err("no read"));
        forked(self.flush().expect_err("no flush"));
        assert!(matches!(self.register_buffer(64), Err(Error::Forked)));
        let other = Self::connect(&verbs(), (SERVER, 1));
        assert!(matches!(other, Err(Error::Forked)), "{other:?}");
        assert!(matches!(Listener::bind(&verbs(), (CLIENT, 0)), Err(Error::Forked)));
    }
}

impl Deed for Shared<Stream<Verbs>> {
    fn close(&mut self) -> Result<(), Error> {
        Deed::close(self.get())
    }

    fn refuses(&mut self) {
        self.get().refuses();
    }
}

/// A program with a blocking stream.
#[test]
fn stream() {
    let Some(argument) = role("stream") else { return };
    let (deed, busy, address) = parsed(&argument);
    let connect = || Stream::connect_with(&verbs(), address, &patient()).expect("a server");
    if !busy {
        let mut stream = connect();
        echo(&mut stream, b"first");
        let Some(mut stream) = forked(deed, stream) else { return };
        echo(&mut stream, b"later");
        Stream::close(&mut stream, LONG).expect("closes");
        return println!("done");
    }
    let (mut other, stream) = (connect(), Shared::new(connect()));
    stream.get().write_all(b"wait!").expect("written");
    let call = in_a_call(move || assert_eq!(&five(stream.get()), b"freed"));
    if forked(deed, stream).is_none() {
        return;
    }
    echo(&mut other, b"free!");
    call.join().expect("the call ends");
    for stream in [stream.get(), &mut other] {
        echo(stream, b"later");
        Stream::close(stream, LONG).expect("closes");
    }
    println!("done");
}

/// A program with a listener, and a connection that it has accepted.
struct Listens {
    listener: Listener<Verbs>,
    accepted: Stream<Verbs>,
}

impl Deed for Listens {
    fn close(&mut self) -> Result<(), Error> {
        Deed::close(&mut self.accepted)
    }

    fn refuses(&mut self) {
        self.accepted.refuses();
        assert!(matches!(self.listener.try_request(), Err(Error::Forked)));
        assert!(matches!(self.listener.accept(), Err(Error::Forked)));
        assert!(matches!(self.listener.wait(None), Err(Error::Forked)));
        self.listener.waker().wake();
    }
}

/// A program that accepts, with a thread in `accept` if it is busy.
#[test]
fn listener() {
    let Some(argument) = role("listener") else { return };
    let (deed, busy, _) = parsed(&argument);
    let options = patient().options;
    let listener = Listener::bind_with(&verbs(), (CLIENT, 0), options, Limits::default()).expect("listens");
    let address = listener.local_addr().expect("it listens");
    let connect = move || Stream::connect_with(&verbs(), address, &patient()).expect("a listener");
    let first = std::thread::spawn(connect);
    let (mut accepted, _) = listener.accept().expect("the first");
    let mut client = first.join().expect("connects");
    let mut exchange = |accepted: &mut Stream<Verbs>| {
        client.write_all(b"hello").expect("written");
        assert_eq!(&five(accepted), b"hello");
    };
    exchange(&mut accepted);
    let listens = Shared::new(Listens { listener, accepted });
    // It stays, as its client waits until it is established.
    let accept = move || std::mem::forget(listens.get().listener.accept().expect("the second"));
    let call = busy.then(|| in_a_call(accept));
    struct Whole(Shared<Listens>);
    impl Deed for Whole {
        fn close(&mut self) -> Result<(), Error> {
            self.0.get().close()
        }
        fn refuses(&mut self) {
            self.0.get().refuses();
        }
    }
    impl Drop for Whole {
        fn drop(&mut self) {
            // SAFETY: from `Shared::new`; the parent forgets its own.
            drop(unsafe { Box::from_raw(self.0.0) });
        }
    }
    let Some(whole) = forked(deed, Whole(listens)) else { return };
    std::mem::forget(whole);
    let second = std::thread::spawn(move || drop(connect()));
    match call {
        Some(call) => call.join().expect("accepts"),
        None => accept(),
    }
    second.join().expect("connects");
    exchange(&mut listens.get().accepted);
    println!("done");
}

/// An endpoint and a connection of it.
struct Loop {
    endpoint: Endpoint<Verbs>,
    id: ConnectionId,
}

impl Loop {
    fn connect(address: SocketAddr) -> Self {
        let mut endpoint = Endpoint::new(&verbs(), Limits::default()).expect("an endpoint");
        let id = endpoint.connect(address, None, LONG, patient().options).expect("connects");
        let mut one = Self { endpoint, id };
        while !one.endpoint.is_open(id) {
            one.wait();
        }
        one
    }

    fn wait(&mut self) {
        self.endpoint.wait(None).expect("waits");
        while self.endpoint.next_event().is_some() {}
        self.endpoint.check(self.id).expect("a server");
    }

    fn write(&mut self, message: &[u8; 5]) {
        assert_eq!(self.endpoint.write(self.id, &[IoSlice::new(message)]).expect("written"), Some(5));
    }

    fn read(&mut self) -> [u8; 5] {
        let mut back = [0; 5];
        loop {
            match self.endpoint.read(self.id, &mut back).expect("read") {
                Some(5) => return back,
                None => self.wait(),
                Some(other) => panic!("{other}"),
            }
        }
    }
}

impl Deed for Shared<Loop> {
    fn close(&mut self) -> Result<(), Error> {
        let Loop { endpoint, id } = self.get();
        endpoint.close(*id, LONG)
    }

    fn refuses(&mut self) {
        let Loop { endpoint, id } = self.get();
        assert!(matches!(endpoint.write(*id, &[IoSlice::new(b"child")]), Err(Error::Forked)));
        assert!(matches!(endpoint.read(*id, &mut [0]), Err(Error::Forked)));
        assert!(matches!(endpoint.flush(*id), Err(Error::Forked)));
        assert!(matches!(endpoint.progress(), Err(Error::Forked)));
        assert!(matches!(endpoint.wait(None), Err(Error::Forked)));
        assert!(matches!(endpoint.abandon(*id, LONG), Err(Error::Forked)));
        let address = SocketAddr::new(CLIENT.parse().expect("an address"), 0);
        assert!(matches!(endpoint.listen(address, patient().options), Err(Error::Forked)));
        assert!(matches!(Endpoint::new(&verbs(), Limits::default()), Err(Error::Forked)));
        endpoint.waker().expect("a descriptor").wake();
        endpoint.abort(*id);
        // SAFETY: from `Shared::new`, and not used any more in this child.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// A program with an endpoint, which sleeps in `wait` if it is busy.
#[test]
fn endpoint() {
    let Some(argument) = role("endpoint") else { return };
    let (deed, busy, address) = parsed(&argument);
    let (mut other, one) = (Loop::connect(address), Shared::new(Loop::connect(address)));
    one.get().write(b"wait!");
    let wait = move || assert_eq!(&one.get().read(), b"freed");
    let call = busy.then(|| in_a_call(wait));
    if forked(deed, one).is_none() {
        return;
    }
    other.write(b"free!");
    assert_eq!(&other.read(), b"free!");
    match call {
        Some(call) => call.join().expect("the call ends"),
        None => wait(),
    }
    one.get().write(b"later");
    assert_eq!(&one.get().read(), b"later");
    println!("done");
}

/// A runtime, and streams of one endpoint.
struct Runtime {
    streams: Vec<AsyncStream<Verbs>>,
    runtime: tokio::runtime::Runtime,
}

impl Deed for Runtime {
    fn close(&mut self) -> Result<(), Error> {
        self.runtime.block_on(self.streams[0].close(Duration::from_secs(1)))
    }

    fn refuses(&mut self) {
        let forked = |error: std::io::Error| {
            let error = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
            assert!(matches!(error, Some(Error::Forked)), "{error:?}");
        };
        self.runtime.block_on(async {
            let stream = &mut self.streams[0];
            forked(stream.write_all(b"child").await.expect_err("no write"));
            forked(stream.read(&mut [0]).await.expect_err("no read"));
            forked(stream.shutdown().await.expect_err("no shutdown"));
            let other = AsyncStream::connect(&verbs(), (SERVER, 1)).await;
            assert!(matches!(other, Err(Error::Forked)), "{other:?}");
        });
    }
}

/// A program with asynchronous streams. If it is busy, a task waits for one.
#[test]
fn tasks() {
    let Some(argument) = role("tasks") else { return };
    let (deed, busy, address) = parsed(&argument);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut streams = runtime.block_on(async {
        let endpoint = AsyncEndpoint::new(&verbs(), Limits::default()).expect("an endpoint");
        let mut streams = Vec::new();
        for _ in 0..3 {
            streams.push(endpoint.connect(address, &patient()).await.expect("a server"));
        }
        streams
    });
    let five = async |stream: &mut AsyncStream<Verbs>| {
        let mut back = [0; 5];
        stream.read_exact(&mut back).await.expect("read");
        back
    };
    let waiting = busy.then(|| {
        let mut stream = streams.pop().expect("one");
        runtime.block_on(async { stream.write_all(b"wait!").await.expect("written") });
        let waiting = runtime.spawn(async move { assert_eq!(&five(&mut stream).await, b"freed") });
        runtime.block_on(tokio::task::yield_now());
        waiting
    });
    let Some(Runtime { mut streams, runtime }) = forked(deed, Runtime { streams, runtime }) else { return };
    runtime.block_on(async {
        if let Some(waiting) = waiting {
            streams[1].write_all(b"free!").await.expect("written");
            assert_eq!(&five(&mut streams[1]).await, b"free!");
            waiting.await.expect("the task ends");
        }
        for stream in &mut streams {
            stream.write_all(b"later").await.expect("written");
            assert_eq!(&five(stream).await, b"later");
        }
    });
    println!("done");
}

/// Returns what the child does, whether its parent is in a call, and the server's address.
fn parsed(argument: &str) -> (&str, bool, SocketAddr) {
    INHERITED.get_or_init(inherited);
    let mut parts = argument.split(' ');
    let mut part = || parts.next().expect("a part");
    (part(), part() == "busy", part().parse().expect("an address"))
}

fn run(face: &str) {
    let home = Home::new(&format!("children-{face}"));
    let mut server = Running::start(&mut program(&home, SERVER, "echoes", ""));
    let address = server.line("listens on ");
    for deed in DEEDS {
        for parent in ["idle", "busy"] {
            let argument = format!("{deed} {parent} {address}");
            let (done, text) = Running::start(&mut program(&home, CLIENT, face, &argument)).finish();
            assert!(done && text.contains("done"), "{argument}: {text}");
        }
    }
    drop(server);
    home.is_left();
}

#[test]
fn children_leave_streams_alone() {
    run("stream");
}

#[test]
fn children_leave_listeners_alone() {
    run("listener");
}

#[test]
fn children_leave_endpoints_alone() {
    run("endpoint");
}

#[test]
fn children_leave_tasks_alone() {
    run("tasks");
}

/// A program with a stream, a listener and a child that lives on.
#[test]
fn has_a_child() {
    let Some(address) = role("has_a_child") else { return };
    let mut stream = Stream::connect_with(&verbs(), &*address, &patient()).expect("a server");
    echo(&mut stream, b"first");
    let listener = Listener::bind(&verbs(), (CLIENT, 0)).expect("a listener");
    // SAFETY: fork(2): the child sleeps, and does nothing else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            std::thread::park();
        }
    }
    println!("child {child}");
    println!("listens on {}", listener.local_addr().expect("it listens"));
    println!("process {}", std::process::id());
    loop {
        std::thread::park();
    }
}

/// A program that listens where another one did.
#[test]
fn listens_again() {
    let Some(address) = role("listens_again") else { return };
    Listener::bind(&verbs(), &*address).expect("the address is free");
    println!("done");
}

/// What the kernel keeps while a descriptor is open ends with the parent, however long a child
/// lives.
#[test]
fn a_child_holds_nothing_of_a_dead_parent() {
    let home = Home::new("children-dead");
    let mut server = Running::start(&mut program(&home, SERVER, "echoes", ""));
    let address = server.line("listens on ");
    let mut parent = Running::start(&mut program(&home, CLIENT, "has_a_child", &address));
    let child = Pid::from_raw(parent.line("child ").parse().expect("a number")).expect("a process");
    let listened = parent.line("listens on ");
    let pid = Pid::from_raw(parent.line("process ").parse().expect("a number")).expect("a process");
    kill_process(pid, Signal::KILL).expect("it runs");
    server.line("ended");
    let again = || Running::start(&mut program(&home, CLIENT, "listens_again", &listened)).finish().0;
    common::await_some("the address", || again().then_some(()));
    kill_process(child, Signal::KILL).expect("it lives");
    drop(parent);
    drop(server);
    home.is_left();
}
