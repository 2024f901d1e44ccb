//! Asynchronous streams, one of which a task waits for at the fork.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rdma_conn::{AsyncEndpoint, AsyncStream, Error, Limits};
use rdma_verbs::Verbs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

use crate::{Face, MESSAGE, PING, is_forked, patient, verbs};

/// Two streams of one endpoint, and a runtime.
pub(crate) struct Tasks {
    stream: AsyncStream<Verbs>,
    /// Has the other stream until a message comes on this channel.
    waiting: Option<JoinHandle<AsyncStream<Verbs>>>,
    channel: String,
    server: SocketAddr,
    runtime: Runtime,
}

pub(crate) fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

async fn asks(stream: &mut AsyncStream<Verbs>, request: &str, end: &[u8]) {
    stream.write_all(request.as_bytes()).await.expect("written");
    hears(stream, end).await;
}

async fn hears(stream: &mut AsyncStream<Verbs>, end: &[u8]) {
    let (mut heard, mut some) = (Vec::new(), [0; 64]);
    while !heard.ends_with(end) {
        let count = stream.read(&mut some).await.expect("read");
        assert!(count > 0, "the server has left");
        heard.extend_from_slice(&some[..count]);
    }
}

/// Returns a task that waits for a message, and then returns the stream.
async fn waits(mut stream: AsyncStream<Verbs>, channel: &str) -> JoinHandle<AsyncStream<Verbs>> {
    asks(&mut stream, &format!("SUBSCRIBE {channel}\r\n"), b":1\r\n").await;
    let waiting = tokio::spawn(async move {
        hears(&mut stream, MESSAGE).await;
        stream
    });
    // It begins.
    tokio::task::yield_now().await;
    waiting
}

impl Face for Tasks {
    const SHARED: bool = false;

    fn new(server: SocketAddr) -> Self {
        static CHANNELS: AtomicUsize = AtomicUsize::new(0);
        let channel = format!("forks-{}", CHANNELS.fetch_add(1, Ordering::Relaxed));
        let runtime = runtime();
        let (stream, waiting) = runtime.block_on(async {
            let endpoint = AsyncEndpoint::new(&verbs(), Limits::default()).expect("an endpoint");
            let connect = async || endpoint.connect(server, &patient()).await.expect("a server");
            let other = connect().await;
            (connect().await, waits(other, &channel).await)
        });
        Self { stream, waiting: Some(waiting), channel, server, runtime }
    }

    fn exchange(&mut self) {
        let Self { stream, waiting, channel, runtime, .. } = self;
        let waited = waiting.take().expect("a task");
        runtime.block_on(async {
            asks(stream, "PING\r\n", PING.1).await;
            asks(stream, &format!("PUBLISH {channel} freed\r\n"), b":1\r\n").await;
            let mut other = waited.await.expect("the task ends");
            asks(&mut other, &format!("UNSUBSCRIBE {channel}\r\n"), b":0\r\n").await;
            *waiting = Some(waits(other, channel).await);
        });
    }

    fn close(&mut self) -> Result<(), Error> {
        self.runtime.block_on(self.stream.close(Duration::from_secs(1)))
    }

    fn refuses(&mut self) {
        let Self { stream, server, runtime, .. } = self;
        runtime.block_on(async {
            is_forked(&stream.write_all(b"child").await.expect_err("no write"));
            is_forked(&stream.read(&mut [0]).await.expect_err("no read"));
            is_forked(&stream.shutdown().await.expect_err("no shutdown"));
            let other = AsyncStream::connect(&verbs(), *server).await;
            assert!(matches!(other, Err(Error::Forked)), "{other:?}");
        });
    }
}
