//! Streams on the tokio runtime, over the embedded fabric.

use std::future::{Future, poll_fn};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::task::Poll;
use std::time::Duration;

use rdma_conn::{
    Access, AsyncEndpoint, AsyncListener, AsyncStream, CallerMemory, Connect, Limits, Listener, Options,
    SharedMemory, Stream,
};
use rdma_proto::Keepalive;
use rdma_softsim::{Fabric, SoftSim};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

const LONG: Duration = Duration::from_secs(20);

async fn pair_with(client: Options, server: Options) -> (AsyncStream<SoftSim>, AsyncStream<SoftSim>) {
    pair_by(&Connect::default().options(client), server).await
}

async fn pair_by(how: &Connect, server: Options) -> (AsyncStream<SoftSim>, AsyncStream<SoftSim>) {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind_with(&fabric.host(&[address.ip()]), address, server, Limits::default())
        .expect("a free address");
    let listener = AsyncListener::try_from(listener).expect("is watched");
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    let serve = async {
        let (mut server, _) = listener.accept().await.expect("accepts");
        server.flush().await.expect("is established");
        server
    };
    let (client, server) = tokio::join!(AsyncStream::connect_with(&host, address, how), serve);
    (client.expect("connects"), server)
}

async fn pair() -> (AsyncStream<SoftSim>, AsyncStream<SoftSim>) {
    pair_with(Options::default(), Options::default()).await
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index ^ (index >> 8) ^ (index >> 16)) as u8).collect()
}

/// One task reads while another writes, on both ends, through windows that are always too small: each waits for what the
/// other one's task may notice first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_do_not_forget_each_other() {
    let mut options = (Options::default(), Options::default());
    for options in [&mut options.0, &mut options.1] {
        options.protocol.window = 1000;
        options.protocol.send_buffer = 700;
    }
    let (client, server) = pair_with(options.0, options.1).await;
    let sent = pattern(1 << 20);
    let mut tasks = Vec::new();
    for stream in [client, server] {
        let (mut reader, mut writer) = stream.into_split();
        let (outgoing, expected) = (sent.clone(), sent.clone());
        tasks.push(tokio::spawn(async move {
            writer.write_all(&outgoing).await.expect("written");
            writer.flush().await.expect("flushed");
        }));
        tasks.push(tokio::spawn(async move {
            let mut received = vec![0; expected.len()];
            reader.read_exact(&mut received).await.expect("all bytes");
            assert!(received == expected);
        }));
    }
    for task in tasks {
        timeout(LONG, task).await.expect("nobody waits for ever").expect("does not panic");
    }
}

/// A cancelled read or write has read or written nothing.
/// As it stands in logs.
#[tokio::test]
async fn a_stream_is_told_of_in_a_line() {
    let (client, _server) = pair().await;
    let told = format!("{client:?}");
    assert!(told.contains("192.0.2.1:6379") && told.contains("192.0.2.2:") && told.len() < 100, "{told}");
}

#[tokio::test]
async fn cancelled_futures_lose_nothing() {
    let (mut client, mut server) = pair().await;
    let mut byte = [0; 1];
    assert!(timeout(Duration::from_millis(5), server.read(&mut byte)).await.is_err(), "nothing to read yet");
    client.write_all(b"x").await.expect("written");
    assert_eq!(server.read(&mut byte).await.expect("read"), 1);
    assert_eq!(&byte, b"x");

    // Fill everything, then give up on one more write.
    let mut accepted = 0;
    while let Ok(written) = timeout(Duration::from_millis(50), client.write(&[7; 1 << 16])).await {
        accepted += written.expect("written");
    }
    let mut received = vec![0; accepted];
    timeout(LONG, server.read_exact(&mut received)).await.expect("in time").expect("all that was accepted");
    client.write_all(b"y").await.expect("written");
    server.read_exact(&mut byte).await.expect("read");
    assert_eq!(&byte, b"y");
}

/// VR-CLOSE-001: dropping does not wait, and delivers all the same.
#[tokio::test]
async fn dropped_streams_deliver_in_the_background() {
    for shut in [true, false] {
        let (mut client, mut server) = pair().await;
        let last = pattern(3 << 20);
        let (_, received) = tokio::join!(
            async {
                client.write_all(&last).await.expect("written");
                if shut {
                    client.shutdown().await.expect("delivered");
                }
                drop(client);
            },
            async {
                let mut received = Vec::new();
                timeout(LONG, server.read_to_end(&mut received)).await.expect("in time").expect("in order");
                received
            }
        );
        assert!(received == last, "{} of {} bytes", received.len(), last.len());
    }
}

