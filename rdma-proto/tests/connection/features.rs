//! Features: optional, requested by clients, answered by servers.

use rdma_proto::wire::{FeatureSet, Message, Opcode};
use rdma_proto::{Config, Error, PeerMisbehaved, State};

use crate::pair::{Client, Pair, Server, quiet};

fn question(select: u16) -> [u8; 32] {
    Message::GetServerFeature { select, features: FeatureSet::NONE }.encode()
}

fn negotiating(client: u64, server: u64) -> Pair {
    let client = quiet(Config::client()).negotiate(true).features(FeatureSet(client));
    Pair::connected(client, quiet(Config::server()).features(FeatureSet(server)))
}

/// VR-FEAT-001, VR-FEAT-008: clients only if configured to, servers never.
#[test]
fn a_question_is_sent_only_if_configured() {
    let mut pair = Pair::quiet();
    pair.finish([1000, 1000]);
    for who in [Client, Server] {
        let all_registrations = pair.side(who).messages().len() == pair.side(who).registrations();
        assert!(all_registrations, "{:?}", pair.side(who).messages());
        assert_eq!(pair.side(who).machine.features(), FeatureSet::NONE);
    }
}

/// VR-FEAT-009, VR-FEAT-010, VR-FEAT-012.
#[test]
fn a_client_asks_learns_and_tells_what_both_have() {
    let pair = negotiating(0b0110, 0b0011);
    let told: Vec<Message> = pair
        .client
        .messages()
        .into_iter()
        .filter(|message| !matches!(message, Message::RegisterXferMemory(_)))
        .collect();
    assert_eq!(
        told,
        [
            Message::GetServerFeature { select: 0, features: FeatureSet::NONE },
            Message::SetClientFeature { select: 0, features: FeatureSet(0b0010) },
        ]
    );
    assert_eq!(pair.client.machine.features(), FeatureSet(0b0010));
    assert_eq!(pair.server.machine.features(), FeatureSet(0b0010));
}

/// VR-FEAT-004.
#[test]
fn unknown_bits_enable_nothing() {
    let mut pair = negotiating(0, u64::MAX);
    assert_eq!(pair.client.machine.features(), FeatureSet::NONE);
    let all = Message::SetClientFeature { select: 0, features: FeatureSet(u64::MAX) };
    let mut plain = Pair::quiet();
    plain.server.machine.handle_message(plain.now, &all.encode());
    assert_eq!(plain.server.machine.features(), FeatureSet::NONE);
    plain.finish([10, 10]);
    pair.finish([10, 10]);
}

/// VM-001, VM-002: otherwise when the last is full.
#[test]
fn windows_are_registered_ahead_where_both_want_it() {
    let (all, none) = (FeatureSet::MULTI_BUFFER.0, FeatureSet::NONE.0);
    for (client, server, registrations) in [(all, all, 2), (all, none, 1), (none, all, 1), (none, none, 1)] {
        let mut pair = negotiating(client, server);
        for who in [Client, Server] {
            assert_eq!(pair.side(who).registrations(), registrations, "{who:?} of {client:x} and {server:x}");
        }
        pair.finish([1000, 1000]);
    }
}

/// VM-001: a client that only asks for a proof has requested no feature.
#[test]
fn a_registration_ahead_needs_its_feature() {
    let all = FeatureSet::MULTI_BUFFER;
    let mut pair =
        Pair::connected(quiet(Config::client()).features(all), quiet(Config::server()).features(all));
    for who in [Client, Server] {
        assert_eq!((pair.side(who).messages().len(), pair.side(who).registrations()), (1, 1));
    }
    pair.finish([1000, 1000]);
}

/// VM-001.
#[test]
fn a_choice_that_was_not_offered_enables_nothing() {
    let all = FeatureSet::MULTI_BUFFER;
    let choice = Message::SetClientFeature { select: 0, features: all }.encode();
    let mut pair = Pair::connected(quiet(Config::client()), quiet(Config::server()).features(all));
    pair.server.machine.handle_message(pair.now, &choice);
    assert_eq!(pair.server.machine.features(), FeatureSet::NONE, "nobody asked");
    pair.server.machine.handle_message(pair.now, &question(0));
    pair.server.machine.handle_message(pair.now, &choice);
    assert_eq!(pair.server.machine.features(), FeatureSet::NONE, "the answer is not sent");
    pair.post(Server);
    pair.server.machine.handle_message(pair.now, &choice);
    assert_eq!(pair.server.machine.features(), all);
}

