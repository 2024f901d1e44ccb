//! Copies into and out of memory that a peer may change, beside copies of private memory.

use std::hint::black_box;
use std::sync::atomic::AtomicU8;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rdma_backend::memory::SharedMemory;

const SIZES: [usize; 4] = [64, 4 << 10, 64 << 10, 16 << 20];

fn memory(criterion: &mut Criterion) {
    let bytes: Vec<AtomicU8> = (0..SIZES[3] + 8).map(|_| AtomicU8::new(0)).collect();
    let shared = SharedMemory::new(&bytes);
    // Not zeroes: unwritten, those would be one shared page, which stays in the processor's cache.
    let mut plain = vec![2_u8; SIZES[3]];
    let mut local = vec![1_u8; SIZES[3]];

    let mut group = criterion.benchmark_group("copy out");
    for size in SIZES {
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_with_input(BenchmarkId::new("shared", size), &size, |bencher, size| {
            bencher.iter(|| assert!(black_box(&shared).read(0, black_box(&mut local[..*size]))));
        });
        group.bench_with_input(BenchmarkId::new("shared, unaligned", size), &size, |bencher, size| {
            bencher.iter(|| assert!(black_box(&shared).read(3, black_box(&mut local[..*size]))));
        });
        group.bench_with_input(BenchmarkId::new("plain", size), &size, |bencher, size| {
            bencher.iter(|| black_box(&mut local[..*size]).copy_from_slice(black_box(&plain[..*size])));
        });
    }
    group.finish();

    let mut group = criterion.benchmark_group("copy in");
    for size in SIZES {
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_with_input(BenchmarkId::new("shared", size), &size, |bencher, size| {
            bencher.iter(|| assert!(black_box(&shared).write(0, black_box(&local[..*size]))));
        });
        group.bench_with_input(BenchmarkId::new("shared, unaligned", size), &size, |bencher, size| {
            bencher.iter(|| assert!(black_box(&shared).write(3, black_box(&local[..*size]))));
        });
        group.bench_with_input(BenchmarkId::new("plain", size), &size, |bencher, size| {
            bencher.iter(|| black_box(&mut plain[..*size]).copy_from_slice(black_box(&local[..*size])));
        });
    }
    group.finish();
}

criterion_group!(benches, memory);
criterion_main!(benches);
