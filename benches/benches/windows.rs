//! The offset machines: one notification of 64 bytes, in and out, with the change of windows of 1 MiB that it brings.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rdma_proto::window::{RxWindow, TxWindow};
use rdma_proto::wire::Window;

const WINDOW: Window = Window { address: 0x7f12_3456_0000, length: 1 << 20, rkey: 0xabcd };
const BYTES: u32 = 64;

fn windows(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("window");
    group.throughput(Throughput::Elements(1));

    for regions in [1, 2] {
        let mut rx = RxWindow::new(WINDOW.length, regions);
        group.bench_function(format!("receive and consume, {regions} regions"), |bencher| {
            bencher.iter(|| {
                if let Some(region) = rx.unannounced() {
                    black_box(region);
                    rx.announce();
                }
                rx.receive(black_box(BYTES)).expect("within the window");
                let readable = black_box(rx.readable()).expect("what was just received");
                rx.consume(readable.len).expect("what is readable");
            });
        });
    }

    let mut tx = TxWindow::new();
    group.bench_function("take", |bencher| {
        bencher.iter(|| {
            if tx.room() == 0 {
                tx.register(black_box(WINDOW), WINDOW.length).expect("a window like any");
            }
            tx.take(black_box(BYTES))
        });
    });
    group.finish();
}

criterion_group!(benches, windows);
criterion_main!(benches);
