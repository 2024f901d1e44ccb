//! The work of `benches/peer/libvalkey.c`, on `rdma-verbs`. `benches/peer/run` counts it.
//!
//! ```text
//! peer stream ROUNDS      a request of 64 bytes and its answer, which is there when it is read
//! peer endpoint ROUNDS    such a request and its answer, by an event loop on an endpoint
//! peer pieces ROUNDS      16 requests written as one, then their 16 answers read together
//! peer waits ROUNDS       a request whose answer comes when the client waits, by an event
//! peer spins ROUNDS       a request whose answer comes after the client has looked three times
//! peer value ROUNDS       GET of a value of 32 MiB, into a registered buffer
//! ```

use std::io::{IoSlice, Read, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use rdma_conn::{Connect, ConnectionId, Endpoint, Event, Limits, Options, Stream};
use rdma_kv::{Buffer, Client, Transport};
use rdma_verbs::Verbs;

const LEN: usize = 64;
const MANY: usize = 16;
const VALUE: usize = 32 << 20;

/// Longer than any delay of the device.
const SPIN: Duration = Duration::from_secs(10);

type Piece = [u8; LEN];

#[inline(never)]
fn measured_write(stream: &mut Stream<Verbs>, request: &Piece) {
    assert_eq!(stream.write(request).expect("written"), LEN);
}

#[inline(never)]
fn measured_read(stream: &mut Stream<Verbs>, answer: &mut Piece) {
    stream.read_exact(answer).expect("read");
}

#[inline(never)]
fn measured_pieces_write(stream: &mut Stream<Verbs>, pieces: &[IoSlice<'_>; MANY]) {
    assert_eq!(stream.write_vectored(pieces).expect("written"), MANY * LEN);
}

#[inline(never)]
fn measured_endpoint_write(endpoint: &mut Endpoint<Verbs>, id: ConnectionId, request: &Piece) {
    assert_eq!(endpoint.write(id, &[IoSlice::new(request)]).expect("written"), Some(LEN));
}

#[inline(never)]
fn measured_endpoint_read(endpoint: &mut Endpoint<Verbs>, answer: &mut Piece) -> usize {
    endpoint.progress().expect("goes on");
    let mut answers = 0;
    while let Some(event) = endpoint.next_event() {
        if let Event::Readable(id) = event {
            answers += usize::from(endpoint.read(id, answer).expect("read") == Some(LEN));
        }
    }
    answers
}

/// One read takes many answers, each with a completion.
#[inline(never)]
fn measured_many_read(stream: &mut Stream<Verbs>, answers: &mut [u8; MANY * LEN]) {
    stream.read_exact(answers).expect("read");
}

fn connect(options: Options) -> Stream<Verbs> {
    let verbs = Verbs::load().expect("the device of benches/peer");
    let how = Connect::default().options(options);
    let mut stream = Stream::connect_with(&verbs, "192.0.2.1:6379", &how).expect("connects");
    // The first write registers the send buffer.
    stream.write_all(&[b'a'; LEN]).expect("written");
    stream.read_exact(&mut [0; LEN]).expect("read");
    stream
}

fn requests(rounds: usize, when: u8, options: Options) {
    let mut stream = connect(options);
    let mut answer = [0; LEN];
    for _ in 0..rounds {
        measured_write(&mut stream, &[when; LEN]);
        measured_read(&mut stream, &mut answer);
        assert_eq!(answer, [b'r'; LEN]);
    }
    std::mem::forget(stream);
}

/// Sixteen requests as pieces of one write, which is one notification; then as many writes, whose
/// answers are read together.
fn pieces(rounds: usize) {
    let mut stream = connect(Options::default());
    let piece: Piece = [b'a'; LEN];
    let mut answers = [0; MANY * LEN];
    for _ in 0..rounds {
        measured_pieces_write(&mut stream, &[IoSlice::new(&piece); MANY]);
        stream.read_exact(&mut answers[..LEN]).expect("read");
        for number in 1..=MANY {
            stream.write_all(&[if number < MANY { b'l' } else { b'a' }; LEN]).expect("written");
        }
        measured_many_read(&mut stream, &mut answers);
    }
    std::mem::forget(stream);
}

fn endpoint(rounds: usize) {
    let verbs = Verbs::load().expect("the device of benches/peer");
    let mut endpoint = Endpoint::new(&verbs, Limits::default()).expect("an endpoint");
    let peer = SocketAddr::from(([192, 0, 2, 1], 6379));
    let id = endpoint.connect(peer, None, Duration::from_secs(5), Options::default()).expect("begins");
    let mut answer = [0; LEN];
    while !endpoint.is_open(id) {
        endpoint.progress().expect("goes on");
        while endpoint.next_event().is_some() {}
    }
    for round in 0..=rounds {
        if round == 0 {
            assert_eq!(endpoint.write(id, &[IoSlice::new(&[b'a'; LEN])]).expect("written"), Some(LEN));
        } else {
            measured_endpoint_write(&mut endpoint, id, &[b'a'; LEN]);
        }
        let mut answers = 0;
        while answers == 0 {
            answers = measured_endpoint_read(&mut endpoint, &mut answer);
        }
    }
    std::mem::forget(endpoint);
}

#[inline(never)]
fn measured_value(client: &mut Client<Stream<Verbs>>, buffer: &mut <Stream<Verbs> as Transport>::Buffer) {
    assert_eq!(client.get_into(b"key", buffer, 0..VALUE).expect("got"), Some(VALUE));
}

fn value(rounds: usize) {
    let mut client = Client::new(connect(rdma_kv::options()));
    let mut buffer = client.buffer(VALUE).expect("memory");
    for _ in 0..rounds {
        measured_value(&mut client, &mut buffer);
        let mut last = [0];
        assert!(buffer.read(VALUE - 1, &mut last) && last == *b"v");
    }
    assert!(client.counts().bytes_landed >= (rounds * (VALUE - (2 << 20))) as u64, "{:?}", client.counts());
    std::mem::forget(client);
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (what, rounds) = (arguments.next(), arguments.next().and_then(|rounds| rounds.parse().ok()));
    let rounds = rounds.unwrap_or(1000);
    match what.as_deref() {
        Some("stream") => requests(rounds, b'a', Options::default()),
        Some("waits") => requests(rounds, b'w', Options::default()),
        Some("spins") => requests(rounds, b's', Options::default().spin(SPIN)),
        Some("pieces") => pieces(rounds),
        Some("endpoint") => endpoint(rounds),
        Some("value") => value(rounds),
        _ => {
            eprintln!("usage: peer stream|endpoint|pieces|waits|spins|value ROUNDS");
            return ExitCode::from(64);
        }
    }
    ExitCode::SUCCESS
}
