use rdma_proto::wire::{Message, Window};
use rdma_proto::{Action, ApiMisuse, Config, Error, Machine, RNR_RETRY_INFINITE, Source, Span};

use crate::pair::{Client, Pair, Server, at, peer, quiet};

fn windows_of(window: u32, windows: u8) -> Pair {
    let base = |base| quiet(base).window(window).windows(windows);
    Pair::connected(base(Config::client()), base(Config::server()))
}

/// VR-FLOW-006: however many pieces were written.
#[test]
fn one_notification_for_one_flush() {
    let mut pair = Pair::quiet();
    for bytes in [1, 2, 3] {
        pair.client.write(bytes);
    }
    pair.settle();
    assert_eq!(pair.client.writes(), [(6, Some(6))]);
}

/// VR-XFER-004.
#[test]
fn bytes_around_the_end_of_the_send_buffer_are_a_plain_write_and_one_with_the_sum() {
    let client = quiet(Config::client()).send_buffer(40);
    let mut pair = Pair::connected(client, quiet(Config::server()).window(1000));
    pair.client.write(30);
    pair.settle();
    pair.client.write(25);
    pair.settle();
    assert_eq!(pair.client.writes(), [(30, Some(30)), (10, None), (15, Some(25))]);
    assert_eq!(pair.server.read(100), 55);
}

/// VR-FLOW-011: the bytes after the wrap wait.
#[test]
fn with_one_request_left_a_flush_ends_at_the_end_of_the_buffer() {
    let client = quiet(Config::client()).send_buffer(40).send_depth(1);
    let mut pair = Pair::connected(client, quiet(Config::server()).window(1000));
    pair.client.write(30);
    pair.settle();
    pair.client.write(25);
    pair.settle();
    assert_eq!(pair.client.writes(), [(30, Some(30)), (10, Some(10)), (15, Some(15))]);
    assert_eq!(pair.server.read(100), 55);
}

/// VR-FLOW-001.
#[test]
fn a_message_longer_than_the_window_is_split_at_its_last_byte() {
    for windows in [1, 2] {
        let mut pair = windows_of(16, windows);
        pair.client.write(40);
        pair.finish([0, 0]);
        assert_eq!(pair.client.writes(), [(16, Some(16)), (16, Some(16)), (8, Some(8))]);
        assert_eq!(pair.server.registrations(), 3, "{windows} windows");
    }
}

/// VR-XFER-001.
#[test]
fn one_byte_less_the_same_and_one_more_than_the_window() {
    for bytes in [15, 16, 17, 31, 32, 33] {
        for windows in [1, 2] {
            let mut pair = windows_of(16, windows);
            pair.finish([bytes, bytes]);
        }
    }
}

/// VR-MEM-003: and the first is announced again only when it is free.
#[test]
fn the_second_region_is_filled_while_the_first_is_unread() {
    for who in [Client, Server] {
        let mut pair = windows_of(16, 2);
        pair.side(who).write(100);
        pair.settle();
        assert_eq!(pair.side(peer(who)).registrations(), 2, "nothing was read");
        assert_eq!(pair.side(peer(who)).machine.unread(), 32);
        assert_eq!(pair.side(peer(who)).read(15), 15);
        pair.settle();
        assert_eq!(pair.side(peer(who)).registrations(), 2, "one byte of the first region is still unread");
        assert_eq!(pair.side(peer(who)).read(1), 1);
        pair.settle();
        assert_eq!(pair.side(peer(who)).registrations(), 3);
        pair.finish([0, 0]);
    }
}

/// VR-MEM-004, VR-MEM-010.
#[test]
fn a_single_region_is_announced_again_when_full_and_read() {
    let mut pair = windows_of(16, 1);
    pair.client.write(15);
    pair.settle();
    pair.server.read(15);
    pair.settle();
    assert_eq!(pair.server.registrations(), 1, "read, but not full");
    pair.client.write(10);
    pair.settle();
    assert_eq!(pair.server.registrations(), 1, "full, but not read");
    pair.server.read(1);
    pair.settle();
    assert_eq!(pair.server.registrations(), 2);
    pair.finish([0, 0]);
}

/// VR-FLOW-010, VR-FLOW-016.
#[test]
fn input_goes_on_while_output_waits() {
    let mut pair = windows_of(16, 2);
    pair.server.write(1000);
    pair.settle();
    for _ in 0..100 {
        assert_eq!(pair.client.write(7), 7);
        pair.settle();
        assert_eq!(pair.server.read(100), 7);
    }
    pair.finish([0, 0]);
}

