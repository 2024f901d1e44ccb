//! rdma-kv and rdma-redis.

use std::net::SocketAddr;

use rdma_conn::Stream;
use rdma_verbs::Verbs;
use redis::aio::MultiplexedConnection;
use tokio::runtime::Runtime;

use crate::{Face, LONG, is_forked, patient, tasks, verbs};

/// A client of rdma-kv. It has no call that closes it.
pub(crate) struct Kv(rdma_kv::Client<Stream<Verbs>>);

impl Face for Kv {
    const CLOSES: bool = false;

    fn new(server: SocketAddr) -> Self {
        let stream = Stream::connect_with(&verbs(), server, &patient()).expect("a server");
        let mut client = rdma_kv::Client::new(stream);
        client.set_timeout(Some(LONG));
        Self(client)
    }

    fn exchange(&mut self) {
        assert_eq!(self.0.exists(&[b"no such key"]).expect("a reply"), 0);
    }

    fn refuses(&mut self) {
        let forked = |error| match error {
            rdma_kv::Error::Io(error) => is_forked(&error),
            other => panic!("{other:?}"),
        };
        forked(self.0.buffer(64).expect_err("no memory"));
        forked(self.0.exists(&[b"key"]).expect_err("no request"));
    }
}

/// A multiplexed connection of rdma-redis, and its runtime. It has no call that closes it.
pub(crate) struct Redis {
    connection: MultiplexedConnection,
    client: rdma_redis::Client<Verbs>,
    runtime: Runtime,
}

impl Redis {
    fn ping(&mut self) -> redis::RedisResult<String> {
        self.runtime.block_on(redis::cmd("PING").query_async(&mut self.connection))
    }
}

impl Face for Redis {
    const SHARED: bool = false;
    const CLOSES: bool = false;

    fn new(server: SocketAddr) -> Self {
        let long = LONG.as_secs();
        let url = format!("valkey+rdma://{server}?timeout={long}&response_timeout={long}");
        let client = rdma_redis::Client::open(verbs(), url).expect("a URL");
        let runtime = tasks::runtime();
        let connection = runtime.block_on(client.get_multiplexed_async_connection()).expect("a server");
        Self { connection, client, runtime }
    }

    fn exchange(&mut self) {
        assert_eq!(self.ping().expect("a reply"), "PONG");
    }

    fn refuses(&mut self) {
        // redis-rs says of every request after the first failure that the pipe is broken.
        self.ping().expect_err("no request");
        let other = self.runtime.block_on(self.client.get_multiplexed_async_connection());
        let why = other.expect_err("no connection").to_string();
        assert!(why.contains("forked child"), "{why}");
    }
}
