//! What a request of 64 B and its reply cost a program whose buffer has much spare capacity, and on
//! a connection that has carried a long value. For `benches/instructions`.
//!
//! ```text
//! capacity ROUNDS FACE          the buffer has room for 64 KiB
//! capacity ROUNDS FACE after    it has room for 16 MiB, and 64 MiB were received before
//! capacity                      prints the bytes that stay allocated after 64 MiB
//! ```
//!
//! Both ends and the device run on one thread in virtual time, as in `instructions.rs`. callgrind
//! collects the functions `measured_…`.

use std::future::Future;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use allocation_counter::measure;
use bytes::BytesMut;
use rdma_conn::{AsyncStream, ConnectionId, Endpoint, Event, Limits as Share, Options, Stream};
use rdma_kv::{Client, Transport};
use rdma_server::{Flow, Rdma, Replies, Server, ServerSettings, Service, SessionId};
use rdma_softsim::{DeviceKind, FaultPlan, Limits, Simulation, SimulationSettings, SoftSim};
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, RedisConnectionInfo, RedisResult, Value};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::Runtime;

const LEN: usize = 64;
const SMALL: usize = 64 << 10;
const LARGE: usize = 16 << 20;
const VALUE: usize = 64 << 20;
/// Before what stays allocated is counted, so much has filled each window.
const FIRST: usize = 4 << 20;

const ADDRESS: ([u8; 4], u16) = ([192, 0, 2, 1], 6379);
type Piece = [u8; LEN];

fn simulation() -> Simulation {
    Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), FaultPlan::new())
}

/// Advances time until everything that follows from the posted requests has happened.
fn settle(sim: &Simulation) {
    let until = sim.now().after(Duration::from_millis(1));
    while sim.deadline().is_some_and(|at| at <= until) {
        sim.step();
    }
    // It would count as memory that a value leaves.
    drop(sim.take_trace());
}

/// A program's use of a connection.
trait Face {
    /// Gives it a buffer with room for `len` bytes.
    fn room(&mut self, len: usize);

    /// Sends a request of 64 B, has `peer` answer it, and receives the reply.
    fn round(&mut self, peer: &mut Peer);

    /// Receives a value.
    fn value(&mut self, peer: &mut Peer, len: usize);
}

/// The other end, which discards what it receives.
struct Peer {
    sim: Simulation,
    endpoint: Endpoint<SoftSim>,
    id: Option<ConnectionId>,
}

impl Peer {
    fn new() -> Self {
        let sim = simulation();
        let host = sim.host(&[ADDRESS.0.into()], Limits::default());
        let mut endpoint = Endpoint::new(&host, Share::default()).expect("an endpoint");
        endpoint.listen(ADDRESS.into(), Options::default()).expect("a free address");
        Self { sim, endpoint, id: None }
    }

    /// Connects a program's endpoint, on a host of its own.
    fn connect(&mut self, options: Options) -> (Endpoint<SoftSim>, ConnectionId) {
        let host = self.sim.host(&[[192, 0, 2, 2].into()], Limits::default());
        let mut client = Endpoint::new(&host, Share::default()).expect("an endpoint");
        let limit = Duration::from_secs(60);
        let id = client.connect(SocketAddr::from(ADDRESS), None, limit, options).expect("begins");
        self.id = None;
        while self.id.is_none() || !client.is_open(id) {
            client.progress().expect("goes on");
            while client.next_event().is_some() {}
            self.settle();
        }
        (client, id)
    }

    /// Has everything happen that follows from what both ends did.
    fn settle(&mut self) {
        for _ in 0..2 {
            settle(&self.sim);
            self.endpoint.progress().expect("goes on");
            while let Some(event) = self.endpoint.next_event() {
                if let Event::Opened { id, .. } = event {
                    self.id = Some(id);
                }
            }
            let Some(id) = self.id else { continue };
            let unread = self.endpoint.connection(id).map_or(0, |connection| connection.unread());
            self.endpoint.consume(id, unread as usize).expect("it is there");
        }
    }