/// VR-XFER-005, VR-XFER-006: a foreign sender may use one immediate for several plain writes.
#[test]
fn an_immediate_of_zero_is_nothing_and_sums_are_taken_as_they_come() {
    let mut pair = Pair::quiet();
    let now = pair.now;
    let machine = &mut pair.client.machine;
    for (immediate, unread) in [(0, 0), (5, 5), (0, 5), (59, 64)] {
        machine.handle_immediate(now, rdma_proto::Immediate(immediate));
        assert_eq!(machine.unread(), unread);
    }
}

/// VR-MEM-013, VR-FLOW-014.
#[test]
fn windows_buffers_and_queues_of_one_still_carry_a_stream() {
    let tiny = |base| quiet(base).window(1).windows(1).send_buffer(1).send_depth(1).peer_receives(2);
    for rnr_retry in [0, 7] {
        let mut pair = Pair::with_retries(tiny(Config::client()), tiny(Config::server()), rnr_retry);
        pair.finish([50, 50]);
    }
}

/// VR-FLOW-011: the counts inside ids wrap several times.
#[test]
#[cfg_attr(miri, ignore = "nothing of it is seen in less than 65536 turns")]
fn more_requests_than_an_id_can_count() {
    let mut pair = Pair::quiet();
    for _ in 0..140_000 {
        pair.client.write(1);
        pair.post(Client);
        while pair.carry(Client) || pair.report(Client) {}
        while pair.handle(Server) {}
        pair.server.read(1);
        if pair.client.send_queue.room() == 0 {
            pair.settle();
        }
        pair.client.log.clear();
    }
    assert_eq!((pair.client.wrote, pair.server.read), (140_000, 140_000));
    pair.finish([100, 100]);
}

/// VR-XFER-011: in order, and never before.
#[test]
fn space_comes_back_when_bytes_are_acknowledged() {
    let mut pair = Pair::quiet();
    pair.client.reports = false;
    assert_eq!(pair.client.write(1000), 256);
    pair.finish_without_completions();
    assert_eq!(pair.client.machine.space().len, 0, "carried and read, but not acknowledged");
    assert_eq!(pair.client.machine.unconfirmed(), 256);
    pair.client.reports = true;
    pair.settle();
    assert_eq!(pair.client.machine.space().len, 256);
    assert_eq!(pair.client.machine.unconfirmed(), 0);
}

impl Pair {
    fn finish_without_completions(&mut self) {
        while self.settle() || self.server.read(usize::MAX) > 0 {}
    }
}

/// VR-XFER-004, VR-FLOW-006: in one flush with those of the send buffer.
#[test]
fn lent_bytes_keep_their_place_in_the_stream() {
    let client = quiet(Config::client()).send_buffer(40);
    let mut pair = Pair::connected(client, quiet(Config::server()).window(1000));
    assert_eq!((pair.client.write(30), pair.client.lend(100)), (30, 100));
    pair.settle();
    assert_eq!(pair.client.writes(), [(30, None), (100, Some(130))]);
    // The loan took no place in the send buffer.
    assert_eq!(pair.client.write(35), 35);
    pair.settle();
    assert_eq!(pair.client.writes()[2..], [(10, None), (25, Some(35))]);
    assert_eq!(pair.server.read(1000), 165);
}

/// VR-XFER-004: for one notification, as long as the peer's window has room.
#[test]
fn bytes_before_and_behind_lent_ones_leave_with_them() {
    let client = quiet(Config::client()).send_buffer(40);
    let mut pair = Pair::connected(client, quiet(Config::server()).window(2000));
    // Longer than the buffer, which has room all the same.
    assert_eq!((pair.client.write(30), pair.client.lend(1000), pair.client.write(5)), (30, 1000, 5));
    pair.post(Client);
    assert_eq!(pair.client.writes(), [(30, None), (1000, None), (5, Some(1035))]);
    // Loans without a byte between them are as one. A write between them counts the first as used.
    assert_eq!((pair.client.lend(50), pair.client.lend(1)), (50, 0));
    pair.post(Client);
    assert_eq!((pair.client.lend(50), pair.client.write(1)), (50, 0));
    pair.settle();
    assert_eq!(pair.client.write(100), 40);
    pair.settle();
    assert_eq!(pair.client.writes()[3..], [(50, Some(50)), (50, Some(50)), (5, None), (35, Some(40))]);
    assert_eq!(pair.server.read(2000), 1175);
}

/// VR-FLOW-001.
#[test]
fn lent_bytes_are_split_at_the_ends_of_windows() {
    let mut pair = windows_of(16, 2);
    assert_eq!(pair.client.lend(40), 40);
    pair.client.write(3);
    pair.finish([0, 0]);
    assert_eq!(pair.client.writes(), [(16, Some(16)), (16, Some(16)), (8, None), (3, Some(11))]);
}