/// VR-CLOSE-003: a task that waits for bytes to leave hears that the peer has left, in order, without taking them.
#[tokio::test]
async fn a_flush_ends_when_the_peer_does() {
    let (mut client, server) = pair().await;
    // More than both windows of a peer that reads nothing: the rest cannot leave.
    let windows = 2 * Options::default().protocol.window as usize;
    let mut taken = 0;
    while taken <= windows {
        taken += client.write(&[7; 1 << 20]).await.expect("written");
    }
    drop(server);
    let error = timeout(LONG, client.flush()).await.expect("ends").expect_err("nobody takes the rest");
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe, "{error}");
}

/// Two tasks accept: that one of them gives up does not concern the other.
#[tokio::test]
async fn an_accept_that_is_dropped_takes_no_wake_up_along() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("free");
    let listener = Arc::new(AsyncListener::try_from(listener).expect("is watched"));
    let first = tokio::spawn({
        let listener = Arc::clone(&listener);
        async move { listener.accept().await.map(|(stream, _)| stream) }
    });
    tokio::task::yield_now().await;
    {
        let mut second = pin!(listener.accept());
        assert!(polled(second.as_mut()).await.is_none(), "nobody has asked");
    }
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    let dial = tokio::spawn(async move { AsyncStream::connect(&host, address).await });
    let accepted = timeout(LONG, first).await.expect("the first one hears of it").expect("does not panic");
    drop((accepted.expect("accepted"), dial));
}

/// Settings that mean "never" are no moments to wait for.
#[tokio::test]
async fn for_ever_is_a_duration() {
    let forever = |options: Options| {
        options.keep_memory(Duration::MAX).linger(Duration::MAX).handshake_timeout(Duration::MAX)
    };
    let (mut client, mut server) = pair_with(forever(Options::default()), forever(Options::default())).await;
    client.write_all(b"x").await.expect("written");
    assert_eq!(timeout(LONG, server.read(&mut [0; 2])).await.expect("in time").expect("read"), 1);
    // There is something to wait for, and a time until which memory is kept.
    server.write_all(b"y").await.expect("written");
    assert!(timeout(Duration::from_millis(5), server.read(&mut [0; 1])).await.is_err(), "nothing to read");
    drop(client);
    assert_eq!(timeout(LONG, server.read(&mut [0; 2])).await.expect("in time").expect("the end"), 0);
}

#[tokio::test]
async fn a_refused_connection_says_so() {
    let fabric = Fabric::new();
    let _server = fabric.host(&[[192, 0, 2, 1].into()]);
    let client = fabric.host(&[[192, 0, 2, 2].into()]);
    let error = AsyncStream::connect(&client, "192.0.2.1:6379").await.expect_err("nobody listens");
    assert!(error.to_string().contains("nothing listens there for RDMA"), "{error}");
}

/// A dropped connect leaves nothing behind.
#[tokio::test]
async fn a_cancelled_connect_is_gone() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let server = fabric.host(&[address.ip()]);
    let _unanswered = Listener::bind(&server, address).expect("a free address");
    let client = fabric.host(&[[192, 0, 2, 2].into()]);
    let connect = AsyncStream::connect(&client, address);
    assert!(timeout(Duration::from_millis(50), connect).await.is_err(), "nobody accepts");
    assert_eq!(fabric.resources([192, 0, 2, 2].into()), Default::default());
}

/// A future that waits to lend, or to have its memory back, can be dropped: nothing is lent twice, nothing is lost.
#[tokio::test]
async fn cancelled_lending_loses_nothing() {
    let mut options = Options::default();
    options.protocol.window = 10_000;
    let (mut client, mut server) = pair_with(Options::default(), options).await;
    let bytes = pattern(100_000);
    let mut buffer = client.register_buffer(bytes.len()).expect("registered");
    assert!(buffer.write(0, &bytes));
    let buffer = Arc::new(buffer);
    assert_eq!(client.lend(&buffer, 0..bytes.len()).await.expect("lent"), bytes.len());
    {
        // The first part fills the windows of a server that does not read.
        let mut waits = pin!(client.lend(&buffer, 0..5));
        assert!(polled(waits.as_mut()).await.is_none(), "there is no room for more");
    }
    {
        let mut waits = pin!(client.returned(&buffer));
        assert!(polled(waits.as_mut()).await.is_none(), "the server has not read it");
    }
    let mut got = vec![0; bytes.len() + 3];
    let reader = async { server.read_exact(&mut got).await };
    let writer = async {
        client.lend(&buffer, 10..13).await.expect("lent");
        client.returned(&buffer).await.expect("comes back");
    };
    let (read, ()) = tokio::join!(reader, writer);
    read.expect("all arrives");
    assert_eq!((&got[..bytes.len()], &got[bytes.len()..]), (&bytes[..], &bytes[10..13]));
    assert_eq!(Arc::strong_count(&buffer), 1);
}