    /// Sends as many of these bytes as there is room for.
    fn send(&mut self, pieces: &[&[u8]]) -> usize {
        let id = self.id.expect("connected");
        let pieces: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let sent = self.endpoint.write(id, &pieces).expect("goes on").unwrap_or(0);
        self.settle();
        sent
    }

    /// Sends `head`, `len` bytes and `tail`, while `take` takes what has arrived.
    fn send_long(&mut self, head: &[u8], len: usize, tail: &[u8], mut take: impl FnMut(&mut Self)) {
        let some = vec![0x5a; 1 << 20];
        assert_eq!(self.send(&[head]), head.len());
        let mut left = len;
        while left > 0 {
            left -= self.send(&[&some[..left.min(some.len())]]);
            take(self);
        }
        while self.send(&[tail]) < tail.len() {
            take(self);
        }
        take(self);
    }
}

struct OnStream(Stream<SoftSim>, Vec<u8>);

#[inline(never)]
fn measured_stream_write(stream: &mut Stream<SoftSim>, request: &Piece) {
    assert_eq!(stream.write(request).expect("written"), LEN);
}

#[inline(never)]
fn measured_stream_read(stream: &mut Stream<SoftSim>, room: &mut [u8]) {
    assert_eq!(stream.read(room).expect("read"), LEN);
}

impl Face for OnStream {
    fn room(&mut self, len: usize) {
        self.1 = vec![0; len];
    }

    fn round(&mut self, peer: &mut Peer) {
        measured_stream_write(&mut self.0, &[0x5a; LEN]);
        assert_eq!(peer.send(&[&[0x5a; LEN]]), LEN);
        measured_stream_read(&mut self.0, &mut self.1);
    }

    fn value(&mut self, peer: &mut Peer, len: usize) {
        let Self(stream, room) = self;
        let mut left = len;
        stream.set_read_timeout(Some(Duration::ZERO));
        peer.send_long(b"", len, b"", |_| {
            while let Ok(read) = stream.read(room) {
                left -= read;
            }
        });
        stream.set_read_timeout(None);
        assert_eq!(left, 0);
    }
}

struct OnEndpoint(Endpoint<SoftSim>, ConnectionId, Vec<u8>);

#[inline(never)]
fn measured_endpoint_write(endpoint: &mut Endpoint<SoftSim>, id: ConnectionId, request: &Piece) {
    assert_eq!(endpoint.write(id, &[IoSlice::new(request)]).expect("written"), Some(LEN));
}

#[inline(never)]
fn measured_endpoint_read(endpoint: &mut Endpoint<SoftSim>, room: &mut [u8]) {
    endpoint.progress().expect("goes on");
    while let Some(event) = endpoint.next_event() {
        if let Event::Readable(id) = event {
            assert_eq!(endpoint.read(id, room).expect("read"), Some(LEN));
        }
    }
}

impl Face for OnEndpoint {
    fn room(&mut self, len: usize) {
        self.2 = vec![0; len];
    }

    fn round(&mut self, peer: &mut Peer) {
        measured_endpoint_write(&mut self.0, self.1, &[0x5a; LEN]);
        assert_eq!(peer.send(&[&[0x5a; LEN]]), LEN);
        measured_endpoint_read(&mut self.0, &mut self.2);
    }

    fn value(&mut self, peer: &mut Peer, len: usize) {
        let Self(endpoint, id, room) = self;
        peer.send_long(b"", len, b"", |_| {
            endpoint.progress().expect("goes on");
            while endpoint.next_event().is_some() {}
            while endpoint.read(*id, room).expect("read").is_some() {}
        });
        endpoint.progress().expect("goes on");
        while endpoint.next_event().is_some() {}
    }
}

/// Polls in a runtime that does not run: what the device has done is found by the poll itself.
struct OnAsyncStream(AsyncStream<SoftSim>, Box<[MaybeUninit<u8>]>);

