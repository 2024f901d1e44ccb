//! Streams on the tokio runtime, over the embedded fabric.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::task::Poll;
use std::time::Duration;

use rdma_conn::{
    Access, AsyncEndpoint, AsyncListener, AsyncStream, CallerMemory, Connect, Limits, Listener, Options,
    SharedMemory,
};
use rdma_softsim::{Fabric, SoftSim};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::time::timeout;

use crate::world::pattern;

mod ending;
mod making;

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

async fn polled<T>(mut future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// One task reads while another writes, on both ends, through windows that are always too small.
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
        timeout(LONG, task).await.expect("every wait ends").expect("does not panic");
    }
}

/// A decoder's buffer that has grown once has megabytes of spare capacity at every later read.
#[tokio::test]
async fn a_read_prepares_only_the_bytes_that_it_fills() {
    let (mut client, mut server) = pair().await;
    let sent = pattern(3 << 20);
    let mut spare = Box::new_uninit_slice(16 << 20);
    for bytes in [&sent[..1], &sent[..64], &sent[..]] {
        let mut received = 0;
        let reader = async {
            while received < bytes.len() {
                let mut into = ReadBuf::uninit(&mut spare);
                poll_fn(|cx| Pin::new(&mut server).poll_read(cx, &mut into)).await.expect("bytes");
                let read = into.filled().len();
                assert_eq!(into.initialized().len(), read);
                assert!(*into.filled() == bytes[received..received + read]);
                received += read;
            }
        };
        let writer = async { client.write_all(bytes).await.expect("written") };
        timeout(LONG, async { tokio::join!(reader, writer) }).await.expect("in time");
    }
    drop(client);
    let mut into = ReadBuf::uninit(&mut spare);
    poll_fn(|cx| Pin::new(&mut server).poll_read(cx, &mut into)).await.expect("an end in order");
    assert!(into.filled().is_empty() && into.initialized().len() <= 1);
}

#[tokio::test]
async fn cancelled_futures_lose_nothing() {
    let (mut client, mut server) = pair().await;
    let mut byte = [0; 1];
    assert!(timeout(Duration::from_millis(5), server.read(&mut byte)).await.is_err(), "nothing to read yet");
    client.write_all(b"x").await.expect("written");
    assert_eq!(server.read(&mut byte).await.expect("read"), 1);
    assert_eq!(&byte, b"x");

    // Fill everything, then cancel one more write.
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

/// Application memory whose code panics when it is asked for its bytes or dropped.
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

/// A panic of application memory affects only its own program's call, whichever thread drives.
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
    // It is dropped where the arrival of its last part is found, or at the end of the connection.
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
