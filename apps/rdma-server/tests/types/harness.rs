use std::io::{ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use rdma_server::{Address, EventLoop, ListenerId, Session, SessionId, SessionState};

use crate::test_beds::TestBed;

/// Time limit for everything: soft-RoCE in an emulated machine is slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) type Loop = EventLoop<Log>;

#[derive(Default)]
pub(crate) struct Log {
    pub(crate) arrived: Vec<SessionId>,
    pub(crate) accepted: Vec<SessionId>,
    pub(crate) connected: Vec<(SessionId, SessionState)>,
    pub(crate) read: Vec<u8>,
    pub(crate) ended: bool,
    pub(crate) to_write: Vec<u8>,
    pub(crate) calls: Vec<&'static str>,
}

pub(crate) struct Pair {
    pub(crate) events: Loop,
    pub(crate) client: SessionId,
    pub(crate) server: SessionId,
    pub(crate) listener: ListenerId,
    pub(crate) address: Address,
}

pub(crate) fn new_loop() -> Loop {
    let mut events = Loop::new(Log::default()).expect("a loop");
    events.timeouts.handshake = PATIENCE;
    events
}

pub(crate) fn listening(test_bed: &impl TestBed) -> (Loop, ListenerId, Address) {
    let mut events = new_loop();
    let listener = events.listen(test_bed.server(), &test_bed.address(), accept).expect("a free address");
    let address = events.listener_addr(listener).expect("an address");
    (events, listener, address)
}

pub(crate) fn pair(test_bed: &impl TestBed) -> Pair {
    let (mut events, listener, address) = listening(test_bed);
    let client = events.connect(test_bed.client(), &address, None, on_connected).expect("begins to connect");
    assert_eq!(events.get(client).expect("is there").state(), SessionState::Connecting);
    run(&mut events, |events| events.state.connected.len() == 1 && events.state.accepted.len() == 1);
    assert_eq!(events.state.connected, [(client, SessionState::Connected)], "{:?}", events.get(client));
    let server = events.state.accepted[0];
    assert_eq!(events.get(server).expect("is there").state(), SessionState::Connected);
    Pair { events, client, server, listener, address }
}

pub(crate) fn run(events: &mut Loop, done: impl Fn(&Loop) -> bool) {
    let begun = Instant::now();
    while !done(events) {
        assert!(begun.elapsed() < PATIENCE, "it does not happen; calls: {:?}", events.state.calls);
        events.turn(Some(Duration::from_millis(100))).expect("a turn");
    }
}

/// Takes turns until nothing has happened for a moment.
pub(crate) fn settle(events: &mut Loop) {
    for _ in 0..5 {
        events.turn(Some(Duration::from_millis(10))).expect("a turn");
    }
}

pub(crate) fn accept(events: &mut Loop, id: SessionId) {
    assert_eq!(events.get(id).expect("is there").state(), SessionState::Accepting);
    events.state.arrived.push(id);
    events.accept(id, on_accepted).expect("waits to be accepted");
}

pub(crate) fn on_accepted(events: &mut Loop, id: SessionId) {
    events.state.accepted.push(id);
}

pub(crate) fn on_connected(events: &mut Loop, id: SessionId) {
    let state = events.get(id).expect("is there").state();
    events.state.connected.push((id, state));
}

pub(crate) fn on_readable(events: &mut Loop, id: SessionId) {
    let mut chunk = vec![0; 64 << 10];
    let connection = events.get_mut(id).expect("is there");
    match connection.read(&mut chunk) {
        Ok(0) => {
            connection.set_read_handler(None);
            events.state.ended = true;
        }
        Ok(len) => events.state.read.extend(&chunk[..len]),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
    }
}

pub(crate) fn on_writable(events: &mut Loop, id: SessionId) {
    let mut rest = std::mem::take(&mut events.state.to_write);
    events.state.calls.push("write");
    let connection = events.get_mut(id).expect("is there");
    match connection.write(&rest) {
        Ok(len) => drop(rest.drain(..len)),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
    }
    if rest.is_empty() {
        connection.set_write_handler(None, Default::default());
    }
    events.state.to_write = rest;
}

impl Pair {
    pub(crate) fn at(&mut self, id: SessionId) -> &mut Session<Log> {
        self.events.get_mut(id).expect("is there")
    }

    pub(crate) fn write(&mut self, from: SessionId, bytes: &[u8]) {
        self.at(from).write_all(bytes).expect("room");
    }

    pub(crate) fn read(&mut self, at: SessionId, len: usize) -> Vec<u8> {
        self.events.state.read.clear();
        self.at(at).set_read_handler(Some(on_readable));
        run(&mut self.events, |events| events.state.read.len() >= len || events.state.ended);
        self.at(at).set_read_handler(None);
        std::mem::take(&mut self.events.state.read)
    }

    pub(crate) fn read_to_end(&mut self, at: SessionId) -> Vec<u8> {
        let read = self.read(at, usize::MAX);
        assert!(self.events.state.ended);
        read
    }

    /// Writes a pattern until only the peer's application can make room. Returns how much.
    pub(crate) fn fill(&mut self, from: SessionId) -> usize {
        let mut written = 0;
        loop {
            let before = written;
            loop {
                let chunk = pattern(written, 64 << 10);
                match self.at(from).write(&chunk) {
                    Ok(len) => written += len,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                        break;
                    }
                }
            }
            if written == before {
                return written;
            }
            // Bytes on their way make room without the application.
            settle(&mut self.events);
        }
    }
}

pub(crate) fn pattern(offset: usize, len: usize) -> Vec<u8> {
    (offset..offset + len).map(|index| (index ^ (index >> 8) ^ (index >> 16)) as u8).collect()
}