/// It is signalled so that the owner learns when the memory is free.
#[test]
fn one_memory_is_lent_at_a_time_and_its_last_request_is_signalled() {
    const MOST: u32 = (1 << 30) - 1;
    let mut pair = windows_of(64, 1);
    assert_eq!((pair.client.lend(65), pair.client.machine.lendable(), pair.client.lend(1)), (65, 0, 0));
    pair.settle();
    assert_eq!((pair.server.read(64), pair.settle()), (64, true));
    assert_eq!(pair.client.machine.lendable(), MOST, "all is posted and acknowledged");
    assert_eq!((pair.client.machine.confirmed(), pair.client.machine.unconfirmed()), (65, 0));
    let last = pair.client.log.last();
    assert!(matches!(last, Some(Action::Write { signaled: true, from, .. }) if from.len() == 1), "{last:?}");
    assert_eq!(pair.server.read(10), 1);
    let beyond = pair.client.machine.lend(1 << 30);
    let misuse = ApiMisuse::LendBeyondLimit { bytes: 1 << 30, lendable: MOST as usize };
    assert_eq!(beyond, Err(Error::ApiMisuse(misuse)));
}

/// Puts as many bytes as fit into contiguous room, and returns where they are taken from, and
/// whether that is signalled.
fn written(machine: &mut Machine, bytes: usize) -> (u64, Span, bool) {
    machine.put(bytes).expect("there is room");
    let Some(Action::Write { id, from: Source::Buffer(span), signaled, .. }) = machine.poll_action(|| at(1))
    else {
        panic!("it is not written")
    };
    (id, span, signaled)
}

/// VR-XFER-011: a send buffer can be changed without a later request.
#[test]
fn bytes_that_no_completion_reports_are_confirmed_if_asked() {
    let mut pair = Pair::quiet();
    pair.client.machine.confirm();
    pair.settle();
    assert_eq!(pair.client.writes(), [], "nothing is unconfirmed");
    pair.client.write(10);
    pair.settle();
    assert_eq!(pair.client.machine.unconfirmed(), 10, "not signalled");
    pair.client.machine.confirm();
    pair.settle();
    assert_eq!(pair.client.writes(), [(10, Some(10)), (0, None)]);
    assert_eq!(pair.client.machine.unconfirmed(), 0);
    pair.client.machine.confirm();
    pair.client.write(10);
    pair.settle();
    assert_eq!(pair.client.writes().len(), 3, "what was confirmed already asks for nothing");
}

/// VR-XFER-011: bytes in flight are not overwritten, and their room is not given twice.
#[test]
fn a_send_buffer_is_replaced_while_bytes_are_in_flight() {
    let config = quiet(Config::client()).send_buffer(8);
    let mut machine = Machine::new(config, Default::default()).expect("in bounds");
    machine.handle_established(at(1), RNR_RETRY_INFINITE);
    while machine.poll_action(|| at(1)).is_some() {}
    machine.put(1).expect("there is room");
    assert!(!machine.can_replace_send_buffer(64), "a byte waits for the window");
    machine.replace_send_buffer(64);
    assert_eq!(machine.space().len, 7);
    let window = Window { address: 1 << 32, length: 1000, rkey: 1 };
    machine.handle_message(at(1), &Message::RegisterXferMemory(window).encode());
    while machine.poll_action(|| at(1)).is_some() {}
    let (first, span, signaled) = written(&mut machine, 7);
    assert_eq!((span, signaled, machine.has_space()), (Span { offset: 1, len: 7 }, true, false));

    assert!(!machine.can_replace_send_buffer(4), "bytes in flight would not fit");
    machine.replace_send_buffer(64);
    let (second, span, _) = written(&mut machine, 100);
    assert_eq!((span, machine.has_space()), (Span { offset: 0, len: 56 }, false));
    machine.handle_sent(at(1), first);
    assert_eq!(machine.space(), Span { offset: 56, len: 8 });
    machine.handle_sent(at(1), second);
    assert_eq!((machine.unconfirmed(), machine.poll_action(|| at(1))), (0, None));

    machine.replace_send_buffer(4);
    let mut at_once = machine;
    assert_eq!(written(&mut at_once, 10).1, Span { offset: 0, len: 4 });
    // A byte at a time: a signal comes before the shorter one is full.
    let mut parts = (0..4).map(|_| written(&mut machine, 1)).collect::<Vec<_>>();
    assert!(parts.iter().map(|(_, span, _)| span.offset).eq(0..4), "{parts:?}");
    parts.retain(|(_, _, signaled)| *signaled);
    machine.handle_sent(at(1), parts.first().expect("none is signalled").0);
    assert!(machine.has_space());
}
