use std::io::{ErrorKind, Read, Write};

use rdma_server::{Barrier, SessionId};

use crate::harness::{Loop, pair, run, settle};
use crate::test_beds::TestBed;

fn read_one(events: &mut Loop, id: SessionId) {
    events.state.calls.push("read");
    let mut byte = [0];
    match events.get_mut(id).expect("is there").read(&mut byte) {
        Ok(len) => events.state.read.extend(&byte[..len]),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
    }
}

fn count_write(events: &mut Loop, id: SessionId) {
    events.state.calls.push("write");
    let connection = events.get_mut(id).expect("is there");
    connection.set_write_handler(None, Barrier::ReadFirst);
}

/// By level: nothing new arrives between the calls.
pub(crate) fn a_read_handler_is_called_as_long_as_there_is_something(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    pair.write(pair.client, b"letters");
    pair.at(pair.server).set_read_handler(Some(read_one));
    run(&mut pair.events, |events| events.state.read.len() == 7);
    assert_eq!(pair.events.state.read, b"letters");
}

pub(crate) fn a_removed_handler_is_not_called(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    let server = pair.at(pair.server);
    server.set_read_handler(Some(read_one));
    server.set_read_handler(None);
    server.set_write_handler(Some(count_write), Barrier::ReadFirst);
    server.set_write_handler(None, Barrier::ReadFirst);
    pair.write(pair.client, b"unread");
    settle(&mut pair.events);
    assert!(pair.events.state.calls.is_empty(), "{:?}", pair.events.state.calls);
    assert!(!pair.events.has_pending());
    assert_eq!(pair.read(pair.server, 6), b"unread");
}

fn order(test_bed: &impl TestBed, barrier: Barrier) -> Vec<&'static str> {
    let mut pair = pair(test_bed);
    pair.write(pair.client, b"x");
    let (mut events, server) = (pair.events, pair.server);
    settle(&mut events);
    let connection = events.get_mut(server).expect("is there");
    connection.set_read_handler(Some(read_one));
    connection.set_write_handler(Some(count_write), barrier);
    run(&mut events, |events| events.state.calls.len() >= 2);
    events.state.calls.truncate(2);
    events.state.calls
}

pub(crate) fn the_read_handler_comes_first(test_bed: &impl TestBed) {
    assert_eq!(order(test_bed, Barrier::ReadFirst), ["read", "write"]);
}

pub(crate) fn a_barrier_puts_the_write_handler_first(test_bed: &impl TestBed) {
    assert_eq!(order(test_bed, Barrier::WriteFirst), ["write", "read"]);
}

fn answer_and_close(events: &mut Loop, id: SessionId) {
    events.state.calls.push("close");
    events.get_mut(id).expect("is there").write_all(b"goodbye").expect("room");
    events.close(id);
    assert!(events.get(id).is_none());
    assert!(events.get_mut(id).is_none());
    events.close(id);
}

/// The write handler of the same turn is not called after it, and the last bytes arrive.
pub(crate) fn a_handler_may_close_its_own_connection(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    pair.write(pair.client, b"x");
    settle(&mut pair.events);
    let server = pair.at(pair.server);
    server.set_read_handler(Some(answer_and_close));
    server.set_write_handler(Some(count_write), Barrier::ReadFirst);
    let client = pair.client;
    // A socket reports room and bytes in one event. Either way the close comes first.
    assert_eq!(pair.read_to_end(client), b"goodbye");
    assert_eq!(pair.events.state.calls.iter().filter(|call| **call == "close").count(), 1);
}

fn close_everybody_else(events: &mut Loop, id: SessionId) {
    let others: Vec<_> = events.connections().map(|(other, _)| other).filter(|other| *other != id).collect();
    for other in others {
        events.close(other);
    }
    events.state.calls.push("closed others");
    events.get_mut(id).expect("is there").set_read_handler(None);
}

/// The same for one whose handler was due in the same turn.
pub(crate) fn a_handler_may_close_the_other_end(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    for id in [pair.client, pair.server] {
        pair.write(id, b"x");
    }
    settle(&mut pair.events);
    for id in [pair.client, pair.server] {
        pair.at(id).set_read_handler(Some(close_everybody_else));
    }
    run(&mut pair.events, |events| !events.state.calls.is_empty());
    settle(&mut pair.events);
    assert_eq!(pair.events.state.calls, ["closed others"]);
    assert_eq!(pair.events.connections().count(), 1);
}

pub(crate) fn an_idle_loop_has_nothing_pending(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    pair.write(pair.client, b"x");
    pair.read(pair.server, 1);
    for id in [pair.client, pair.server] {
        pair.at(id).set_read_handler(Some(read_one));
    }
    settle(&mut pair.events);
    assert!(!pair.events.has_pending());
    assert_eq!(pair.events.process_pending(), 0);
}
