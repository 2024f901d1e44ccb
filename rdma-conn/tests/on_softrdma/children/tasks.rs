//! Asynchronous streams.

use std::time::Duration;

use rdma_conn::{AsyncEndpoint, AsyncStream, Error, Limits};
use rdma_verbs::Verbs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Deed, forked, parsed, run};
use crate::echo::{patient, verbs};
use crate::fabric::{SERVER, role};

/// A runtime, and streams of one endpoint.
struct Runtime {
    streams: Vec<AsyncStream<Verbs>>,
    runtime: tokio::runtime::Runtime,
}

impl Deed for Runtime {
    fn close(&mut self) -> Result<(), Error> {
        self.runtime.block_on(self.streams[0].close(Duration::from_secs(1)))
    }

    fn refuses(&mut self) {
        let forked = |error: std::io::Error| {
            let error = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
            assert!(matches!(error, Some(Error::Forked)), "{error:?}");
        };
        self.runtime.block_on(async {
            let stream = &mut self.streams[0];
            forked(stream.write_all(b"child").await.expect_err("no write"));
            forked(stream.read(&mut [0]).await.expect_err("no read"));
            forked(stream.shutdown().await.expect_err("no shutdown"));
            let other = AsyncStream::connect(&verbs(), (SERVER, 1)).await;
            assert!(matches!(other, Err(Error::Forked)), "{other:?}");
        });
    }
}

/// A program with asynchronous streams. If it is busy, a task waits for one.
#[test]
fn tasks() {
    let Some(argument) = role("children::tasks::tasks") else { return };
    let (deed, busy, address) = parsed(&argument);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut streams = runtime.block_on(async {
        let endpoint = AsyncEndpoint::new(&verbs(), Limits::default()).expect("an endpoint");
        let mut streams = Vec::new();
        for _ in 0..3 {
            streams.push(endpoint.connect(address, &patient()).await.expect("a server"));
        }
        streams
    });
    let five = async |stream: &mut AsyncStream<Verbs>| {
        let mut back = [0; 5];
        stream.read_exact(&mut back).await.expect("read");
        back
    };
    let waiting = busy.then(|| {
        let mut stream = streams.pop().expect("one");
        runtime.block_on(async { stream.write_all(b"wait!").await.expect("written") });
        let waiting = runtime.spawn(async move { assert_eq!(&five(&mut stream).await, b"freed") });
        runtime.block_on(tokio::task::yield_now());
        waiting
    });
    let Some(Runtime { mut streams, runtime }) = forked(deed, Runtime { streams, runtime }) else { return };
    runtime.block_on(async {
        if let Some(waiting) = waiting {
            streams[1].write_all(b"free!").await.expect("written");
            assert_eq!(&five(&mut streams[1]).await, b"free!");
            waiting.await.expect("the task ends");
        }
        for stream in &mut streams {
            stream.write_all(b"later").await.expect("written");
            assert_eq!(&five(stream).await, b"later");
        }
    });
    println!("done");
}

#[test]
fn children_leave_tasks_alone() {
    run("children::tasks::tasks");
}
