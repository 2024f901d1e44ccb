//! The connection machine: its cost per message, without the verbs calls that follow from it.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rdma_backend::time::Instant;
use rdma_backend::{Immediate, RNR_RETRY_INFINITE};
use rdma_proto::wire::{Message, Window};
use rdma_proto::{Action, Config, Machine, RegionAddress};

const BYTES: u32 = 64;
/// The peer's window. It is as long as possible, so that the measurement contains few renewals.
const WINDOW: Window = Window { address: 0x7f12_3456_0000, length: 1 << 24, rkey: 0xabcd };

/// A client's machine, and a peer that acknowledges at once and always grants room.
struct Driver {
    machine: Machine,
    now: Instant,
    room: u32,
}

impl Driver {
    fn new() -> Self {
        let regions =
            [RegionAddress { address: 0x1000, rkey: 1 }, RegionAddress { address: 0x20_0000, rkey: 2 }];
        let mut machine = Machine::new(Config::client(), regions).expect("the usual settings");
        let now = Instant::default();
        machine.handle_established(now, RNR_RETRY_INFINITE);
        let mut driver = Self { machine, now, room: 0 };
        driver.register();
        driver.post();
        driver
    }

    fn register(&mut self) {
        self.machine.handle_message(self.now, &Message::RegisterXferMemory(WINDOW).encode());
        self.room = WINDOW.length;
    }

    fn post(&mut self) {
        while let Some(action) = self.machine.poll_action(|| self.now) {
            match black_box(action) {
                Action::Send { id, signaled: true, .. } | Action::Write { id, signaled: true, .. } => {
                    self.machine.handle_sent(self.now, id);
                }
                Action::Send { .. } | Action::Write { .. } => {}
                Action::Disconnect => unreachable!("nothing here ends"),
            }
        }
    }

    fn write(&mut self) {
        if self.room < BYTES {
            self.register();
        }
        self.room -= BYTES;
        let space = black_box(self.machine.space());
        self.machine.commit(BYTES.min(space.len) as usize).expect("there is space");
        self.post();
    }

    fn read(&mut self) {
        self.machine.handle_immediate(self.now, black_box(Immediate(BYTES)));
        let readable = black_box(self.machine.readable()).expect("what just came");
        self.machine.consume(readable.len).expect("what is readable");
        self.post();
    }
}

fn machine(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("machine");
    group.throughput(Throughput::Elements(1));
    group.bench_function("write 64 B", |bencher| {
        let mut driver = Driver::new();
        bencher.iter(|| driver.write());
    });
    group.bench_function("read 64 B", |bencher| {
        let mut driver = Driver::new();
        bencher.iter(|| driver.read());
    });
    group.bench_function("request and reply of 64 B", |bencher| {
        let mut driver = Driver::new();
        bencher.iter(|| {
            driver.write();
            driver.read();
        });
    });
    group.bench_function("new", |bencher| bencher.iter(Driver::new));
    group.finish();
}

criterion_group!(benches, machine);
criterion_main!(benches);
