//! Blocking streams and listeners.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use rdma_conn::{Error, Limits, Listener, Stream};
use rdma_verbs::Verbs;

use super::{Deed, Shared, forked, in_a_call, parsed, run};
use crate::echo::{LONG, patient, verbs};
use crate::fabric::{CLIENT, SERVER, role};

pub(super) fn echo(stream: &mut Stream<Verbs>, message: &[u8; 5]) {
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
    let Some(argument) = role("children::streams::stream") else { return };
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
    let Some(argument) = role("children::streams::listener") else { return };
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

#[test]
fn children_leave_streams_alone() {
    run("children::streams::stream");
}

#[test]
fn children_leave_listeners_alone() {
    run("children::streams::listener");
}