#[inline(never)]
fn measured_async_write(stream: &mut AsyncStream<SoftSim>, request: &Piece) {
    let mut cx = Context::from_waker(Waker::noop());
    assert!(matches!(Pin::new(stream).poll_write(&mut cx, request), Poll::Ready(Ok(LEN))));
}

/// Reads as a decoder does, into the uninitialised rest of a buffer.
#[inline(never)]
fn measured_async_read(stream: &mut AsyncStream<SoftSim>, room: &mut [MaybeUninit<u8>]) -> usize {
    let mut into = ReadBuf::uninit(room);
    let mut cx = Context::from_waker(Waker::noop());
    match Pin::new(stream).poll_read(&mut cx, &mut into) {
        Poll::Ready(read) => read.map(|()| into.filled().len()).expect("read"),
        Poll::Pending => 0,
    }
}

impl Face for OnAsyncStream {
    fn room(&mut self, len: usize) {
        self.1 = Box::new_uninit_slice(len);
    }

    fn round(&mut self, peer: &mut Peer) {
        measured_async_write(&mut self.0, &[0x5a; LEN]);
        assert_eq!(peer.send(&[&[0x5a; LEN]]), LEN);
        assert_eq!(measured_async_read(&mut self.0, &mut self.1), LEN);
    }

    fn value(&mut self, peer: &mut Peer, len: usize) {
        let Self(stream, room) = self;
        let mut cx = Context::from_waker(Waker::noop());
        let mut left = len;
        peer.send_long(b"", len, b"", |_| {
            let mut read = 1;
            while read > 0 {
                let mut into = ReadBuf::uninit(room);
                let polled = Pin::new(&mut *stream).poll_read(&mut cx, &mut into);
                assert!(!matches!(polled, Poll::Ready(Err(_))), "{polled:?}");
                read = into.filled().len();
                left -= read;
            }
        });
        assert_eq!(left, 0);
    }
}

type Buffer = <Stream<SoftSim> as Transport>::Buffer;

/// The reply is there when the client asks.
struct OnKv(Client<Stream<SoftSim>>, Buffer, usize);

#[inline(never)]
fn measured_kv(client: &mut Client<Stream<SoftSim>>, buffer: &mut Buffer, room: usize) -> Option<usize> {
    client.get_into(b"key", buffer, 0..room).expect("got")
}

impl Face for OnKv {
    fn room(&mut self, len: usize) {
        self.1 = self.0.buffer(len).expect("memory");
        self.2 = len;
    }

    fn round(&mut self, peer: &mut Peer) {
        let reply = [&b"$64\r\n"[..], &[0x5a; LEN], b"\r\n"].concat();
        assert_eq!(peer.send(&[&reply]), reply.len());
        assert_eq!(measured_kv(&mut self.0, &mut self.1, self.2), Some(LEN));
        peer.settle();
    }

    fn value(&mut self, peer: &mut Peer, len: usize) {
        let mut buffer = self.0.buffer(len).expect("memory");
        thread::scope(|scope| {
            let getting = scope.spawn(|| self.0.get_into(b"key", &mut buffer, 0..len).expect("got"));
            peer.send_long(format!("${len}\r\n").as_bytes(), len, b"\r\n", |_| thread::yield_now());
            while !getting.is_finished() {
                peer.settle();
                thread::yield_now();
            }
            assert_eq!(getting.join().expect("no panic"), Some(len));
        });
    }
}

/// redis-rs's decoder keeps its buffer: spare capacity that a program does not choose.
struct OnRedis {
    connection: MultiplexedConnection,
    driver: Pin<Box<dyn Future<Output = ()>>>,
    command: Cmd,
}

