use core::time::Duration;

use rdma_proto::time::Instant;
use rdma_proto::wire::{FeatureSet, Message, Window};
use rdma_proto::{Action, ApiMisuse, Config, Error, Machine, PeerMisbehaved, Readable, RegionAddress};
use rdma_proto::{Immediate, RNR_RETRY_INFINITE};

use crate::pair::quiet;

const WINDOW: u32 = 8;
const NOW: Instant = Instant::from_start(Duration::ZERO);

fn announced(machine: &mut Machine) -> Option<Window> {
    let Some(Action::Send { message, .. }) = machine.poll_action(|| NOW) else { return None };
    match Message::decode(&message) {
        Ok(Message::RegisterXferMemory(window)) => Some(window),
        other => panic!("{other:?}"),
    }
}

const fn region(rkey: u32) -> RegionAddress {
    RegionAddress { address: 0x1000 * rkey as u64, rkey }
}

fn window(rkey: u32) -> Option<Window> {
    let RegionAddress { address, rkey } = region(rkey);
    Some(Window { address, length: WINDOW, rkey })
}

/// VR-MEM-003, VR-MEM-010: it is announced at once. Either may be dropped once it is read.
#[test]
fn a_second_region_comes_when_it_is_needed_and_goes() {
    let config = quiet(Config::client()).window(WINDOW).windows(1);
    let mut machine = Machine::new(config, [region(1), RegionAddress::default()]).expect("in bounds");
    machine.handle_established(NOW, RNR_RETRY_INFINITE);
    assert_eq!(announced(&mut machine), window(1));
    machine.handle_immediate(NOW, Immediate(WINDOW - 1));
    assert_eq!(machine.lacks_region(), None, "the peer can go on");
    machine.add_region(region(9));
    machine.handle_immediate(NOW, Immediate(1));
    assert_eq!((machine.lacks_region(), announced(&mut machine)), (Some(1), None));

    machine.add_region(region(2));
    assert_eq!(announced(&mut machine), window(2));
    machine.handle_immediate(NOW, Immediate(3));
    let parts = [Readable { region: 0, offset: 0, len: WINDOW }, Readable { region: 1, offset: 0, len: 3 }];
    let [first, second] = parts.map(Some);
    assert_eq!((machine.all_readable(), machine.unread()), ([first, None, second], 11));
    assert_eq!(machine.drop_region(), None, "both hold unread bytes");
    machine.consume(WINDOW).expect("there are as many");
    assert_eq!(machine.all_readable(), [None, None, second]);
    assert_eq!((machine.drop_region(), machine.drop_region()), (Some(0), None));

    machine.handle_immediate(NOW, Immediate(WINDOW - 3));
    assert_eq!((machine.lacks_region(), announced(&mut machine)), (Some(0), None));
    machine.add_region(region(3));
    assert_eq!(announced(&mut machine), window(3));
}

/// VR-MEM-003, VR-MEM-008: windows wholly in the requested part of the stream.
#[test]
fn windows_lie_in_memory_of_the_application() {
    let config = quiet(Config::client()).window(WINDOW).windows(2);
    let mut machine = Machine::new(config, [region(1), region(2)]).expect("in bounds");
    machine.handle_established(NOW, RNR_RETRY_INFINITE);
    assert_eq!(announced(&mut machine), window(1));
    machine.handle_immediate(NOW, Immediate(3));
    machine.consume(2).expect("there are as many");

    // One byte is there, 5 are to come in this window; two whole windows and a byte are left.
    let memory = region(7);
    let landed = Readable { region: Readable::LANDED, offset: 6, len: 2 * WINDOW };
    assert_eq!(machine.land(memory, 6 + 2 * WINDOW + 1), Ok(Some(landed)));
    assert_eq!(machine.land(memory, WINDOW), Err(ApiMisuse::LandingUnderWay));
    assert_eq!((machine.landing_in_use(), machine.may_land()), (6..6 + 2 * WINDOW + 1, true));
    assert_eq!((announced(&mut machine), machine.is_landing()), (None, true));
    let lies = |offset| Some(Window { address: memory.address + offset, length: WINDOW, rkey: memory.rkey });
    for offset in [6, 6 + u64::from(WINDOW)] {
        machine.handle_immediate(NOW, Immediate(if offset == 6 { 5 } else { WINDOW }));
        assert_eq!(announced(&mut machine), lies(offset));
    }
    assert_eq!((machine.landing_in_use(), machine.may_land()), (6..6 + 2 * WINDOW, true));
    machine.handle_immediate(NOW, Immediate(WINDOW));
    assert_eq!(announced(&mut machine), window(2));
    machine.handle_immediate(NOW, Immediate(4));
    let own = |region, offset, len| Some(Readable { region, offset, len });
    assert_eq!(machine.all_readable(), [own(0, 2, 6), Some(landed), own(1, 0, 4)]);
    assert_eq!((machine.landing_in_use(), machine.may_land()), (6..6 + 2 * WINDOW, false));
    for len in [6, 2 * WINDOW] {
        assert!(machine.is_landing());
        machine.consume(len).expect("there are as many");
    }
    assert!(!machine.is_landing());
    assert_eq!(machine.readable(), own(1, 0, 4));
}

#[test]
fn what_cannot_land_does_not() {
    let config = quiet(Config::client()).window(WINDOW).windows(1);
    let mut machine = Machine::new(config, [region(1), RegionAddress::default()]).expect("in bounds");
    machine.handle_established(NOW, RNR_RETRY_INFINITE);
    assert_eq!(announced(&mut machine), window(1));
    assert_eq!(machine.land(region(7), 2 * WINDOW - 1), Ok(None));
    let memory = RegionAddress { address: u64::MAX - 5, rkey: 1 };
    let wraps = ApiMisuse::LandingWraps { address: memory.address, length: 6 };
    assert_eq!(machine.land(memory, 6), Err(wraps));

    assert!(machine.land(region(7), 4 * WINDOW).expect("nothing lands").is_some());
    machine.stop_landing();
    assert!(!machine.is_landing(), "no window was announced there");
    machine.handle_disconnected();
    assert_eq!(machine.land(region(7), 4 * WINDOW), Ok(None));
}