/// VR-CLOSE-001: what was written to an accepted stream before it is established is delivered,
/// though the stream is shut down or dropped before, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_ended_before_it_is_established_delivers() {
    for drops in [false, true] {
        let fabric = Fabric::new();
        let address = SocketAddr::from(([192, 0, 2, 1], 6379));
        let server = fabric.host(&[address.ip()]);
        let listener = Listener::bind(&server, address).expect("a free address");
        // So that it is not established before it is ended.
        fabric.set_latency(Duration::from_millis(50));
        let client = fabric.host(&[[192, 0, 2, 2].into()]);
        let how = Connect::default().timeout(LONG);
        let reading = tokio::spawn(async move {
            let mut stream = AsyncStream::connect_with(&client, address, &how).await?;
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).await?;
            Ok::<_, std::io::Error>(bytes)
        });
        let accepting = tokio::task::spawn_blocking(move || listener.accept_timeout(LONG));
        let (accepted, _) = accepting.await.expect("no panic").expect("a request");
        let mut stream = AsyncStream::try_from(accepted).expect("a runtime");
        stream.write_all(b"last words").await.expect("there is room");
        if !drops {
            stream.shutdown().await.expect("all arrives");
        }
        drop(stream);
        assert_eq!(reading.await.expect("no panic").expect("an end in order"), b"last words");
    }
}

/// Without a runtime there is no stream for tasks, and what was written to the one before is
/// delivered as if it were dropped.
#[test]
fn a_stream_that_finds_no_runtime_delivers() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let server = fabric.host(&[address.ip()]);
    let listener = Listener::bind_with(&server, address, Options::default().linger(LONG), Limits::default())
        .expect("a free address");
    let mut options = Options::default();
    options.protocol.window = 1000;
    let client = fabric.host(&[[192, 0, 2, 2].into()]);
    let (mut stream, mut accepted) = std::thread::scope(|scope| {
        let how = Connect::default().options(options);
        let connecting = scope.spawn(move || Stream::connect_with(&client, address, &how));
        let (mut accepted, _) = listener.accept_timeout(LONG).expect("a request");
        accepted.flush().expect("a client");
        (connecting.join().expect("no panic").expect("somebody listens"), accepted)
    });
    let sent = pattern(100_000);
    accepted.write_all(&sent).expect("there is room");
    AsyncStream::try_from(accepted).expect_err("there is no runtime");
    let mut got = Vec::new();
    stream.read_to_end(&mut got).expect("an end in order");
    assert!(got == sent, "{} bytes", got.len());
}

/// Memory of a program whose code panics: when it is asked for its bytes, or when it is dropped.
struct Panics {
    bytes: [AtomicU8; 100],
    asked: bool,
}

impl Panics {
    fn new(asked: bool) -> Self {
        Self { bytes: [const { AtomicU8::new(0) }; 100], asked }
    }
}

impl CallerMemory for Panics {
    fn shared(&self) -> SharedMemory<'_> {
        assert!(!self.asked, "as it was told");
        SharedMemory::new(&self.bytes)
    }
}

impl Drop for Panics {
    fn drop(&mut self) {
        assert!(self.asked || std::thread::panicking(), "as it was told");
    }
}