/// Gives a request to the connection, or takes the reply.
#[inline(never)]
fn measured_redis(
    mut driver: Pin<&mut dyn Future<Output = ()>>,
    mut request: Pin<&mut dyn Future<Output = RedisResult<Value>>>,
) -> Poll<RedisResult<Value>> {
    let mut cx = Context::from_waker(Waker::noop());
    if let Poll::Ready(reply) = request.as_mut().poll(&mut cx) {
        return Poll::Ready(reply);
    }
    assert!(driver.as_mut().poll(&mut cx).is_pending(), "the connection has ended");
    request.as_mut().poll(&mut cx)
}

impl OnRedis {
    fn new(stream: AsyncStream<SoftSim>, peer: &mut Peer) -> Self {
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let info = RedisConnectionInfo::default();
        let mut connecting = pin!(MultiplexedConnection::new_with_config(&info, stream, config));
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..2 {
            if let Poll::Ready(connected) = connecting.as_mut().poll(&mut cx) {
                let (connection, driver) = connected.expect("connects");
                let mut command = redis::cmd("GET");
                command.arg("key");
                return Self { connection, driver: Box::pin(driver), command };
            }
            peer.settle();
            // It has told its name and its version.
            peer.send(&[b"+OK\r\n+OK\r\n"]);
        }
        panic!("redis-rs waits for more");
    }
}

impl Face for OnRedis {
    /// The buffer is that of the longest reply.
    fn room(&mut self, _len: usize) {}

    fn round(&mut self, peer: &mut Peer) {
        let Self { connection, driver, command } = self;
        let mut request = connection.req_packed_command(command);
        assert!(measured_redis(driver.as_mut(), request.as_mut()).is_pending());
        peer.settle();
        peer.send(&[&[&b"$64\r\n"[..], &[0x5a; LEN], b"\r\n"].concat()]);
        assert!(measured_redis(driver.as_mut(), request.as_mut()).is_ready());
    }

    fn value(&mut self, peer: &mut Peer, len: usize) {
        let Self { connection, driver, command } = self;
        let mut request = connection.req_packed_command(command);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(request.as_mut().poll(&mut cx).is_pending());
        assert!(driver.as_mut().poll(&mut cx).is_pending());
        peer.settle();
        peer.send_long(format!("${len}\r\n").as_bytes(), len, b"\r\n", |_| {
            assert!(driver.as_mut().poll(&mut cx).is_pending());
        });
        assert!(request.as_mut().poll(&mut cx).is_ready());
    }
}

struct Echo;

impl Service for Echo {
    type Client = ();

    fn serve(&mut self, _: SessionId, (): &mut (), input: &mut BytesMut, replies: &mut Replies) -> Flow {
        replies.extend_from_slice(&input.split());
        Flow::Stay
    }
}

/// A server, whose client is the peer.
struct OnServer {
    sim: Simulation,
    server: Server<Echo>,
    client: Endpoint<SoftSim>,
    id: ConnectionId,
}

#[inline(never)]
fn measured_server(server: &mut Server<Echo>) {
    server.turn(Some(Duration::ZERO)).expect("a turn");
}

impl OnServer {
    fn new() -> Self {
        let sim = simulation();
        let [host, theirs] = [1, 2].map(|last| sim.host(&[[192, 0, 2, last].into()], Limits::default()));
        let mut server = Server::new(Echo, ServerSettings::default().protected(false)).expect("a loop");
        server.bind(Rdma::new(host), &[SocketAddr::from(ADDRESS).into()]).expect("a free address");
        let mut client = Endpoint::new(&theirs, Share::default()).expect("an endpoint");
        let limit = Duration::from_secs(60);
        let id = client.connect(ADDRESS.into(), None, limit, Options::default()).expect("begins");
        let mut this = Self { sim, server, client, id };
        while this.server.counters().admitted == 0 || !this.client.is_open(id) {
            this.server.turn(Some(Duration::ZERO)).expect("a turn");
            this.settle();
        }
        this
    }

    fn settle(&mut self) {
        settle(&self.sim);
        self.client.progress().expect("goes on");
        while self.client.next_event().is_some() {}
    }

