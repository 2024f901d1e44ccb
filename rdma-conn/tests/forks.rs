//! Calls in a forked child, on the embedded fabric: each returns, whatever the threads of the
//! parent do. The README has the table, and `on_softrdma/children` has the ways in which children
//! end.
#![allow(unsafe_code, reason = "fork(2)")]

use std::io::Write;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use rdma_conn::{
    AsyncListener, AsyncStream, Endpoint, Error, Limits, Listener, Options, SharedEvents, Stream,
};
use rdma_softsim::{Capture, Fabric, Transfer};
use rustix::event::{EventfdFlags, eventfd};

const LONG: Duration = Duration::from_secs(600);

/// Longer than a machine may stand still, in seconds. A child that hangs ends then.
const HANGS: u32 = 120;

/// Runs `does` in a forked child, and waits for its end. Returns what failed.
fn in_child(what: &'static str, does: impl FnOnce()) -> Option<&'static str> {
    // SAFETY: fork(2): the C library makes its allocator usable in the child. That the child uses
    // the rest of what it has does no harm is tested here.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "no child");
    if child == 0 {
        // SAFETY: alarm(2) and _exit(2) have no preconditions.
        unsafe { libc::alarm(HANGS) };
        let done = catch_unwind(AssertUnwindSafe(does));
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waitpid(2), with a live status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    (status != 0).then_some(what)
}

/// Holds the fabric's lock from the first message on, until the sender is dropped.
struct Holds(SyncSender<()>, Receiver<()>);

impl Capture for Holds {
    fn pass(&mut self, _transfer: &Transfer<'_>) -> ControlFlow<()> {
        self.0.send(()).expect("is awaited");
        _ = self.1.recv();
        ControlFlow::Break(())
    }

    fn end(&mut self, _connection: u64) {}
}

/// Waits until this thread sleeps in the kernel.
fn await_sleep(thread: i32) {
    let path = format!("/proc/self/task/{thread}/stat");
    loop {
        let stat = std::fs::read_to_string(&path).expect("a thread");
        if stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S')) {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn eventfd_waker() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor")
}

#[test]
fn each_call_of_a_child_returns() {
    let fabric = Fabric::new();
    let [server, client] = [1, 2].map(|last| fabric.host(&[[192, 0, 2, last].into()]));
    let at = |port| SocketAddr::from(([192, 0, 2, 1], port));
    let listener = Listener::bind(&server, at(6379)).expect("a free address");
    let mut endpoint = Endpoint::new(&server, Limits::default()).expect("a device");
    let id = endpoint.listen(at(6380), Options::default()).expect("a free address");
    let events = SharedEvents::new(&client).expect("a device");
    let mut sharer =
        Endpoint::with_events(&events, Limits::default(), eventfd_waker()).expect("a descriptor");

    // Connections, which a child must not take over.
    let dials: Vec<_> = (0..2)
        .map(|_| {
            let client = client.clone();
            thread::spawn(move || Stream::connect(&client, at(6379)))
        })
        .collect();
    let accept = || loop {
        if let Some(accepted) = listener.try_accept().expect("accepts") {
            break accepted;
        }
        listener.wait(None).expect("waits");
    };
    let (adopted, adopted_id) = accept();
    let mut stream = Stream::from_endpoint(adopted, adopted_id);
    let (other, other_id) = accept();
    let mut failed = Vec::new();
    failed.extend(in_child("a stream for tokio", move || {
        let taken = AsyncStream::from_endpoint(other, other_id);
        assert!(matches!(taken, Err(Error::Forked)), "{taken:?}");
    }));
    let unused = Listener::bind(&server, at(6381)).expect("a free address");
    failed.extend(in_child("a listener for tokio", move || {
        let taken = AsyncListener::try_from(unused);
        assert!(matches!(taken, Err(Error::Forked)), "{taken:?}");
    }));
    failed.extend(in_child("options of a listener", || {
        let set = endpoint.set_options(id, Options::default());
        assert!(matches!(set, Err(Error::Forked)), "{set:?}");
    }));
    failed.extend(in_child("a way", || {
        let leads = rdma_conn::leads_back(&client, at(6379), LONG);
        assert!(matches!(leads, Err(Error::Forked)), "{leads:?}");
    }));

    // Another thread is in a call, with the fabric's lock.
    let ((held, is_held), (release, released)) = (sync_channel(1), channel());
    assert!(fabric.capture(Box::new(Holds(held, released))));
    let sends = thread::spawn(move || stream.write_all(b"hello").and_then(|()| stream.flush()));
    is_held.recv().expect("a message");
    failed.extend(in_child("what is known behind a lock", || {
        let address = catch_unwind(AssertUnwindSafe(|| endpoint.local_addr(id)));
        address.expect_err("another thread has the lock");
    }));
    // And one more, with the lock of the shared events, which waits for the fabric's.
    let (send, receive) = channel();
    let connects = thread::spawn(move || {
        send.send(rustix::thread::gettid().as_raw_nonzero().get()).expect("is awaited");
        _ = sharer.connect(at(6379), None, LONG, Options::default());
    });
    await_sleep(receive.recv().expect("a thread"));
    failed.extend(in_child("shared events behind a lock", || {
        assert!(format!("{events:?}").contains("SharedEvents"));
    }));
    drop(release);
    assert_eq!(failed, [""; 0], "the child fails, or hangs");
    sends.join().expect("no panic").expect("sent");
    connects.join().expect("the call ends");
    dials.into_iter().for_each(|dial| drop(dial.join().expect("no panic")));
}
