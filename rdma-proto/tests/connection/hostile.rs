//! Each invalid input of a hostile or broken peer, beside the nearest valid one.

use rdma_proto::wire::{Message, Opcode, Window};
use rdma_proto::{CompletionStatus, Immediate};
use rdma_proto::{Config, Error, InvalidMessage, PeerIncompatible, PeerMisbehaved, State};

use crate::pair::{Client, Pair, Server, failure, quiet};

fn failed(misbehaved: PeerMisbehaved) -> State {
    State::Failed(Error::PeerMisbehaved(misbehaved))
}

/// VR-CLOSE-007: it disconnects at once, and does nothing else.
fn ends(pair: &mut Pair, state: State) {
    assert_eq!(pair.client.state(), state);
    let before = pair.client.log.len();
    pair.post(Client);
    assert_eq!(pair.client.log[before..], [rdma_proto::Action::Disconnect]);
}

fn message(bytes: &[u8]) -> Pair {
    let mut pair = Pair::quiet();
    pair.client.machine.handle_message(pair.now, bytes);
    pair
}

/// VR-CTRL-012.
#[test]
fn unknown_opcodes() {
    for opcode in [4, 5, 0x00ff, 0x0200, 0xffff] {
        let mut bytes = [0; 32];
        bytes[..2].copy_from_slice(&u16::to_be_bytes(opcode));
        let opcode = Opcode(opcode);
        ends(
            &mut message(&bytes),
            State::Failed(Error::InvalidMessage(InvalidMessage::UnknownOpcode { opcode })),
        );
    }
}

/// VR-CTRL-011.
#[test]
fn messages_of_any_other_length() {
    for length in [0, 1, 31, 33, 64] {
        let mut bytes = vec![0; length];
        if let Some(low) = bytes.get_mut(1) {
            *low = 2; // a keepalive, were it as long as one
        }
        ends(&mut message(&bytes), State::Failed(Error::InvalidMessage(InvalidMessage::Length { length })));
    }
    assert_eq!(message(&Message::Keepalive.encode()).client.state(), State::Open);
}

/// VR-CTRL-008: it fails in the device.
#[test]
fn a_message_longer_than_its_receive() {
    let mut pair = Pair::quiet();
    pair.client.machine.handle_failure(failure(CompletionStatus::LOC_LEN_ERR));
    ends(&mut pair, State::Failed(Error::InvalidMessage(InvalidMessage::TooLong)));
}

/// VR-MEM-009.
#[test]
fn a_window_that_its_device_refuses() {
    let mut pair = Pair::quiet();
    pair.client.machine.handle_failure(failure(CompletionStatus::REM_ACCESS_ERR));
    ends(&mut pair, failed(PeerMisbehaved::WindowRefused));
}

/// VR-CTRL-006.
#[test]
fn reserved_bytes_are_ignored() {
    let mut bytes = [0xa5; 32];
    bytes[..2].copy_from_slice(&[0, 2]);
    assert_eq!(message(&bytes).client.state(), State::Open);
}

/// VR-FLOW-002, VR-SEC-003: no sum wraps.
#[test]
fn immediates_beyond_the_window() {
    for (used, immediate) in [(0, 65), (63, 2), (64, 65), (1, u32::MAX), (63, u32::MAX), (2, u32::MAX - 1)] {
        let mut pair = Pair::connected(quiet(Config::client()).windows(1), quiet(Config::server()));
        pair.client.machine.handle_immediate(pair.now, Immediate(used));
        assert_eq!(pair.client.state(), State::Open);
        assert_eq!(pair.client.machine.unread(), u64::from(used));
        pair.client.machine.handle_immediate(pair.now, Immediate(immediate));
        ends(&mut pair, failed(PeerMisbehaved::WindowOverrun { immediate, received: used, length: 64 }));
        assert_eq!(pair.client.machine.unread(), u64::from(used), "what came before can be read");
    }
}