    fn round(&mut self) {
        assert_eq!(self.client.write(self.id, &[IoSlice::new(&[0x5a; LEN])]).expect("written"), Some(LEN));
        self.settle();
        measured_server(&mut self.server);
        self.settle();
        assert_eq!(self.client.read(self.id, &mut [0; LEN]).expect("read"), Some(LEN));
    }

    fn value(&mut self, len: usize) {
        let (mut bytes, mut sent, mut received) = (vec![0x5a; 1 << 20], 0, 0);
        while received < len {
            if sent < len {
                let most = bytes.len().min(len - sent);
                sent += self
                    .client
                    .write(self.id, &[IoSlice::new(&bytes[..most])])
                    .expect("goes on")
                    .unwrap_or(0);
            }
            self.settle();
            self.server.turn(Some(Duration::ZERO)).expect("a turn");
            self.settle();
            while let Some(read) = self.client.read(self.id, &mut bytes).expect("goes on") {
                received += read;
            }
        }
    }
}

const FACES: [&str; 6] = ["stream", "endpoint", "async", "kv", "redis", "server"];

fn face(name: &str, peer: &mut Peer) -> Box<dyn Face> {
    let options = if name == "kv" { rdma_kv::options() } else { Options::default() };
    let (endpoint, id) = peer.connect(options);
    let stream = |endpoint| Stream::from_endpoint(endpoint, id);
    let asynchronous = |endpoint| AsyncStream::from_endpoint(endpoint, id).expect("a runtime");
    match name {
        "stream" => Box::new(OnStream(stream(endpoint), Vec::new())),
        "endpoint" => Box::new(OnEndpoint(endpoint, id, Vec::new())),
        "async" => Box::new(OnAsyncStream(asynchronous(endpoint), Box::new_uninit_slice(0))),
        "kv" => {
            let mut client = Client::new(stream(endpoint));
            client.set_timeout(None);
            let buffer = client.buffer(SMALL).expect("memory");
            Box::new(OnKv(client, buffer, SMALL))
        }
        "redis" => Box::new(OnRedis::new(asynchronous(endpoint), peer)),
        _ => panic!("there is no {name}"),
    }
}

fn rounds(name: &str, rounds: usize, after: bool) {
    if name == "server" {
        let mut server = OnServer::new();
        if after {
            server.value(VALUE);
        }
        (0..rounds).for_each(|_| server.round());
        std::mem::forget(server);
        return;
    }
    let mut peer = Peer::new();
    let mut face = face(name, &mut peer);
    face.room(SMALL);
    if after {
        face.value(&mut peer, VALUE);
        face.room(LARGE);
    }
    (0..rounds).for_each(|_| face.round(&mut peer));
    // No later event could deliver the last bytes.
    std::mem::forget((face, peer));
}

/// Prints the bytes that a value leaves allocated. The first one has grown what all share.
fn kept(name: &str) {
    let kept = if name == "server" {
        let mut server = OnServer::new();
        server.value(FIRST);
        let kept = measure(|| server.value(VALUE));
        std::mem::forget(server);
        kept
    } else {
        let mut peer = Peer::new();
        let mut face = face(name, &mut peer);
        face.room(SMALL);
        face.value(&mut peer, FIRST);
        let kept = measure(|| face.value(&mut peer, VALUE));
        std::mem::forget((face, peer));
        kept
    };
    println!("bytes that a value of 64 MiB leaves allocated, {name} {}", kept.bytes_current.max(0));
}

fn main() {
    // It does not run: each poll finds what the device has done.
    let runtime: Runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _entered = runtime.enter();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [count, name, after @ ..] => rounds(name, count.parse().expect("a number"), !after.is_empty()),
        // redis-rs keeps buffers of the longest reply: apps/rdma-redis/README.md.
        _ => FACES.iter().filter(|name| **name != "redis").for_each(|name| kept(name)),
    }
}
