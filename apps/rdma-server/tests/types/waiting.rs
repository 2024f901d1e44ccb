use std::io::{ErrorKind, Read, Write};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rdma_server::{Session, SessionId, SessionState};

use crate::harness::{Log, Loop, PATIENCE, listening, new_loop, pair, pattern, run};
use crate::listening::{is_refusal, without_listener};
use crate::test_beds::TestBed;

fn echo(events: &mut Loop, id: SessionId) {
    let mut chunk = [0; 100];
    let connection = events.get_mut(id).expect("is there");
    match connection.read(&mut chunk) {
        Ok(0) => events.close(id),
        Ok(len) => connection.write_all(&chunk[..len]).expect("room"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
    }
}

fn with_server(
    test_bed: &impl TestBed,
    server: impl FnOnce(&mut Loop, SessionId) + Send,
    client: impl FnOnce(&mut Session<Log>),
) {
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || {
            let (mut events, _, address) = listening(test_bed);
            tell.send(address).expect("the client waits for it");
            run(&mut events, |events| !events.state.accepted.is_empty());
            let id = events.state.accepted[0];
            server(&mut events, id);
            events.finish().expect("a turn");
        });
        let address = told.recv().expect("a server");
        let mut events = new_loop();
        let id = events.blocking_connect(test_bed.client(), &address, None, PATIENCE).expect("connects");
        client(events.get_mut(id).expect("is there"));
        events.finish().expect("a turn");
    });
}

pub(crate) fn a_blocking_connect_waits(test_bed: &impl TestBed) {
    let echoing = |events: &mut Loop, id| {
        events.get_mut(id).expect("is there").set_read_handler(Some(echo));
        run(events, |events| events.connections().count() == 0);
    };
    with_server(test_bed, echoing, |connection| {
        assert_eq!(connection.state(), SessionState::Connected);
        connection.sync_write(b"hello\r\nworld\n", PATIENCE).expect("written");
        assert_eq!(connection.sync_read_line(100, PATIENCE).expect("a line"), b"hello");
        assert_eq!(connection.sync_read_line(100, PATIENCE).expect("a line"), b"world");
        connection.sync_write(b"a line that is too long\n", PATIENCE).expect("written");
        let error = connection.sync_read_line(10, PATIENCE).expect_err("too long");
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    });
}

pub(crate) fn a_blocking_connect_without_a_listener_fails(test_bed: &impl TestBed) {
    let (mut events, address) = (new_loop(), without_listener(test_bed));
    let error = events
        .blocking_connect(test_bed.client(), &address, None, PATIENCE)
        .expect_err("there is no listener");
    assert!(is_refusal(error.kind()), "{error}");
    assert_eq!(events.connections().count(), 0);
}

/// More than fits on the way, so both sides must wait.
pub(crate) fn sync_calls_move_whole_pieces(test_bed: &impl TestBed) {
    const LEN: usize = 5 << 20;
    let reading = |events: &mut Loop, id| {
        let connection = events.get_mut(id).expect("is there");
        let mut all = vec![0; LEN];
        connection.sync_read(&mut all, PATIENCE).expect("all of it");
        assert!(all == pattern(0, LEN), "the bytes differ");
        connection.sync_write(b"done\n", PATIENCE).expect("written");
    };
    with_server(test_bed, reading, |connection| {
        connection.sync_write(&pattern(0, LEN), PATIENCE).expect("written");
        assert_eq!(connection.sync_read_line(10, PATIENCE).expect("a line"), b"done");
        let error = connection.sync_read(&mut [0; 1], PATIENCE).expect_err("the server has left");
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    });
}

pub(crate) fn sync_calls_time_out(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    let soon = Duration::from_millis(20);
    let client = pair.at(pair.client);
    assert_eq!(client.sync_read(&mut [0; 1], soon).expect_err("nothing").kind(), ErrorKind::TimedOut);
    assert_eq!(client.sync_read_line(10, soon).expect_err("nothing").kind(), ErrorKind::TimedOut);
    assert_eq!(client.state(), SessionState::Connected);
    assert_eq!(client.read(&mut [0; 1]).expect_err("nothing").kind(), ErrorKind::WouldBlock);
    let too_much = vec![0; 64 << 20];
    assert_eq!(client.sync_write(&too_much, soon).expect_err("no room").kind(), ErrorKind::TimedOut);
    assert_eq!(client.state(), SessionState::Connected);
}
