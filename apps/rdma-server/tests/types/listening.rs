use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rdma_server::{
    Accepted, Address, Carrier, ConnectionType, Kind, Listening, LoopId, SessionId, SessionState, Transport,
};

use crate::harness::{
    Loop, PATIENCE, accept, listening, new_loop, on_connected, on_readable, pair, run, settle,
};
use crate::test_beds::{TestBed, connects_by_itself};

pub(crate) fn without_listener(test_bed: &impl TestBed) -> Address {
    let (mut events, listener, address) = listening(test_bed);
    events.close_listener(listener);
    address
}

pub(crate) fn connecting_without_a_listener_fails_once(test_bed: &impl TestBed) {
    let address = without_listener(test_bed);
    let mut events = new_loop();
    // Some types know at once.
    match events.connect(test_bed.client(), &address, None, on_connected) {
        Err(error) => assert!(is_refusal(error.kind()), "{error}"),
        Ok(id) => {
            run(&mut events, |events| !events.state.connected.is_empty());
            settle(&mut events);
            assert_eq!(events.state.connected, [(id, SessionState::Error)]);
            let connection = events.get_mut(id).expect("is there until it is closed");
            let kind = connection.last_error().expect("an error").kind();
            assert!(is_refusal(kind), "{:?}", connection.last_error());
            assert_eq!(connection.write(b"x").expect_err("the same again").kind(), kind);
        }
    }
}

/// Connecting to a removed Unix socket finds no file.
pub(crate) fn is_refusal(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionRefused | ErrorKind::NotFound)
}

pub(crate) fn a_taken_address_is_refused(test_bed: &impl TestBed) {
    let (mut events, listener, address) = listening(test_bed);
    let error = events.listen(test_bed.server(), &address, accept).expect_err("it is taken");
    assert!(matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable), "{error}");
    events.close_listener(listener);
    events.listen(test_bed.server(), &address, accept).expect("it is free again");
}

pub(crate) fn a_listener_may_be_closed_before_its_connections(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    pair.events.close_listener(pair.listener);
    assert!(pair.events.listener_addr(pair.listener).is_none());
    settle(&mut pair.events);
    pair.write(pair.client, b"still here");
    assert_eq!(pair.read(pair.server, 10), b"still here");
}

fn refuse(events: &mut Loop, id: SessionId) {
    events.state.calls.push("refused");
    events.accept(id, say_why).expect("waits to be accepted");
}

fn say_why(events: &mut Loop, id: SessionId) {
    events.get_mut(id).expect("is there").write_all(b"-ERR no room\r\n").expect("room for that");
    events.close(id);
}

/// The reason arrives before the end, even if the peer sends something meanwhile.
pub(crate) fn a_connection_can_be_refused(test_bed: &impl TestBed) {
    let mut events = new_loop();
    let listener = events.listen(test_bed.server(), &test_bed.address(), refuse).expect("a free address");
    let address = events.listener_addr(listener).expect("an address");
    let client = events.connect(test_bed.client(), &address, None, talk).expect("begins to connect");
    run(&mut events, |events| events.state.ended);
    assert_eq!(events.state.read, b"-ERR no room\r\n");
    assert_eq!(events.get(client).expect("is there").state(), SessionState::Closed);
}

fn talk(events: &mut Loop, id: SessionId) {
    let connection = events.get_mut(id).expect("is there");
    // It may be known already that a peer has closed.
    let _ = connection.write(b"PING\r\n");
    connection.set_read_handler(Some(on_readable));
}

pub(crate) fn many_connections_at_once(test_bed: &impl TestBed) {
    const MANY: usize = 12;
    let (mut events, _, address) = listening(test_bed);
    for _ in 0..MANY {
        events.connect(test_bed.client(), &address, None, on_connected).expect("begins to connect");
    }
    run(&mut events, |events| events.state.connected.len() == MANY && events.state.accepted.len() == MANY);
    for (id, state) in events.state.connected.clone() {
        assert_eq!(state, SessionState::Connected);
        events.get_mut(id).expect("is there").write_all(b"x").expect("room");
    }
    for id in events.state.accepted.clone() {
        events.get_mut(id).expect("is there").set_read_handler(Some(on_readable));
    }
    run(&mut events, |events| events.state.read.len() == MANY);
}