/// A panic in the code of a program's memory is that program's own: connections that share the
/// endpoint go on, whoever drives it.
#[test]
fn memory_that_panics_concerns_no_other_connection() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let (ours, theirs) = (runtime().expect("a runtime"), runtime().expect("a runtime"));
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let server = fabric.host(&[address.ip()]);
    let listener = theirs.block_on(AsyncListener::bind(&server, address)).expect("a free address");
    let client = fabric.host(&[[192, 0, 2, 2].into()]);
    let endpoint = {
        let _runtime = ours.enter();
        AsyncEndpoint::new(&client, Limits::NONE).expect("a device")
    };
    let connect = async || {
        let how = Connect::default();
        let (stream, accepted) = tokio::join!(endpoint.connect(address, &how), listener.accept());
        (stream.expect("somebody listens"), accepted.expect("a request").0)
    };
    let mut pairs = theirs.block_on(async { [connect().await, connect().await] });
    let talk = |pairs: &mut [(AsyncStream<SoftSim>, AsyncStream<SoftSim>)]| {
        theirs.block_on(async {
            for (stream, accepted) in pairs {
                stream.write_all(b"here").await.expect("goes on");
                let mut bytes = [0; 4];
                timeout(LONG, accepted.read_exact(&mut bytes)).await.expect("goes on").expect("goes on");
            }
        });
    };
    let (stream, _) = &mut pairs[0];
    let asked = AssertUnwindSafe(|| stream.register_memory(Panics::new(true), Access::NONE).map(drop));
    catch_unwind(asked).expect_err("it panics");
    talk(&mut pairs);
    let (stream, accepted) = &mut pairs[0];
    // It is dropped by whoever finds that all of it has arrived, as the end of the connection does.
    let memory = Arc::new(stream.register_memory(Panics::new(false), Access::NONE).expect("registered"));
    theirs.block_on(async {
        assert_eq!(stream.lend(&memory, 0..100).await.expect("lent"), 100);
        drop(memory);
        accepted.read_exact(&mut [0; 100]).await.expect("arrives");
        stream.shutdown().await.expect("all has arrived");
    });
    talk(&mut pairs[1..]);
    // The background thread drives it from now on.
    drop(ours);
    talk(&mut pairs[1..]);
}

/// Polls once.
async fn polled<T>(mut future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// A server that accepts and does not read: its clients are connected all the same, by the endpoint's driver.
#[tokio::test]
async fn connections_come_about_without_anybody_reading() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = AsyncListener::bind(&fabric.host(&[address.ip()]), address).await.expect("free");
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    // Nobody accepts either.
    let mut client =
        timeout(LONG, AsyncStream::connect(&host, address)).await.expect("ends").expect("connects");
    client.write_all(b"early").await.expect("written");
    drop(client);
    let (mut server, peer) = timeout(LONG, listener.accept()).await.expect("is there").expect("accepted");
    assert_eq!(peer.ip(), std::net::IpAddr::from([192, 0, 2, 2]));
    let mut bytes = Vec::new();
    timeout(LONG, server.read_to_end(&mut bytes)).await.expect("in time").expect("in order");
    assert_eq!(bytes, b"early");
}

/// Many connections of one endpoint, each with its own tasks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_of_one_endpoint_do_not_disturb_each_other() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let mut options = Options::default();
    options.protocol.window = 1000;
    let listener =
        AsyncListener::bind_with(&fabric.host(&[address.ip()]), address, options, Limits::default())
            .await
            .expect("free");
    let endpoint =
        AsyncEndpoint::new(&fabric.host(&[[192, 0, 2, 2].into()]), Limits::default()).expect("a device");
    let server = tokio::spawn(async move {
        for _ in 0..100 {
            let (stream, _) = listener.accept().await.expect("accepts");
            tokio::spawn(async move {
                let (mut from, mut to) = tokio::io::split(stream);
                tokio::io::copy(&mut from, &mut to).await
            });
        }
    });
    let mut clients = Vec::new();
    for seed in 0..100 {
        let mut stream = endpoint.connect(address, &Connect::default()).await.expect("connects");
        clients.push(tokio::spawn(async move {
            let sent: Vec<u8> = pattern(20_000).iter().map(|byte| byte ^ seed).collect();
            for chunk in sent.chunks(700) {
                stream.write_all(chunk).await.expect("written");
                let mut answer = vec![0; chunk.len()];
                stream.read_exact(&mut answer).await.expect("answered");
                assert!(answer == chunk);
            }
        }));
    }
    server.await.expect("does not panic");
    for client in clients {
        timeout(LONG, client).await.expect("nobody waits for ever").expect("does not panic");
    }
}

