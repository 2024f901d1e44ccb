//! Control messages: 32 bytes in, 32 bytes out.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rdma_proto::wire::{FeatureSet, MESSAGE_LEN, Message, Window};

const MESSAGES: [(&str, Message); 3] = [
    ("features", Message::GetServerFeature { select: 0, features: FeatureSet(5) }),
    ("keepalive", Message::Keepalive),
    (
        "register",
        Message::RegisterXferMemory(Window { address: 0x7f12_3456_0000, length: 1 << 20, rkey: 0xabcd }),
    ),
];

fn codec(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("encode");
    group.throughput(Throughput::Bytes(MESSAGE_LEN as u64));
    for (name, message) in MESSAGES {
        group.bench_function(name, |bencher| bencher.iter(|| black_box(message).encode()));
    }
    group.finish();

    let mut group = criterion.benchmark_group("decode");
    group.throughput(Throughput::Bytes(MESSAGE_LEN as u64));
    for (name, message) in MESSAGES {
        let bytes = message.encode();
        group.bench_function(name, |bencher| bencher.iter(|| Message::decode(black_box(&bytes))));
    }
    group.finish();
}

criterion_group!(benches, codec);
criterion_main!(benches);