/// VM-002: it was held back for the landing.
#[test]
fn a_landing_given_up_lets_the_next_window_go_ahead() {
    let all = FeatureSet::MULTI_BUFFER;
    let config = quiet(Config::client()).window(WINDOW).windows(2).negotiate(true).features(all);
    let mut machine = Machine::new(config, [region(1), region(2)]).expect("in bounds");
    machine.handle_established(NOW, RNR_RETRY_INFINITE);
    while machine.poll_action(|| NOW).is_some() {}
    machine.handle_message(NOW, &Message::GetServerFeature { select: 0, features: all }.encode());
    while machine.poll_action(|| NOW).is_some() {}
    assert_eq!(machine.features(), all);

    assert!(machine.land(region(7), 4 * WINDOW).expect("nothing lands yet").is_some());
    machine.handle_immediate(NOW, Immediate(WINDOW));
    machine.consume(WINDOW).expect("there are as many");
    assert_eq!(announced(&mut machine), None, "memory of the application comes next, in its turn");
    machine.stop_landing();
    assert_eq!(announced(&mut machine), window(1));
}

/// VR-MEM-001, VR-MEM-008: a server may first decide whether it registers one, and how long it is.
#[test]
fn the_first_window_can_be_withheld() {
    let config = quiet(Config::server()).window(2 * WINDOW).windows(1);
    let mut machine = Machine::new(config, Default::default()).expect("in bounds");
    machine.withhold_window();
    machine.handle_established(NOW, RNR_RETRY_INFINITE);
    assert_eq!((announced(&mut machine), machine.lacks_region()), (None, None));
    assert_eq!(machine.land(region(7), 100), Ok(None), "the length of windows is not known yet");
    let mut hasty = machine;
    hasty.handle_immediate(NOW, Immediate(1));
    let no_window = PeerMisbehaved::NoWindow { immediate: 1 };
    assert_eq!(hasty.failure(), Some(&Error::PeerMisbehaved(no_window)), "VR-FLOW-003");
    machine.handle_immediate(NOW, Immediate(0));
    assert_eq!((announced(&mut machine), machine.failure()), (None, None));

    machine.open_window(region(1), WINDOW, WINDOW);
    machine.open_window(region(2), 2 * WINDOW, 2 * WINDOW);
    assert_eq!((announced(&mut machine), announced(&mut machine)), (window(1), None));
    machine.handle_immediate(NOW, Immediate(WINDOW));
    assert_eq!(machine.lacks_region(), Some(1));
    machine.consume(WINDOW).expect("there are as many");
    assert_eq!(announced(&mut machine), window(1));
}

/// VR-MEM-020, VR-MEM-010: in the same region, when it was filled and read, and never beyond it.
#[test]
fn a_servers_window_grows() {
    let config = quiet(Config::server()).window(WINDOW).windows(1).grow_to(Some(3 * WINDOW));
    let grown = |length| window(1).map(|window| Window { length, ..window });
    let mut machine = Machine::new(config, [region(1), RegionAddress::default()]).expect("in bounds");
    machine.handle_established(NOW, RNR_RETRY_INFINITE);
    for length in [WINDOW, 2 * WINDOW, 3 * WINDOW, 3 * WINDOW] {
        assert_eq!(announced(&mut machine), grown(length));
        machine.handle_immediate(NOW, Immediate(length));
        assert_eq!((announced(&mut machine), machine.lacks_region()), (None, None), "it is unread");
        assert_eq!(machine.readable(), Some(Readable { region: 0, offset: 0, len: length }));
        machine.consume(length).expect("there are as many");
    }
    assert_eq!(announced(&mut machine), grown(3 * WINDOW));
    machine.handle_immediate(NOW, Immediate(3 * WINDOW + 1));
    let overrun = PeerMisbehaved::WindowOverrun { immediate: 25, received: 0, length: 3 * WINDOW };
    assert_eq!(machine.failure(), Some(&Error::PeerMisbehaved(overrun)));

    // A region that is shorter than agreed has less room to grow, or none. A client's window keeps
    // its length (VR-MEM-008).
    let client = config.role(rdma_proto::Role::Client);
    for (config, length, region_length, longest) in [
        (config, WINDOW / 2, WINDOW / 2, WINDOW / 2),
        (config, WINDOW, WINDOW, WINDOW),
        (config, WINDOW, WINDOW + 1, WINDOW + 1),
        (config, WINDOW, u32::MAX, 2 * WINDOW),
        (client, WINDOW, 3 * WINDOW, WINDOW),
    ] {
        let mut machine = Machine::new(config, Default::default()).expect("in bounds");
        machine.withhold_window();
        machine.handle_established(NOW, RNR_RETRY_INFINITE);
        machine.open_window(region(1), length, region_length);
        for length in [length, longest] {
            assert_eq!(announced(&mut machine), grown(length));
            machine.handle_immediate(NOW, Immediate(length));
            machine.consume(length).expect("there are as many");
        }
    }
    assert_eq!((config.region(), client.region()), (3 * WINDOW, WINDOW));

    for wrong in [config.windows(2), client.windows(2), config.grow_to(Some(WINDOW - 1))] {
        let refused = Machine::new(wrong, Default::default()).err();
        assert!(matches!(refused, Some(ApiMisuse::Config { field: "grow_to", .. })), "{refused:?}");
    }
}