/// A runtime that ends takes its tasks along. What another one does with a stream from there goes on, and what was dropped there is
/// delivered.
#[test]
fn a_runtime_that_ends_leaves_its_connections_to_the_background_thread() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (first, second) = (runtime(), runtime());
    let (mut client, server) = first.block_on(pair());
    let mut abandoned = first.block_on(pair());
    first.block_on(async {
        abandoned.0.write_all(b"last words").await.expect("written");
    });
    drop(abandoned.0);
    drop(first);
    let reads = second.spawn(async move {
        let mut server = server;
        let mut bytes = [0; 5];
        server.read_exact(&mut bytes).await.map(|_| bytes)
    });
    let last = second.spawn(async move {
        let mut bytes = Vec::new();
        abandoned.1.read_to_end(&mut bytes).await.map(|_| bytes)
    });
    second.block_on(async {
        tokio::task::yield_now().await;
        client.write_all(b"still").await.expect("written");
        let bytes = timeout(LONG, reads).await.expect("nobody waits for ever").expect("does not panic");
        assert_eq!(&bytes.expect("read"), b"still");
        let bytes = timeout(LONG, last).await.expect("nobody waits for ever").expect("does not panic");
        assert_eq!(bytes.expect("in order"), b"last words");
    });
}

/// A deadline that comes sooner than all that was to be done counts, also where the background thread drives.
#[test]
fn a_close_ends_in_time_after_the_runtime_has_ended() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (first, second) = (runtime(), runtime());
    // Nothing else is due.
    let idle = |options: Options| {
        let protocol = options.protocol.keepalive(Some(Keepalive::NONE));
        options.protocol(protocol).keep_memory(Duration::from_secs(86400))
    };
    let how = Connect::default().options(idle(Options::default())).timeout(Duration::from_secs(86400));
    let (mut client, _reads_nothing) = first.block_on(pair_by(&how, idle(Options::default())));
    first.block_on(async {
        let bytes = pattern(8 << 20);
        // More than all windows and buffers hold.
        timeout(Duration::from_millis(50), client.write_all(&bytes)).await.expect_err("nobody reads");
    });
    drop(first);
    // The background thread has had its turn by then, nearly always: otherwise this shows nothing.
    std::thread::sleep(Duration::from_millis(100));
    let closed = second.block_on(async { timeout(LONG / 2, client.close(Duration::from_millis(50))).await });
    closed.expect("in time").expect_err("not everything arrived");
}

/// One task reads and writes a stream at the same time, which is whole again after that.
#[tokio::test]
async fn a_borrowed_stream_is_read_and_written_at_once() {
    let (mut client, mut server) = pair().await;
    // More than both sides hold, so that neither direction ends before the other begins.
    let sent = pattern(8 << 20);
    let echoes = async {
        let (mut reader, mut writer) = server.split();
        tokio::io::copy(&mut reader, &mut writer).await.expect("all bytes")
    };
    let asks = async {
        let (mut reader, mut writer) = client.split();
        let mut received = vec![0; sent.len()];
        let writes = writer.write_all(&sent);
        let (written, read) = tokio::join!(writes, reader.read_exact(&mut received));
        assert!(written.and(read).is_ok() && received == sent);
        assert_eq!(reader.stream().peer_addr(), writer.stream().peer_addr());
        client.shutdown().await.expect("arrives");
    };
    let (echoed, ()) = timeout(LONG, async { tokio::join!(echoes, asks) }).await.expect("in time");
    assert_eq!(echoed, 8 << 20);
}

/// Halves of one stream make it again; those of two streams do not.
#[tokio::test]
async fn halves_are_reunited() {
    let (client, mut server) = pair().await;
    let (other, _theirs) = pair().await;
    let (reader, mut writer) = client.into_split();
    let (other_reader, other_writer) = other.into_split();
    writer.write_all(b"by halves").await.expect("written");
    let (reader, other_writer) = reader.reunite(other_writer).expect_err("of two streams");
    drop((other_reader, other_writer));
    let mut client = reader.reunite(writer).expect("of one stream");
    client.shutdown().await.expect("arrives");
    let mut heard = String::new();
    timeout(LONG, server.read_to_string(&mut heard)).await.expect("in time").expect("an end in order");
    assert_eq!(heard, "by halves");
}