/// VR-FLOW-003: before there is a window, and between two.
#[test]
fn immediates_without_a_window() {
    let mut pair = Pair::new(quiet(Config::client()), quiet(Config::server()));
    pair.client.machine.handle_immediate(pair.now, Immediate(0));
    assert_eq!(pair.client.state(), State::Connecting);
    pair.client.machine.handle_immediate(pair.now, Immediate(1));
    ends(&mut pair, failed(PeerMisbehaved::NoWindow { immediate: 1 }));

    let mut pair = Pair::quiet();
    pair.client.machine.handle_immediate(pair.now, Immediate(64));
    pair.client.machine.handle_immediate(pair.now, Immediate(1));
    ends(&mut pair, failed(PeerMisbehaved::NoWindow { immediate: 1 }));
}

fn registered(windows: &[Window], limit: u32) -> Pair {
    let client = quiet(Config::client()).window_limit(limit).send_buffer(8);
    let mut pair = Pair::new(client, quiet(Config::server()));
    pair.establish(Client);
    for window in windows {
        pair.client.write(8);
        pair.post(Client);
        while pair.carry_away(Client) || pair.report(Client) {}
        let registration = Message::RegisterXferMemory(*window);
        pair.client.machine.handle_message(pair.now, &registration.encode());
        pair.client.send_queue.window(*window);
    }
    pair
}

/// VR-MEM-005, VR-MEM-006, VR-MEM-007.
#[test]
fn windows_that_cannot_be() {
    let window = |address, length| Window { address, length, rkey: 1 };
    ends(&mut registered(&[window(0x1000, 0)], 64), failed(PeerMisbehaved::EmptyWindow));
    assert_eq!(registered(&[window(0x1000, 64)], 64).client.state(), State::Open);
    for length in [65, 1 << 31, u32::MAX] {
        ends(
            &mut registered(&[window(0x1000, length)], 64),
            State::Failed(Error::PeerIncompatible(PeerIncompatible::WindowTooLarge { length, limit: 64 })),
        );
    }
    assert_eq!(registered(&[window(u64::MAX - 8, 8)], 64).client.state(), State::Open);
    let (address, length) = (u64::MAX - 7, 9);
    ends(
        &mut registered(&[window(address, length)], 64),
        failed(PeerMisbehaved::WindowWraps { address, length }),
    );
}

/// VR-MEM-017.
#[test]
fn a_window_replaced_early() {
    let window = |length| Window { address: 0x1000, length, rkey: 1 };
    ends(
        &mut registered(&[window(20), window(20)], 64),
        failed(PeerMisbehaved::EarlyRegistration { used: 8, length: 20 }),
    );
    // When it is full, another length, place and key are allowed.
    let mut pair = registered(&[window(8), Window { address: 0x9_0000, length: 3, rkey: 9 }], 64);
    pair.client.write(8);
    assert_eq!(pair.post(Client), 1);
    assert_eq!(pair.client.writes(), [(8, Some(8)), (3, Some(3))]);
    assert_eq!(pair.client.state(), State::Open);
}

/// VR-MEM-011, VR-MEM-012. The send queue checks that bytes go into what was registered.
#[test]
fn windows_of_every_length_in_turn() {
    let mut pair = registered(&[], 64);
    let mut length = 1;
    for round in 0..if cfg!(miri) { 20 } else { 500_u64 } {
        length = length * 5 % 63 + 1;
        let window = Window { address: round << 20, length, rkey: round as u32 };
        pair.client.machine.handle_message(pair.now, &Message::RegisterXferMemory(window).encode());
        pair.client.send_queue.window(window);
        while pair.client.send_queue.room() > 0 {
            let wrote = pair.client.write(8);
            assert!(wrote + pair.post(Client) > 0, "neither space nor anything to do");
            while pair.carry_away(Client) || pair.report(Client) {}
        }
        assert_eq!(pair.client.state(), State::Open);
    }
}

#[test]
fn a_server_takes_what_a_client_refuses() {
    for bytes in [
        Message::GetServerFeature { select: 0, features: Default::default() }.encode(),
        Message::SetClientFeature { select: 0, features: Default::default() }.encode(),
    ] {
        let mut pair = message(&bytes);
        assert!(matches!(pair.client.state(), State::Failed(Error::PeerMisbehaved(_))));
        pair.server.machine.handle_message(pair.now, &bytes);
        assert_eq!(pair.side(Server).state(), State::Open);
    }
}
