//! A stream over the embedded fabric beside a TCP stream over loopback, in one run: the same request and reply between the
//! same two threads.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rdma_conn::{Listener, Options, Stream};
use rdma_softsim::{Fabric, SoftSim};

/// Answers each `len` bytes with as many, until the client leaves.
fn echo(mut stream: impl Read + Write, len: usize) {
    let mut bytes = vec![0; len];
    while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok() {}
}

fn softsim(len: usize) -> Stream<SoftSim> {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener =
        Listener::bind(&fabric.host(&[address.ip()]), address, Options::server()).expect("listens");
    thread::spawn(move || echo(listener.accept().expect("accepts").0, len));
    Stream::connect(&fabric.host(&[[192, 0, 2, 2].into()]), address).expect("connects")
}

fn tcp(len: usize) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
    let address = listener.local_addr().expect("is bound");
    thread::spawn(move || {
        let (stream, _) = listener.accept().expect("accepts");
        stream.set_nodelay(true).expect("is a socket");
        echo(stream, len);
    });
    let stream = TcpStream::connect(address).expect("connects");
    stream.set_nodelay(true).expect("is a socket");
    stream
}

fn round_trip(mut stream: impl Read + Write, bytes: &mut [u8]) -> impl FnMut() {
    move || {
        stream.write_all(bytes).expect("written");
        stream.read_exact(bytes).expect("read");
        black_box(&bytes);
    }
}

fn streams(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("stream round trip");
    for len in [64, 1 << 10, 16 << 10, 1 << 20] {
        group.throughput(Throughput::Bytes(2 * len as u64));
        let mut bytes = vec![0x5a; len];
        group.bench_function(BenchmarkId::new("softsim", len), |bencher| {
            bencher.iter(round_trip(softsim(len), &mut bytes));
        });
        group.bench_function(BenchmarkId::new("TCP loopback", len), |bencher| {
            bencher.iter(round_trip(tcp(len), &mut bytes));
        });
    }
    group.finish();
}

criterion_group!(benches, streams);
criterion_main!(benches);