/// What somebody tries first who knows `tokio::net`: a host and a port, defaults, a line of `Debug`, a descriptor.
#[tokio::test]
async fn a_listener_as_of_tokio() {
    let fabric = Fabric::new();
    let (server, host) = (fabric.host(&[[192, 0, 2, 1].into()]), fabric.host(&[[192, 0, 2, 2].into()]));
    // The first address is nobody's here.
    let elsewhere = SocketAddr::from(([203, 0, 113, 1], 6379));
    let here = SocketAddr::from(([192, 0, 2, 1], 6379));
    AsyncListener::bind(&server, elsewhere).await.expect_err("no device has it");
    let listener = AsyncListener::bind(&server, &[elsewhere, here][..]).await.expect("the second is free");
    listener.set_options(Options::default().receives(0)).expect_err("none at all are out of bounds");
    listener.set_options(Options::default().linger(LONG)).expect("within bounds");
    assert!(poll_fn(|cx| Poll::Ready(listener.poll_accept(cx).is_pending())).await, "nobody has come");

    let (client, accepted) =
        tokio::join!(AsyncStream::connect(&host, ("192.0.2.1", 6379)), listener.accept());
    let (mut client, (mut server, _)) = (client.expect("connects"), accepted.expect("accepts"));
    for line in [
        format!("{listener:?}"),
        format!("{client:?}"),
        format!("{:?}", listener.endpoint()),
        format!("{:?}", listener.endpoint().downgrade()),
    ] {
        assert!(line.len() < 100 && !line.contains('\n'), "{line}");
    }
    assert_ne!(client.as_fd().as_raw_fd(), listener.as_fd().as_raw_fd());
    assert_eq!(server.as_fd().as_raw_fd(), listener.endpoint().as_fd().as_raw_fd());

    client.write_all(b"all of it").await.expect("written");
    let mut all = Vec::new();
    let (closed, read) = tokio::join!(client.close(LONG), server.read_to_end(&mut all));
    closed.expect("everything has arrived");
    read.expect("in order");
    assert_eq!(all, b"all of it");
}

/// Blocking streams become those of tasks, with what has come and what is under way.
#[tokio::test]
async fn streams_become_asynchronous() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("a free address");
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    let served = std::thread::spawn(move || listener.accept().map(|(stream, _)| (stream, listener)));
    let (dialed, host) = tokio::task::spawn_blocking(move || (Stream::connect(&host, address), host))
        .await
        .expect("does not panic");
    let mut dialed = dialed.expect("connects");
    let (accepted, listener) = served.join().expect("does not panic").expect("accepts");
    let line = format!("{dialed:?}");
    assert!(line.len() < 100, "{line}");
    std::io::Write::write_all(&mut dialed, b"before").expect("written");

    let mut server = AsyncStream::try_from(accepted).expect("is watched");
    let mut client = AsyncStream::try_from(dialed).expect("is watched");
    client.write_all(b" and after").await.expect("written");
    let mut bytes = [0; 16];
    timeout(LONG, server.read_exact(&mut bytes)).await.expect("in time").expect("comes");
    assert_eq!(&bytes, b"before and after");
    // A task that sleeps is woken: events of a blocking stream go to nobody.
    let waits = tokio::spawn(async move { client.read_u8().await });
    tokio::task::yield_now().await;
    server.write_u8(7).await.expect("written");
    assert_eq!(timeout(LONG, waits).await.expect("in time").expect("does not panic").expect("comes"), 7);

    // One that is still being established.
    let dial = || {
        let host = host.clone();
        tokio::spawn(async move { AsyncStream::connect(&host, address).await })
    };
    let dials = dial();
    let (endpoint, id) = loop {
        if let Some(accepted) = listener.try_accept().expect("accepts") {
            break accepted;
        }
        tokio::task::yield_now().await;
    };
    let mut server = AsyncStream::from_endpoint(endpoint, id).expect("is watched");
    let mut client = timeout(LONG, dials).await.expect("in time").expect("no panic").expect("connects");
    client.write_u8(8).await.expect("written");
    assert_eq!(timeout(LONG, server.read_u8()).await.expect("in time").expect("comes"), 8);

    // One whose endpoint has told things that nobody took.
    let dials = dial();
    let (mut endpoint, id) = loop {
        if let Some(accepted) = listener.try_accept().expect("accepts") {
            break accepted;
        }
        tokio::task::yield_now().await;
    };
    while !endpoint.is_open(id) {
        endpoint.progress().expect("goes on");
        tokio::task::yield_now().await;
    }
    let mut server = AsyncStream::try_from(Stream::from_endpoint(endpoint, id)).expect("is watched");
    let mut client = timeout(LONG, dials).await.expect("in time").expect("no panic").expect("connects");
    let waits = tokio::spawn(async move { server.read_u8().await });
    tokio::task::yield_now().await;
    client.write_u8(9).await.expect("written");
    assert_eq!(timeout(LONG, waits).await.expect("in time").expect("does not panic").expect("comes"), 9);
}

#[test]
fn no_runtime() {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let host = fabric.host(&[address.ip()]);
    let listener = Listener::bind(&host, address).expect("a free address");
    AsyncListener::try_from(listener).expect_err("nobody would drive it");
}