/// VR-RES-007: one turn takes a bounded number of connections. Later turns take the others.
pub(crate) fn a_crowd_does_not_hold_the_loop(test_bed: &impl TestBed) {
    const CROWD: usize = 20;
    const AT_MOST: usize = 16;
    let (mut events, _, address) = listening(test_bed);
    let mut clients = new_loop();
    for _ in 0..CROWD {
        clients.connect(test_bed.client(), &address, None, on_connected).expect("begins to connect");
    }
    settle(&mut clients);
    while events.state.arrived.len() < CROWD {
        let before = events.state.arrived.len();
        events.turn(Some(PATIENCE)).expect("a turn");
        let came = events.state.arrived.len() - before;
        assert!(came <= AT_MOST, "{came} connections in one turn");
    }
}

/// A type whose listener runs out of descriptors, then finds a failed request, and then nothing.
struct Exhausted(Arc<AtomicUsize>, UnixStream);

impl ConnectionType for Exhausted {
    type Settings = ();

    fn kind(&self) -> Kind {
        Kind { carrier: Carrier::Tcp, tls: false }
    }

    fn configure(&self, (): ()) -> io::Result<()> {
        Ok(())
    }

    fn listen(&self, _: LoopId, _: &Address) -> io::Result<Box<dyn Listening>> {
        Ok(Box::new(Self(Arc::clone(&self.0), self.1.try_clone()?)))
    }

    fn connect(&self, _: LoopId, _: &Address, _: Option<&Address>) -> io::Result<Box<dyn Transport>> {
        Err(ErrorKind::Unsupported.into())
    }
}

impl Listening for Exhausted {
    fn accept(&mut self) -> io::Result<Accepted> {
        match self.0.fetch_add(1, Ordering::Relaxed) {
            0 => Err(ErrorKind::OutOfMemory.into()),
            1 => Ok(Accepted::Lost(ErrorKind::ConnectionAborted.into())),
            _ => Ok(Accepted::Nobody),
        }
    }

    fn local_addr(&self) -> Option<Address> {
        None
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.1.as_fd()
    }
}

#[test]
fn a_listener_rests_when_resources_have_run_out_and_goes_on() {
    let (ours, mut theirs) = UnixStream::pair().expect("sockets");
    let asked = Arc::default();
    let mut events = new_loop();
    events
        .listen(&Exhausted(Arc::clone(&asked), ours), &"127.0.0.1:0".parse().expect("one"), accept)
        .expect("listens");
    // Readable, like the descriptor of a listener whose request cannot be taken.
    theirs.write_all(b"x").expect("room");
    events.turn(Some(PATIENCE)).expect("a turn");
    assert_eq!(asked.load(Ordering::Relaxed), 1, "it is asked once");
    assert!(!events.has_pending(), "the loop sleeps meanwhile");
    run(&mut events, |_| asked.load(Ordering::Relaxed) > 1);
    assert_eq!(asked.load(Ordering::Relaxed), 3, "one that came to nothing, and at once the next");
}

pub(crate) fn leave_waiting(events: &mut Loop, id: SessionId) {
    events.state.arrived.push(id);
}

/// Nothing accepts. Either the system connects all the same, or the attempt times out.
pub(crate) fn a_handshake_ends_in_time(test_bed: &impl TestBed) {
    let mut events = new_loop();
    events.timeouts.handshake = Duration::from_millis(200);
    let listener =
        events.listen(test_bed.server(), &test_bed.address(), leave_waiting).expect("a free address");
    let address = events.listener_addr(listener).expect("an address");
    let id = events.connect(test_bed.client(), &address, None, on_connected).expect("begins to connect");
    run(&mut events, |events| !events.state.connected.is_empty() && !events.state.arrived.is_empty());
    let connection = events.get(id).expect("is there");
    if connects_by_itself(test_bed) {
        assert_eq!(connection.state(), SessionState::Connected);
    } else if connection.state() == SessionState::Error {
        assert_eq!(connection.last_error().expect("an error").kind(), ErrorKind::TimedOut);
    }
    let arrived = events.state.arrived[0];
    assert_eq!(events.get(arrived).expect("is there").state(), SessionState::Accepting);
    events.close(arrived);
    let begun = Instant::now();
    while events.closing() > 0 {
        assert!(begun.elapsed() < PATIENCE);
        events.turn(Some(Duration::from_millis(100))).expect("a turn");
    }
    assert_eq!(events.state.connected.len(), 1, "the handler is called exactly once");
}
