//! Ends of tasks' connections, with or without their runtime.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use rdma_conn::{AsyncStream, Connect, Listener, Options};
use rdma_proto::Keepalive;
use rdma_softsim::Fabric;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::{LONG, pair, pair_by, pair_with};
use crate::world::{pattern, streams};

/// VR-CLOSE-001: dropping does not wait, but still delivers.
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

/// VR-CLOSE-003: a task that waits for bytes to leave fails if the peer ends without taking them.
#[tokio::test]
async fn a_flush_ends_when_the_peer_does() {
    let (mut client, server) = pair().await;
    // More than both windows of a peer that reads nothing, so that the rest cannot leave.
    let windows = 2 * Options::default().protocol.window as usize;
    let mut taken = 0;
    while taken <= windows {
        taken += client.write(&[7; 1 << 20]).await.expect("written");
    }
    drop(server);
    let error = timeout(LONG, client.flush()).await.expect("ends").expect_err("the rest is not taken");
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe, "{error}");
}

/// Settings that mean "never" set no timers.
#[tokio::test]
async fn for_ever_is_a_duration() {
    let forever = |options: Options| {
        options.keep_memory(Duration::MAX).linger(Duration::MAX).handshake_timeout(Duration::MAX)
    };
    let (mut client, mut server) = pair_with(forever(Options::default()), forever(Options::default())).await;
    client.write_all(b"x").await.expect("written");
    assert_eq!(timeout(LONG, server.read(&mut [0; 2])).await.expect("in time").expect("read"), 1);
    // One timer to wait for, and one that releases memory.
    server.write_all(b"y").await.expect("written");
    assert!(timeout(Duration::from_millis(5), server.read(&mut [0; 1])).await.is_err(), "nothing to read");
    drop(client);
    assert_eq!(timeout(LONG, server.read(&mut [0; 2])).await.expect("in time").expect("the end"), 0);
}

/// VR-CLOSE-001: bytes written before it is established arrive, even if it is ended before, too.
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

/// Without a runtime, conversion fails, and a stream's written bytes arrive as if it were dropped.
#[test]
fn a_stream_that_finds_no_runtime_delivers() {
    let mut options = Options::default();
    options.protocol.window = 1000;
    let (mut stream, mut accepted) = streams(options, Options::default().linger(LONG));
    let sent = pattern(100_000);
    accepted.write_all(&sent).expect("there is room");
    AsyncStream::try_from(accepted).expect_err("there is no runtime");
    let mut got = Vec::new();
    stream.read_to_end(&mut got).expect("an end in order");
    assert!(got == sent, "{} bytes", got.len());
}

/// A stream moved to another runtime continues, and the bytes of dropped streams arrive.
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
        let bytes = timeout(LONG, reads).await.expect("every wait ends").expect("does not panic");
        assert_eq!(&bytes.expect("read"), b"still");
        let bytes = timeout(LONG, last).await.expect("every wait ends").expect("does not panic");
        assert_eq!(bytes.expect("in order"), b"last words");
    });
}

/// A deadline earlier than all others takes effect, even if the background thread drives.
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
        timeout(Duration::from_millis(50), client.write_all(&bytes))
            .await
            .expect_err("the peer does not read");
    });
    drop(first);
    // By then the background thread has nearly always run. If not, this test shows nothing.
    std::thread::sleep(Duration::from_millis(100));
    let closed = second.block_on(async { timeout(LONG / 2, client.close(Duration::from_millis(50))).await });
    closed.expect("in time").expect_err("not everything arrived");
}
