//! A second receive region that comes and goes.

use core::time::Duration;

use rdma_proto::backend::{Immediate, RNR_RETRY_INFINITE};
use rdma_proto::time::Instant;
use rdma_proto::wire::{Message, Window};
use rdma_proto::{Action, Config, Machine, Readable, RegionAddress};

use crate::pair::quiet;

const WINDOW: u32 = 8;
const NOW: Instant = Instant::from_start(Duration::ZERO);

/// The window that the machine announces now.
fn announced(machine: &mut Machine) -> Option<Window> {
    let Some(Action::Send { message, .. }) = machine.poll_action(NOW) else { return None };
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

/// VR-MEM-003, VR-MEM-010: a region that is added while the first is full of unread bytes is announced at once, and either
/// may go once it is read.
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

    // From here on there is one again, and it is the other one.
    machine.handle_immediate(NOW, Immediate(WINDOW - 3));
    assert_eq!((machine.lacks_region(), announced(&mut machine)), (Some(0), None));
    machine.add_region(region(3));
    assert_eq!(announced(&mut machine), window(3));
}
