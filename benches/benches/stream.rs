//! A stream over the embedded fabric beside TCP over loopback and a Unix socket, in one run: equal
//! requests and replies between two threads; and one direction, beside `memcpy`.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rdma_conn::{Connect, Listener, Options, RegisteredBuffer, Stream};
use rdma_proto::wire::FeatureSet;
use rdma_softsim::{Fabric, SoftSim};

fn echo(mut stream: impl Read + Write, len: usize) {
    let mut bytes = vec![0; len];
    while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok() {}
}

/// A client's stream to a thread that echoes. Both sides busy-poll for `spin` before they sleep.
fn softsim(len: usize, spin: Duration) -> Stream<SoftSim> {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind_with(
        &fabric.host(&[address.ip()]),
        address,
        Options::default().spin(spin),
        rdma_conn::Limits::default(),
    )
    .expect("listens");
    thread::spawn(move || echo(listener.accept().expect("accepts").0, len));
    let how = Connect::default().options(Options::default().spin(spin));
    Stream::connect_with(&fabric.host(&[[192, 0, 2, 2].into()]), address, &how).expect("connects")
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

fn unix(len: usize) -> UnixStream {
    let (client, server) = UnixStream::pair().expect("sockets");
    thread::spawn(move || echo(server, len));
    client
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
        for (name, spin) in [("softsim", Duration::ZERO), ("softsim, spinning", Duration::from_micros(100))] {
            group.bench_function(BenchmarkId::new(name, len), |bencher| {
                bencher.iter(round_trip(softsim(len, spin), &mut bytes));
            });
        }
        group.bench_function(BenchmarkId::new("Unix socket", len), |bencher| {
            bencher.iter(round_trip(unix(len), &mut bytes));
        });
        group.bench_function(BenchmarkId::new("TCP loopback", len), |bencher| {
            bencher.iter(round_trip(tcp(len), &mut bytes));
        });
    }
    group.finish();
}

/// Bytes of a stream that are timed together, and of each write. A part fills four windows. All
/// received data lands, except in windows that were announced before.
const BULK: usize = 64 << 20;
const PART: usize = 4 << 20;

/// Announces a window before the last one is full (`spec/multi-buffer.md`): none ends with a stop.
fn ahead(options: Options) -> Options {
    options.protocol(options.protocol.features(FeatureSet::MULTI_BUFFER).negotiate(true))
}

/// One direction, beside a copy of the same length in parts of the same length: *copied* is `write`
/// and `read`, *lent* sends from registered memory and receives into registered memory.
fn bulk(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("stream one way");
    group.throughput(Throughput::Bytes(BULK as u64));
    group.sample_size(10);
    for (name, lent) in [("softsim, copied", false), ("softsim, lent", true)] {
        for (waiting, spin) in [("sleeping", Duration::ZERO), ("spinning", Duration::from_micros(100))] {
            group.bench_function(BenchmarkId::new(name, waiting), |bencher| {
                let mut stream = sink(lent, spin);
                let bytes = vec![0x5a; PART];
                let memory = [(); 2].map(|()| Arc::new(stream.register_buffer(PART).expect("memory")));
                bencher.iter(|| {
                    for part in 0..BULK / PART {
                        if lent {
                            lend(&mut stream, &memory[part % 2]);
                        } else {
                            stream.write_all(&bytes).expect("written");
                        }
                    }
                    stream.read_exact(&mut [0]).expect("the other side has all of it");
                });
            });
        }
    }
    let (from, mut to) = (vec![0x5a_u8; PART], vec![1_u8; PART]);
    group.bench_function("memcpy", |bencher| {
        bencher.iter(|| (0..BULK / PART).for_each(|_| black_box(&mut to).copy_from_slice(black_box(&from))));
    });
    group.finish();
}

fn lend(stream: &mut Stream<SoftSim>, memory: &Arc<RegisteredBuffer<SoftSim>>) {
    stream.returned(memory).expect("the peer reads");
    let mut at = 0;
    while at < PART {
        at += stream.lend(memory, at..PART).expect("the peer reads");
    }
}

/// Returns the client's stream to a thread that answers each [`BULK`] bytes with one byte.
fn sink(lent: bool, spin: Duration) -> Stream<SoftSim> {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind_with(
        &fabric.host(&[address.ip()]),
        address,
        ahead(Options::default().spin(spin)),
        rdma_conn::Limits::default(),
    )
    .expect("listens");
    thread::spawn(move || {
        let mut stream = listener.accept().expect("accepts").0;
        let mut bytes = vec![0; PART];
        let memory = Arc::new(stream.register_landing(PART).expect("memory"));
        loop {
            for _ in 0..BULK / PART {
                let taken = if lent {
                    stream.receive(&memory, 0..PART).is_ok()
                } else {
                    stream.read_exact(&mut bytes).is_ok()
                };
                if !taken {
                    return;
                }
            }
            if stream.write_all(b".").is_err() {
                return;
            }
        }
    });
    let how = Connect::default().options(ahead(Options::default().spin(spin)));
    Stream::connect_with(&fabric.host(&[[192, 0, 2, 2].into()]), address, &how).expect("connects")
}

criterion_group!(benches, streams, bulk);
criterion_main!(benches);
