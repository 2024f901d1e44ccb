//! Work for an instruction counter: `machine N` sends and receives N messages of 64 bytes through one connection machine and
//! a peer that acknowledges at once.

use std::hint::black_box;

use rdma_proto::backend::{Immediate, RNR_RETRY_INFINITE};
use rdma_proto::time::Instant;
use rdma_proto::wire::{Message, Window};
use rdma_proto::{Action, Config, Connection, RegionAddress};

const BYTES: u32 = 64;
const WINDOW: Window = Window { address: 0x7f12_3456_0000, length: 1 << 24, rkey: 0xabcd };

fn post(machine: &mut Connection, now: Instant) {
    while let Some(action) = machine.poll_action(now) {
        match black_box(action) {
            Action::Send { id, signaled: true, .. } | Action::Write { id, signaled: true, .. } => {
                machine.handle_sent(now, id);
            }
            _ => {}
        }
    }
}

fn main() {
    let n: u32 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let regions = [RegionAddress { address: 0x1000, rkey: 1 }, RegionAddress { address: 0x20_0000, rkey: 2 }];
    let mut machine = Connection::new(Config::client(), regions).expect("the usual settings");
    let now = Instant::default();
    machine.handle_established(now, RNR_RETRY_INFINITE);
    machine.handle_message(now, &Message::RegisterXferMemory(WINDOW).encode());
    post(&mut machine, now);
    for _ in 0..n {
        // What a connection does for a request: space, copy, commit, post.
        let space = black_box(machine.space());
        machine.commit(BYTES.min(space.len) as usize).expect("there is space");
        post(&mut machine, now);
        black_box(machine.next_timeout());
        // And for a reply: one completion, then the read.
        machine.handle_immediate(now, black_box(Immediate(BYTES)));
        post(&mut machine, now);
        let readable = black_box(machine.readable()).expect("what just came");
        machine.consume(readable.len).expect("what is readable");
        post(&mut machine, now);
        black_box(machine.next_timeout());
    }
}
