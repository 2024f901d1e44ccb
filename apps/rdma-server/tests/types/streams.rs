use std::io::{ErrorKind, IoSlice, Read, Write};

use rdma_server::{Barrier, ConnectionType, SessionState};

use crate::harness::{on_readable, on_writable, pair, pattern, run, settle};
use crate::test_beds::TestBed;

pub(crate) fn bytes_arrive_in_both_directions(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    pair.write(pair.client, b"question");
    assert_eq!(pair.read(pair.server, 8), b"question");
    pair.write(pair.server, b"answer");
    assert_eq!(pair.read(pair.client, 6), b"answer");
}

pub(crate) fn nothing_to_read_is_no_end(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    for id in [pair.client, pair.server] {
        let connection = pair.at(id);
        let error = connection.read(&mut [0; 8]).expect_err("there is nothing");
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        assert_eq!(connection.read(&mut []).expect("nothing was asked for"), 0);
        assert_eq!(connection.write(&[]).expect("nothing was given"), 0);
        assert_eq!(connection.state(), SessionState::Connected);
        assert!(connection.last_error().is_none());
    }
    pair.write(pair.client, b"still here");
    assert_eq!(pair.read(pair.server, 10), b"still here");
}

pub(crate) fn a_vectored_write_arrives_in_order(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    let slices = [b"one ".as_slice(), b"", b"two ", b"three"].map(IoSlice::new);
    assert_eq!(pair.at(pair.client).write_vectored(&slices).expect("room"), 13);
    assert_eq!(pair.read(pair.server, 13), b"one two three");
}

pub(crate) fn a_writer_without_room_sleeps_until_there_is_some(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    let written = pair.fill(pair.client);
    pair.events.state.to_write = pattern(written, 100);
    pair.at(pair.client).set_write_handler(Some(on_writable), Barrier::ReadFirst);
    settle(&mut pair.events);
    assert!(!pair.events.has_pending());
    let in_vain = pair.events.state.calls.len();
    assert!(in_vain <= 1, "called {in_vain} times without room");

    let mut read = pair.read(pair.server, written);
    run(&mut pair.events, |events| events.state.to_write.is_empty());
    if read.len() < written + 100 {
        let left = written + 100 - read.len();
        read.extend(pair.read(pair.server, left));
    }
    assert!(read == pattern(0, written + 100), "the bytes differ");
}

/// Several windows and buffers in both directions at once.
pub(crate) fn long_transfers_arrive_whole(test_bed: &impl TestBed) {
    let mut pair = pair(test_bed);
    let sent = pattern(0, 5 << 20);
    pair.events.state.to_write.clone_from(&sent);
    pair.at(pair.client).set_write_handler(Some(on_writable), Barrier::ReadFirst);
    pair.at(pair.server).set_read_handler(Some(on_readable));
    run(&mut pair.events, |events| events.state.read.len() >= 5 << 20);
    assert!(pair.events.state.read == sent, "the bytes differ");
}

pub(crate) fn addresses_and_kind_are_told(test_bed: &impl TestBed) {
    let pair = pair(test_bed);
    let (client, server) = (pair.events.get(pair.client), pair.events.get(pair.server));
    let (client, server) = (client.expect("is there"), server.expect("is there"));
    assert_eq!(client.peer_addr(), Some(pair.address.clone()));
    assert_eq!(server.local_addr(), Some(pair.address.clone()));
    assert_eq!(client.local_addr(), server.peer_addr());
    for connection in [client, server] {
        assert_eq!(connection.kind(), test_bed.server().kind());
        assert_eq!(connection.is_local(), test_bed.is_local());
    }
}