/// VM-003: a fifth window is one too many. Where the bit is not in force, the second is.
#[test]
fn one_window_too_many_ends_the_connection() {
    for (features, fits) in [(FeatureSet::MULTI_BUFFER.0, 2), (FeatureSet::NONE.0, 0)] {
        let mut pair = negotiating(features, features);
        let window = rdma_proto::wire::Window { address: 1 << 20, length: 64, rkey: 9 };
        let message = Message::RegisterXferMemory(window).encode();
        for _ in 0..fits {
            pair.server.machine.handle_message(pair.now, &message);
            assert_eq!(pair.server.state(), State::Open);
        }
        pair.server.machine.handle_message(pair.now, &message);
        let early = PeerMisbehaved::EarlyRegistration { used: 0, length: 64 };
        assert_eq!(pair.server.state(), State::Failed(Error::PeerMisbehaved(early)));
    }
}

/// VR-FEAT-002: at any time, and often.
#[test]
fn every_question_is_answered_with_its_select() {
    let mut pair = Pair::quiet();
    let selects = [0, 7, 7, 7, 0, 0xffff];
    for select in selects {
        let question = Message::GetServerFeature { select, features: FeatureSet(99) };
        pair.server.machine.handle_message(pair.now, &question.encode());
        pair.post(Server);
    }
    let answers: Vec<Message> = pair.server.messages().into_iter().skip(1).collect();
    let expected = selects.map(|select| Message::GetServerFeature { select, features: FeatureSet::NONE });
    assert_eq!(answers, expected);
}

/// VR-FEAT-002.
#[test]
fn answers_keep_the_order_of_their_questions() {
    let mut pair = Pair::quiet();
    for _ in 0..3 {
        for select in [1, 2, 2, 3, 1] {
            pair.server.machine.handle_message(pair.now, &question(select));
        }
        pair.server.log.clear();
        assert_eq!(pair.post(Server), 5);
        let expected =
            [1, 2, 2, 3, 1].map(|select| Message::GetServerFeature { select, features: FeatureSet::NONE });
        assert_eq!(pair.server.messages(), expected);
    }
}

/// VR-FEAT-003, VR-RES-008: it costs a peer its receives, not our memory.
#[test]
fn one_question_many_times_is_fine() {
    const TIMES: usize = if cfg!(miri) { 100 } else { 3000 };
    let mut pair = Pair::quiet();
    for _ in 0..TIMES {
        pair.server.machine.handle_message(pair.now, &question(3));
    }
    pair.client.machine.handle_disconnected(); // it would not understand the answers
    let mut answers = 0;
    loop {
        answers += pair.post(Server);
        if answers == TIMES {
            break;
        }
        assert!(pair.carry(Server), "{answers} answers");
        while pair.carry(Server) || pair.handle(Client) || pair.report(Server) {}
    }
    assert_eq!(pair.server.state(), State::Open);
}

/// VR-FEAT-007.
#[test]
fn different_questions_without_end_are_a_flood() {
    let mut pair = Pair::quiet();
    for select in 0..4 {
        pair.server.machine.handle_message(pair.now, &question(select));
    }
    assert_eq!(pair.server.state(), State::Open, "four may wait");
    pair.server.machine.handle_message(pair.now, &question(4));
    assert_eq!(pair.server.state(), State::Failed(Error::PeerMisbehaved(PeerMisbehaved::FeatureFlood)));
}

/// VR-FEAT-007: more often than can be counted.
#[test]
#[cfg_attr(miri, ignore = "nothing of it is seen in less than 65536 questions")]
fn one_question_without_end_is_a_flood_too() {
    let mut pair = Pair::quiet();
    for _ in 0..u16::MAX {
        pair.server.machine.handle_message(pair.now, &question(0));
    }
    assert_eq!(pair.server.state(), State::Open);
    pair.server.machine.handle_message(pair.now, &question(0));
    assert_eq!(pair.server.state(), State::Failed(Error::PeerMisbehaved(PeerMisbehaved::FeatureFlood)));
}

/// VR-FEAT-014: the first or a second answer.
#[test]
fn an_answer_without_a_question_ends_the_connection() {
    for mut pair in [Pair::quiet(), negotiating(0, 0)] {
        assert_eq!(pair.client.state(), State::Open);
        pair.client.machine.handle_message(pair.now, &question(0));
        let unasked = Error::PeerMisbehaved(PeerMisbehaved::UnaskedFeatures);
        assert_eq!(pair.client.state(), State::Failed(unasked));
    }
}

/// VR-FEAT-014.
#[test]
fn a_server_that_sets_client_features_is_refused() {
    let mut pair = Pair::quiet();
    let set = Message::SetClientFeature { select: 0, features: FeatureSet::NONE };
    pair.client.machine.handle_message(pair.now, &set.encode());
    let opcode = Opcode::SET_CLIENT_FEATURE;
    let sent = Error::PeerMisbehaved(PeerMisbehaved::ServerSent { opcode });
    assert_eq!(pair.client.state(), State::Failed(sent));
}
