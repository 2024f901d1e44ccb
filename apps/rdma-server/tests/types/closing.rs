use std::io::{ErrorKind, Read, Write};

use rdma_server::{Carrier, ConnectionType, SessionState};

use crate::harness::{PATIENCE, on_readable, pair, pattern, run, settle};
use crate::test_beds::TestBed;

pub(crate) fn a_close_delivers_what_was_written(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    pair.events.timeouts.linger = PATIENCE;
    let written = pair.fill(pair.client);
    pair.events.close(pair.client);
    // Some bytes cannot have left, because the peer does not read yet.
    settle(&mut pair.events);
    assert_eq!(pair.events.closing(), 1);
    assert!(pair.events.get(pair.client).is_none());
    let read = pair.read_to_end(pair.server);
    assert_eq!(read.len(), written);
    assert!(read == pattern(0, written), "the bytes differ");
}

/// A socket's peer may have ended only its own direction.
pub(crate) fn the_end_is_read_and_then_writes_fail_if_both_directions_have_ended(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    pair.events.close(pair.client);
    assert_eq!(pair.read_to_end(pair.server), b"");
    let server = pair.at(pair.server);
    assert_eq!(server.state(), SessionState::Closed);
    assert_eq!(server.read(&mut [0; 1]).expect("still the end"), 0);
    let written = server.write(b"late");
    if server.kind().carrier == Carrier::Rdma {
        assert_eq!(written.expect_err("no program reads it").kind(), ErrorKind::BrokenPipe);
    } else {
        assert_eq!(written.expect("a peer may read it"), 4);
    }
    assert!(server.last_error().is_none());
}

pub(crate) fn a_shutdown_ends_both_directions(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    pair.write(pair.client, b"last words");
    pair.at(pair.client).shutdown(PATIENCE);
    assert_eq!(pair.read_to_end(pair.server), b"last words");
    pair.events.state.ended = false;
    pair.at(pair.client).set_read_handler(Some(on_readable));
    run(&mut pair.events, |events| events.state.ended);
    assert_eq!(pair.at(pair.client).state(), SessionState::Closed);
}

pub(crate) fn an_aborted_connection_ends_for_its_peer(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    pair.events.abort(pair.client);
    assert_eq!(pair.events.closing(), 0);
    let kind = test_bed.server().kind();
    let told = kind.tls || kind.carrier == Carrier::Tcp;
    let mut ended = false;
    let begun = std::time::Instant::now();
    while !ended {
        assert!(begun.elapsed() < PATIENCE);
        pair.events.turn(Some(std::time::Duration::from_millis(100))).expect("a turn");
        let server = pair.at(pair.server);
        match server.read(&mut [0; 1]) {
            Ok(read) => {
                assert!(!told, "it looks like an orderly end");
                ended = read == 0;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // Some types can tell that it is no orderly end. They report it again.
            Err(error) => {
                assert_eq!(server.state(), SessionState::Error);
                assert_eq!(server.last_error().expect("an error").kind(), error.kind());
                assert_eq!(server.read(&mut [0; 1]).expect_err("the same").kind(), error.kind());
                ended = true;
            }
        }
    }
}

pub(crate) fn nothing_is_left_after_closing(test_bed: &impl TestBed) {
    let before = test_bed.held();
    for _ in 0..3 {
        let mut pair = pair(test_bed);
        pair.write(pair.client, b"x");
        pair.events.finish().expect("a turn");
    }
    assert_eq!(test_bed.held(), before);
}
